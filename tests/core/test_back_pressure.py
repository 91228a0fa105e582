"""A slow store holds the search back, so that what it has not stored stays bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from door import Door

from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import TreeShard, TreeWork
from agentr_core.methods.faults import parse
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime import equipment as equipping
from agentr_core.runtime.equipment import Checkpoint, Equipment
from agentr_core.store.database import Store, Writer
from agentr_core.store.tables import Rows
from agentr_core.types import Instance

IN_FLIGHT = 4
TREES = 20
MAX_ROWS = 60
PATIENCE_S = 600


class Street(Door):
    """As many doors as it takes."""

    def instances(self, split: str) -> Sequence[Instance]:
        return [Instance(environment="door", split=split, index=index) for index in range(TREES)]


class GateStore(Store):
    """A store whose writes wait until `gate` is set; it counts the trees that are finished in
    it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.finished = 0

    def write(self, rows: Rows) -> None:
        assert self.gate.wait(PATIENCE_S)
        super().write(rows)
        self.finished += sum(row["finished"] for row in rows.get("tree", ()))


class CountingWriter(Writer):
    """Counts what it was given, and says when all trees in flight wait for room."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, max_rows=MAX_ROWS)
        self.rows = 0
        self.finished = 0
        self.largest = 0
        self.stalled = asyncio.Event()
        self._waiting = 0

    def add(self, unit: Rows) -> None:
        super().add(unit)
        size = sum(map(len, unit.values()))
        self.rows += size
        self.largest = max(self.largest, size)
        self.finished += sum(row["finished"] for row in unit.get("tree", ()))

    async def room(self) -> None:
        self._waiting += 1
        if self._waiting == IN_FLIGHT:
            self.stalled.set()
        await super().room()
        self._waiting -= 1


@pytest.mark.slow
async def test_finished_trees_do_not_pile_up_before_a_slow_store(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipping, "_MIN_CONCURRENCY", IN_FLIGHT)
    recipe = parse(
        {
            "name": "street",
            "environment": {"name": "door"},
            "model": {"path": str(tiny_model_dir), "max_batch": 4},
            "search": {"dives": 2, "width": 3, "depth": 4},
        }
    )
    equipment = Equipment(
        recipe=recipe,
        run_id="run",
        make_environment=lambda _: Street(),
        load_model=lambda role, path: ScriptedModel(lambda messages, seed, number: fingerprint(seed, number)),
        progress=lambda done, total, note: None,
    )
    shard = TreeShard(
        iteration=1,
        checkpoint=Checkpoint(id="policy", path=tmp_path, weights_sha256=""),
        trees=tuple(TreeWork(tree_id=i.key, first_id=i.key, instance=i) for i in Street().instances("train")),
        done=0,
        total=TREES,
    )
    store = GateStore(tmp_path / "store.duckdb")

    async with CountingWriter(store) as writer:
        working = asyncio.create_task(shard.work(equipment, writer))
        async with asyncio.timeout(PATIENCE_S):
            await writer.stalled.wait()
        assert writer.finished < TREES // 2
        assert writer.rows <= 3 * MAX_ROWS + IN_FLIGHT * 2 * writer.largest
        store.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await working
    assert store.finished == writer.finished == TREES
