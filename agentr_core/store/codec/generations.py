"""The generations of a sampler, to rows and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentr_core.store.codec.texts import text_id
from agentr_core.store.database import Store
from agentr_core.store.tables import Row
from agentr_core.types import FinishReason, Generation, Step

Kind = Literal["node", "step", "judgement"]

TOKENS_ONLY = -1
"""The number of a reply of which only the tokens are known, such as a replayed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One reply: number `number` of the request with seed `seed`."""

    seed: int
    number: int
    generation: Generation


def draw_row(kind: Kind, owner_id: str, position: int, draw: Draw) -> Row:
    """Return the row of a reply; store its text with it."""
    generation = draw.generation
    return {
        "kind": kind,
        "owner_id": owner_id,
        "position": position,
        "draw": draw.number,
        "reply_id": text_id(generation.text),
        "token_ids": list(generation.token_ids),
        "logprobs": None if generation.logprobs is None else list(generation.logprobs),
        "seed": draw.seed,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "tokenizer": generation.tokenizer,
        "thinks": generation.thinks,
    }


def step_tokens(kind: Kind, owner_id: str, position: int, step: Step) -> Iterator[Row]:
    """Yield the row of a step of which only the tokens and the finish reason are known; none if
    these are not known.
    """
    if has_tokens(step):
        yield {
            "kind": kind,
            "owner_id": owner_id,
            "position": position,
            "draw": TOKENS_ONLY,
            "reply_id": text_id(step.reply),
            "token_ids": list(step.token_ids),
            "logprobs": None if step.logprobs is None else list(step.logprobs),
            "seed": None,
            "finish_reason": step.finish_reason,
            "prompt_tokens": None,
            "completion_tokens": len(step.token_ids),
            "tokenizer": step.tokenizer,
            "thinks": False,
        }


def has_tokens(step: Step) -> bool:
    """Return whether anything is known about how the reply of a step was sampled."""
    known = (step.logprobs, step.finish_reason, step.tokenizer)
    return bool(step.token_ids) or any(value is not None for value in known)


def sampled(
    token_ids: list[int] | None,
    logprobs: list[float] | None,
    finish_reason: FinishReason | None,
    tokenizer: str | None,
) -> dict[str, Any]:
    """Return the fields of a `Step` that say how its reply was sampled, from the columns of an
    outer join.
    """
    return {
        "token_ids": tuple(token_ids or ()),
        "logprobs": None if logprobs is None else tuple(logprobs),
        "finish_reason": finish_reason,
        "tokenizer": tokenizer,
    }


def load_draws(store: Store, kind: Kind, owner_ids: Sequence[str]) -> dict[str, dict[int, tuple[Draw, ...]]]:
    """Return the stored replies of trees or trajectories: by owner, then by position, in the order
    of their numbers.

    Replies of which only the tokens are known (a replayed or imported step) are left out.
    """
    records = store.rows(_DRAWS, kind, list(owner_ids))
    draws: dict[str, dict[int, tuple[Draw, ...]]] = {}
    for owner_id, position, number, seed, text, token_ids, finish_reason, prompt, completion, *more in records:
        logprobs, tokenizer, thinks = more
        generation = Generation(
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            prompt_tokens=prompt,
            completion_tokens=completion,
            logprobs=None if logprobs is None else tuple(logprobs),
            tokenizer=tokenizer,
            thinks=bool(thinks),
        )
        of_owner = draws.setdefault(owner_id, {})
        of_owner[position] = (*of_owner.get(position, ()), Draw(seed=seed, number=number, generation=generation))
    return draws


_DRAWS = """
select g.owner_id, g.position, g.draw, g.seed, t.text, g.token_ids, g.finish_reason, g.prompt_tokens,
    g.completion_tokens, g.logprobs, g.tokenizer, g.thinks
from generation g join text t on t.text_id = g.reply_id
where g.kind = ? and g.seed is not null and g.owner_id in (select unnest(?))
order by g.owner_id, g.position, g.draw
"""
