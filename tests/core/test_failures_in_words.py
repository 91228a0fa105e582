"""What a report and the viewer say of a failed episode: the first step that went wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gallery
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.evaluation.failures import failure_steps
from agentr_core.evaluation.metrics import first_loop, is_stuck
from agentr_core.reports import wording
from agentr_core.reports.document import Table
from agentr_core.stages.report import Scoreboard, failure_section
from agentr_core.store.codec.ledger import evaluation_rows
from agentr_core.store.codec.trajectories import Episode, episode_rows, instance_row, load_episodes
from agentr_core.store.database import Store
from agentr_core.store.tables import merge
from agentr_core.types import Instance, Step, StopReason, Trajectory
from agentr_core.viewer import pages
from agentr_core.viewer.server import templates


def make_failure(*actions: str, refused: int | None = None, stop: StopReason = StopReason.STEP_LIMIT) -> Trajectory:
    steps = tuple(
        Step(reply=f"Action: {action}", action=action, observation=f"after {action}", reward=0.0, valid=at != refused)
        for at, action in enumerate(actions)
    )
    instance = Instance(environment="door", split="test", index=0)
    return Trajectory(
        instance=instance, first_observation="Goal: go.", steps=steps, reward=0.0, success=False, stop=stop
    )


REFUSED = make_failure("look", "go", "wait", refused=1)
LOOPING = make_failure("look", *["a", "b"] * 3)
LOST = make_failure("look", "open", stop=StopReason.DISASTER)
ENDED = make_failure("look", "open")
REFUSED_IN_A_LOOP = make_failure("look", *["a"] * 3, refused=2)
REFUSED_FROM_A_LOOPS_FIRST_STEP = make_failure("look", *["a"] * 3, refused=1)
REFUSED_BEFORE_A_LOOP = make_failure("look", "bad", *["a"] * 3, refused=1)
# Were the two equal actions taken together first, the loop that begins with the second were lost.
LOOPING_AFTER_A_REPEAT = make_failure("a", "a", "b", "a", "b", "a", "b")
EPISODES = {
    "refused": (REFUSED, "step 1 is the first that was refused: go → after go"),
    "loop": (LOOPING, "step 1 begins a loop, 3 times in a row up to step 6: a; b"),
    "lost": (LOST, "step 1 lost the episode: open → after open"),
    "ended": (ENDED, "step 1 is the last, ended by step limit: open → after open"),
    "refused in a loop": (REFUSED_IN_A_LOOP, "step 1 begins a loop, 3 times in a row up to step 3: a"),
    "refused first in a loop": (REFUSED_FROM_A_LOOPS_FIRST_STEP, "step 1 is the first that was refused: a → after a"),
    "refused before a loop": (REFUSED_BEFORE_A_LOOP, "step 1 is the first that was refused: bad → after bad"),
    "loop after a repeat": (LOOPING_AFTER_A_REPEAT, "step 1 begins a loop, 3 times in a row up to step 6: a; b"),
    "no step": (make_failure(), "no step; it ended by step limit"),
}
EVALUATION = "aaaa00000000e009"


class EvaluationScores(Scoreboard):
    """The scores of a run of which one evaluation is stored."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def episodes(self, iteration: int) -> list[Episode]:
        return load_episodes(self._store, EVALUATION)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EPISODES)
def test_the_report_and_the_viewer_name_the_same_step_of_a_stored_episode(kind: str, tmp_path: Path) -> None:
    trajectory, sentence = EPISODES[kind]
    store = gallery.fill(tmp_path / "store.duckdb")
    evaluation = evaluation_rows(
        EVALUATION,
        iteration_id=gallery.ITERATION,
        checkpoint_id=gallery.TRAINED,
        name="test",
        split="test",
        config={},
        finished=True,
    )
    episode = episode_rows("aaaa000000000009", trajectory, evaluation_id=EVALUATION, iteration_id=gallery.ITERATION)
    store.write(merge([{"instance": [instance_row(trajectory.instance)]}, evaluation, episode]))
    (section,) = failure_section(0, EvaluationScores(store))
    (table,) = section.blocks
    assert isinstance(table, Table)
    assert table.rows[0].cells[2] == sentence
    page = pages.trajectory(store, load_episodes(store, EVALUATION)[0].trajectory_id)
    assert page is not None
    env = templates(shows_tokens=False, takes_notes=False)
    html = env.get_template("trajectory.html.jinja").render(**page.values)
    item = html.partition('<section class="wrong-steps">')[2].partition("<li>")[2].partition("</li>")[0]
    text = " ".join(re.sub(r"<[^>]*>", "", item).split())
    if not trajectory.steps:
        assert text == "Ended by step limit after 0 steps, reward 0"
        return
    assert re.search(r'href="#(\d+)"', item)[1] == re.findall(r"\d+", sentence)[0]  # type: ignore[index]
    assert text.lower().replace(" after", " → after") == sentence


