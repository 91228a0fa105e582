"""An unchanged agent of pydantic-ai, in plain text and without tools, plays TextCraft.

One instance a process: `agentr gateway run -- python deployments/agents/pydantic_ai_textcraft.py`.
Many at once in one process, which saves each episode the start of Python:
`python deployments/agents/pydantic_ai_textcraft.py http://127.0.0.1:8170 64`.
"""

import asyncio
import os
import sys
from typing import Any

import httpx
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentr_core.environments.crafting.textcraft import TextCraft


async def play(client: AsyncOpenAI, split: str, index: int) -> float:
    world, reward, over = TextCraft(), 0.0, False
    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)))
    history: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart(world.instruction)]),
        ModelResponse(parts=[TextPart("Ok.")]),
    ]
    observation = world.reset(world.instances(split)[index])
    for _ in range(20):
        answer = await agent.run(observation, message_history=history)
        history = answer.all_messages()
        observation, reward, over, _truncated, _info = world.step(world.parse(answer.output))
        if over:
            break
    return reward


async def play_offered() -> None:
    """Play the episode that the variables of a launcher name."""
    key, index = os.environ["OPENAI_API_KEY"], int(os.environ["AGENTR_INDEX"])
    # Address and key are those of OPENAI_BASE_URL and OPENAI_API_KEY.
    reward = await play(AsyncOpenAI(), os.environ["AGENTR_SPLIT"], index)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, trust_env=False) as gateway:
        posted = await gateway.post(f"{os.environ['AGENTR_EPISODE_URL']}/reward", json={"reward": reward})
        posted.raise_for_status()


async def work(gateway: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    """Play one episode after the other."""
    while True:
        try:
            if (answer := await gateway.post("/episodes")).status_code == httpx.codes.OK:
                await play_and_report(gateway, client, answer.json())
        except httpx.TransportError as error:
            sys.stderr.write(f"the gateway does not answer: {error!r}\n")
            await asyncio.sleep(5)


async def play_and_report(gateway: httpx.AsyncClient, client: AsyncOpenAI, offer: dict[str, Any]) -> None:
    # A client of its own for each episode would load all certificates anew.
    here = client.with_options(base_url=offer["base_url"], api_key=offer["key"])
    try:
        reward = await play(here, offer["split"], offer["index"])
        await gateway.post(f"/episodes/{offer['episode']}/reward", json={"reward": reward})
    except AgentRunError as error:
        # No reward of 0: the run offers the episode again, unless it was over.
        sys.stderr.write(f"{error.message}\n")
        await gateway.post(f"/episodes/{offer['episode']}/failed", json={"reason": error.message})


async def main(url: str, at_once: int) -> None:
    # A gateway that other machines reach prints a token.
    headers = {"Authorization": f"Bearer {os.environ.get('AGENTR_GATEWAY_TOKEN', 'none')}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as gateway:
        client = AsyncOpenAI(api_key="none")
        await asyncio.gather(*(work(gateway, client) for _ in range(at_once)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else play_offered())
