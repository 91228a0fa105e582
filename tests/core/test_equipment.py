"""What the terminal shows of the model while trees grow and episodes are played, and how many do so
at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agentr_core.errors import ConfigError
from agentr_core.models.batching import Batcher
from agentr_core.models.local.prefill import BLOCK
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes import parse
from agentr_core.runtime.equipment import in_flight, speed, window
from agentr_core.types import Message, Request, Sampling


def ask(text: str) -> Request:
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(max_new_tokens=2), seed=0)


async def test_a_model_without_a_cache() -> None:
    batcher = Batcher(ScriptedModel(lambda messages, seed, number: "a b"), max_batch=4)
    assert speed(batcher) == "0 replies, 0 tokens/s, batches 0% full"
    await batcher.sample(ask("hello"))
    words = speed(batcher).split()
    assert words[:2] == ["1", "replies,"]
    assert words[3:] == ["tokens/s,", "batches", "25%", "full"]


async def test_a_model_with_a_cache_says_how_often_it_helped(tiny_model_dir: Path) -> None:
    model = TransformersModel.load(tiny_model_dir, device="cpu", max_batch=4)
    batcher = Batcher(model, max_batch=4)
    request = ask("get 2 oak log " * 20)
    tokens = model.count_tokens(request)
    assert tokens > BLOCK
    await batcher.sample(request)
    assert speed(batcher).endswith("full, 0% of prompts cached")
    await batcher.sample(request)
    # The last token of a prompt is computed with the reply; what is kept are whole blocks.
    blocks = (tokens - 1) // BLOCK
    assert model.cached_share() == blocks * BLOCK / (2 * (tokens - 1))
    assert speed(batcher).endswith(f"full, {model.cached_share():.0%} of prompts cached")
    await model.close()


def test_large_batches_are_kept_full() -> None:
    model = ScriptedModel(lambda messages, seed, number: "a")
    assert in_flight(Batcher(model, max_batch=16), 4) == 512
    assert in_flight(Batcher(model, max_batch=4096), 4) == 2048
    assert in_flight(Batcher(model, max_batch=4096), 1) == 8192
    assert in_flight(Batcher(model, max_batch=4096), 1, wanted=8) == 8


def test_a_window_without_room_for_a_reply_is_told() -> None:
    """Each prompt once lost its whole history, and nobody said so."""
    batcher = Batcher(ScriptedModel(lambda messages, seed, number: "a", context_length=20), max_batch=4)
    recipe = parse({"name": "door", "model": {"path": "none"}, "context": "window"})
    assert window(recipe, batcher, Sampling(max_new_tokens=19)) is not None
    with pytest.raises(ConfigError, match="one of 20 tokens fills the model's context of 20, so nothing would be left"):
        window(recipe, batcher, Sampling(max_new_tokens=20))
