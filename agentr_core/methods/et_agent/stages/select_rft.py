"""Selection for fine-tuning: trajectories of an iteration's flywheel that are fit become samples;
all others are stored as rejections.
"""

from __future__ import annotations

from typing import Any

from agentr_core.fingerprint import derive_seed
from agentr_core.methods.et_agent.flywheel.tagged import Tagged
from agentr_core.methods.et_agent.flywheel.turns import manner_of
from agentr_core.methods.et_agent.rft import STAGE, fit_for_tuning
from agentr_core.runtime.place import Workplace
from agentr_core.stages.whole_episodes import whole_rows
from agentr_core.store.codec.anew import store_anew
from agentr_core.store.codec.families import load_members
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.tables import merge
from agentr_core.threads import in_thread
from agentr_core.types import SampleKind


async def select_rft(place: Workplace, iteration: int) -> dict[str, Any]:
    """Make the samples of an iteration from its flywheel; return how many there are, and how many
    trajectories are not trained on.

    Families that an error stopped contribute the members that they have.
    """
    iteration_id = place.iteration_id(iteration)

    def make() -> dict[str, Any]:
        members = load_members(place.store, iteration_id)
        with place.worlds() as worlds:
            tagged = {
                key
                for key, member in members.items()
                if isinstance(manner_of(worlds.of(member.instance), member.instance), Tagged)
            }
        chosen = fit_for_tuning(
            # Of equal texts the first is kept and its tokens are trained on, so ids, which contain
            # the run, must not order them.
            sorted(members.items(), key=lambda member: [step.token_ids for step in member[1].steps]),
            per_question=place.recipe.et_agent.rft.per_question,
            seed=derive_seed(place.recipe.seed, STAGE, iteration),
            in_tags=tagged,
        )
        kept = whole_rows(place, iteration, dict(chosen.kept), stage=STAGE)
        rows = merge([rejection_rows(chosen.rejected, iteration_id=iteration_id), kept])
        store_anew(place.store, rows, iteration_id=iteration_id, stage=STAGE, kinds=[SampleKind.GOOD])
        return {"samples": len(kept.get("sample", ())), "rejected": len(chosen.rejected)}

    with place.timed("select_rft", iteration):
        return await in_thread(make)
