"""Alarms: after each step of group RL and at the end of each stage, measures from the store are
compared with the thresholds of `recipes.alarms`. Training on a dataset checks its own steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentr_core.evaluation.metrics import success_rate
from agentr_core.recipes.alarms import Crossing
from agentr_core.runtime.context import RunContext, Stage
from agentr_core.store.codec.ledger import load_alarms
from agentr_core.store.database import Store, snapshot
from agentr_core.store.queries import alarms as queries
from agentr_core.store.queries.runs import unreadable_reply_counts
from agentr_core.store.queries.trees import Validation, validations


def watch_step(
    ctx: RunContext, iteration: int, stage: str, step: int, measures: Mapping[str, float | None]
) -> Crossing | None:
    """Check a step of group RL against all alarms; store and report each threshold that it crosses.
    Return the first of them if the recipe ends a training at an alarm, otherwise None.

    Args:
        measures: the columns of the step's row in table rl_step, the share of empty replies, and
            the success of a validation after the step, if there was one.
    """
    store, config, iteration_id = ctx.store, ctx.recipe.alarms, ctx.iteration_id(iteration)
    all_validations: list[Validation] = []
    with snapshot(store) as state:
        history = queries.step_measures(state, iteration_id, step)
        if "eval_success" in measures and queries.has_improved(state, iteration_id):
            all_validations = validations(state, iteration_id)
    history.append(
        {
            rule: measures.get(column)
            for rule, column in {**queries.WATCHED_COLUMNS, "empty_replies": "empty_share"}.items()
        }
    )
    if all_validations:
        bounds = {
            validation.step: success_rate(
                [n < round(validation.success * validation.episodes) for n in range(validation.episodes)]
            )
            for validation in all_validations
        }
        best_before = max((bound.low for number, bound in bounds.items() if number < step), default=0.0)
        # Success has surely fallen if its interval lies below that of the best step before.
        history[-1]["held_out_drop"] = best_before - bounds[step].high
    crossings = config.find_crossings(history, step=step)
    if crossings:
        store.write(ctx.raise_alarms(stage, iteration, crossings))
    return crossings[0] if crossings and config.reaction != "tell" else None


def check_stage(ctx: RunContext, iteration: int, stage: Stage) -> None:
    """Check a stage that has just ended, and whose output is stored, against all alarms; store and
    report each threshold that it crosses.

    Raises `AlarmRaised` if one is crossed and the recipe ends a run at an alarm; again if the stage
    is run again and the cause remains.
    """
    config = ctx.recipe.alarms
    with snapshot(ctx.store) as state:
        crossings = config.find_crossings([_measures(ctx, state, iteration, stage)])
        earlier_alarms = [
            alarm
            for alarm in load_alarms(state, ctx.iteration_id(iteration))
            if alarm.stage == stage.name and alarm.name == "error_budget" and alarm.threshold == config.error_budget
        ]
    if crossings:
        ctx.store.write(ctx.raise_alarms(stage.name, iteration, crossings))
    for alarm in earlier_alarms:
        # Alarms that a worker of a cluster stored have notified nobody yet.
        ctx.on_alarm(alarm)
    for reason in (*crossings, *earlier_alarms) if config.reaction != "tell" else ():
        raise reason.to_error("goes on after this stage")


def _measures(ctx: RunContext, store: Store, iteration: int, stage: Stage) -> dict[str, float | None]:
    """Return the measures of an ended stage that alarms watch, by rule. Of a share, the bound of
    its 95% Wilson interval that is farther from the threshold is taken: a few replies prove
    nothing.
    """
    iteration_id = ctx.iteration_id(iteration)
    evaluates, judges = stage.name == "evaluate", stage.roles == ("judge",)

    def intervals_of(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
        shares = {name: success_rate([True] * n + [False] * (all_ - n)) for name, (all_, n) in counts.items() if all_}
        return {name: (share.low, share.high) for name, share in shares.items()}

    # Group RL is watched step by step.
    purpose = "judged" if judges else "evaluated" if evaluates else "collected" if stage.gathers else ""
    helper_roles = {*stage.roles} - {"actor", "teacher", "scorer"}
    if not (purpose or helper_roles):
        return {}
    intervals, measures = intervals_of(queries.share_counts(store, iteration_id)), dict[str, float | None]()
    for rule, measure in (("cut_replies", "cut"), ("empty_replies", "empty")):
        measures[rule] = intervals.get(f"{measure} {purpose}", (None, None))[0]
    # While experience is gathered, a world may ask any helper.
    helpers = {
        role: n
        for role, n in unreadable_reply_counts(store, iteration_id).items()
        if stage.gathers or role in helper_roles
    }
    unreadable_intervals = [
        *intervals_of(helpers).values(),
        *([intervals["unread verdicts"]] if judges and "unread verdicts" in intervals else []),
    ]
    measures["unreadable_replies"] = max((low for low, _ in unreadable_intervals), default=None)
    if judges and (agreement := {name: interval for name, interval in intervals.items() if name.startswith("agrees ")}):
        measures["judge_agreement"] = min(high for _, high in agreement.values())
        earlier_intervals = (
            intervals_of(queries.share_counts(store, ctx.iteration_id(number))) for number in range(1, iteration)
        )
        first_intervals = next(
            (interval_by_name for interval_by_name in earlier_intervals if "agrees tree" in interval_by_name), {}
        )
        drops = [first_intervals[name][0] - high for name, (_, high) in agreement.items() if name in first_intervals]
        measures["judge_drift"] = max(drops, default=None)
    if (
        evaluates
        and (gain := queries.held_out_gain_interval(store, iteration_id))
        and queries.has_improved(store, iteration_id)
    ):
        measures["held_out_drop"] = -gain[1]
    return measures
