"""Write a checkpoint as a directory to publish: weights, tokenizer, chat template and a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.methods.table import method_of
from agentr_core.models.checkpoint_dir import ADAPTER_CONFIG, read_json, weights_sha256
from agentr_core.recipes.recipe import OPTIONAL_SECTIONS, Recipe
from agentr_core.reports.model_card import Card, CardScore, render_card
from agentr_core.stages.evaluate import load_measures
from agentr_core.stages.report import finite_estimate
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import StoredEvaluation, evaluations_of_checkpoint
from agentr_core.store.queries.listings import ancestry
from agentr_core.store.queries.runs import RunCheckpoint, find_checkpoints
from agentr_core.system import new_folder
from agentr_core.training.checkpoints import ADAPTER, HISTORY, MANIFEST, read_manifest
from flows.commands.lineage import line_of
from tasks.workspaces import open_store, stored_recipe


def publish_checkpoint(workspace: Path, prefix: str, folder: Path, *, base_model: str, licence: str) -> str:
    """Write a checkpoint of a workspace into a new folder; return a line with the names of its
    files.

    Args:
        prefix: the beginning of the checkpoint's id; for a checkpoint saved during training, then
            `@` and the step.
        base_model: the name under which the model that it was trained from is published; empty: the
            card does not mention it.
        licence: the identifier of a licence; empty: the card names none.

    Raises:
        ConfigError: there is no such checkpoint, the folder is there already, the weights are not
            those that were trained, or `base_model` is missing for an adapter.
        ModelDirectoryError: the checkpoint's directory has no sound weights.
        DiskError: the folder cannot be written; nothing is left of it.
    """
    store = open_store(workspace, must_exist=True)
    checkpoint = _checkpoint(store, workspace, prefix)
    source = Path(checkpoint.path)
    if folder.exists():
        raise ConfigError(f"{folder} already exists; name a new folder")
    if weights_sha256(source) != checkpoint.weights_sha256:
        raise ConfigError(f"the weights in {source} are not those that were trained; restore them, or train them again")
    if (source / ADAPTER_CONFIG).exists() and not base_model:
        raise ConfigError(f"{source} is an adapter; give --base-model, the name that others have its model by")
    card = render_card(_card(store, workspace, checkpoint, folder.name, base_model, licence))
    with new_folder(folder) as draft:
        # Without a published name, the configuration of an adapter that lies next to merged weights
        # would name its model by a folder of this machine.
        left_out = shutil.ignore_patterns(MANIFEST, HISTORY, *([] if base_model else [ADAPTER]))
        # `copyfile` does not copy the modes of the files, with which nobody else could read them.
        shutil.copytree(source, draft, ignore=left_out, copy_function=shutil.copyfile, dirs_exist_ok=True)
        _name_parent(draft, base_model)
        (draft / "README.md").write_text(card, encoding="utf-8")
    return f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}"


def _checkpoint(store: Store, workspace: Path, prefix: str) -> RunCheckpoint:
    matches = find_checkpoints(store, prefix)
    if len(matches) != 1:
        raise ConfigError(
            f"{len(matches) or 'no'} checkpoints in {workspace} begin with {prefix!r} and were trained there; "
            f'`agentr sql "select checkpoint_id, path from checkpoint where iteration_id is not null" -w {workspace}` '
            "lists them"
        )
    return matches[0]


def _card(store: Store, workspace: Path, checkpoint: RunCheckpoint, name: str, base_model: str, licence: str) -> Card:
    manifest, recipe = read_manifest(Path(checkpoint.path)), stored_recipe(workspace, checkpoint.run_id)
    scores = (_score(store, evaluation) for evaluation in evaluations_of_checkpoint(store, checkpoint.checkpoint_id))
    return Card(
        name=name,
        method=recipe.method,
        iteration=checkpoint.iteration,
        worlds=recipe.world_names,
        parent=base_model,
        licence=licence,
        weights_sha256=checkpoint.weights_sha256,
        trained_tokens=manifest.trained_tokens,
        num_steps=manifest.steps,
        dataset_hash=manifest.dataset_hash,
        scores=tuple(filter(None, scores)),
        recipe=_visible(recipe, json.loads(checkpoint.config), base_model),
        comparison_run_id=recipe.compare.pool,
        versions=manifest.versions,
        ancestry=tuple(
            line_of(line, hidden_names=("model",)) for line in ancestry(store, checkpoint.checkpoint_id, "checkpoint")
        ),
    )


def _score(store: Store, evaluation: StoredEvaluation) -> CardScore | None:
    """Return the score of an evaluation; None if no episode of it was played."""
    measures = load_measures(store, evaluation.evaluation_id)
    success, gain = finite_estimate(measures.get("success")), finite_estimate(measures.get("gain_over_base"))
    return (
        None if success is None else CardScore(name=evaluation.name, split=evaluation.split, success=success, gain=gain)
    )


def _visible(recipe: Recipe, config: Mapping[str, Any], base_model: str) -> Mapping[str, Any]:
    """Return the sections of a resolved recipe that its method reads, without paths of this
    machine.
    """
    foreign = {"workspace", "models", "base", *OPTIONAL_SECTIONS} - set(method_of(recipe).sections)
    sections = {name: section for name, section in config.items() if name not in foreign}
    return {**sections, "model": {**config["model"], "path": base_model}}


def _name_parent(folder: Path, base_model: str) -> None:
    """Set the name of the base model in the configuration of each adapter in a folder."""
    for file in folder.rglob(ADAPTER_CONFIG):
        config = {**read_json(file), "base_model_name_or_path": base_model}
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")
