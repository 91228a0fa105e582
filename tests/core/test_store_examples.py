"""The named questions: each is asked of one small store, and by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import gallery
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from agentr_core.errors import ConfigError
from agentr_core.store.codec.ledger import metric_rows, timing_rows
from agentr_core.store.codec.samples import derivation_rows
from agentr_core.store.codec.trajectories import load_trajectories, oracle_rows, trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.questions import example, examples
from agentr_core.store.tables import Regrade, merge, row_of
from agentr_core.types import Derivation, Verdict
from agentr_core.viewer import pages
from flows.cli import cli
from flows.commands.lineage import traced

WITHOUT_ROWS = {"soundness", "forgotten", "never", "disputed"}
"""Questions without an answer in this store: nothing dangles, the later model wins all, and the
judge agrees with the tree."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ws")
    store = gallery.fill(folder / "store.duckdb")
    for node, value_sum in ((2, 2.0), (3, 0.0)):
        store.update("node", {"tree_id": gallery.TREE, "node_index": node, "value_sum": value_sum})
    child, parent = (gallery.ROLLOUTS[0], gallery.ROLLOUTS[1])
    win = gallery._trajectory("", success=True)
    store.write(
        merge(
            [
                oracle_rows(gallery.TREE, {1: Verdict.GOOD, 3: Verdict.BAD}),
                timing_rows(gallery.ITERATION, "collect", {"generate": 9.0}, tokens=100),
                metric_rows("evaluation", gallery.AFTER, "gain_over_base", 1.0, low=0.5, high=1.0, n=1),
                *(
                    trajectory_rows(f"{key}f", win, source="flywheel", iteration_id=gallery.ITERATION)
                    for key in (child, parent)
                ),
                derivation_rows(
                    [Derivation(child=f"{child}f", parent=f"{parent}f", operator="C1", position=1)],
                    iteration_id=gallery.ITERATION,
                ),
                {
                    "scoring": [{"scoring_id": "s", "grader": "regex", "settings": "{}"}],
                    "regrade": [
                        row_of("regrade", Regrade(reward=0.0, success=False), scoring_id="s", trajectory_id=f"{child}f")
                    ],
                },
                {
                    "training_step": [
                        {"checkpoint_id": gallery.TRAINED, "step": n, "loss": 1 / n, "trained_tokens": n, "seconds": n}
                        for n in (1, 2)
                    ]
                },
            ]
        )
    )
    return folder


@pytest.fixture(scope="module")
def store(workspace: Path) -> Store:
    return Store(workspace / "store.duckdb")


