"""Learning curves of trainings, from the rows of a store to figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentr_core.stages.curves import curve_figure, fine_tuning_figures, group_rl_figures
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import CurvePoint, training_curve
from agentr_core.store.queries.trees import GroupStep, Validation


def group_step(step: int, **measured: float) -> GroupStep:
    whole = {
        "step": step,
        "reward": 0.5,
        "pass_at_1": 0.5,
        "pass_at_n": 0.75,
        "mixed_share": 0.5,
        "episode_tokens": 20.0,
    }
    return GroupStep._make({**dict.fromkeys(GroupStep._fields), **whole, **measured}.values())


def test_fine_tuning_has_three_curves_and_none_of_what_was_not_measured() -> None:
    steps = [CurvePoint(step, 1 / step, 1e-3, 2.0) for step in (1, 2, 3)]
    assert [figure.caption.split()[0] for figure in fine_tuning_figures(steps)] == ["Loss", "Learning", "Norm"]
    old = [step._replace(learning_rate=None, grad_norm=None) for step in steps]
    assert [figure.caption.split()[0] for figure in fine_tuning_figures(old)] == ["Loss"]
    assert fine_tuning_figures(steps[:1]) == [], "one step makes no curve"
    assert group_rl_figures([group_step(1)], [], 8) == [], "nor do three measures of it"


def test_numbers_that_are_not_finite_are_left_out_of_a_curve() -> None:
    (figure,) = curve_figure("norm", norm=[(1, 1.0), (2, float("inf")), (3, float("nan")), (4, 2.0)])
    assert figure == curve_figure("norm", norm=[(1, 1.0), (2, None), (4, 2.0)])[0]


def test_group_learning_has_the_validation_beside() -> None:
    steps = [group_step(step, reward=step / 10, entropy=1.0, clip_share=0.1, learning_rate=1e-4) for step in (1, 2, 3)]
    figures = group_rl_figures(steps, [Validation(2, 8, 0.25, 0.5)], 8)
    svgs = {figure.caption: figure.svg for figure in figures}
    reward = svgs["Mean reward of the episodes of a step and of the development set."]
    assert ">validation<" in reward
    assert reward.count("<circle") == 1
    assert {"Entropy of the policy in nats a token.", "Share of tokens whose ratio is clipped."} <= svgs.keys()
    assert "Learning rate." in svgs
    assert not [caption for caption in svgs if caption.startswith(("KL", "Norm"))], "nothing was measured of them"
    assert "Mean reward of the episodes of a step." in [figure.caption for figure in group_rl_figures(steps, [], 8)]


@pytest.mark.slow
def test_a_long_training_is_read_by_its_extremes(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    with store.transaction() as con:
        con.execute(
            "insert into iteration (iteration_id, run_id, iteration, status, checkpoint_out) "
            "values ('i', 'r', 1, 'finished', 'c'), ('j', 'r', 2, 'finished', 'd')"
        )
        con.execute(
            "insert into training_step (checkpoint_id, step, loss, trained_tokens, seconds, learning_rate, grad_norm) "
            "select 'c', n, if(n = 4321, 0.001, 1 / n), n, n, 1e-3, if(n = 77777, 1e6, 1) from range(1, 100001) t(n)"
        )
        con.execute(
            "insert into training_step (checkpoint_id, step, loss, trained_tokens, seconds) "
            "values ('d', 1, 0.5, 1, 1.0)"
        )
    curve = training_curve(store, "i")
    assert len(curve) <= 1500
    assert [point.step for point in curve] == sorted({point.step for point in curve})
    assert max(curve, key=lambda point: point.grad_norm or 0).step == 77777
    assert CurvePoint(4321, 0.001, 1e-3, 1.0) in curve
    assert curve[0].step == 1
    assert training_curve(store, "j") == [CurvePoint(1, 0.5, None, None)]
