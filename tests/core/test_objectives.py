"""Objectives as records: what of them is in ids, and that a job file keeps them whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.job import JOB, Preference, PreferenceLoss, Supervised, TrainingJob

PAIRS = Preference(preference=PreferenceLoss(beta=0.1, loss_type=("sigmoid", "sft")))


def job(objective: Supervised | Preference) -> TrainingJob:
    return TrainingJob(
        model_dir=Path("model"),
        dataset_file=Path("rows.parquet"),
        output_dir=Path("out"),
        config=TrainingConfig(),
        num_train_epochs=1.0,
        seed=3,
        parent="parent",
        dataset_hash="rows",
        objective=objective,
    )


@pytest.mark.parametrize(
    ("objective", "pinned"),
    [(Supervised(), "9e1308f775baf86f"), (Preference(preference=PreferenceLoss(beta=0.1)), "918e7ad0026d93be")],
)
def test_the_id_of_a_training_stays(objective: Supervised | Preference, pinned: str) -> None:
    assert job(objective).fingerprint == pinned


@pytest.mark.parametrize("objective", [Supervised(), PAIRS])
def test_a_job_file_keeps_its_objective(objective: Supervised | Preference) -> None:
    assert JOB.validate_json(JOB.dump_json(job(objective))) == job(objective)


def test_settings_are_stored_under_their_names() -> None:
    assert Supervised().settings == {}
    assert PAIRS.settings == {"preference": PAIRS.preference}
