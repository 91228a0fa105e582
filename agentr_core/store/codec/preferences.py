"""Preference pairs to rows and back."""

from __future__ import annotations

from agentr_core.store.codec.samples import load_samples, sample_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Preference, PreferenceCase


def preference_rows(
    preference_id: str, preference: Preference, *, chosen_id: str, rejected_id: str, iteration_id: str
) -> Rows:
    """Return the rows of a preference and its two samples; they are one unit.

    Args:
        chosen_id, rejected_id: the ids of the samples.
    """
    instance = preference.chosen.instance
    head = {
        "preference_id": preference_id,
        "iteration_id": iteration_id,
        "kind": str(preference.case),
        "instance_id": None if instance is None else instance.key,
        "chosen_sample_id": chosen_id,
        "rejected_sample_id": rejected_id,
        "chosen_reward": preference.chosen_reward,
        "rejected_reward": preference.rejected_reward,
        "margin": preference.margin,
        "dropped_steps": preference.dropped,
    }
    sides = [
        sample_rows(
            key, sample, iteration_id=iteration_id, trajectory_id=sample.provenance.extra.get("trajectory") or None
        )
        for key, sample in ((chosen_id, preference.chosen), (rejected_id, preference.rejected))
    ]
    return merge([*sides, {"preference": [head]}])


def load_preferences(store: Store, iteration_id: str) -> dict[str, Preference]:
    """Return the preferences of an iteration by id."""
    rows = store.rows(
        "select preference_id, kind, chosen_sample_id, rejected_sample_id, chosen_reward, rejected_reward, "
        "dropped_steps from preference where iteration_id = ? order by preference_id",
        iteration_id,
    )
    samples = load_samples(store, sorted({key for row in rows for key in row[2:4]}))
    return {
        key: Preference(
            case=PreferenceCase(kind),
            chosen=samples[chosen],
            rejected=samples[rejected],
            chosen_reward=chosen_reward,
            rejected_reward=rejected_reward,
            dropped=dropped,
        )
        for key, kind, chosen, rejected, chosen_reward, rejected_reward, dropped in rows
    }
