"""ET-Agent's part of a report: what the flywheel made, by operator, and how much of that was fit
for training.
"""

from __future__ import annotations

from agentr_core.methods.et_agent.rft import STAGE as RFT
from agentr_core.methods.et_agent.stages.family_maker import STAGE as EVOLVE
from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row, Section, Table
from agentr_core.reports.records import FunnelStage
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report_funnels import rejected_by, to_rows
from agentr_core.store.codec.families import FLYWHEEL
from agentr_core.store.queries.families import OperatorCount, operator_counts
from agentr_core.store.queries.funnels import episode_counts

TITLE = "The flywheel by operator"
_MADE = {
    "fresh": "fresh, before the first round",
    "C0": "C0 a fresh one beside a right one",
    "C1": "C1 first redundant step written anew",
    "C2": "C2 thoughts written anew",
    "I1": "I1 first flawed step corrected by itself",
    "I2": "I2 a hint after the flawed step",
    "I3": "I3 a hint after the whole",
    "I4": "I4 its own review after the whole",
}


def funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return what came out of each stage of an iteration `rft`."""
    iteration_id = place.iteration_id(iteration)
    made = episode_counts(place.store, iteration_id, FLYWHEEL)
    return to_rows(
        place,
        iteration,
        [
            FunnelStage(name="trajectories", count=made.played, rejected=rejected_by(place, iteration_id, EVOLVE)),
            FunnelStage(name="right answers", count=made.solved, rejected=rejected_by(place, iteration_id, RFT)),
        ],
    )


def family_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on what each operator made; none without a flywheel."""
    charged = place.recipe.et_agent.curriculum.counts
    found = operator_counts(place.store, place.iteration_id(iteration), charged)
    if not found:
        return ()
    cost = charged.capitalize()
    titles = ("Trajectories", "Right, %", cost, f"{cost} saved, if right", "Samples")
    columns = (Column("Operator", "text"), *map(Column, titles))
    note = (
        f"A child that goes on from its parent has the parent's {charged} up to there, too. {cost} saved are those of "
        "the parent minus those of its child, on average."
    )
    return (Section("families", TITLE, (Table(columns, tuple(map(_row, found))),), note),)


def _row(made: OperatorCount) -> Row:
    return Row(
        (
            _MADE.get(made.operator, made.operator),
            wording.count(made.children),
            wording.percent(made.right / made.children),
            wording.decimal(made.cost, 2),
            None if made.saved is None else wording.signed(made.saved, 2),
            wording.count(made.samples),
        )
    )
