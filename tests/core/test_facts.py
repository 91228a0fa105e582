"""What worlds tell of their instances: checked, stored once an instance, shown in lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gallery
import pytest
from combination_lock import CombinationLock

from agentr_core.environment import MAX_NUM_FACTS, Environment
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.errors import IllTypedAnswer
from agentr_core.runtime.instances import instance_rows
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.facts import load_facts
from agentr_core.types import Instance, StopReason, Trajectory
from agentr_core.viewer.lists import list_page
from flows.commands.environments import world_text


class Telling(CombinationLock):
    told: ClassVar[Any] = {"dials": 3, "kind": "lock", "hard": True, "share": 0.5}

    def facts(self, instance: Instance) -> Mapping[str, Any]:
        return dict(self.told)


def lock(index: int = 0) -> Instance:
    return Instance(environment="combination-lock", split="train", index=index)


def test_a_world_tells_nothing_unless_it_has_its_own() -> None:
    assert CombinationLock().facts(lock()) == {}
    assert not CombinationLock.has(Environment.facts)
    assert instance_rows(CombinationLock(), [lock()])["instance_facts"] == []
    assert Telling().facts(lock()) == {"dials": 3, "kind": "lock", "hard": True, "share": 0.5}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"Kind": 1}, "have a name 'Kind'; one has at most 30 small letters"),
        ({"kind') or true --": 1}, "begins with a letter"),
        ({"kind": float("nan")}, "kind is nan; it must be a finite number"),
        ({"kind": None}, "kind is None"),
        ({"kind": "a" * 201}, "a text of at most 200 characters"),
        ({f"f{n}": n for n in range(MAX_NUM_FACTS + 1)}, "a mapping of at most 8 names"),
    ],
)
def test_what_is_no_fact_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, told: Any, why: str) -> None:
    monkeypatch.setattr(Telling, "told", told)
    with pytest.raises(IllTypedAnswer) as caught:
        Telling().facts(lock())
    assert "combination-lock: the facts of combination-lock/train/0" in str(caught.value)
    assert why in str(caught.value)


def test_textcraft_tells_the_crafts_of_the_shortest_way() -> None:
    env = TextCraft()
    instance = env.instances("test")[0]
    replies = env.expert(instance) or ()
    assert env.facts(instance) == {"crafts": sum("Action: craft" in reply for reply in replies)}
    assert "\nfacts of an instance, which lists have as columns\n  crafts: 1\n" in world_text("textcraft", {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store whose instances have facts: crafts 2 and 10, and a source."""
    store = gallery.fill(tmp_path / "store.duckdb")
    instance = Instance(environment="toy", split="train", index=8)
    episode = Trajectory.ended(instance, "Another.", (), StopReason.TIME_LIMIT)
    store.write(trajectory_rows("another", episode, source="rollout", iteration_id=gallery.ITERATION))
    keys = [key for (key,) in store.rows("select distinct instance_id from trajectory order by 1")]
    rows = [
        {"instance_id": key, "facts": {"crafts": 10 if n % 2 else 2, "source": "a'b"}} for n, key in enumerate(keys)
    ]
    store.write({"instance_facts": rows})
    return store


@pytest.mark.slow
def test_lists_have_facts_as_columns_filters_and_orders(store: Store) -> None:
    plain = list_page(store, "trajectories", {})
    assert [head.text for head in plain.headers][3:5] == ["Crafts", "Source of the world"]
    assert plain.choices["fact_crafts"] == ["2", "10"]
    assert plain.titles == {"fact_crafts": "crafts", "fact_source": "source of the world"}
    some = list_page(store, "trajectories", {"fact_crafts": "10"})
    assert 0 < some.total < plain.total
    assert {row[3].text for row in some.rows} == {"10"}
    values = [row[3].text for row in list_page(store, "trajectories", {"sort": "fact_crafts"}).rows]
    assert values == sorted(values, key=float)
    assert set(values) == {"2", "10"}
    assert list_page(store, "trajectories", {"fact_source": "a'b"}).total == plain.total
    assert list_page(store, "trajectories", {"fact_source": "a"}).total == 0
    # What the page shows is what its SQL asks.
    assert len(store.query(some.sql)) == some.total
    ((value,),) = store.rows("select distinct facts->>'$.crafts' from v_trajectories where facts->>'$.crafts' = '10'")
    assert value == "10"


@pytest.mark.slow
def test_a_later_version_of_a_world_tells_anew_and_foreign_names_are_not_asked(store: Store) -> None:
    ((key,),) = store.rows("select min(instance_id) from instance_facts")
    store.write({"instance_facts": [{"instance_id": key, "facts": {"crafts": 3, "x') or (1=1": 1}}]})
    assert load_facts(store, key) == {"crafts": 3, "x') or (1=1": 1}
    assert [head.text for head in list_page(store, "trajectories", {}).headers][3:5] == [
        "Crafts",
        "Source of the world",
    ]
    assert list_page(store, "trajectories", {"fact_crafts": "3"}).total > 0
    assert store.rows("select * from v_orphans") == []
