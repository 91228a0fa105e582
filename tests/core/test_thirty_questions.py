"""Thirty questions that a new analyst asks of a store, each answered by one `agentr sql`.

They were written down before any view was changed for them; some were replaced by others that the
small store of the tests can answer. The answers come from what the store was made of, not from
other queries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gallery
import pytest
from click.testing import CliRunner
from finished import finish

from agentr_core.store.codec.ledger import metric_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import merge
from flows.cli import cli

RUN = "bbbb000000000001"
ALL = set(range(20))
BASE, FIRST, LAST = {0, 1, 2, 3}, {2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6, 7, 8, 9}
"""The instances that each model wins, of twenty."""
SETS = f"from v_episodes where run_id = '{RUN}' and evaluation = 'test'"
GALLERY = f"run_id = '{gallery.RUN}'"


def keys(numbers: set[int]) -> list[list[Any]]:
    """Return the rows that name test instances, in the order of their ids."""
    return [[key] for key in sorted(f"toy/test/{number}" for number in numbers)]


QUESTIONS: dict[str, tuple[str, list[list[Any]]]] = {
    "Which runs are here, by which method, and are they finished?": (
        "select recipe, method, status from v_runs order by all",
        [["toy", "agent-r", "interrupted"], ["toy-agent-r", "agent-r", "finished"]],
    ),
    "What is the success of each iteration on the held-out set?": (
        f"select iteration, success from v_iterations where run_id = '{RUN}' and evaluation = 'test' order by 1",
        [[number, len(wins) / 20] for number, wins in enumerate((BASE, FIRST, LAST))],
    ),
    "How many held-out episodes did the last iteration win, of how many?": (
        f"select count(*) filter (success), count(*) {SETS} and iteration = 2",
        [[len(LAST), 20]],
    ),
    "How much better is the last iteration than the base model?": (
        "select iteration, gain, won, lost from v_comparisons "
        f"where run_id = '{RUN}' and iteration = 2 and other_run_id = '{RUN}' and other_iteration = 0",
        [[2, (len(LAST) - len(BASE)) / 20, len(LAST - BASE), len(BASE - LAST)]],
    ),
    "Which instances were lost by all models?": (
        f"select instance_id {SETS} group by all having not max(success) order by 1",
        keys(ALL - BASE - FIRST - LAST),
    ),
    "Which did the base model win that the last one lost?": (
        f"select instance_id {SETS} and success group by all having max(iteration) = 0 order by 1",
        keys(BASE - FIRST - LAST),
    ),
    "Which does the last model win for the first time?": (
        f"select instance_id {SETS} and success group by all having min(iteration) = 2 order by 1",
        keys(LAST - BASE - FIRST),
    ),
    "Which are won by some models and lost by others?": (
        f"select instance_id {SETS} group by all having max(success) and not min(success) order by 1",
        keys((BASE | FIRST | LAST) - (BASE & FIRST & LAST)),
    ),
    "Which share of the held-out episodes does each model win?": (
        "select model, avg(success) from v_trajectories "
        f"where run_id = '{RUN}' and split = 'test' group by all order by 1",
        [[f"m{number}", len(wins) / 20] for number, wins in enumerate((BASE, FIRST, LAST))],
    ),
    "Why did the episodes end that were lost, on the way and held out?": (
        f"select stop_reason, count(*) from v_trajectories where not success and run_id = '{RUN}' group by all",
        [["step_limit", 60 - len(BASE) - len(FIRST) - len(LAST)]],
    ),
    "Why did the lost episodes of the last model end?": (
        f"select stop, count(*) {SETS} and iteration = 2 and not success group by all",
        [["step_limit", 20 - len(LAST)]],
    ),
    "How many steps have won episodes, and lost ones?": (
        f"select success, avg(num_steps) {SETS} group by all order by 1",
        [[0, 1.0], [1, 1.0]],
    ),
    "What is the success by difficulty, in iteration 1?": (
        f"select depth, avg(success) from v_episodes where {GALLERY} and iteration = 1 group by all",
        [[2, 1.0]],
    ),
    "What is the 95% interval of the last model?": (
        "select success_low < success, success < success_high from v_evaluations "
        f"where run_id = '{RUN}' and iteration = 2",
        [[True, True]],
    ),
    "What was the goal of a lost episode?": (
        f"select goal from v_trajectories where trajectory_id = '{gallery.BEFORE[:-4]}0'",
        [["Start."]],
    ),
    "What was said in a lost episode, step by step?": (
        "select position, action, observation from v_steps "
        f"where trajectory_id = '{gallery.BEFORE[:-4]}0' order by position",
        [[0, "LOOK", "seen look"], [1, "END", "seen end"]],
    ),
    "Which actions are refused most often?": (
        "select action, count(*) from v_nodes where not valid group by all order by 2 desc",
        [["LOSE", 1]],
    ),
    "What share of the actions in trees is refused?": (
        "select avg((not valid)::int) from v_nodes where parent >= 0",
        [[0.25]],
    ),
    "At which step is the first error, by the judge, most often?": (
        "select first_error, count(*) from v_pairs where judged group by all order by 2 desc limit 1",
        [[1, 1]],
    ),
    "Which action did the judge call bad most often?": (
        "select action, count(*) from v_critic_steps where verdict = 'bad' group by all order by 2 desc limit 1",
        [["LOSE", 1]],
    ),
    "How many verdicts were good, bad, uncertain, unreadable?": (
        "select verdict, count(*) from verdict group by all",
        [["bad", 1]],
    ),
    "In what share of the trees is there a success?": (
        "select avg(won) from (select max(success) as won from v_nodes group by tree_id)",
        [[1.0]],
    ),
    "How many pairs of a good and a bad path has each iteration?": (
        f"select iteration, pairs from v_funnel where {GALLERY} and iteration > 0",
        [[1, 1]],
    ),
    "How many samples of each kind are trained on?": (
        "select kind, count(*) from v_samples where used group by all",
        [["revision", 1]],
    ),
    "What was turned away, and why?": (
        "select stage, reason, count(*) from v_rejections group by all",
        [["filter", "duplicate", 1]],
    ),
    "Of which instance and tree is this row of the training set?": (
        "select distinct instance_id, tree_id, tree_seed from v_lineage where dataset_position = 0",
        [["toy/train/3", gallery.TREE, 99]],
    ),
    "Which learning rate had each training, and how did its loss go?": (
        f"select iteration, learning_rate, first_loss, last_loss from v_trainings where {GALLERY}",
        [[1, 0.001, 2.0, 1.0]],
    ),
    "How many groups of reinforcement learning had no contrast?": (
        f"select count(*) filter (not contrast), count(*) from v_groups where {GALLERY}",
        [[0, 1]],
    ),
    "What is the mean reward in each step of reinforcement learning?": (
        f"select step, avg(reward) from v_groups where {GALLERY} group by all",
        [[1, 0.5]],
    ),
    "Where did the time go?": (
        f"select stage, part, sum(seconds) from timing join iteration using (iteration_id) where run_id = '{RUN}' "
        "group by all order by 3 desc",
        [["collect", "generate", 270.0], ["collect", "environment", 15.0]],
    ),
    "How many tokens were sampled to collect?": (
        f"select sum(tokens) from timing join iteration using (iteration_id) where run_id = '{RUN}'",
        [[300]],
    ),
    "What failed with an exception, and how often?": (
        "select class, phase, count(*) from event group by all",
        [["ValueError", "step", 1]],
    ),
    "Is an instance both trained on and held out?": (
        f"select count(*) from v_samples s join v_episodes e using (instance_id) where s.used and e.run_id = '{RUN}'",
        [[0]],
    ),
    "Which checkpoint is best, and where is it?": (
        "select v.iteration, c.path from v_iterations v join checkpoint c using (checkpoint_id) "
        f"where run_id = '{RUN}' and evaluation = 'test' order by success desc limit 1",
        [[2, "m2"]],
    ),
    "What does the report say was gained?": (
        "select iteration, value, low, high, n from v_metrics where metric = 'gain_over_base' and depth is null",
        [[1, 1.0, 0.5, 1.5, 1]],
    ),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ws")
    gallery.fill(folder / "store.duckdb")
    finish(folder, RUN, [BASE, FIRST, LAST])
    steps = [
        {
            "checkpoint_id": gallery.TRAINED,
            "step": number,
            "loss": 3.0 - number,
            "learning_rate": 1e-3 / number,
            "trained_tokens": number,
            "seconds": number,
        }
        for number in (1, 2)
    ]
    gain = metric_rows("evaluation", gallery.AFTER, "gain_over_base", 1.0, low=0.5, high=1.5, n=1)
    Store(folder / "store.duckdb").write(merge([{"training_step": steps}, gain]))
    return folder


def test_there_are_thirty() -> None:
    assert len(QUESTIONS) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_one_query_answers_it(workspace: Path, question: str) -> None:
    sql, expected = QUESTIONS[question]
    done = CliRunner().invoke(cli, ["sql", sql, "-w", str(workspace), "--format", "json"], catch_exceptions=False)
    assert [list(row.values()) for row in json.loads(done.output)] == expected
