"""What a report says about the preference pairs of an iteration, and the funnel of the iterations that explore."""

from __future__ import annotations

from agentr_core.preferences import STAGE
from agentr_core.reports.records import FunnelStage, PreferenceRecord, PreferenceStep, Tally
from agentr_core.stages.place import Workplace


def preference_record(place: Workplace, iteration: int) -> PreferenceRecord | None:
    """Return what is known of the pairs of an iteration; None where none was looked for."""
    if place.recipe.phase(iteration) != "dpo":
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
        rejected=_rejected(place, source_id, STAGE),
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


def treeless_funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return what came out of each stage of data construction of an iteration of method `eto`, or one that clones."""
    own, source = place.iteration_id(iteration), place.source_id(iteration)
    expert, explored, solved, pairs, samples, rows = (
        int(number or 0) for number in place.one(_COUNTS, source, own) or (0,) * 6
    )
    by_expert = FunnelStage(name="expert episodes", count=expert, rejected=_rejected(place, source, "expert"))
    stages = {
        "sft": [by_expert],
        "rft": [
            *([by_expert] if place.recipe.eto.clones(iteration) else []),
            FunnelStage(name="explored episodes", count=explored),
            FunnelStage(name="successes", count=solved),
        ],
        "dpo": [
            by_expert,
            FunnelStage(name="explored episodes", count=explored),
            FunnelStage(name="preference pairs", count=pairs, rejected=_rejected(place, source, STAGE)),
        ],
    }[place.recipe.phase(iteration) or "sft"]
    trained = FunnelStage(name="trained rows", count=rows, rejected=_rejected(place, own, "filter"))
    return (*stages, FunnelStage(name="samples of the pool" if source != own else "samples", count=samples), trained)


def _rejected(place: Workplace, iteration_id: str, stage: str) -> tuple[Tally, ...]:
    rows = place.all(
        "select reason, count(*) from rejection where iteration_id = ? and stage = ? "
        "group by reason order by count(*) desc, reason",
        iteration_id,
        stage,
    )
    return tuple(Tally(name=reason, count=count) for reason, count in rows)


_COUNTS = """
select
    (select count(*) from trajectory where iteration_id = $1 and source = 'expert'),
    (select count(*) from trajectory where iteration_id = $1 and source = 'rollout'),
    (select count(*) from trajectory where iteration_id = $1 and source = 'rollout' and success),
    (select count(*) from preference where iteration_id = $1),
    (select count(*) from sample where iteration_id = $1),
    (select count(*) from dataset d join dataset_row using (dataset_id) where d.iteration_id = $2)
"""
