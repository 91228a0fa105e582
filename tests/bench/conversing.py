"""Conversations that grow by a reply and an observation a turn: with the prefix cache against
without it, where each turn computes its whole prompt.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from measures import Clock, Measure

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling

MODEL = Path("data/models/textcraft-tiny")
NEW_TOKENS = 16
OBSERVATION = "Got 2 oak log. Inventory: [oak log] (2) [stick] (4)"


def measure(*, conversations: int, turns: int, words: int, clock: Clock) -> list[Measure]:
    """Return how many times as fast conversations are with the cache, and what it saved them.

    Each begins with a prompt of about `words` words of its own.
    """
    (plain_s, _), (cache_s, share) = (
        asyncio.run(_converse(conversations, turns, words, size, clock)) for size in (0, 1 << 30)
    )
    note = f"{conversations} conversations of {turns} turns in {cache_s:.2f} s, without the cache in {plain_s:.2f} s"
    return [
        Measure(name="conversation_cache_ratio", value=plain_s / cache_s, unit="x", goal="> 1", note=note),
        Measure(name="conversation_cached_share", value=100 * share, unit="%", note="of the tokens of all prompts"),
    ]


async def _converse(conversations: int, turns: int, words: int, size: int, clock: Clock) -> tuple[float, float]:
    """Return the seconds that all turns take with a cache of `size` bytes, and the cached share."""
    model = TransformersModel.load(
        MODEL, dtype="float32", device="cpu", max_batch=conversations, prefix_cache_bytes=size
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS)
    talks: list[tuple[Message, ...]] = [_opening(number, words) for number in range(conversations)]
    start = clock()
    for turn in range(turns):
        replies = await model.generate(
            [Request(messages=talk, sampling=sampling, seed=turn + number) for number, talk in enumerate(talks)]
        )
        talks = [
            (
                *talk,
                Message(role="assistant", text=reply.text, token_ids=reply.token_ids),
                Message(role="user", text=OBSERVATION),
            )
            for talk, (reply,) in zip(talks, replies, strict=True)
        ]
    seconds, share = clock() - start, model.cached_share()
    await model.close()
    return seconds, share


def _opening(number: int, words: int) -> tuple[Message, ...]:
    text = " ".join(["oak", "stick", *(str(word * number % 7) for word in range(words))])
    return (Message(role="user", text=f"{number:03} {text}"),)
