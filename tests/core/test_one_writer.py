"""One process works on a run, and one grows a tree: a second one is refused, and what two have
mixed is found.
"""

from __future__ import annotations

import asyncio
import contextvars
import fcntl
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from toy import Line, Policy, instance

from agentr_core.errors import RunBusy
from agentr_core.methods.faults import parse
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.recipes.recipe import resolved
from agentr_core.search.grow import grow
from agentr_core.search.tree import Arena, Expansion
from agentr_core.store.codec.ledger import checkpoint_rows, iteration_rows, run_rows
from agentr_core.store.codec.trajectories import claim_trees, expansion_rows, finished_tree_rows, load_trees, tree_rows
from agentr_core.store.database import Store, Writer
from agentr_core.store.queries.listings import iteration_lines, run_lines
from agentr_core.store.tables import TreeHead, merge
from agentr_core.types import Tree
from flows import stages
from flows.commands import stores
from flows.commands.questions import runs_of
from tasks import runs
from tasks.wiring import RunRef
from tasks.workspaces import STORE_FILE

WRITING = ("collect", "critique", "splice", "demonstrate", "think", "explore", "prefer", "dataset", "train", "evaluate")
CONFIG = SearchConfig(dives=4, width=3, depth=6)
SEED = 11


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    return RunRef(workspace=str(tmp_path / "ws"), run_id="r")


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITING)
def test_a_stage_by_itself_holds_the_lock_of_its_run(run: RunRef, name: str) -> None:
    lock = Path(run.workspace) / "locks" / run.run_id
    lock.parent.mkdir(parents=True)
    config = resolved(parse({"name": "x", "model": {"path": "m"}}))
    row = run_rows("r", recipe="x", method="agent-r", config=config, versions={}, workspace="ws")
    Store(Path(run.workspace) / STORE_FILE).write(row)
    with lock.open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(RunBusy, match="run r is already under way"):
            asyncio.run(getattr(stages, name).fn(run.run_id, 1, run.workspace))


def test_a_wheel_shares_its_lock_with_its_own_stages_alone(run: RunRef) -> None:
    with runs.run_locked(run):
        with runs.run_locked(run), runs.run_locked(replace(run, run_id="arm")):
            pass
        # Another flow of the same process began outside.
        with pytest.raises(RunBusy):
            contextvars.Context().run(lambda: runs.run_locked(run).__enter__())
    with runs.run_locked(run):
        pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    ws_store = Store(tmp_path / "ws" / STORE_FILE)
    run = run_rows("r", recipe="x", method="agent-r", config={}, versions={}, workspace="ws")
    ws_store.write(
        merge(
            [
                run,
                iteration_rows("i", run_id="r", iteration=1, checkpoint_in="c"),
                checkpoint_rows("c", path="m", weights_sha256="aa", config={}),
            ]
        )
    )
    return ws_store


@pytest.mark.slow
def test_a_run_that_nobody_works_on_is_shown_as_interrupted(store: Store, run: RunRef) -> None:
    assert (run_lines(store)[0].status, iteration_lines(store, "r")[0].status) == ("interrupted", "interrupted")
    with runs.run_locked(run):
        assert (run_lines(store)[0].status, iteration_lines(store, "r")[0].status) == ("running", "running")
        assert "running" in runs_of(store.path.parent)
        assert store.query("select status from v_runs")["status"].tolist() == ["running"]
    assert "interrupted" in runs_of(store.path.parent)
    assert store.query("select status from v_runs")["status"].tolist() == ["interrupted"]
    store.update("run", {"run_id": "r", "status": "failed", "finished_at": datetime.now(UTC)})
    assert (run_lines(store)[0].status, iteration_lines(store, "r")[0].status) == ("failed", "interrupted")


def test_a_run_that_has_only_collected_so_far_is_not_interrupted(store: Store) -> None:
    store.update("run", {"run_id": "r", "status": "collecting"})
    assert (run_lines(store)[0].status, iteration_lines(store, "r")[0].status) == ("collecting", "collecting")


def test_what_a_finished_run_forecast_or_gathers_is_not_interrupted(store: Store) -> None:
    store.write(iteration_rows("base", run_id="r", iteration=0, checkpoint_out="c"))
    store.update("run", {"run_id": "r", "status": "finished", "finished_at": datetime.now(UTC)})
    assert [line.status for line in iteration_lines(store, "r")] == ["finished", "collecting"]


