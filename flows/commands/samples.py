"""Training samples as a person looks at them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from agentr_core.errors import ConfigError
from agentr_core.samples.labels import IGNORED
from agentr_core.store.codec import load_samples
from agentr_core.store.queries.datasets import run_of_sample, samples_beginning
from agentr_core.texts import visible
from agentr_core.types import Sample
from tasks.workspaces import open_store, stored_recipe


def preview_tokens(workspace: Path, prefix: str, model: Path | None = None) -> list[tuple[str, bool]]:
    """Return each token that training reads of the one sample whose id begins with `prefix`, each
    with whether it is trained: its position, its id, its text as it is written in JSON, and what it
    is. They are rendered as for the model that the sample's run begins with, or for another one.

    Raises `ConfigError` as `preview_sample`, and if that model is no directory here, and
    `ModelDirectoryError` and `DataFault` as rendering does.
    """
    from agentr_core.samples.rendering import load_renderer

    key, sample = _one(workspace, prefix)
    if model is None:
        run = run_of_sample(open_store(workspace, must_exist=True), key)
        if run is None:
            raise ConfigError(f"the store has no run of sample {key}; name a model with --model")
        run_id, begun = run
        model = Path(stored_recipe(workspace, run_id).model.path)
        if not model.is_dir():
            raise ConfigError(f"the model of run {run_id} is no directory here; name one with --model")
    else:
        begun = datetime.now(UTC)
    renderer = load_renderer(model, at=begun)
    ids, labels = renderer.render_sample(sample.messages)
    return [
        (f"{place:6}  {token:7}  {visible(json.dumps(text, ensure_ascii=False)):24} {mark}".rstrip(), label != IGNORED)
        for place, (token, label, text) in enumerate(zip(ids, labels, renderer.pieces(ids), strict=True))
        for mark in ["trained" if label != IGNORED else ""]
    ]


def preview_sample(workspace: Path, prefix: str) -> list[tuple[str, bool]]:
    """Return the turns of the one sample whose id begins with `prefix`, each with whether it is
    trained; a turn that was grown by continuation is given as its spans.

    Characters that are invisible or would control a terminal are written out as marks.

    Raises `ConfigError` if there is no such sample, or several.
    """
    _, sample = _one(workspace, prefix)
    return [
        (f"[{', '.join(filter(None, marks))}]\n{visible(span.text)}\n", span.train)
        for message in sample.messages
        for span in message.parts
        for marks in [(message.role, "example" * message.example, "trained" * span.train)]
    ]


def _one(workspace: Path, prefix: str) -> tuple[str, Sample]:
    store = open_store(workspace, must_exist=True)
    found = samples_beginning(store, prefix, limit=2)
    if len(found) != 1:
        raise ConfigError(
            f"{'more than one' if found else 'no'} sample in {workspace} begins with {prefix!r}; "
            f'`agentr sql "select sample_id, kind from v_samples limit 10" -w {workspace}` shows some'
        )
    ((key, sample),) = load_samples(store, found).items()
    return key, sample
