"""A real model behind the gateway: its replies are stored as they were sampled, under the prompt
that it read, whatever an agent made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asgi import running
from outside import Agent, asked, played, said

from agentr_core.environments.gateway.server import app
from agentr_core.episodes.transcript import conversations, transcript_of
from agentr_core.fingerprint import derive_seed
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Request, Sampling

SAMPLING = Sampling(temperature=1.5, max_new_tokens=6, logprobs=True)


@pytest.fixture
def url() -> Iterator[str]:
    with running(app()) as address:
        yield address


def play_threads(agent: Agent) -> None:
    """Have two threads in turn, respell one of them, forget a reply, and begin anew."""
    left, right = [asked("get oak log")], [asked("craft stick")]
    for _ in range(2):
        left += [said(f"\n {agent.says(*left)}  "), asked("Got 1 oak log")]
        right += [said(agent.says(*right)), asked("Could not find")]
    agent.says(*left[:1], *left[2:])
    agent.says(asked("Sum up."), *right)
    agent.end(reward=1)


async def test_each_recorded_reply_is_what_the_model_replies_to_its_prompt(url: str, tiny_model_dir: Path) -> None:
    model = TransformersModel.load(tiny_model_dir, device="cpu")
    trajectory, _, env = await played(url, play_threads, model=model, sampling=SAMPLING, side_calls="train")
    assert len(trajectory.steps) == 6
    for position, step in enumerate(trajectory.steps):
        messages = transcript_of(env).prompt(env, trajectory.first_observation, trajectory.steps[:position])
        request = Request(messages=messages, sampling=SAMPLING, seed=derive_seed(1, "step", position))
        ((reply,),) = await model.generate([request])
        assert (reply.token_ids, reply.text) == (step.token_ids, step.reply)
    # What is trained of a conversation are these tokens, and each once.
    positions: list[int] = []
    for part in conversations(env, trajectory):
        row = model.renderer.render_sample(part.messages)
        labels = [label for label in row.labels if label != -100]
        positions += part.positions
        assert labels == [token for position in part.positions for token in trajectory.steps[position].token_ids]
    assert sorted(positions) == list(range(6))
    await model.close()