def head_of(writer: str | None) -> TreeHead:
    return TreeHead(
        tree_id="t",
        iteration_id="i",
        checkpoint_id="c",
        config=CONFIG.method,
        instance=instance(3),
        first_observation=Line().reset(instance(3)),
        seed=SEED,
        writer=writer,
    )


async def expansions(sampling_seed: int) -> tuple[Tree, list[Expansion]]:
    """A whole tree of the same id, as a collector grows it whose replies fall otherwise."""
    log: list[Expansion] = []
    tree = await grow(instance(3), Line(), Policy(), CONFIG, seed=sampling_seed, on_expansion=log.append)
    return tree, log


def root(seed: int) -> Tree:
    return Arena(instance=instance(3), first_observation=Line().reset(instance(3)), seed=seed).tree()


@pytest.mark.slow
async def test_rows_of_a_second_collector_are_refused_and_nothing_is_mixed(store: Store) -> None:
    tree, log = await expansions(SEED)
    other_tree, other_log = await expansions(SEED + 1)
    assert other_tree.nodes != tree.nodes
    mine, theirs = head_of("one"), head_of("two")
    store.write(tree_rows(mine, root(SEED)))
    store.write(expansion_rows(mine, log[0]))
    for unit in (tree_rows(theirs, root(SEED)), *(expansion_rows(theirs, expansion) for expansion in other_log)):
        with pytest.raises(RunBusy, match="tree t is being written by another process, too"):
            store.write(unit)
    for expansion in log[1:]:
        store.write(expansion_rows(mine, expansion))
    store.write(finished_tree_rows(mine, tree))
    assert load_trees(store, ["t"])["t"] == tree
    assert stores.faults(store.path.parent) == []


@pytest.mark.slow
async def test_a_tree_goes_on_under_the_writer_that_claims_it(store: Store) -> None:
    tree, log = await expansions(SEED)
    store.write(tree_rows(head_of(None), root(SEED)))
    store.write(expansion_rows(head_of(None), log[0]))
    claim_trees(store, ["t", "not begun"], "two")
    with pytest.raises(RunBusy):
        store.write(expansion_rows(head_of(None), log[1]))
    for expansion in log[1:]:
        store.write(expansion_rows(head_of("two"), expansion))
    store.write(finished_tree_rows(head_of("two"), tree))
    assert load_trees(store, ["t"])["t"] == tree


async def test_the_writer_of_a_stage_ends_with_the_refusal(store: Store) -> None:
    _, log = await expansions(SEED)
    store.write(tree_rows(head_of("one"), root(SEED)))
    with pytest.raises(RunBusy):
        async with Writer(store, interval_s=0.01) as writer:
            writer.add(expansion_rows(head_of("two"), log[0]))


@pytest.mark.slow
async def test_a_tree_that_two_wrote_is_found(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    _, log = await expansions(SEED)
    _, other_log = await expansions(SEED + 1)
    store.write(tree_rows(head_of(None), root(SEED)))
    # As before writers were told apart: what is there stays, but for statistics and stops.
    for mine, theirs in zip(log, other_log, strict=False):
        store.write(expansion_rows(head_of(None), mine))
        store.write(expansion_rows(head_of(None), theirs))
    assert store.query("select * from v_orphans").empty
    faults = stores.faults(store.path.parent)
    assert faults
    assert all(line.startswith("node t, ") for line in faults)


def test_a_trajectory_that_another_played_is_refused(store: Store) -> None:
    row = {
        "trajectory_id": "a",
        "source": "rollout",
        "iteration_id": "i",
        "evaluation_id": None,
        "instance_id": "x",
        "instance": instance(3),
        "first_observation": "o",
        "steps": (),
        "asked": (),
        "given": 0,
        "reward": 1.0,
        "success": True,
        "stop": "success",
        "num_steps": 3,
        "tree_id": None,
        "leaf": None,
    }
    store.write({"trajectory": [row]})
    store.write({"trajectory": [row]})
    with pytest.raises(RunBusy, match="trajectory a is being written by another process, too"):
        store.write({"trajectory": [row | {"num_steps": 5, "stop": "failure", "success": False}]})
