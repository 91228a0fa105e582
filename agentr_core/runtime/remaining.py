"""An estimate of the time that a run still needs, from what its stages took on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentr_core.runtime.place import Stage, Workplace
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import last_finished, stage_seconds, stages_with_tokens

_LEAST_COMPARED = 20.0
"""Seconds of finished stages below which this run is taken to be as fast as the earlier one."""
_LEAST_LEFT = 0.02
"""The smallest remaining time of a stage, as a share of its expected time: one that takes longer
than expected is never shown as done.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is expected of a run at the beginning of one of its stages, in seconds."""

    stage: float | None = None
    """The whole stage; None where it is not known."""
    spent: float = 0.0
    """What the stage took before it was interrupted."""
    after: float | None = None
    """All that comes after the stage; None where part of it is not known."""

    def left(self, elapsed_s: float, last_done_s: float, done: int, total: int) -> tuple[float | None, float | None]:
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
        share = done / total if 0 < done <= total else 0.0
        # The time since the last unit ended belongs to the next one; it is no sign of slower units.
        wait = elapsed_s - last_done_s
        stage: float | None = None
        slower = 1.0
        if self.stage is not None:
            rest = max(0.0, self.stage - self.spent)
            by_pace = (1 - share) * rest + last_done_s if share else rest
            stage = max(_LEAST_LEFT * self.stage, rest - elapsed_s, (1 - share) * by_pace - wait if share else 0.0)
            slower = max(1.0, by_pace / rest) if rest else 1.0
        elif share:
            ahead = last_done_s / share * (1 - share)
            stage = max(_LEAST_LEFT * ahead, ahead - wait)
        return stage, None if stage is None or self.after is None else stage + slower * self.after


def own_seconds(store: Store, run_id: str, stages: Iterable[tuple[int, Stage]]) -> dict[tuple[int, str], float]:
    """Return the seconds of the stages of a run, by iteration and name. Stages that need a model
    but neither sampled nor trained a token are left out: their work was taken over from another
    run.

    Args:
        stages: those of the run's recipe, each with its iteration.
    """
    asking = {(iteration, stage.name) for iteration, stage in stages if "gpu" in stage.needs}
    idle = asking.difference(stages_with_tokens(store, run_id))
    return {key: seconds for key, seconds in stage_seconds(store, run_id).items() if key not in idle}


def remaining(place: Workplace, stage: str, iteration: int) -> Remaining:
    """Return what is expected of a run as a stage begins.

    A stage takes as long as in the last finished run of the same recipe in the workspace, times the
    ratio of the two runs so far. Without such a run it takes as long as in this run's last
    iteration that had it; the first evaluation stands for later ones. Only what a run did itself
    counts (`own_seconds`).
    """
    recipe = place.recipe
    earlier = last_finished(
        place.store, recipe=recipe.name, method=recipe.method, iterations=recipe.iterations, beside=place.run_id
    )
    order = [
        (number, entry)
        for number in range(recipe.iterations + 1)
        for entry in place.method.plan_of(recipe, number).stages
    ]
    position = next(
        (at for at, (number, entry) in enumerate(order) if (number, entry.name) == (iteration, stage)), None
    )
    if position is None:
        return Remaining()
    current = own_seconds(place.store, place.run_id, order)
    reference = own_seconds(place.store, earlier, order) if earlier else {}
    common_stages = [
        key for number, entry in order[:position] if (key := (number, entry.name)) in current and key in reference
    ]
    total = sum(reference[key] for key in common_stages)
    ratio = sum(current[key] for key in common_stages) / total if total >= _LEAST_COMPARED else 1.0

    def expected(number: int, name: str) -> float | None:
        if (number, name) in reference:
            return ratio * reference[number, name]
        return next((current[before, name] for before in range(number - 1, -1, -1) if (before, name) in current), None)

    later = [(expected(number, entry.name), entry.needs) for number, entry in order[position + 1 :]]
    # What needs neither a model nor a world takes seconds.
    complete = all(seconds is not None or not needs for seconds, needs in later)
    return Remaining(
        stage=expected(iteration, stage),
        spent=stage_seconds(place.store, place.run_id).get((iteration, stage), 0.0),
        after=sum(seconds or 0.0 for seconds, _ in later) if complete else None,
    )