def test_there_are_thirty_with_a_sentence_each() -> None:
    queries = examples()
    assert len(queries) >= 30
    assert all(
        query.about.endswith(".") and query.sql.endswith(";") and query.sql.count(";") == 1
        for query in queries.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", examples())
def test_an_example_gives_rows_where_the_store_has_them(store: Store, name: str) -> None:
    answer = store.answer(example(name).sql)
    assert bool(answer.num_rows) is (name not in WITHOUT_ROWS), name


def test_the_three_witnesses_of_a_first_error(store: Store) -> None:
    (path,) = store.answer("select * from v_critic_audit").to_pylist()
    assert (path["judge_error"], path["tree_error"], path["oracle_error"]) == (1, 1, 1)
    assert (path["judge_after_oracle"], path["judge_after_tree"], path["value_drop"]) == (0, 0, 1.0)
    assert path["steps"] == 1, "the judge saw the last step alone"
    (step,) = store.answer("select * from v_critic_steps").to_pylist()
    assert (step["verdict"], step["oracle"], step["value"], step["sibling_value"], step["value_drop"]) == (
        "bad",
        "bad",
        0.0,
        1.0,
        1.0,
    )


def test_a_step_worth_as_much_as_its_siblings_is_no_error_whatever_the_last_digits_of_the_means(
    tmp_path: Path,
) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    with store.transaction() as con:
        # The judged step was visited once, its sibling three times.
        con.execute("update node set visits = 1, value_sum = 0.1 where node_index = 3")
        con.execute("update node set visits = 3, value_sum = ? where node_index = 2", [0.1 + 0.1 + 0.1])
    (path,) = store.answer("select * from v_critic_audit").to_pylist()
    assert (path["judge_error"], path["tree_error"], path["value_drop"]) == (1, None, None)
    assert store.rows("select value_drop from v_critic_steps") == [(0.0,)]
    page = pages.pair(store, gallery.PAIR)
    assert page is not None
    assert page.values["tree_error"] is None


def test_two_models_are_paired_by_episode(store: Store) -> None:
    rows = store.answer("select iteration, other_iteration, episodes, gain, won, lost from v_comparisons").to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [(0, 1, 1, -1.0, 0, 1), (1, 0, 1, 1.0, 1, 0)]


@pytest.mark.slow
def test_what_a_teacher_collects_is_no_token_of_the_actor(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    roles = "select role, purpose, replies, prompt_tokens from v_tokens where run_id = ? order by all"
    rows = store.rows(roles, gallery.RUN)
    assert {role for role, purpose, *_ in rows if purpose == "collected"} == {"actor"}
    store.update("iteration", {"iteration_id": gallery.ITERATION, "collected_by": gallery.BASE})
    assert store.rows(roles, gallery.RUN) == sorted(
        ("teacher" if purpose == "collected" else role, purpose, *numbers) for role, purpose, *numbers in rows
    )


def test_what_a_teacher_goes_on_with_is_played_by_the_teacher(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    config = {
        "splice": {"continuation": {"by": "teacher"}},
        "models": {"teacher": {"backend": "openai", "path": "", "server": {"model": "large"}}},
    }
    tokens = "select role, sum(replies)::bigint from v_tokens where purpose = 'collected' group by all order by 1"
    request = "{'seed': 71, 'number': 0, 'prompt_tokens': 1, 'completion_tokens': 1, 'thinks': false}"
    with store.transaction() as con:
        con.execute(f"update trajectory set asked = [{request}, null] where source = 'rollout'")
    ((_, replies),) = store.rows(tokens)
    with store.transaction() as con:
        con.execute("update run set config = ?", [json.dumps(config)])
    assert store.rows(tokens) == [("actor", replies - 4), ("teacher", 4)]
    assert store.rows("select distinct source, model, checkpoint_id from v_trajectories order by all") == [
        ("episode", "base", gallery.BASE),
        ("episode", "one", gallery.TRAINED),
        ("rollout", "large", None),
    ]


@pytest.mark.slow
def test_a_trace_names_a_row_of_a_dataset_the_seed_of_an_episode_and_a_model_where_it_lies_now(
    workspace: Path, store: Store
) -> None:
    dataset, episode = "aaaa00000000d000", gallery.ROLLOUTS[2]
    with store.transaction() as con:
        request = "{'seed': 71, 'number': 0, 'prompt_tokens': 1, 'completion_tokens': 1, 'thinks': false}"
        con.execute(f"update trajectory set asked = [{request}, null] where trajectory_id = ?", [episode])
    assert f"  one of them {gallery.REVISION}" in traced(workspace, dataset, "text").splitlines()[0]
    assert "  seed 71  " in traced(workspace, episode, "text").splitlines()[0]
    text = traced(workspace, episode, "text")
    (trajectory,) = load_trajectories(store, [episode]).values()
    assert f"\n[first observation]\n{trajectory.first_observation}\n\n[reply 0]\n{trajectory.steps[0].reply}\n" in text
    model_path = workspace / "checkpoints" / gallery.TRAINED
    assert str(model_path) not in traced(workspace, gallery.TRAINED, "text")
    model_path.mkdir(parents=True)
    assert f"  model {model_path}  " in traced(workspace, gallery.TRAINED, "text").splitlines()[0]


def test_the_rows_of_a_lineage_are_told_apart_by_the_judged_step(store: Store) -> None:
    assert "verdict_position" in store.answer(example("lineage").sql).column_names


def test_an_unknown_example_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no example sucess; there are success, gains"):
        example("sucess")


def test_the_command_lists_and_asks_them_in_every_format(workspace: Path, tmp_path: Path) -> None:
    def output_of(*words: str) -> str:
        return CliRunner().invoke(cli, ["sql", *words, "-w", str(workspace)], catch_exceptions=False).output

    assert output_of("--examples").splitlines()[0].split("  ")[0] == "success"
    assert output_of("--example", "pairs", "--show") == f"{example('pairs').sql}\n"
    assert json.loads(output_of("--example", "pairs", "--format", "json"))[0]["pair_id"] == gallery.PAIR
    file = tmp_path / "pairs.parquet"
    assert output_of("--example", "pairs", "--format", "parquet", "--output", str(file)) == f"{file}: 1 row\n"
    assert pq.read_table(file)["pair_id"].to_pylist() == [gallery.PAIR]
    assert output_of("--example", "pairs", "--format", "csv", "--output", str(tmp_path / "p.csv")).endswith("1 row\n")
    assert (tmp_path / "p.csv").read_text().startswith("run_id,iteration,pair_id")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--format", "parquet", "select 1"], "name a file with --output FILE"),
        ([], "give one question"),
        (["select 1", "--example", "pairs"], "give one question"),
        (["select 1", "--output", "{workspace}/store.duckdb"], "is the store itself"),
        (["select 1", "--output", "{workspace}/store.duckdb.wal"], "is the store itself"),
        (["select 1", "--output", "{link}"], "is the store itself"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(
    workspace: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    before = (workspace / "store.duckdb").read_bytes()
    link = tmp_path / "link.csv"
    link.symlink_to(workspace / "store.duckdb")
    arguments = [word.format(workspace=workspace, link=link) for word in words]
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(cli, ["sql", *arguments, "-w", str(workspace)], catch_exceptions=False)
    assert (workspace / "store.duckdb").read_bytes() == before
