"""Two seeds of one recipe, run in stores of their own as on two machines, become one store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentr_core.store.care.rewriting import merge_stores
from agentr_core.store.database import Store
from agentr_core.store.queries.listings import contradictions, dangling_references
from flows.flywheel import flywheel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


@pytest.mark.long
def test_two_seeds_with_the_same_chats_become_one_store(recipe: Path) -> None:
    chats = recipe.with_name("general.jsonl")
    turns = [[{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}] for n in range(4)]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns), encoding="utf-8")
    stores = []
    for seed in (0, 1):
        workspace = recipe.parent / f"machine-{seed}"
        overrides = [f"data.general.file={chats}", "data.general.share=0.5"]
        asyncio.run(flywheel(str(recipe), [*overrides, f"seed={seed}", f"workspace={workspace}"]))
        stores.append(Store(workspace / "store.duckdb"))
    target, source = stores
    general_ids = {row for row in target.rows("select sample_id from sample where kind = 'general'")}
    assert general_ids & {row for row in source.rows("select sample_id from sample where kind = 'general'")}
    rows = source.rows("select dataset_id, position, sample_id from dataset_row order by all")

    merge_stores(target, [source])

    assert target.rows("select count(*) from run") == [(2,)]
    all_rows = target.rows("select dataset_id, position, sample_id from dataset_row order by all")
    assert set(rows) < set(all_rows)
    assert dangling_references(target) == []
    assert contradictions(target) == []
    assert merge_stores(target, [source]).num_removed_by_table == {}
