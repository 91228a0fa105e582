"""Clients and agents that others wrote, on a real gateway: each calls two tools at once and ends
with an answer, in one conversation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from asgi import running
from openai import AsyncOpenAI
from outside import Agent, asked, played

from agentr_core.environments.gateway.server import app
from agentr_core.episodes.transcript import call_text, conversations
from agentr_core.types import Message

QUESTION = "What do the anvil and the feather weigh?"
# Arguments with odd spaces and escapes, and text around the calls.
CALLS = call_text(
    "weight", '{ "item":"feather"}', before=call_text("weight", '{"item": "\\u0061nvil"}', before="Both.")
)
ANSWER = "The anvil weighs 3 kg."
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
FUNCTION: dict[str, Any] = {"name": "weight", "description": "Tell what an item weighs.", "parameters": SCHEMA}
CHAT: list[Any] = [{"type": "function", "function": FUNCTION}]
RESPONSES: list[Any] = [{"type": "function", **FUNCTION, "strict": False}, {"type": "web_search"}]
MESSAGES: list[Any] = [{"name": "weight", "description": FUNCTION["description"], "input_schema": SCHEMA}]


def weight(item: str) -> str:
    """Tell what an item weighs.

    Args:
        item: The name of the item.
    """
    return {"anvil": "3 kg", "feather": "nothing"}[item]


def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
    results = [message.text for message in messages if message.role == "tool"]
    return CALLS if not results else ANSWER if results == ["3 kg", "nothing"] else f"What? {results}"


def chat(agent: Agent, ask: Callable[[list[Any]], Any]) -> str:
    history: list[Any] = [asked(QUESTION)]
    while (message := ask(history)).tool_calls:
        history.append(message.model_dump(exclude_none=True))
        history += [
            {"role": "tool", "tool_call_id": call.id, "content": weight(**json.loads(call.function.arguments))}
            for call in message.tool_calls
        ]
    return str(message.content)


def chat_plain(agent: Agent) -> str:
    return chat(agent, lambda history: agent.ask(*history, tools=CHAT).choices[0].message)


def chat_stream(agent: Agent) -> str:
    def ask(history: list[Any]) -> Any:
        with agent.client.chat.completions.stream(model="policy", messages=history, tools=CHAT) as events:
            return events.get_final_completion().choices[0].message

    return chat(agent, ask)


def responses(agent: Agent, ask: Callable[[list[Any]], Any]) -> str:
    history: list[Any] = [asked(QUESTION)]
    while not (response := ask(history)).output_text or len(response.output) > 1:
        calls = [item for item in response.output if item.type == "function_call"]
        history += [item.model_dump(exclude_none=True) for item in response.output]
        history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": weight(**json.loads(call.arguments))}
            for call in calls
        ]
    return str(response.output_text)


def responses_plain(agent: Agent) -> str:
    create = agent.client.responses.create
    return responses(agent, lambda history: create(model="policy", input=history, tools=RESPONSES))


def responses_stream(agent: Agent) -> str:
    def ask(history: list[Any]) -> Any:
        with agent.client.responses.stream(model="policy", input=history, tools=RESPONSES) as events:
            return events.get_final_response()

    return responses(agent, ask)


def anthropic(agent: Agent) -> Anthropic:
    return Anthropic(base_url=agent.told["anthropic_url"], api_key="none", max_retries=0)


def messages(agent: Agent, ask: Callable[[list[Any]], Any]) -> str:
    history: list[Any] = [asked(QUESTION)]
    while (message := ask(history)).stop_reason == "tool_use":
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weight(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    return str(message.content[0].text)


def messages_plain(agent: Agent) -> str:
    with anthropic(agent) as client:
        create = client.messages.create
        return messages(agent, lambda h: create(model="policy", max_tokens=99, messages=h, tools=MESSAGES))


def messages_stream(agent: Agent) -> str:
    with anthropic(agent) as client:

        def ask(history: list[Any]) -> Any:
            with client.messages.stream(model="policy", max_tokens=99, messages=history, tools=MESSAGES) as events:
                return events.get_final_message()

        return messages(agent, ask)


def tool_runner(agent: Agent) -> str:
    with anthropic(agent) as client:
        run = client.beta.messages.tool_runner
        question: list[Any] = [asked(QUESTION)]
        last: Any = run(model="policy", max_tokens=99, messages=question, tools=[beta_tool(weight)]).until_done()
        return str(last.content[0].text)


def by_key(agent: Agent) -> str:
    """All agents may share one address: the key says whose episode it is."""
    where = agent.told["base_url"].partition("/episodes/")[0]
    with Anthropic(base_url=f"{where}/v1", auth_token=agent.told["key"], max_retries=0) as client:
        create = client.messages.create
        return messages(agent, lambda h: create(model="small", max_tokens=99, messages=h, tools=MESSAGES))


CLIENTS = [
    chat_plain, chat_stream, responses_plain, responses_stream, messages_plain, messages_stream, tool_runner, by_key,
]  # fmt: skip


def pydantic_chat(agent: Agent) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> str:
        async with AsyncOpenAI(base_url=agent.told["base_url"], api_key="none") as client:
            return await pydantic(OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)))

    return asyncio.run(run())


def pydantic_responses(agent: Agent) -> str:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> str:
        async with AsyncOpenAI(base_url=agent.told["base_url"], api_key="none") as client:
            return await pydantic(OpenAIResponsesModel("policy", provider=OpenAIProvider(openai_client=client)))

    return asyncio.run(run())


def pydantic_messages(agent: Agent) -> str:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    async def run() -> str:
        async with AsyncAnthropic(base_url=agent.told["anthropic_url"], api_key="none") as client:
            return await pydantic(AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client)))

    return asyncio.run(run())


async def pydantic(model: Any) -> str:
    import pydantic_ai

    return str((await pydantic_ai.Agent(model, tools=[weight]).run(QUESTION)).output)


def agents_of_openai(agent: Agent, kind: str) -> str:
    import agents

    async def run() -> str:
        async with AsyncOpenAI(base_url=agent.told["base_url"], api_key="none") as client:
            model = getattr(agents, kind)(model="policy", openai_client=client)
            weigher = agents.Agent(name="weigher", model=model, tools=[agents.function_tool(weight)])
            config = agents.RunConfig(tracing_disabled=True)
            return str((await agents.Runner.run(weigher, QUESTION, run_config=config)).final_output)

    return asyncio.run(run())


def agents_responses(agent: Agent) -> str:
    return agents_of_openai(agent, "OpenAIResponsesModel")


def agents_chat(agent: Agent) -> str:
    return agents_of_openai(agent, "OpenAIChatCompletionsModel")


def langchain(model: Any) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage

    history: list[Any] = [HumanMessage(QUESTION)]
    bound = model.bind_tools([weight])
    while (message := bound.invoke(history)).tool_calls:
        results = [ToolMessage(weight(**call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
        history += [message, *results]
    return str(message.text)


def langchain_chat(agent: Agent) -> str:
    from langchain_openai import ChatOpenAI

    key: Any = "none"
    return langchain(ChatOpenAI(model="policy", base_url=agent.told["base_url"], api_key=key))


def langchain_responses(agent: Agent) -> str:
    from langchain_openai import ChatOpenAI

    key: Any = "none"
    return langchain(ChatOpenAI(model="policy", base_url=agent.told["base_url"], api_key=key, use_responses_api=True))


def langchain_messages(agent: Agent) -> str:
    from langchain_anthropic import ChatAnthropic

    settings: dict[str, Any] = {"model": "policy", "api_key": "none", "max_tokens": 99}
    return langchain(ChatAnthropic(base_url=agent.told["anthropic_url"], **settings))


HARNESSES = [
    pydantic_chat, pydantic_responses, pydantic_messages, agents_chat, agents_responses, langchain_chat,
    langchain_responses, langchain_messages,
]  # fmt: skip


@pytest.mark.parametrize("solve", [*CLIENTS, *(pytest.param(each, marks=pytest.mark.slow) for each in HARNESSES)])
async def test_two_calls_at_once_are_answered_and_trained_in_one_conversation(solve: Callable[[Agent], str]) -> None:
    def play(agent: Agent) -> str:
        text = solve(agent)
        agent.end(reward=float(text == ANSWER))
        return text

    with running(app()) as url:
        trajectory, text, env = await played(url, play, reply=reply, context=100_000)
    assert (text, trajectory.reward) == (ANSWER, 1.0)
    (part,) = conversations(env, trajectory)
    assert [message.role for message in part.messages] == ["tools", "user", "assistant", "tool", "tool", "assistant"]
    assert [message.text for message in part.messages if message.train] == [CALLS, ANSWER]
