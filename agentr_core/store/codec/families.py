"""Families of a flywheel, and the model answers that made them, to rows and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.store.codec.calls import answer_columns, answer_of
from agentr_core.store.codec.texts import instance_row, text_rows
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Store
from agentr_core.store.tables import Rows
from agentr_core.types import Answer, Instance, Trajectory

FLYWHEEL = "flywheel"
"""The source of a flywheel's trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEdit:
    """A stored answer with its id, the instance in whose family it was asked for, and its
    subject.
    """

    edit_id: str
    subject: str
    instance_id: str
    answer: Answer


def edit_rows(
    edit_id: str, answer: Answer, *, subject: str, prompt: str, instance: Instance, iteration_id: str
) -> Rows:
    """Return the rows of the question that asked a model to make a child, and of its answer."""
    return {
        "instance": [instance_row(instance)],
        "text": text_rows([answer.text]),
        "edit": [
            {
                "edit_id": edit_id,
                "iteration_id": iteration_id,
                "instance_id": instance.key,
                "subject": subject,
                "prompt": prompt,
                **answer_columns(answer),
            }
        ],
    }


def load_edits(store: Store, iteration_id: str) -> list[StoredEdit]:
    """Return the answers of models in an iteration's flywheel."""
    return [
        StoredEdit(edit_id=edit_id, subject=subject, instance_id=instance_id, answer=answer_of(columns))
        for edit_id, subject, instance_id, *columns in store.rows(_EDITS, iteration_id)
    ]


def family_rows(
    family_id: str,
    instance: Instance,
    *,
    iteration_id: str,
    checkpoint_id: str,
    members: int,
    rounds: int,
    ended_by: str,
) -> Rows:
    """Return the row of a finished family."""
    row = {
        "family_id": family_id,
        "iteration_id": iteration_id,
        "instance_id": instance.key,
        "checkpoint_id": checkpoint_id,
        "members": members,
        "rounds": rounds,
        "ended_by": ended_by,
    }
    return {"instance": [instance_row(instance)], "family": [row]}


def load_members(store: Store, iteration_id: str) -> dict[str, Trajectory]:
    """Return the trajectories of an iteration's flywheel by id."""
    return load_trajectories(store, iteration_id=iteration_id, source=FLYWHEEL)


def tokens_written(store: Store, trajectory_ids: Sequence[str]) -> dict[str, int]:
    """Return how many tokens were drawn for each trajectory, without those of the recorded steps
    that it continues.

    Trajectories for which none were drawn are left out.
    """
    return {key: int(tokens) for key, tokens in store.rows(_TOKENS, list(trajectory_ids))}


_EDITS = """
select e.edit_id, e.subject, e.instance_id, e.role, e.model, e.prompt_hash, e.seed, t.text, e.finish_reason,
    e.prompt_tokens, e.completion_tokens, e.thinks
from edit e join text t on t.text_id = e.reply_id
where e.iteration_id = ?
order by e.edit_id
"""
_TOKENS = """
select owner_id, sum(completion_tokens) from generation
where kind = 'step' and seed is not null and owner_id in (select unnest(?::varchar[]))
group by owner_id
"""
