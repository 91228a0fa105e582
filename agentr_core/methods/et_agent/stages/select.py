"""The selection in a curriculum stage: chooses the questions to train on by their rollouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.et_agent.selection import Selection, draw, reasons, select
from agentr_core.recipes.curriculum import CurriculumConfig
from agentr_core.runtime.instances import SELECTED, separate_instances
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.choices import chosen_rows
from agentr_core.store.codec.selections import (
    RolloutOutcome,
    Selected,
    load_rollout_outcomes,
    load_selection,
    selection_rows,
)
from agentr_core.store.tables import merge

STAGE = "select"
_LEFT_OUT: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(("s_corr", "s_tool", "front", "crowding")) | {"selected": False, "reason": "incomplete"}
)


async def select_questions(place: Workplace, iteration: int) -> dict[str, Any]:
    """Choose the questions of an iteration by its rollouts, and store the outcome for each. A
    stored selection is not changed.

    Raises `DataFault` when no question can be trained on.
    """
    iteration_id, config = place.iteration_id(iteration), place.recipe.et_agent.curriculum
    found = load_selection(place.store, iteration_id)
    if not found:
        instances = {one.key: one for one in await separate_instances(place, iteration)}
        with place.timed(STAGE, iteration):
            outcomes = load_rollout_outcomes(place.store, iteration_id)
            seed = derive_seed(place.recipe.seed, STAGE, iteration)
            found = chosen_of(outcomes, config, seed=seed)
            chosen = [instances[one.instance_id] for one in found if one.selected]
            rows = selection_rows(iteration_id, found)
            place.store.write(merge([rows, chosen_rows(iteration_id, {SELECTED: chosen})]))
    count = sum(one.selected for one in found)
    if not count:
        raise DataFault(
            f"no question of iteration {iteration} has right and wrong answers among its {config.rollouts} rollouts; "
            "sample more of each (et_agent.curriculum.rollouts), or other questions"
        )
    return {"questions": len(found), "selected": count}


def chosen_of(outcomes: Sequence[RolloutOutcome], config: CurriculumConfig, *, seed: int) -> list[Selected]:
    """Return the outcome for each question, in the order of the rollouts.

    A question with a rollout that failed for good is left out, because dispersions over different
    numbers of rollouts cannot be compared.
    """
    groups: defaultdict[str, list[RolloutOutcome]] = defaultdict(list)
    for one in outcomes:
        groups[one.instance_id].append(one)
    played = {key: [one for one in group if one.reward is not None] for key, group in groups.items()}
    whole = [key for key in groups if len(played[key]) == config.rollouts]
    shape = len(whole), config.rollouts
    correctness = np.array([one.reward for key in whole for one in played[key]], dtype=np.float64).reshape(shape)
    costs = np.array([_cost(one, config) for key in whole for one in played[key]], dtype=np.float64).reshape(shape)
    if config.select == "random":
        found = draw(whole, correctness, costs, config.questions, mixed_only=config.mixed_only, seed=seed)
    else:
        found = select(whole, correctness, costs, config.questions, mixed_only=config.mixed_only)
    told = dict(zip(whole, _told(found, reasons(found, drawn=config.select == "random")), strict=True))
    return [
        Selected(
            instance_id=key,
            episodes=len(group),
            correctness=fmean(one.reward or 0.0 for one in group) if group else 0.0,
            cost=fmean(_cost(one, config) for one in group) if group else 0.0,
            **told.get(key, _LEFT_OUT),
        )
        for key, group in played.items()
    ]


def _told(found: Selection, why: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what a selection says about each question, as fields of its row."""
    for place, reason in enumerate(why):
        crowding = float(found.crowding[place])
        yield {
            "s_corr": float(found.correctness[place]),
            "s_tool": float(found.calls[place]),
            "front": int(found.rank[place]) if found.rank[place] >= 0 else None,
            "crowding": None if math.isnan(crowding) else crowding,
            "selected": bool(found.selected[place]),
            "reason": reason,
        }


def _cost(one: RolloutOutcome, config: CurriculumConfig) -> int:
    return (one.calls if config.counts == "calls" else one.steps) or 0
