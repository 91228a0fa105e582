"""What a report says about the preference pairs of an iteration."""

from __future__ import annotations

from agentr_core.methods.eto.preferences import STAGE
from agentr_core.reports.records import PreferenceRecord, PreferenceStep, Tally
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report_funnels import rejected_by


def preference_record(place: Workplace, iteration: int) -> PreferenceRecord | None:
    """Return what is known of the pairs of an iteration; None where none was looked for."""
    if not place.plan(iteration).pairs:
        return None
    iteration_id, source_id = place.iteration_id(iteration), place.source_id(iteration)
    kinds = place.all(
        "select kind, count(*) from preference where iteration_id = ? group by kind order by count(*) desc, kind",
        source_id,
    )
    # A margin of 1 belongs to the last tenth.
    margins = place.all(
        "select least(floor(margin * 10 + 1e-6), 9) / 10 as low, count(*) from preference "
        "where iteration_id = ? and margin is not null group by low order by low",
        source_id,
    )
    cut = place.one("select count(*) from preference where iteration_id = ? and dropped_steps > 0", source_id)
    steps = place.all(
        "select t.step, t.loss, t.reward_accuracy, t.chosen_logps, t.rejected_logps, t.chosen_rewards, "
        "t.rejected_rewards from iteration i join training_step t on t.checkpoint_id = i.checkpoint_out "
        "where i.iteration_id = ? and t.reward_accuracy is not null order by t.step",
        iteration_id,
    )
    return PreferenceRecord(
        kinds=tuple(Tally(name=kind, count=count) for kind, count in kinds),
        rejected=rejected_by(place, source_id, STAGE),
        margins=tuple((float(low), count) for low, count in margins),
        cut=int(cut[0]) if cut else 0,
        steps=tuple(
            PreferenceStep(
                step=step,
                loss=loss,
                accuracy=accuracy,
                chosen_logps=chosen_logps,
                rejected_logps=rejected_logps,
                chosen_rewards=chosen_rewards,
                rejected_rewards=rejected_rewards,
            )
            for step, loss, accuracy, chosen_logps, rejected_logps, chosen_rewards, rejected_rewards in steps
        ),
    )
