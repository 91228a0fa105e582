"""Small training jobs for tests: random rows, a job with plain settings."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.training import trainers
from agentr_core.training.job import Preference, PreferenceLoss, TrainingJob
from agentr_core.training.packing import TokenPair, TokenRow

PAIR_LENGTHS = [(24, 40), (61, 33), (90, 120), (18, 18), (47, 80), (55, 21)]


def random_row(length: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return token ids and labels; about a third of the tokens, and never the first, carry loss."""
    generator = random.Random(seed)
    ids = tuple(generator.randrange(3, 300) for _ in range(length))
    labels = [token if generator.random() < 0.35 else IGNORE_INDEX for token in ids]
    labels[0], labels[-1] = IGNORE_INDEX, ids[-1]
    return ids, tuple(labels)


def write_dataset(file: Path, lengths: list[int]) -> Path:
    """Write a parquet file with a random row for each length."""
    rows = [random_row(length, seed) for seed, length in enumerate(lengths)]
    table = pa.table({"input_ids": [ids for ids, _ in rows], "labels": [labels for _, labels in rows]})
    parquet.write_table(table, file)
    return file


def make_job(model_dir: Path, folder: Path, *, name: str = "out", epochs: float = 2.0, **settings: Any) -> TrainingJob:
    """Return a job on twelve short rows, four to a step, at a learning rate that changes weights
    visibly.
    """
    checkpoint_every = settings.pop("checkpoint_every", 2)
    dataset = folder / "rows.parquet"
    if not dataset.exists():
        write_dataset(dataset, [20 + 7 * (i % 5) for i in range(12)])
    plain = {"learning_rate": 1e-3, "per_device_train_batch_size": 4, "bf16": False, "num_threads": 1}
    return TrainingJob(
        model_dir=model_dir,
        dataset_file=dataset,
        output_dir=folder / name,
        config=TrainingConfig(**(plain | settings)),
        num_train_epochs=epochs,
        seed=3,
        parent="parent",
        dataset_hash="rows",
        checkpoint_every=checkpoint_every,
    )


def pairs() -> list[TokenPair]:
    """Return six pairs of random rows."""
    return [
        TokenPair(TokenRow(*random_row(chosen, 2 * seed)), TokenRow(*random_row(rejected, 2 * seed + 1)))
        for seed, (chosen, rejected) in enumerate(PAIR_LENGTHS)
    ]


def columns(rows: list[TokenPair]) -> dict[str, list[Any]]:
    """Return pairs as the columns of a dataset."""
    return {
        f"{side}_{name}": [list(getattr(getattr(row, side), name)) for row in rows]
        for side in ("chosen", "rejected")
        for name in ("input_ids", "labels")
    }


def dpo_job(model_dir: Path, folder: Path, *, loss: PreferenceLoss | None = None, **settings: Any) -> TrainingJob:
    """Return a job of DPO on `pairs`, two to a step."""
    file = folder / "pairs.parquet"
    if not file.exists():
        parquet.write_table(pa.table(columns(pairs())), file)
    plain: dict[str, Any] = {"per_device_train_batch_size": 2, "warmup_ratio": 0.0, "lr_scheduler_type": "constant"}
    job = make_job(model_dir, folder, **(plain | settings))
    return replace(job, dataset_file=file, objective=Preference(preference=loss or PreferenceLoss(beta=0.1)))


ASKED_EARLIER = {"start_from", "num_train_epochs", "save_steps"}
"""Fields of section `training` that whoever makes a job reads."""
_CHECKS = ("agentr_core/recipes/", "agentr_core/fingerprint", "agentr_core/training/requirements")


def watched(config: TrainingConfig) -> tuple[TrainingConfig, set[str]]:
    """Return settings, and the set of those fields that the package has read of them, which grows;
    checks and fingerprints, which read all, do not count.
    """
    names, fields = {field.name for field in dataclasses.fields(TrainingConfig)}, set[str]()

    class Watched(TrainingConfig):
        def __getattribute__(self, name: str) -> Any:
            file = sys._getframe(1).f_code.co_filename.replace("\\", "/")
            if name in names and "agentr_core/" in file and not any(part in file for part in _CHECKS):
                fields.add(name)
            if name == "num_processes":
                fields.add("launch")
            return super().__getattribute__(name)

    return Watched(**vars(config)), fields


def unread(reads: set[str]) -> set[str]:
    """Return the fields of section `training` that a training has not read."""
    return {field.name for field in dataclasses.fields(TrainingConfig)} - reads - ASKED_EARLIER


def set_clock(patch: pytest.MonkeyPatch) -> None:
    """Give the trainer a clock on which a second passes each time it is read, a few times a
    step.
    """
    seconds = itertools.count(1.0)
    patch.setattr(trainers, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
