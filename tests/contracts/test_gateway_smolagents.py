"""An agent of a library that others wrote, on a real gateway: it rewrites its own history."""

from __future__ import annotations

from typing import Any

from asgi import running
from outside import Agent, played
from smolagents import OpenAIModel, ToolCallingAgent, tool

from agentr_core.environments.gateway.server import app
from agentr_core.episodes.transcript import conversations
from agentr_core.types import Message

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}\n</tool_call>'


@tool  # type: ignore[untyped-decorator]
def weight(item: str) -> str:
    """Tell what an item weighs.

    Args:
        item: The name of the item.
    """
    return "3 kg" if item == "anvil" else "nothing"


def answer(messages: tuple[Message, ...], seed: int, number: int) -> str:
    """Weigh first, then answer with what was told."""
    if "3 kg" in messages[-1].text:
        return CALL.format(name="final_answer", argument="answer", value="It weighs 3 kg.")
    return CALL.format(name="weight", argument="item", value="anvil")


def solve(agent: Agent) -> Any:
    model = OpenAIModel("policy", api_base=agent.told["base_url"], api_key="none")
    result = ToolCallingAgent([weight], model, verbosity_level=0).run("What does the anvil weigh?")
    model.client.close()
    agent.end(reward=float(result == "It weighs 3 kg."))
    return result


async def test_an_agent_of_smolagents_is_trained_on_what_it_sent() -> None:
    with running(app()) as url:
        trajectory, result, env = await played(url, solve, reply=answer, context=100_000)
    assert (result, trajectory.reward, trajectory.success) == ("It weighs 3 kg.", 1.0, True)
    # It writes its calls as text into its history, where the id of a call tells which reply it was.
    ((_, messages, _),) = conversations(env, trajectory)
    assert [message.role for message in messages] == ["tools", "system", "user", "assistant", "user", "assistant"]
    assert [message.text for message in messages if message.train] == [step.reply for step in trajectory.steps]
    assert "Observation:" in messages[4].text
