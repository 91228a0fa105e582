"""Group RL on the reasoning world: the loss falls on sampled tokens alone, with the
log-probabilities with which they were sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import curricula
import pytest
import torch
from toolboxes import Bench
from transformers import AutoModelForCausalLM

from agentr_core.environments.reasoning.grammar import STOPS
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.episodes.rollout import roll_out_episode
from agentr_core.episodes.transcript import whole_episode
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.samples.rendering import load_renderer
from agentr_core.training.group.policy import MAX_ROUNDING_NATS, policy_row
from agentr_core.types import Generation, Instance, Request, Sampling, Trajectory

RIVER = Problem(id="r", question="How many mouths?", golds=("1",), source="rivers", domain="knowledge")
SAMPLING = Sampling(temperature=1.0, max_new_tokens=4, logprobs=True)


def world() -> ReasoningWorld:
    passages = {"Ostra": "Ostra lies on the Red River."}
    return ReasoningWorld({"train": (RIVER,)}, Bench(passages), Rules(search_calls=2, spare_replies=2))


@pytest.fixture(scope="module")
def path(save_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return curricula.save_model(tmp_path_factory.mktemp("models") / "phrases", save_tiny_model)


async def play_episodes(path: Path, count: int) -> list[Trajectory]:
    model = TransformersModel.load(path, device="cpu")

    async def sample(request: Request) -> list[Generation]:
        return (await model.generate([request]))[0]

    river = Instance(environment="reasoning", split="train", index=0)
    trajectories = [
        await roll_out_episode(river, world(), sample, max_steps=5, sampling=SAMPLING, seed=seed)
        for seed in range(count)
    ]
    await model.close()
    return trajectories


@pytest.mark.slow
async def test_results_carry_no_loss_and_sampled_tokens_are_as_likely_as_they_were(path: Path) -> None:
    renderer, model = load_renderer(path), AutoModelForCausalLM.from_pretrained(path)
    trajectories = await play_episodes(path, 24)
    assert sum(len(step.tool_calls) for trajectory in trajectories for step in trajectory.steps) >= 8
    assert {trajectory.success for trajectory in trajectories} == {True, False}
    ends = {
        step.reply[step.reply.rfind("<") :]
        for trajectory in trajectories
        for step in trajectory.steps
        if "<" in step.reply
    }
    assert {"</search>", "</answer>"} <= ends
    replies = [step.reply for trajectory in trajectories for step in trajectory.steps]
    stop_replies = [reply for reply in replies if any(stop in reply for stop in STOPS)]
    assert all(reply.endswith(STOPS) for reply in stop_replies), "nothing is left after a stop"
    for trajectory in trajectories:
        row = policy_row(whole_episode(world(), trajectory), trajectory.steps, renderer, [0.0] * len(trajectory.steps))
        trained = tuple(row.input_ids[position] for position in row.positions)
        reply_ids = [step.token_ids for step in trajectory.steps]
        # An end of turn that the episode went on after is not read again.
        row_ids = [
            ids[:-1] if ids[-1] == renderer.end_of_turn and place < len(reply_ids) - 1 else ids
            for place, ids in enumerate(reply_ids)
        ]
        assert trained == tuple(token for ids in row_ids for token in ids)
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
        logprobs = [scores[position - 1, row.input_ids[position]].item() for position in row.positions]
        assert logprobs == pytest.approx(row.logprobs, abs=MAX_ROUNDING_NATS)
