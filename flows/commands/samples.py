"""Training samples as a person looks at them."""

from __future__ import annotations

from pathlib import Path

from agentr_core.errors import ConfigError
from agentr_core.store.codec import load_samples
from agentr_core.store.queries.datasets import samples_beginning
from agentr_core.texts import visible
from tasks.workspaces import open_store


def preview_sample(workspace: Path, prefix: str) -> list[tuple[str, bool]]:
    """Return the turns of the one sample whose id begins with `prefix`, each with whether it is
    trained; a turn that was grown by continuation is given as its spans.

    Characters that are invisible or would control a terminal are written out as marks.

    Raises `ConfigError` if there is no such sample, or several.
    """
    store = open_store(workspace, must_exist=True)
    found = samples_beginning(store, prefix, limit=2)
    if len(found) != 1:
        raise ConfigError(
            f"{'more than one' if found else 'no'} sample in {workspace} begins with {prefix!r}; "
            f'`agentr sql "select sample_id, kind from v_samples limit 10" -w {workspace}` shows some'
        )
    (sample,) = load_samples(store, found).values()
    return [
        (f"[{', '.join(filter(None, marks))}]\n{visible(span.text)}\n", span.train)
        for message in sample.messages
        for span in message.parts
        for marks in [(message.role, "example" * message.example, "trained" * span.train)]
    ]
