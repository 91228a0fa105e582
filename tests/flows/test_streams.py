"""Two runs that differ in the learning rate alone train on the same rows in the same order: no
random stream and no order is named by an id that contains the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import small_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("door_installed")]
ROWS = """
select i.iteration, d.hash, w.position, s.kind, s.instance_id, s.provenance.good_leaf, s.provenance.bad_leaf
from dataset d join iteration i using (iteration_id) join dataset_row w using (dataset_id)
join sample s using (sample_id) order by i.iteration, w.position
"""
GROUPS = """
select g.step, g.number, g.instance_id, g.prefix, r.episode, t.reward, list(s.reply order by s.position) as replies
from rl_group g join rl_rollout r using (iteration_id, step, number) join trajectory t using (trajectory_id)
left join step s using (trajectory_id)
group by all order by g.step, g.number, r.episode
"""


def trained_on(name: str, folder: Path, model: Path, rate: float) -> list[tuple[Any, ...]]:
    """Return what a run with a learning rate trains on, in order; the rate is too small to change
    what later models do.
    """
    store = small_run(name, folder, model, rate=rate)
    return [*store.rows(ROWS), *store.rows(GROUPS)]


LONG = ("continued", "rollback", "value")


@pytest.mark.parametrize(
    "name",
    [
        *("verified", "eto", "et-agent", "grpo", "verdict"),
        *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    ],
)
def test_runs_of_other_rates_train_on_equal_rows_in_equal_order(name: str, tmp_path: Path, door_model: Path) -> None:
    first, second = (trained_on(name, tmp_path / str(rate), door_model, rate) for rate in (1e-12, 2e-12))
    assert len(first) > 10
    assert first == second


def test_a_revisited_episode_is_judged_in_a_run_and_nothing_is_orphaned(tmp_path: Path, door_model: Path) -> None:
    store = small_run("verdict", tmp_path / "runs", door_model)
    [(num_edits, roles)] = store.rows("select count(*), list(distinct role) from edit")
    assert num_edits > 0
    assert num_edits % 2 == 0, "two votes for each step"
    assert roles == ["judge"]
    [(num_rejected,)] = store.rows("select count(distinct subject) from rejection where stage = 'reinforce'")
    [(num_judged,)] = store.rows("select count(distinct subject) from edit")
    assert num_rejected == num_judged, "a model that says nothing readable names no error, and that is told"
    assert not store.rows("select * from v_orphans")
