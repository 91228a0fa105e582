"""n replies to one prompt against one reply to each of n prompts of the same length, in one batch each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from measures import Clock, Measure

from agentr_core.models.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling

MODEL = Path("data/models/textcraft-tiny")
NEW_TOKENS = 16


def measure(*, n: int, words: int, clock: Clock) -> list[Measure]:
    """Return the ratio for prompts of `words` words, without a prefix cache."""
    model = TransformersModel.load(MODEL, dtype="bfloat16", device="cpu", prefix_cache_bytes=0)
    prompts = [_prompt(first, words) for first in range(n)]
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS)
    one = [Request(messages=prompts[0], sampling=sampling, seed=0, n=n)]
    many = [Request(messages=prompt, sampling=sampling, seed=seed) for seed, prompt in enumerate(prompts)]
    tokens = model.count_tokens(one[0])
    shared, separate = asyncio.run(_run(model, [one, many], clock))
    return [
        Measure(
            name="shared_prefill_ratio",
            value=separate / shared,
            unit="x",
            goal="> 1",
            note=f"{n} replies of {NEW_TOKENS} tokens to a prompt of {tokens} tokens in {shared:.2f} s, "
            f"to {n} prompts in {separate:.2f} s",
        )
    ]


def _prompt(first: int, words: int) -> tuple[Message, ...]:
    text = " ".join(["oak", "stick", *(str(number % 7) for number in range(words))])
    return (Message(role="user", text=f"{first:03} {text}"),)


async def _run(model: TransformersModel, batches: Sequence[Sequence[Request]], clock: Clock) -> list[float]:
    """Return the seconds of each batch, the second time it is asked for."""
    seconds = []
    for batch in batches:
        await model.generate(batch)
        started = clock()
        await model.generate(batch)
        seconds.append(clock() - started)
    await model.close()
    return seconds
