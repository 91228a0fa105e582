"""What a report says of a failed episode: the first step that went wrong, in a sentence."""

from __future__ import annotations

import pytest

from agentr_core.evaluation.metrics import first_loop, is_stuck
from agentr_core.stages.report import mishap
from agentr_core.types import Instance, Step, StopReason, Trajectory


def lost(*actions: str, refused: int | None = None, stop: StopReason = StopReason.STEP_LIMIT) -> Trajectory:
    steps = tuple(
        Step(reply=f"Action: {action}", action=action, observation=f"after {action}", reward=0.0, valid=at != refused)
        for at, action in enumerate(actions)
    )
    instance = Instance(environment="door", split="test", index=0)
    return Trajectory(
        instance=instance, first_observation="Goal: go.", steps=steps, reward=0.0, success=False, stop=stop
    )


@pytest.mark.parametrize(
    ("trajectory", "sentence"),
    [
        (lost("look", "go", "wait", refused=1), "step 1, refused: go → after go"),
        (lost("look", *["a", "b"] * 3), "from step 1 on it repeats: a; b"),
        (lost("look", *["a"] * 3, refused=2), "from step 1 on it repeats: a"),
        (lost("look", "bad", *["a"] * 3, refused=1), "step 1, refused: bad → after bad"),
        (lost("look", "open"), "step 1, last, ended by step limit: open → after open"),
        (lost(), "no step; it ended by step limit"),
    ],
)
def test_the_first_step_that_went_wrong_is_told(trajectory: Trajectory, sentence: str) -> None:
    assert mishap(trajectory) == sentence


def test_a_loop_is_the_first_and_of_the_shortest_sequence() -> None:
    assert first_loop(list("xababab")) == (1, 2)
    assert first_loop(list("aaaaaa")) == (0, 1)
    assert first_loop(list("abab")) is None
    assert not is_stuck(list("abab"))
    assert is_stuck(list("xababab"))
