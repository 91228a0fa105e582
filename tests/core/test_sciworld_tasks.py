"""The numbers of ScienceWorld's variations: the published enumerations, and what an agent's words
are matched to.
"""

from __future__ import annotations

from typing import get_args

import pytest

from agentr_core.environments.sciworld.tasks import (
    ETO_STEP_LIMITS,
    VARIATIONS,
    Numbering,
    Variation,
    find_variation,
    first_numbers,
    tasks,
)
from agentr_core.environments.sciworld.world import nearest_action


@pytest.mark.parametrize(
    ("numbering", "kinds", "total"),
    [("agentgym", 22, 4339), ("agentgym-shipped", 23, 4639), ("eto", 24, 4591), ("all", 30, 7207)],
)
def test_an_enumeration_numbers_each_variation_once(numbering: Numbering, kinds: int, total: int) -> None:
    variations = [find_variation(numbering, number) for number in range(total)]
    assert (len(tasks(numbering)), len(set(variations)), None in variations) == (kinds, total, False)
    assert find_variation(numbering, -1) is find_variation(numbering, total) is None
    numbers = first_numbers(numbering)
    assert all(find_variation(numbering, numbers[task]) == Variation(task, 0) for task in tasks(numbering))


def test_published_numbers() -> None:
    numbers = first_numbers("agentgym")
    expected = {
        "boil": 0,
        "change-the-state-of-matter-of": 90,
        "measure-melting-point-known-substance": 660,
        "power-component": 1096,
        "test-conductivity-of-unknown-substances": 2036,
        "find-animal": 3536,
        "chemistry-mix": 3836,
        "lifespan-shortest-lived": 4065,
        "identify-life-stages-2": 4329,
    }
    assert {task: numbers[task] for task in expected} == expected


def test_the_server_of_agentgym_plays_what_stands_300_places_earlier() -> None:
    assert all(
        find_variation("agentgym", number) == find_variation("agentgym-shipped", number) for number in range(1096)
    )
    assert all(
        find_variation("agentgym", number) == find_variation("agentgym-shipped", number + 300)
        for number in range(1096, 4339)
    )


def test_eto_limits_its_own_tasks() -> None:
    assert set(ETO_STEP_LIMITS) == set(tasks("eto"))
    assert set(get_args(Numbering)) == {"agentgym", "agentgym-shipped", "eto", "all"}
    assert sum(VARIATIONS.values()) == 7207


VALID = (
    "focus on agent",
    "focus on red box",
    "go to kitchen",
    "close door to kitchen",
    "pick up metal pot",
    "pick up glass cup",
    "pour self-watering pot into sink",
)
SEEN = "In it, you see: a metal pot, a glass cup, a self-watering pot, a sink. In your inventory: an orange"


@pytest.mark.parametrize(
    ("said", "done"),
    [
        ("pick up metal pot", "pick up metal pot"),
        ("please pick the metal thing up", "pick up metal pot"),
        ("pour the self-watering pot into the sink", "pour self-watering pot into sink"),
        ("open the door to green house", "open door to greenhouse"),
        # Two are as near and as long; the alphabet decides.
        ("pick up", "pick up glass cup"),
        # The one action that shares a word is a focus on something out of sight, and no candidate.
        ("the red box", "the red box"),
        ("the agent", "the agent"),
        ("shut everything", "shut everything"),
        ("", ""),
    ],
)
def test_matching(said: str, done: str) -> None:
    assert nearest_action(said, VALID, SEEN) == done
