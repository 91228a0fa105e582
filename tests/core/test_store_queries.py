"""The program's queries of the store: each works on the newest schema, and finds nothing where
there is nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from agentr_core.episodes.units import UnitError
from agentr_core.store import queries
from agentr_core.store.codec.ledger import event_rows, iteration_rows
from agentr_core.store.codec.samples import FLYWHEEL, derivation_rows
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import EpisodeCounts, ErrorCount, PreferenceCounts, error_counts, refusal_counts
from agentr_core.store.queries.failures import closest_win
from agentr_core.store.queries.listings import (
    LISTINGS,
    ORIGINS,
    ListPage,
    ancestry,
    event_lines,
    filter_choices,
    read_list,
)
from agentr_core.store.queries.runs import IterationProducts, RequestUse, TokenUse
from agentr_core.store.queries.trees import GroupCounts, OperatorCount, operator_counts, trajectory_head
from agentr_core.types import Derivation, Instance, Step, StopReason, Trajectory

Query = Callable[..., Any]
NOTHING: tuple[Any, ...] = (
    None,
    0,
    [],
    {},
    EpisodeCounts(played=0, solved=0),
    PreferenceCounts(kinds={}, margins={}, cut=0),
    TokenUse(prompt=0, completion=0),
    RequestUse(requests=0, prompt=0, completion=0),
    ListPage([], 0),
    (0, 0.0),
    {"gained": 0, "lost": 0, "same": 0},
    IterationProducts(),
    GroupCounts(groups=0, mixed=0, alike_with_wins=0, episodes=0, trained_episodes=0),
)
OF_KIND = {
    "str": "unknown",
    "Sequence[str]": ["unknown"],
    "Collection[int]": [3],
    "Collection[str]": ["tree"],
    "int": 3,
    "int | None": 3,
    "bool": True,
    "bool | None": None,
    "ModelRole": "judge",
    "Counts": "steps",
    "Collection[ModelRole]": ["judge"],
    "Listing": LISTINGS["trees"],
    "Mapping[str, str]": {"instance": "unknown"},
}
"""An argument for each annotation."""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store without rows, of which questions are asked."""
    store = Store(tmp_path_factory.mktemp("empty") / "store.duckdb")
    store.write({})
    return store


@pytest.mark.slow
@pytest.mark.parametrize("kind", ORIGINS)
def test_ancestors_of_each_kind_are_asked_for_in_the_newest_schema(kind: str, empty: Store) -> None:
    assert ancestry(empty, "unknown", kind) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTINGS)
def test_each_list_is_asked_for_with_each_filter_in_the_newest_schema(name: str, empty: Store) -> None:
    filters = dict.fromkeys(LISTINGS[name].filters, "1")
    assert read_list(empty, LISTINGS[name], filters, offset=0, limit=5) == ListPage([], 0)
    assert filter_choices(empty, LISTINGS[name]).keys() <= LISTINGS[name].choices.keys()


OF_THE_SCHEMA = ("relations", "references")
"""Queries that every store has an answer to."""
OF_THE_VIEWER = (
    "neighbour_failures",
    "read_list",
    "closest_win",
    "listing_sql",
    "sortable_columns",
    "listing_with_facts",
    "write_note",
)
"""Asked of a stored row, or of a list and one of its columns: tests of the viewer ask them."""


def every() -> Iterator[Query]:
    """Yield all but those of the schema itself."""
    for module in iter_modules(queries.__path__, f"{queries.__name__}."):
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            if (
                function.__module__ == module.name
                and name not in (*OF_THE_SCHEMA, *OF_THE_VIEWER)
                and not name.startswith("_")
            ):
                yield function


@pytest.mark.slow
@pytest.mark.parametrize("query", [pytest.param(query, id=query.__name__) for query in every()])
def test_nothing_is_found_where_there_is_nothing(query: Query, empty: Store, tmp_path: Path) -> None:
    nowhere = Store(tmp_path / "store.duckdb")
    _, *parameters = inspect.signature(query).parameters.values()
    arguments = {parameter.name: OF_KIND[parameter.annotation] for parameter in parameters}
    assert query(nowhere, **arguments) in NOTHING
    assert not nowhere.path.exists()
    assert query(empty, **arguments) in NOTHING


