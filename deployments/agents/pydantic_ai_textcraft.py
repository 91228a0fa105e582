"""An unchanged agent of pydantic-ai, in plain text and without tools, plays one instance of
TextCraft: `agentr gateway run -- python deployments/agents/pydantic_ai_textcraft.py`.
"""

import os

import httpx
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart

from agentr_core.environments.crafting.textcraft import TextCraft


def main() -> None:
    world, reward, over = TextCraft(), 0.0, False
    # Address and key are those of OPENAI_BASE_URL and OPENAI_API_KEY.
    agent = Agent(f"openai-chat:{os.environ['OPENAI_MODEL']}")
    history: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart(world.instruction)]),
        ModelResponse(parts=[TextPart("Ok.")]),
    ]
    observation = world.reset(world.instances(os.environ["AGENTR_SPLIT"])[int(os.environ["AGENTR_INDEX"])])
    for _ in range(20):
        answer = agent.run_sync(observation, message_history=history)
        history = answer.all_messages()
        observation, reward, over, _truncated, _info = world.step(world.parse(answer.output))
        if over:
            break
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    where = f"{os.environ['AGENTR_EPISODE_URL']}/reward"
    httpx.post(where, headers=headers, json={"reward": reward}, trust_env=False).raise_for_status()


if __name__ == "__main__":
    main()
