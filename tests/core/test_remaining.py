"""What a run still needs, as its stored stages and those of an earlier run tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from finished import finish

from agentr_core.runtime.context import RunContext
from agentr_core.runtime.remaining import Remaining, estimate_remaining
from agentr_core.store.codec.ledger import timing_rows


def run(workspace: Path, run_id: str, *, iterations: int = 2) -> RunContext:
    """Return the workplace of a run that has stored nothing but its rows."""
    return finish(workspace, run_id, [set() for _ in range(iterations + 1)], episodes=0, iterations=iterations)


def took(ctx: RunContext, iteration: int, **seconds: float) -> None:
    """Store how long stages took, beside the 95 seconds that `finish` says of each collection."""
    for stage, value in seconds.items():
        name = "evaluate test" if stage == "evaluate" else stage
        ctx.store.write(timing_rows(ctx.iteration_id(iteration), name, {"generate": value}, tokens=100))


@pytest.mark.slow
def test_an_earlier_run_of_the_recipe_tells_all_that_is_to_come(tmp_path: Path) -> None:
    earlier = run(tmp_path, "a")
    took(earlier, 0, evaluate=10)
    for iteration in (1, 2):
        took(earlier, iteration, critique=20, splice=5, dataset=1, train=60, evaluate=10)
    now = estimate_remaining(run(tmp_path, "b"), "critique", 1)
    # What is left after the critique of the first iteration, and a whole second one.
    assert (now.stage_s, now.after_s) == (20.0, (5 + 1 + 60 + 10) + (95 + 20 + 5 + 1 + 60 + 10))


@pytest.mark.slow
def test_a_run_that_is_slower_so_far_is_taken_to_stay_so(tmp_path: Path) -> None:
    earlier, ctx = run(tmp_path, "a", iterations=1), run(tmp_path, "b", iterations=1)
    took(earlier, 0, evaluate=100)
    took(earlier, 1, critique=20, splice=5, train=40, evaluate=50)
    took(ctx, 0, evaluate=300)
    now = estimate_remaining(ctx, "critique", 1)
    # Both collected for 95 seconds.
    ratio = (300 + 95) / (100 + 95)
    assert now.stage_s == pytest.approx(20 * ratio)
    assert now.after_s == pytest.approx((5 + 40 + 50) * ratio)


@pytest.mark.slow
def test_a_first_run_knows_what_it_has_done_before(tmp_path: Path) -> None:
    ctx = run(tmp_path, "a", iterations=2)
    took(ctx, 0, evaluate=30)
    took(ctx, 1, critique=20, splice=5, train=40, evaluate=30)
    assert estimate_remaining(ctx, "collect", 2) == Remaining(stage_s=95.0, spent_s=95.0, after_s=20 + 5 + 40 + 30)


@pytest.mark.slow
def test_work_that_was_taken_over_says_nothing_of_the_machine(tmp_path: Path) -> None:
    earlier = run(tmp_path, "a")
    for iteration in (1, 2):
        took(earlier, iteration, train=600, evaluate=100)
    ctx = run(tmp_path, "b")
    for stage in ("train", "evaluate test"):
        ctx.store.write(timing_rows(ctx.iteration_id(1), stage, {"other": 0.1}))
    # Both collected for 95 seconds.
    assert estimate_remaining(ctx, "train", 2).stage_s == 600.0
    # Nor does what a finished run has taken over.
    copy_ctx = run(tmp_path / "copied", "a")
    took(copy_ctx, 1, evaluate=100)
    copy_ctx.store.write(timing_rows(copy_ctx.iteration_id(1), "train", {"other": 0.1}))
    assert estimate_remaining(run(tmp_path / "copied", "b"), "train", 1).stage_s is None
    alone = run(tmp_path / "alone", "a")
    alone.store.write(timing_rows(alone.iteration_id(1), "train", {"other": 0.1}))
    assert estimate_remaining(alone, "train", 2).stage_s is None


def test_nothing_is_told_of_what_nobody_has_measured(tmp_path: Path) -> None:
    ctx = run(tmp_path, "a", iterations=1)
    assert estimate_remaining(ctx, "critique", 1).after_s is None
    assert estimate_remaining(ctx, "no such stage", 1) == Remaining()


@pytest.mark.slow
def test_shorter_and_unfinished_runs_and_those_of_other_recipes_tell_nothing(tmp_path: Path) -> None:
    took(run(tmp_path, "a", iterations=1), 1, evaluate=10)
    eto_ctx = finish(tmp_path, "c", [set(), set(), set()], episodes=0, iterations=2, method="eto")
    took(eto_ctx, 1, evaluate=10)
    assert estimate_remaining(run(tmp_path, "b", iterations=2), "critique", 1).after_s is None


@pytest.mark.parametrize(
    ("expected", "elapsed", "measured", "done", "total", "left"),
    [
        (Remaining(stage_s=100, after_s=50), 30.0, 0.0, 0, 0, (70.0, 120.0)),
        # A stage that is behind stays so, and what comes after it, the more so the more is done.
        (Remaining(stage_s=100, after_s=50), 60.0, 60.0, 5, 10, (0.5 * 110, 0.5 * 110 + 50 * 1.1)),
        (Remaining(stage_s=100, after_s=50), 120.0, 120.0, 5, 10, (0.5 * 170, 0.5 * 170 + 50 * 1.7)),
        (Remaining(stage_s=100, after_s=50), 130.0, 120.0, 5, 10, (0.5 * 170 - 10, 0.5 * 170 - 10 + 50 * 1.7)),
        (Remaining(stage_s=100, spent_s=60, after_s=50), 30.0, 30.0, 5, 10, (0.5 * 50, 0.5 * 50 + 50 * 1.25)),
        # One that is ahead may have done what is short.
        (Remaining(stage_s=100, after_s=50), 20.0, 20.0, 5, 10, (80.0, 130.0)),
        # One that is over its time without a unit done has a little left until it ends.
        (Remaining(stage_s=100, after_s=50), 200.0, 0.0, 0, 10, (2.0, 52.0)),
        (Remaining(after_s=50), 30.0, 30.0, 3, 9, (60.0, 110.0)),
        # Ten seconds into the fourth unit.
        (Remaining(after_s=50), 40.0, 30.0, 3, 9, (50.0, 100.0)),
        (Remaining(after_s=50), 300.0, 30.0, 3, 9, (1.2, 51.2)),
        (Remaining(after_s=50), 30.0, 0.0, 0, 9, (None, None)),
        (Remaining(stage_s=100), 30.0, 30.0, 3, 9, (70.0, None)),
    ],
)
def test_what_is_left_follows_from_time_or_from_what_is_done(
    expected: Remaining, elapsed: float, measured: float, done: int, total: int, left: tuple[float | None, float | None]
) -> None:
    assert expected.seconds_left(elapsed, measured, done, total) == tuple(
        side if side is None else pytest.approx(side) for side in left
    )
