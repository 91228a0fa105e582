"""Rows of the records about a run: what ran, what was rejected, what went wrong, what was measured.

Each function returns rows by table that are one unit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from agentr_core.episodes.units import UnitError
from agentr_core.fingerprint import canonical, fingerprint
from agentr_core.store.database import Store
from agentr_core.store.tables import Rows
from agentr_core.types import Rejection

Status = Literal["running", "evaluating", "collecting", "finished", "failed"]
"""`evaluating`: the run consists only of `agentr eval`, which is under way or was interrupted.
`collecting`: the run consists only of gathered episodes.
"""
Part = Literal["generate", "environment", "train", "store", "other"]
SCORES = ("chosen_logps", "rejected_logps", "chosen_rewards", "rejected_rewards", "reward_accuracy")
"""What preference training measures in each step, as columns of table training_step."""


def run_rows(
    run_id: str,
    *,
    recipe: str,
    method: str,
    config: Any,
    versions: Mapping[str, str],
    workspace: str,
    status: Status = "running",
    started_at: datetime | None = None,
    finished_at: datetime | None = None,
) -> Rows:
    """Return the row of a run. `recipe` is the recipe's name, `config` the resolved recipe; times
    are timezone-aware.

    The order of the recipe's fields is kept. Stored again for the same run, only `config`, `status`
    and `finished_at` take effect: a run may continue with more iterations, or on other machines.
    """
    return {
        "run": [
            {
                "run_id": run_id,
                "recipe": recipe,
                "method": method,
                "config": json.dumps(config, ensure_ascii=False),
                "versions": canonical(dict(versions)),
                "workspace": workspace,
                "status": status,
                "started_at": _utc(started_at or datetime.now(UTC)),
                "finished_at": None if finished_at is None else _utc(finished_at),
            }
        ]
    }


def started_at(store: Store, run_id: str) -> datetime | None:
    """Return when a run was first stored, in UTC; None if it is not stored."""
    rows = store.rows("select started_at from run where run_id = ?", run_id)
    return next((in_utc(moment) for (moment,) in rows), None)


def in_utc(stored: datetime | None) -> datetime | None:
    """Return a stored time with its time zone, which the store leaves out; None for None."""
    return None if stored is None else stored.replace(tzinfo=UTC)


def iteration_rows(
    iteration_id: str,
    *,
    run_id: str,
    iteration: int,
    checkpoint_in: str | None = None,
    checkpoint_out: str | None = None,
    collected_by: str | None = None,
) -> Rows:
    """Return the row of an iteration that is running, counted from 1 (0: the evaluation of the
    base). Stored again, it is updated.
    """
    return {
        "iteration": [
            {
                "iteration_id": iteration_id,
                "run_id": run_id,
                "iteration": iteration,
                "checkpoint_in": checkpoint_in,
                "checkpoint_out": checkpoint_out,
                "status": "running",
                "finished_at": None,
            }
            | ({} if collected_by is None else {"collected_by": collected_by})
        ]
    }


def checkpoint_rows(
    checkpoint_id: str,
    *,
    path: str,
    weights_sha256: str,
    config: Any,
    parent_id: str | None = None,
    dataset_id: str | None = None,
    iteration_id: str | None = None,
) -> Rows:
    """Return the row of a checkpoint. The model a run starts from has no dataset or iteration, and
    a parent only where it is another run's checkpoint.
    """
    return {
        "checkpoint": [
            {
                "checkpoint_id": checkpoint_id,
                "parent_id": parent_id,
                "dataset_id": dataset_id,
                "iteration_id": iteration_id,
                "path": path,
                "weights_sha256": weights_sha256,
                "config": canonical(config),
            }
        ]
    }


def evaluation_rows(
    evaluation_id: str,
    *,
    iteration_id: str,
    checkpoint_id: str,
    name: str,
    split: str,
    config: Any,
    finished: bool = False,
) -> Rows:
    """Return the row of an evaluation; `name` is "revision_test" for recovery from failed prefixes,
    else free.
    """
    return {
        "evaluation": [
            {
                "evaluation_id": evaluation_id,
                "iteration_id": iteration_id,
                "checkpoint_id": checkpoint_id,
                "name": name,
                "split": split,
                "config": canonical(config),
                "finished": finished,
            }
        ]
    }


def rejection_rows(rejections: Iterable[Rejection], *, iteration_id: str) -> Rows:
    """Return the rows of the rejections of a filter."""
    return {
        "rejection": [
            {
                "iteration_id": iteration_id,
                "stage": rejection.stage,
                "subject": rejection.subject,
                "reason": rejection.reason,
                "detail": rejection.detail,
            }
            for rejection in rejections
        ]
    }


def metric_rows(
    scope: Literal["run", "iteration", "evaluation"],
    scope_id: str,
    name: str,
    value: float | None,
    *,
    low: float | None = None,
    high: float | None = None,
    n: int | None = None,
) -> Rows:
    """Return the row of a metric with its 95% interval; stored again, it is replaced."""
    return {
        "metric": [
            {"scope": scope, "scope_id": scope_id, "name": name, "value": value, "low": low, "high": high, "n": n}
        ]
    }


def event_rows(error: UnitError, *, run_id: str, iteration_id: str, stage: str) -> Rows:
    """Return the row of a failed try: an error if it was the last try, otherwise a warning."""
    return {
        "event": [
            {
                "event_id": fingerprint(run_id, iteration_id, stage, error, time.time_ns()),
                "run_id": run_id,
                "iteration_id": iteration_id,
                "stage": stage,
                "level": "error" if error.final else "warning",
                "class": error.kind,
                "phase": error.phase,
                "subject": error.key,
                "message": error.message,
                "traceback": error.traceback,
            }
        ]
    }


def timing_rows(iteration_id: str, stage: str, parts: Mapping[Part, float], *, tokens: int | None = None) -> Rows:
    """Return a row for each part of one attempt at a stage, in seconds; `tokens` were generated or
    trained in it.
    """
    at = datetime.now(UTC).isoformat()
    return {
        "timing": [
            {
                "timing_id": fingerprint(iteration_id, stage, part, at),
                "iteration_id": iteration_id,
                "stage": stage,
                "part": part,
                "seconds": float(seconds),
                "tokens": tokens if part in ("generate", "train") else None,
            }
            for part, seconds in parts.items()
        ]
    }


def training_step_rows(
    checkpoint_id: str,
    step: int,
    *,
    loss: float,
    trained_tokens: int,
    seconds: float,
    scores: Mapping[str, float],
) -> Rows:
    """Return the row of an optimizer step. `scores` are those of preference training by column;
    none otherwise.
    """
    return {
        "training_step": [
            {
                "checkpoint_id": checkpoint_id,
                "step": step,
                "loss": loss,
                "trained_tokens": trained_tokens,
                "seconds": seconds,
                **{name: scores.get(name) for name in SCORES},
            }
        ]
    }


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)