@pytest.mark.slow
def test_an_episode_that_failed_in_each_of_two_attempts_at_a_stage_is_lost_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    for subject in ("a", "a", "b"):
        fault = UnitError(key=subject, kind="ValueError", phase="step", message="no", traceback="", is_final=True)
        store.write(event_rows(fault, run_id="r", iteration_id="i", stage="collect"))
    assert error_counts(store, "i") == [ErrorCount(error="ValueError", phase="step", count=3, lost=2)]


def test_a_win_outside_any_group_is_of_no_group(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    step = Step(reply="go", action="go", observation="seen", reward=0.0, terminated=True, token_ids=(1,))
    instance = Instance(environment="toy", split="test", index=0)
    lost = Trajectory.ended(instance, "Start.", [step], StopReason.FAILURE)
    won = Trajectory.ended(instance, "Start.", [replace(step, reward=1.0, success=True)], StopReason.SUCCESS)
    store.write(iteration_rows("i", run_id="r", iteration=1))
    store.write(trajectory_rows("lost", lost, source="rollout", iteration_id="i"))
    store.write(trajectory_rows("won", won, source="expert", iteration_id="i"))
    head = trajectory_head(store, "lost")
    assert head is not None
    win = closest_win(store, head)
    assert win is not None
    assert (win.trajectory_id, win.kin) == ("won", "expert")


@pytest.mark.slow
def test_the_errors_of_a_stage_are_those_of_its_iteration_however_many_others_there_are(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    events = [("i", "collect", "Rare", 1), ("j", "collect", "Other", 2)]
    events += [("i", f"evaluate {number}", "Frequent", 3) for number in range(20)]
    for iteration_id, stage, kind, times in events:
        for subject in map(str, range(times)):
            fault = UnitError(key=subject, kind=kind, phase="step", message="no", traceback="", is_final=True)
            store.write(event_rows(fault, run_id="r", iteration_id=iteration_id, stage=stage))
    assert "Rare" not in {line.error for line in event_lines(store, "r")}
    lines = event_lines(store, "r", iteration_id="i", stage="collect")
    assert [(line.error, line.times) for line in lines] == [("Rare", 1)]


@pytest.mark.slow
def test_a_refusal_is_known_by_three_words_without_its_tag(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    texts = ("\n<result>\nNo such call is left.\n</result>\n", "\nThere is no call.", "No such  call, either", "")
    steps = [Step(reply="r", action="a", observation=text, reward=0.0, valid=False) for text in texts]
    world = Instance(environment="w", split="train", index=0)
    trajectory = Trajectory.ended(world, "task", steps, StopReason.FAILURE)
    store.write(trajectory_rows("t", trajectory, source="rollout", iteration_id="i"))
    assert refusal_counts(store, "i", limit=8) == {"No such call": 1, "No such call,": 1, "There is no": 1, "": 1}


@pytest.mark.slow
def test_where_steps_are_charged_an_operator_saves_steps(tmp_path: Path) -> None:
    store, world = Store(tmp_path / "store.duckdb"), Instance(environment="w", split="train", index=0)
    step = Step(reply="r", action="a", observation="o", reward=1.0, success=True)
    for key, steps in (("parent", 3), ("child", 2)):
        trajectory = Trajectory.ended(world, "task", [step] * steps, StopReason.SUCCESS)
        store.write(trajectory_rows(key, trajectory, source=FLYWHEEL, iteration_id="i"))
    store.write(
        derivation_rows([Derivation(child="child", parent="parent", operator="C1", position=1)], iteration_id="i")
    )
    fresh, c1_count = operator_counts(store, "i", "steps")
    assert fresh == OperatorCount("fresh", children=1, right=1, cost=3.0, saved=None, samples=0)
    assert c1_count == OperatorCount("C1", children=1, right=1, cost=2.0, saved=1.0, samples=0)
    assert [row.cost for row in operator_counts(store, "i", "calls")] == [0.0, 0.0]
