"""Preference pairs of an iteration, and how training on them went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceCounts:
    """The numbers of pairs that an iteration made, by what made the difference and by their
    margin.
    """

    kinds: dict[str, int]
    """The most frequent first."""
    margins: dict[float, int]
    """By the lower end of the tenth that contains the margin of reward; pairs without rewards are
    left out.
    """
    cut: int
    """Pairs whose rejected side was cut."""


@dataclass(frozen=True, slots=True)
class PreferenceTrainingStep:
    """One optimizer step of preference training: means over its pairs."""

    step: int
    loss: float
    reward_accuracy: float
    chosen_logps: float
    rejected_logps: float
    chosen_rewards: float
    rejected_rewards: float


class PreferenceHead(NamedTuple):
    """A pair of samples, of which one is preferred."""

    preference_id: str
    run_id: str | None
    iteration: int | None
    kind: str
    instance_id: str | None
    chosen_sample_id: str
    rejected_sample_id: str
    chosen_reward: float | None
    rejected_reward: float | None
    margin: float | None
    dropped_steps: int | None


def preference_head(store: Store, preference_id: str) -> PreferenceHead | None:
    """Return a preference; None if it is not stored."""
    return next((PreferenceHead(*row) for row in store.rows(_HEAD, preference_id)), None)


def preference_counts(store: Store, iteration_id: str) -> PreferenceCounts:
    """Return the counts of the pairs of an iteration."""
    kinds = store.rows(
        "select kind, count(*) from preference where iteration_id = ? group by kind order by count(*) desc, kind",
        iteration_id,
    )
    # A margin of 1 belongs to the last tenth.
    margins = store.rows(
        "select least(floor(margin * 10 + 1e-6), 9) / 10 as low, count(*) from preference "
        "where iteration_id = ? and margin is not null group by low order by low",
        iteration_id,
    )
    cut = store.count("select count(*) from preference where iteration_id = ? and dropped_steps > 0", iteration_id)
    return PreferenceCounts(kinds=dict(kinds), margins=dict(margins), cut=cut)


def preference_training(store: Store, iteration_id: str) -> list[PreferenceTrainingStep]:
    """Return the steps of an iteration's preference training in their order; none for any other
    training.
    """
    return [PreferenceTrainingStep(*row) for row in store.rows(_STEPS, iteration_id)]


_HEAD = """
select p.preference_id, i.run_id, i.iteration, p.kind, p.instance_id, p.chosen_sample_id, p.rejected_sample_id,
    p.chosen_reward, p.rejected_reward, p.margin, p.dropped_steps
from preference p left join iteration i using (iteration_id)
where p.preference_id = ?
"""
_STEPS = """
select t.step, t.loss, t.reward_accuracy, t.chosen_logps, t.rejected_logps, t.chosen_rewards, t.rejected_rewards
from iteration i join training_step t on t.checkpoint_id = i.checkpoint_out
where i.iteration_id = ? and t.reward_accuracy is not null
order by t.step
"""
