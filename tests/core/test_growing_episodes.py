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


class LoggingSampler:
    """A model, and the log of what it was asked and answered."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self.log: list[tuple[Request, Generation]] = []

    async def __call__(self, request: Request) -> list[Generation]:
        (replies,) = await self.model.generate([request])
        self.log += [(request, reply) for reply in replies]
        return replies


async def play(asked: LoggingSampler, seed: int) -> Trajectory:
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
        sampler = LoggingSampler(model)
        trajectory = await play(sampler, seed)
        sample = Sample(kind=SampleKind.GOOD, messages=whole_episode(Counter(), trajectory), instance=None)
        row = token_row(sample, model.renderer)
        trained_ids: list[int] = []
        for position, (request, reply) in enumerate(sampler.log):
            last = position == len(sampler.log) - 1
            # An end of turn that the turn went on after is neither read nor trained.
            ends_turn = reply.token_ids[-1] == model.renderer.end_of_turn
            token_ids = reply.token_ids[:-1] if ends_turn and not last else reply.token_ids
            prompt = model.renderer.render_prompt(request.messages)
            assert reply.prompt_tokens == len(prompt)
            start, end = len(prompt), len(prompt) + len(token_ids)
            assert row.input_ids[:end] == (*prompt, *token_ids)
            if reply.text or len(reply.token_ids) > 1 or last:
                assert row.labels[start:end] == token_ids
                trained_ids += token_ids
            at_stop = reply.text.endswith(stops)
            assert at_stop or not any(stop in reply.text for stop in stops), "a stop string ends the text and is kept"
            endings.add("stop" if at_stop else "end" if ends_turn else reply.finish_reason)
        assert [label for label in row.labels if label != IGNORE_INDEX] == trained_ids
    assert {"stop", "length"} <= endings, "several kinds of ending must be looked at"
    await model.close()


@pytest.mark.slow
async def test_results_carry_no_loss_and_no_control_token(path: Path) -> None:
    model = TransformersModel.load(path, device="cpu")
    trajectory = await play(LoggingSampler(model), 3)
    row = token_row(
        Sample(kind=SampleKind.GOOD, messages=whole_episode(Counter(), trajectory), instance=None), model.renderer
    )
    text = model._tokenizer.decode
    texts = [
        text([token for token, _ in group])
        for loss, group in groupby(
            zip(row.input_ids, row.labels, strict=True), key=lambda pair: pair[1] != IGNORE_INDEX
        )
        if not loss
    ]
    results = "".join(texts[1:])
    for step in trajectory.steps[:-1]:
        assert step.observation in results
    ends = sum(token == model.renderer.end_of_turn for token in row.input_ids)
    has_end = trajectory.steps[-1].token_ids[-1] == model.renderer.end_of_turn
    assert ends == 3, "of the system's, the user's and the assistant's turn"
    assert (model.renderer.end_of_turn in row.labels) is has_end
    await model.close()


@pytest.mark.slow
async def test_a_prefix_cache_changes_no_reply_of_a_growing_turn(path: Path) -> None:
    cached_model, plain_model = (
        TransformersModel.load(path, device="cpu", prefix_cache_bytes=size) for size in (1 << 20, 0)
    )
    cached_sampler, plain_sampler = LoggingSampler(cached_model), LoggingSampler(plain_model)
    first, second = await play(cached_sampler, 4), await play(plain_sampler, 4)
    assert [step.token_ids for step in first.steps] == [step.token_ids for step in second.steps]
    assert [step.observation for step in first.steps] == [step.observation for step in second.steps]
    for left, right in zip(first.steps, second.steps, strict=True):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
    assert cached_model.cached_share() > plain_model.cached_share() == 0
    await cached_model.close()
    await plain_model.close()
