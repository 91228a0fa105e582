"""What a report says about the preference pairs of an iteration."""

from __future__ import annotations

from agentr_core.methods.eto.preferences import STAGE
from agentr_core.methods.eto.report_records import PreferenceRecord
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report_funnels import rejected_by, tallies
from agentr_core.store.queries.preferences import preference_counts, preference_training


def preference_record(place: Workplace, iteration: int) -> PreferenceRecord | None:
    """Return the record of the pairs of an iteration; None if it makes no pairs."""
    if not place.plan(iteration).pairs:
        return None
    iteration_id, source_id = place.iteration_id(iteration), place.source_id(iteration)
    made = preference_counts(place.store, source_id)
    return PreferenceRecord(
        kinds=tallies(made.kinds),
        rejected=rejected_by(place, source_id, STAGE),
        margins=tuple(made.margins.items()),
        cut=made.cut,
        steps=tuple(preference_training(place.store, iteration_id)),
    )