class IterationScores(Scoreboard):
    """The scores of a run of whose models the episodes are given, by iteration."""

    def __init__(self, *episodes: list[Episode]) -> None:
        self._given = episodes

    def episodes(self, iteration: int) -> list[Episode]:
        return self._given[iteration]


def make_episode(index: int, *, won: bool, for_good: bool = False) -> Episode:
    instance = Instance(environment="door", split="test", index=index)
    trajectory = replace(make_failure(*[] if for_good else ["go"]), instance=instance, success=won)
    key = "" if for_good else f"e{index}"
    return Episode(trajectory_id=key, instance=instance, repeat=0, cut=0, trajectory=trajectory)


def test_an_episode_that_failed_for_good_is_not_among_those_that_are_won_now() -> None:
    before = [
        make_episode(0, won=False),
        make_episode(1, won=True),
        make_episode(2, won=False),
        make_episode(3, won=True),
    ]
    # The base model has no episode of instance 4, which failed for good and was left out.
    after = [
        make_episode(0, won=True),
        make_episode(1, won=False),
        make_episode(4, won=True),
        make_episode(5, won=False),
    ]
    lost_for_good = [make_episode(2, won=False, for_good=True), make_episode(3, won=False, for_good=True)]
    (section,) = failure_section(1, IterationScores(before, [*after, *lost_for_good]))
    assert section.note == "4 of 6 episodes failed. Base had won 2 of them; 1 that it lost are won now."
    (table,) = section.blocks
    assert isinstance(table, Table)
    assert [(row.cells[0], row.cells[-1]) for row in table.rows] == [
        ("door/test/1", "won"),
        ("door/test/5", wording.NOTHING),
    ]


def test_a_world_that_does_not_say_what_it_took_has_refused_nothing() -> None:
    step = Step(reply="Action: go", action="go", observation="", reward=0.0)
    (failure,) = failure_steps([step], StopReason.STEP_LIMIT)
    assert (failure.kind, failure.step) == ("ended", 0)


def test_all_that_went_wrong_is_told_in_its_order() -> None:
    wrong = failure_steps(make_failure("look", *["a", "b"] * 3, "go", refused=7).steps, StopReason.FAILURE)
    assert [(failure.kind, failure.step) for failure in wrong] == [("loop", 1), ("refused", 7), ("lost", 7)]


def test_a_longer_loop_than_the_first_is_told_too() -> None:
    useful, useless = ["a"] * 3, ["b", "c"] * 4
    wrong = failure_steps(make_failure(*useful, "go", *useless).steps, StopReason.STEP_LIMIT)
    assert [(failure.kind, failure.step, failure.actions) for failure in wrong] == [
        ("loop", 0, ["a"]),
        ("loop", 4, ["b", "c"]),
    ]
    assert wrong[1].words == "begins the longest loop, 4 times in a row up to step 11"
    (longest,) = failure_steps(make_failure(*useless, "go", *useful).steps, StopReason.STEP_LIMIT)
    assert longest.words == "begins a loop, 4 times in a row up to step 7"


def test_a_loop_is_the_first_and_reaches_furthest() -> None:
    assert first_loop(list("xababab")) == (1, 2, 3)
    assert first_loop(list("aaaaaa")) == (0, 1, 6)
    assert first_loop(list("aabaabaab")) == (0, 3, 3)
    assert first_loop(list("aaab" * 3)) == (0, 4, 3)
    assert first_loop(list("aaab"), 1) is None
    assert first_loop(list("abab")) is None


@given(st.lists(st.sampled_from("ab"), max_size=14))
def test_an_episode_is_stuck_where_a_sequence_comes_three_times_in_a_row(actions: list[str]) -> None:
    stuck = any(
        actions[at : at + length]
        == actions[at + length : at + 2 * length]
        == actions[at + 2 * length : at + 3 * length]
        for length in range(1, 6)
        for at in range(len(actions) - 3 * length + 1)
    )
    assert is_stuck(actions) == stuck
