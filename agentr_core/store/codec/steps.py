"""Steps, which both nodes of trees and trajectories have, to columns and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.store.codec.generations import sampled
from agentr_core.store.codec.texts import text_id
from agentr_core.store.tables import Row
from agentr_core.types import Step

COLUMNS = """
    r.text, s.action, s.matched, s.valid, o.text, s.reward, s.terminated, s.success, s.disaster, s.dropped,
    g.token_ids, g.logprobs, g.finish_reason, g.tokenizer
"""
"""The columns that `read_step` reads: from `s`, its reply `r`, its observation `o` and its
generation `g`.
"""
_WRITTEN = (
    "reply_id",
    "action",
    "matched",
    "valid",
    "observation_id",
    "reward",
    "terminated",
    "success",
    "disaster",
    "dropped",
)


def step_columns(step: Step | None) -> Row:
    """Return the columns of a step, all of them empty for the root of a tree; texts are stored
    separately.
    """
    if step is None:
        return dict.fromkeys(_WRITTEN)
    return {
        "reply_id": text_id(step.reply),
        "action": step.action,
        "matched": step.matched,
        "valid": step.valid,
        "observation_id": text_id(step.observation),
        "reward": float(step.reward),
        "terminated": step.terminated,
        "success": step.success,
        "disaster": step.disaster,
        "dropped": step.dropped,
    }


def read_step(record: Sequence[Any], calls: Mapping[str, Any]) -> Step:
    """Return the step of a record of `COLUMNS`; `calls` are its fields from `load_calls`."""
    reply, action, matched, valid, observation, reward, terminated, success, disaster, dropped, *how = record
    return Step(
        reply=reply,
        action=action,
        matched=matched,
        valid=valid,
        observation=observation,
        reward=reward,
        terminated=terminated,
        success=success,
        disaster=disaster,
        dropped=dropped or 0,
        **sampled(*how),
        **calls,
    )
