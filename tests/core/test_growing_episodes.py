"""Episodes of one growing turn, sampled by a real model in this process: what was sampled is what
is trained, and a cache of prompt beginnings changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from growing import Counter
from toy import instance

from agentr_core.episodes.rollout import roll_out_episode
from agentr_core.episodes.transcript import whole_episode
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.samples.dataset import token_row
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.system import data_path
from agentr_core.types import Generation, Request, Sample, SampleKind, Sampling, Trajectory

SAMPLING = Sampling(temperature=1.0, max_new_tokens=12, logprobs=True)
TEMPLATES = {"tiny": None, "qwen3": data_path("chat_templates", "qwen3.jinja").read_text(encoding="utf-8")}


class Asked:
    """A model, and the log of what it was asked and answered."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self.log: list[tuple[Request, Generation]] = []

    async def __call__(self, request: Request) -> list[Generation]:
        (replies,) = await self.model.generate([request])
        self.log += [(request, reply) for reply in replies]
        return replies


async def played(asked: Asked, seed: int) -> Trajectory:
    return await roll_out_episode(instance(seed % 5), Counter(), asked, max_steps=8, sampling=SAMPLING, seed=seed)


@pytest.fixture(scope="module", params=list(TEMPLATES))
def path(
    request: pytest.FixtureRequest,
    tiny_model_dir: Path,
    save_tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    template: Any = TEMPLATES[request.param]
    return save_tiny_model(tmp_path_factory.mktemp("q") / "m", template=template) if template else tiny_model_dir


@pytest.mark.slow
async def test_what_was_sampled_is_what_is_trained(path: Path) -> None:
    model = TransformersModel.load(path, device="cpu")
    stops = Counter.transcript.stop
    endings = set()
    for seed in range(8):
        asked = Asked(model)
        trajectory = await played(asked, seed)
        sample = Sample(kind=SampleKind.GOOD, messages=whole_episode(Counter(), trajectory), instance=None)
        row = token_row(sample, model.renderer)
        trained: list[int] = []
        for position, (request, reply) in enumerate(asked.log):
            last = position == len(asked.log) - 1
            # An end of turn that the turn went on after is neither read nor trained.
            over = reply.token_ids[-1] == model.renderer.end_of_turn
            said = reply.token_ids[:-1] if over and not last else reply.token_ids
            prompt = model.renderer.render_prompt(request.messages)
            assert reply.prompt_tokens == len(prompt)
            start, end = len(prompt), len(prompt) + len(said)
            assert row.input_ids[:end] == (*prompt, *said)
            if reply.text or len(reply.token_ids) > 1 or last:
                assert row.labels[start:end] == said
                trained += said
            stopped = reply.text.endswith(stops)
            assert stopped or not any(stop in reply.text for stop in stops), "a stop string ends the text and is kept"
            endings.add("stop" if stopped else "end" if over else reply.finish_reason)
        assert [label for label in row.labels if label != IGNORE_INDEX] == trained
    assert {"stop", "length"} <= endings, "several kinds of ending must be looked at"
    await model.close()


@pytest.mark.slow
async def test_results_carry_no_loss_and_no_control_token(path: Path) -> None:
    model = TransformersModel.load(path, device="cpu")
    trajectory = await played(Asked(model), 3)
    row = token_row(
        Sample(kind=SampleKind.GOOD, messages=whole_episode(Counter(), trajectory), instance=None), model.renderer
    )
    text = model._tokenizer.decode
    apart = [
        text([token for token, _ in group])
        for loss, group in groupby(
            zip(row.input_ids, row.labels, strict=True), key=lambda pair: pair[1] != IGNORE_INDEX
        )
        if not loss
    ]
    shown = "".join(apart[1:])
    for step in trajectory.steps[:-1]:
        assert step.observation in shown
    ends = sum(token == model.renderer.end_of_turn for token in row.input_ids)
    ended = trajectory.steps[-1].token_ids[-1] == model.renderer.end_of_turn
    assert ends == 3, "of the system's, the user's and the assistant's turn"
    assert (model.renderer.end_of_turn in row.labels) is ended
    await model.close()


@pytest.mark.slow
async def test_a_prefix_cache_changes_no_reply_of_a_growing_turn(path: Path) -> None:
    cached, bare = (TransformersModel.load(path, device="cpu", prefix_cache_bytes=size) for size in (1 << 20, 0))
    with_cache, without = Asked(cached), Asked(bare)
    first, second = await played(with_cache, 4), await played(without, 4)
    assert [step.token_ids for step in first.steps] == [step.token_ids for step in second.steps]
    assert [step.observation for step in first.steps] == [step.observation for step in second.steps]
    for one, other in zip(first.steps, second.steps, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert cached.cached_share() > bare.cached_share() == 0
    await cached.close()
    await bare.close()
