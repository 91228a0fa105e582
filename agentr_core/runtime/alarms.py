"""Alarms: after each step of group RL and at the end of each stage, measures from the store are
compared with the thresholds of `recipes.alarms`. Training on a dataset checks its own steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentr_core.evaluation.metrics import success_rate
from agentr_core.recipes.alarms import Crossing
from agentr_core.runtime.place import Stage, Workplace
from agentr_core.store.codec.ledger import alarms_of
from agentr_core.store.database import Store, snapshot
from agentr_core.store.queries import alarms as queries
from agentr_core.store.queries.runs import unreadable_replies
from agentr_core.store.queries.trees import Validation, validations


def watch_step(
    place: Workplace, iteration: int, stage: str, step: int, measures: Mapping[str, float | None]
) -> Crossing | None:
    """Check a step of group RL against all alarms; store and report each threshold that it crosses.
    Return the first of them if the recipe ends a training at an alarm, otherwise None.

    Args:
        measures: the columns of the step's row in table rl_step, the share of empty replies, and
            the success of a validation after the step, if there was one.
    """
    store, alarms, key = place.store, place.recipe.alarms, place.iteration_id(iteration)
    all_validations: list[Validation] = []
    with snapshot(store) as state:
        history = queries.step_measures(state, key, step)
        if "eval_success" in measures and queries.improved(state, key):
            all_validations = validations(state, key)
    history.append(
        {rule: measures.get(column) for rule, column in {**queries.WATCHED, "empty_replies": "empty_share"}.items()}
    )
    if all_validations:
        bounds = {
            line.step: success_rate([n < round(line.success * line.episodes) for n in range(line.episodes)])
            for line in all_validations
        }
        before = max((bound.low for number, bound in bounds.items() if number < step), default=0.0)
        # Success has surely fallen if its interval lies below that of the best step before.
        history[-1]["held_out_drop"] = before - bounds[step].high
    crossings = alarms.crossed(history, step=step)
    if crossings:
        store.write(place.alarms(stage, iteration, crossings))
    return crossings[0] if crossings and alarms.reaction != "tell" else None


def check_stage(place: Workplace, iteration: int, stage: Stage) -> None:
    """Check a stage that has just ended, and whose output is stored, against all alarms; store and
    report each threshold that it crosses.

    Raises `AlarmRaised` if one is crossed and the recipe ends a run at an alarm; again if the stage
    is run again and the cause remains.
    """
    config = place.recipe.alarms
    with snapshot(place.store) as state:
        crossings = config.crossed([_measures(place, state, iteration, stage)])
        earlier_alarms = [
            alarm
            for alarm in alarms_of(state, place.iteration_id(iteration))
            if alarm.stage == stage.name and alarm.name == "error_budget" and alarm.threshold == config.error_budget
        ]
    if crossings:
        place.store.write(place.alarms(stage.name, iteration, crossings))
    for alarm in earlier_alarms:
        # Alarms that a worker of a cluster stored have notified nobody yet.
        place.alarmed(alarm)
    for reason in (*crossings, *earlier_alarms) if config.reaction != "tell" else ():
        raise reason.ends("goes on after this stage")


def _measures(place: Workplace, store: Store, iteration: int, stage: Stage) -> dict[str, float | None]:
    """Return the measures of an ended stage that alarms watch, by rule. Of a share, the bound of
    its 95% Wilson interval that is farther from the threshold is taken: a few replies prove
    nothing.
    """
    key = place.iteration_id(iteration)
    evaluates, judges = stage.name == "evaluate", stage.roles == ("judge",)

    def bounds(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
        shares = {name: success_rate([True] * n + [False] * (all_ - n)) for name, (all_, n) in counts.items() if all_}
        return {name: (share.low, share.high) for name, share in shares.items()}

    # Group RL is watched step by step.
    purpose = "judged" if judges else "evaluated" if evaluates else "collected" if stage.gathers else ""
    helper_roles = {*stage.roles} - {"actor", "teacher", "scorer"}
    if not (purpose or helper_roles):
        return {}
    intervals, measures = bounds(queries.shares(store, key)), dict[str, float | None]()
    for rule, part in (("cut_replies", "cut"), ("empty_replies", "empty")):
        measures[rule] = intervals.get(f"{part} {purpose}", (None, None))[0]
    # While experience is gathered, a world may ask any helper.
    helpers = {role: n for role, n in unreadable_replies(store, key).items() if stage.gathers or role in helper_roles}
    unreadable = [
        *bounds(helpers).values(),
        *([intervals["unread verdicts"]] if judges and "unread verdicts" in intervals else []),
    ]
    measures["unreadable_replies"] = max((low for low, _ in unreadable), default=None)
    if judges and (agreement := {name: interval for name, interval in intervals.items() if name.startswith("agrees ")}):
        measures["judge_agreement"] = min(high for _, high in agreement.values())
        earlier = (bounds(queries.shares(store, place.iteration_id(number))) for number in range(1, iteration))
        first = next((past for past in earlier if "agrees tree" in past), {})
        drops = [first[name][0] - high for name, (_, high) in agreement.items() if name in first]
        measures["judge_drift"] = max(drops, default=None)
    if evaluates and (gain := queries.held_out_gain(store, key)) and queries.improved(store, key):
        measures["held_out_drop"] = -gain[1]
    return measures
