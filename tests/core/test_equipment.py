"""What the terminal shows of the model while trees grow and episodes are played, and how many do so
at once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentr_core.errors import ConfigError
from agentr_core.methods.faults import parse
from agentr_core.models.batching import Batcher
from agentr_core.models.local.cache import BLOCK_SIZE
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.local.workers import LoadCommand, load_local
from agentr_core.models.samplers import sampler_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ModelConfig
from agentr_core.runtime import equipment
from agentr_core.runtime.equipment import (
    call_while_generating,
    concurrency_for,
    count_units,
    sampler_progress,
    window_test,
)
from agentr_core.types import Message, Request, Sampling


def ask(text: str) -> Request:
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(max_new_tokens=2), seed=0)


async def test_a_model_without_a_cache() -> None:
    batcher = Batcher(ScriptedModel(lambda messages, seed, number: "a b"), max_batch=4)
    assert sampler_progress(batcher) == "0 replies, 0 tokens, 0/s, batches 0% full"
    await batcher.sample(ask("hello"))
    words = sampler_progress(batcher).split()
    assert words[:4] == ["1", "replies,", "2", "tokens,"]
    assert words[5:] == ["batches", "25%", "full"]


async def test_what_was_done_before_is_not_taken_for_the_work_of_this_start() -> None:
    batcher = Batcher(ScriptedModel(lambda messages, seed, number: "a b"), max_batch=4)
    lines: list[str] = []

    def progress(done: int, total: int, units: str) -> None:
        lines.append(f"{done}/{total} {units}")

    for before in (0, 3):
        async with count_units(progress, batcher, "trees judged", total=4, done=before) as count:
            count()
    assert [line.split(" replies")[0] for line in lines] == [
        "1/4 trees judged, 0",
        "4/4 trees judged, since it was resumed 0",
    ]


async def test_a_model_with_a_cache_says_how_often_it_helped(tiny_model_dir: Path) -> None:
    model = TransformersModel.load(tiny_model_dir, device="cpu", max_batch=4)
    batcher = Batcher(model, max_batch=4)
    request = ask("get 2 oak log " * 20)
    tokens = model.count_tokens(request)
    assert tokens > BLOCK_SIZE
    await batcher.sample(request)
    assert sampler_progress(batcher).endswith("full, 0% of prompts cached")
    await batcher.sample(request)
    # The last token of a prompt is computed with the reply; what is kept are whole blocks.
    blocks = (tokens - 1) // BLOCK_SIZE
    assert model.cached_share() == blocks * BLOCK_SIZE / (2 * (tokens - 1))
    assert sampler_progress(batcher).endswith(f"full, {model.cached_share():.0%} of prompts cached")
    await model.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_tokens_count_while_their_reply_is_under_way(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(equipment, "_CALL_INTERVAL_S", 0.01)
    loading = LoadCommand(
        path=tiny_model_dir,
        dtype="float32",
        device="cpu",
        max_batch=4,
        context_length=0,
        prefix_cache_bytes=0,
        at=None,
    )
    model = load_local(loading, num_workers=workers)
    batcher = sampler_of(model, ModelConfig(path=str(tiny_model_dir), max_batch=4))
    lines: list[str] = []
    sampling = Sampling(max_new_tokens=400, stop=("never this",))
    long = Request(messages=(Message(role="user", text="get 2 oak log"),), sampling=sampling, seed=1, n=4)
    async with call_while_generating(batcher, lambda: lines.append(sampler_progress(batcher))):
        (generation, *_) = await batcher.sample(long)
    counts = [int(line.split()[2].replace(",", "")) for line in lines if line.startswith("0 replies, ")]
    assert counts == sorted(set(counts))
    assert len(counts) > 1
    assert 0 < counts[0] < counts[-1]
    assert generation.completion_tokens > 100
    rate = sampler_progress(batcher)
    assert rate.startswith(f"4 replies, {batcher.stats().completion_tokens:,} tokens, ")
    await batcher.close()
    await model.close()


async def test_a_model_that_writes_nothing_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equipment, "_CALL_INTERVAL_S", 0.01)
    batcher = Batcher(ScriptedModel(lambda messages, seed, number: "a b"), max_batch=4)
    lines: list[str] = []
    async with call_while_generating(batcher, lambda: lines.append(sampler_progress(batcher))):
        await asyncio.sleep(0.05)
        assert lines == []
        await batcher.sample(ask("hello"))
        await asyncio.sleep(0.05)
    (line,) = lines
    assert line.startswith("1 replies, 2 tokens, ")


def test_large_batches_are_kept_full() -> None:
    model = ScriptedModel(lambda messages, seed, number: "a")
    assert concurrency_for(Batcher(model, max_batch=16), 4) == 512
    assert concurrency_for(Batcher(model, max_batch=4096), 4) == 2048
    assert concurrency_for(Batcher(model, max_batch=4096), 1) == 8192
    assert concurrency_for(Batcher(model, max_batch=4096), 1, configured=8) == 8


def test_a_window_without_room_for_a_reply_is_told() -> None:
    """Each prompt once lost its whole history, and nobody said so."""
    batcher = Batcher(ScriptedModel(lambda messages, seed, number: "a", context_length=20), max_batch=4)
    recipe = parse({"name": "door", "model": {"path": "none"}, "context": "window"})
    assert window_test(recipe, batcher, Sampling(max_new_tokens=19)) is not None
    with pytest.raises(ConfigError, match="one of 20 tokens fills the model's context of 20, so nothing would be left"):
        window_test(recipe, batcher, Sampling(max_new_tokens=20))
