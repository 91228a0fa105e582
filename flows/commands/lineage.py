"""The ancestry of an entity in a store, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from agentr_core.episodes.transcript import turn_texts
from agentr_core.errors import ConfigError
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Store
from agentr_core.store.queries.listings import Ancestor, ancestry, count_nodes, find_entities
from agentr_core.store.queries.runs import find_runs
from agentr_core.texts import count_text, escape_invisible
from tasks.workspaces import open_store

_SHOWN = 5
"""The most ids that are listed for an ambiguous prefix."""


def traced(workspace: Path, prefix: str, form: str) -> str:
    """Return the ancestry of the one entity whose id begins with `prefix`. As `text` that is a line
    for each ancestor, followed by the turns of the entity if it is a trajectory; as `json` a list.

    Raises `ConfigError` if there is none or several, and `StoreError` if there is no store.
    """
    store = open_store(workspace, must_exist=True)
    entities = find_entities(store, prefix, limit=_SHOWN + 1)
    if len(entities) != 1:
        which = ", ".join(
            [*(f"{entity.kind} {entity.key}" for entity in entities[:_SHOWN]), *(["..."] if entities[_SHOWN:] else [])]
        )
        if not entities and (runs := find_runs(store, prefix)):
            raise ConfigError(
                f"{runs[0]} is a run; trace something that it made, such as a checkpoint: "
                f"`agentr sql --example ancestors -w {workspace}` lists them"
            )
        tree, mark, _ = prefix.partition("#")
        if mark and not entities and (nodes := count_nodes(store, tree)):
            raise ConfigError(
                f"tree {tree} in {workspace} has {count_text(nodes, 'node')}; give a number from 0 to {nodes - 1}"
            )
        count = f"more than {_SHOWN}" if entities[_SHOWN:] else len(entities) or "no"
        raise ConfigError(
            f"{count} ids in {workspace} begin with {prefix!r}{f': {which}' if which else ''}; give "
            "that of one checkpoint, dataset, sample, pair, preference, tree, trajectory or evaluation, or TREE#NUMBER"
        )
    lines = ancestry(store, entities[0].key, entities[0].kind)
    if form == "json":
        return json.dumps([dataclasses.asdict(line) for line in lines], indent=2) + "\n"
    text = _text_of(store, entities[0].key) if entities[0].kind == "trajectory" else ""
    return "".join(f"{line_of(line)}\n" for line in lines) + text


def _text_of(store: Store, key: str) -> str:
    """Return the observations and replies of a trajectory as text, turn by turn."""
    (trajectory,) = load_trajectories(store, [key]).values()
    turns = [("first observation", trajectory.first_observation)]
    for number, step in enumerate(trajectory.steps):
        name = "reply" if step.summary_of is None else f"summary up to reply {step.summary_of - 1}, reply"
        turns += [(f"{name} {number}", step.reply), (f"observation {number}", step.observation)]
    texts = ((name, "\n".join(turn_texts(text))) for name, text in turns if text)
    return "".join(f"\n[{name}]\n{escape_invisible(text)}\n" for name, text in texts)


def line_of(ancestor: Ancestor, *, hidden_names: Collection[str] = ()) -> str:
    """Return an ancestor as one line, without the facts whose names are in `hidden_names`."""
    facts = {name: fact for name, fact in ancestor.facts.items() if name not in hidden_names}
    text = "see above" if ancestor.seen else "  ".join(f"{name} {_fact_text(fact)}" for name, fact in facts.items())
    relation = f"{ancestor.relation}: " if ancestor.relation else ""
    return f"{'  ' * ancestor.depth}{relation}{ancestor.entity.kind} {ancestor.entity.key}  {text}".rstrip()


def _fact_text(fact: Any) -> str:
    return escape_invisible(", ".join(map(str, fact)) if isinstance(fact, list) else str(fact)).replace("\n", " ")
