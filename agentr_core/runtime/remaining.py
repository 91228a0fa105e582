"""An estimate of the time that a run still needs, from what its stages took on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentr_core.runtime.context import RunContext, Stage
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import last_finished_run, stage_seconds, stages_with_tokens

_MIN_COMPARED_S = 20.0
"""Seconds of finished stages below which this run is taken to be as fast as the earlier one."""
_MIN_SHARE_LEFT = 0.02
"""The smallest remaining time of a stage, as a share of its expected time: one that takes longer
than expected is never shown as done.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is expected of a run at the beginning of one of its stages, in seconds."""

    stage_s: float | None = None
    """The whole stage; None where it is not known."""
    spent_s: float = 0.0
    """What the stage took before it was interrupted."""
    after_s: float | None = None
    """All that comes after the stage; None where part of it is not known."""

    def seconds_left(
        self, elapsed_s: float, last_done_s: float, done: int, total: int
    ) -> tuple[float | None, float | None]:
        """Return the seconds that are left of the stage and of the run, None where not known.

        If the stage is slower than an earlier measurement, the rest of it and the later stages are
        expected to be slower, too: the more of it is done, the more its own pace counts. If it is
        faster, nothing is concluded, since short units are done first. Without an earlier
        measurement, its pace alone decides.

        Args:
            elapsed_s: seconds since the stage began or went on in this process.
            last_done_s: seconds until the last of its units was done.
            done, total: units of the stage done since then, and units that were to do then.
        """
        done_share = done / total if 0 < done <= total else 0.0
        # The time since the last unit ended belongs to the next one; it is no sign of slower units.
        unit_wait_s = elapsed_s - last_done_s
        stage_left_s: float | None = None
        slowdown = 1.0
        if self.stage_s is not None:
            rest_s = max(0.0, self.stage_s - self.spent_s)
            paced_s = (1 - done_share) * rest_s + last_done_s if done_share else rest_s
            stage_left_s = max(
                _MIN_SHARE_LEFT * self.stage_s,
                rest_s - elapsed_s,
                (1 - done_share) * paced_s - unit_wait_s if done_share else 0.0,
            )
            slowdown = max(1.0, paced_s / rest_s) if rest_s else 1.0
        elif done_share:
            rest_s = last_done_s / done_share * (1 - done_share)
            stage_left_s = max(_MIN_SHARE_LEFT * rest_s, rest_s - unit_wait_s)
        return (
            stage_left_s,
            None if stage_left_s is None or self.after_s is None else stage_left_s + slowdown * self.after_s,
        )


def worked_seconds(store: Store, run_id: str, stages: Iterable[tuple[int, Stage]]) -> dict[tuple[int, str], float]:
    """Return the seconds of the stages of a run, by iteration and name. Stages that need a model
    but neither sampled nor trained a token are left out: their work was taken over from another
    run.

    Args:
        stages: those of the run's recipe, each with its iteration.
    """
    gpu_stages = {(iteration, stage.name) for iteration, stage in stages if "gpu" in stage.needs}
    idle_stages = gpu_stages.difference(stages_with_tokens(store, run_id))
    return {key: seconds for key, seconds in stage_seconds(store, run_id).items() if key not in idle_stages}


def estimate_remaining(ctx: RunContext, stage: str, iteration: int) -> Remaining:
    """Return what is expected of a run as a stage begins.

    A stage takes as long as in the last finished run of the same recipe in the workspace, times the
    ratio of the two runs so far. Without such a run it takes as long as in this run's last
    iteration that had it; the first evaluation stands for later ones. Only what a run did itself
    counts (`worked_seconds`).
    """
    recipe = ctx.recipe
    earlier_run_id = last_finished_run(
        ctx.store,
        recipe=recipe.name,
        method=recipe.method,
        iterations=recipe.iterations,
        excluded_run_id=ctx.run_id,
    )
    all_stages = [
        (number, entry)
        for number in range(recipe.iterations + 1)
        for entry in ctx.method.plan_of(recipe, number).stages
    ]
    position = next(
        (index for index, (number, entry) in enumerate(all_stages) if (number, entry.name) == (iteration, stage)), None
    )
    if position is None:
        return Remaining()
    current = worked_seconds(ctx.store, ctx.run_id, all_stages)
    reference = worked_seconds(ctx.store, earlier_run_id, all_stages) if earlier_run_id else {}
    common_stages = [
        key for number, entry in all_stages[:position] if (key := (number, entry.name)) in current and key in reference
    ]
    total = sum(reference[key] for key in common_stages)
    ratio = sum(current[key] for key in common_stages) / total if total >= _MIN_COMPARED_S else 1.0

    def expected(number: int, name: str) -> float | None:
        if (number, name) in reference:
            return ratio * reference[number, name]
        return next(
            (
                current[earlier_number, name]
                for earlier_number in range(number - 1, -1, -1)
                if (earlier_number, name) in current
            ),
            None,
        )

    later_stages = [(expected(number, entry.name), entry.needs) for number, entry in all_stages[position + 1 :]]
    # What needs neither a model nor a world takes seconds.
    complete = all(seconds is not None or not needs for seconds, needs in later_stages)
    return Remaining(
        stage_s=expected(iteration, stage),
        spent_s=stage_seconds(ctx.store, ctx.run_id).get((iteration, stage), 0.0),
        after_s=sum(seconds or 0.0 for seconds, _ in later_stages) if complete else None,
    )
