"""The dataset of an iteration: its samples filtered, mixed and tokenised, as a Parquet file and rows in the store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.chat_file import read_chat
from agentr_core.datasets import Dataset, build_dataset
from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.rendering import load_renderer
from agentr_core.samples import sample_id
from agentr_core.stages.instances import test_instances
from agentr_core.stages.place import Workplace
from agentr_core.store.codec import dataset_rows, load_samples, rejection_rows, sample_rows
from agentr_core.store.tables import merge

STAGE = "dataset"


def dataset_id(place: Workplace, iteration: int) -> str:
    """Return the id of the dataset of an iteration."""
    return fingerprint("dataset", place.iteration_id(iteration), place.recipe.data)


def dataset_file(place: Workplace, iteration: int) -> Path:
    """Return the path of the Parquet file with columns `input_ids` and `labels`."""
    return place.root / "datasets" / f"{dataset_id(place, iteration)}.parquet"


async def dataset(place: Workplace, iteration: int) -> dict[str, Any]:
    """Build the dataset of an iteration unless it is there; return its hash and what it is made of.

    Raises `DataFault` when no sample is left, since training on nothing would only repeat the policy; and when the file
    of a stored dataset is gone and its samples no longer give the same one.
    """
    with place.timed(STAGE, iteration):
        return await asyncio.to_thread(_build, place, iteration)


def _build(place: Workplace, iteration: int) -> dict[str, Any]:
    recipe = place.recipe
    iteration_id = place.iteration_id(iteration)
    key, file = dataset_id(place, iteration), dataset_file(place, iteration)
    stored = place.one("select hash, counts from dataset where dataset_id = ?", key)
    if stored is not None and file.exists():
        return {"dataset_hash": stored[0], **json.loads(stored[1])}
    env = place.make_environment()
    try:
        held_out = test_instances(recipe, env)
    finally:
        env.close()
    general, useless = read_chat(Path(recipe.data.general.file)) if recipe.data.general.share else ((), ())
    earlier = [
        sample
        for before in range(1, iteration if recipe.data.replay else 1)
        for sample in load_samples(place.store, iteration_id=place.iteration_id(before)).values()
    ]
    built = build_dataset(
        load_samples(place.store, iteration_id=iteration_id).values(),
        recipe.data,
        load_renderer(place.policy(iteration).path),
        test=held_out,
        seed=derive_seed(recipe.seed, "dataset", iteration),
        earlier=earlier,
        general=general,
    )
    if not built.rows:
        raise DataFault(
            f"iteration {iteration} of run {place.run_id} has no sample to train on; "
            "`select * from v_funnel` and `select * from v_rejections` show where they were lost"
        )
    if stored is not None and stored[0] != built.manifest.dataset_hash:
        raise DataFault(
            f"dataset {key} was stored with hash {stored[0]} and is {built.manifest.dataset_hash} now, and its file "
            f"{file} is gone; bring the file back, or begin a new run"
        )
    _write_file(built, file)
    used = {row.sample_id for row in built.rows}
    place.store.write(
        merge(
            [
                *(sample_rows(sample_id(s), s, iteration_id=iteration_id) for s in general if sample_id(s) in used),
                rejection_rows([*useless, *built.rejections], iteration_id=iteration_id),
                dataset_rows(
                    key,
                    [row.sample_id for row in built.rows],
                    iteration_id=iteration_id,
                    content_hash=built.manifest.dataset_hash,
                    counts=_counts(built),
                ),
            ]
        )
    )
    return {"dataset_hash": built.manifest.dataset_hash, **_counts(built)}


def _counts(built: Dataset) -> dict[str, Any]:
    manifest = built.manifest
    return {
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "samples": {str(kind): count for kind, count in manifest.samples.items()},
        "trained_tokens": dict(manifest.trained_tokens),
        "replayed": manifest.replayed,
        "general_passes": manifest.general_passes,
        "seed": manifest.seed,
    }


def _write_file(built: Dataset, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "input_ids": pa.array([list(row.input_ids) for row in built.rows], pa.list_(pa.int32())),
            "labels": pa.array([list(row.labels) for row in built.rows], pa.list_(pa.int32())),
        }
    )
    draft = path.with_suffix(".new")
    pq.write_table(table, draft)
    draft.replace(path)
