"""Show what training reads of samples, trajectories and lines of general data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from agentr_core.errors import ConfigError
from agentr_core.methods.grpo.readings import Reading, expert_episode_of, other_episodes, readings
from agentr_core.runtime.equipment import Worlds
from agentr_core.samples.chat_file import read_chat
from agentr_core.stages.dataset import whole_samples
from agentr_core.store.codec.ledger import find_rl_step, load_group_members
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import run_that_made
from agentr_core.store.queries.listings import Entity, find_entities
from agentr_core.texts import escape_invisible
from agentr_core.types import Message, Rejection, Trajectory
from tasks.wiring import make_environment
from tasks.workspaces import open_store, stored_recipe

if TYPE_CHECKING:
    from agentr_core.samples.rendering import RenderedToken, Renderer

Conversation = tuple[Message, ...]


def preview_tokens(workspace: Path, source: str, model: Path | None = None) -> list[tuple[str, bool]]:
    """Return a line for each token that training reads, and whether the token is trained on. A line
    has the token's position, id, text as JSON, writer and, if so, the word `trained`.

    `source` is the beginning of the id of a sample or a trajectory, or FILE:LINE of general data. A
    trajectory is read as its world's transcript builds it, with all replies trained. The text is
    rendered for the model that its run began with, or for `model`, which FILE:LINE needs.

    Raises `ConfigError` as `preview_sample` does, and if there is no directory of the model here;
    `ModelDirectoryError` or `DataFault` if the text cannot be rendered.
    """
    line = _line(source)
    if line is not None:
        if model is None:
            raise ConfigError(f"no run says for which model {source} is read; name one with --model")
        return _token_lines([_renderer(model, datetime.now(UTC)).rendered_tokens(line)])
    store = open_store(workspace, must_exist=True)
    entity = _entity(store, workspace, source)
    return _token_lines(reading(workspace, store, entity.kind, entity.key, model)())


def reading(
    workspace: Path, store: Store, kind: str, key: str, model: Path | None = None
) -> Callable[[], list[list[RenderedToken]]]:
    """Return a function that returns the tokens of each conversation of a stored sample or
    trajectory, as training reads them. The store is read now; the function does without it.

    Raises `ConfigError` and `DataFault` if they cannot be read; the function raises as
    `preview_tokens` does.
    """
    run = run_that_made(store, kind, key)
    if run is None and (model is None or kind == "trajectory"):
        raise ConfigError(f"the store has no run of {kind} {key}" + ("; name a model with --model" * (model is None)))
    run_id, started_at = run or ("", datetime.now(UTC))
    conversations = _conversations(workspace, store, kind, key, run_id)
    path = model or Path(stored_recipe(workspace, run_id).model.path)

    def read() -> list[list[RenderedToken]]:
        if model is None and not path.is_dir():
            raise ConfigError(
                f"the model of run {run_id}, {path}, is no directory here; `agentr preview {key} --tokens --model "
                "FOLDER` reads it with another model's tokenizer"
            )
        renderer = _renderer(path, started_at)
        return [renderer.rendered_tokens(conversation) for conversation in conversations]

    return read


def preview_sample(workspace: Path, source: str) -> list[tuple[str, bool]]:
    """Return the turns of `source`, which is as for `preview_tokens`, each with whether it is
    trained on; a turn that was generated in several parts is returned as these parts.

    If the model was shown a diagnosis while it generated a sample, that text is inserted before the
    first trained turn and marked as not part of the sample. Characters that are invisible or would
    control a terminal are written out as marks.

    Raises `ConfigError` if `source` names nothing or several, and `DataFileError` if the file
    cannot be read.
    """
    line, diagnosis = _line(source), ""
    if line is None:
        store = open_store(workspace, must_exist=True)
        entity = _entity(store, workspace, source)
        run_id, _ = run_that_made(store, entity.kind, entity.key) or ("", None)
        conversations = _conversations(workspace, store, entity.kind, entity.key, run_id)
        if entity.kind == "sample":
            diagnosis = load_samples(store, [entity.key])[entity.key].provenance.extra.get("diagnosis", "")
    else:
        conversations = [line]
    turns = [
        (f"[{', '.join(filter(None, marks))}]\n{escape_invisible(span.text)}\n", span.train)
        for messages in conversations
        for message in messages
        for span in message.parts
        for marks in [(message.role, "example" * message.example, "trained" * span.train)]
    ]
    if diagnosis:
        first = next(place for place, (_, is_trained) in enumerate(turns) if is_trained)
        turns.insert(first, (f"[told while it was sampled, not in the sample]\n{escape_invisible(diagnosis)}\n", False))
    return turns


def preview_scored(workspace: Path, source: str, step: int) -> list[tuple[str, bool]]:
    """Return the turns that the scorer of a run (`grpo.distil`) reads to score reply `step` of a
    trajectory, counted from 1, each with whether it is scored in this reading.

    Raises `ConfigError` if there is no such trajectory or reply, or its run has no scorer, and what
    the world raises when its expert plays.
    """
    store = open_store(workspace, must_exist=True)
    entity = _entity(store, workspace, source)
    run = run_that_made(store, entity.kind, entity.key)
    recipe = stored_recipe(workspace, run[0]) if run else None
    if entity.kind != "trajectory" or recipe is None or recipe.grpo.distil is None:
        raise ConfigError(f"{source} is no trajectory of a run with a scorer (grpo.distil), which would read it")
    trajectory, distil = load_trajectories(store, [entity.key])[entity.key], recipe.grpo.distil
    with closing(Worlds(recipe, lambda name: make_environment(recipe.in_world(name)))) as worlds:
        env = worlds.env_of(trajectory.instance)
        others: list[Trajectory] = []
        if distil.context == "expert":
            expert = expert_episode_of(env, trajectory.instance)
            if isinstance(expert, Rejection):
                raise ConfigError(f"the scorer reads nothing of {source}: {expert.detail}")
            others = [] if expert is None else [expert]
        elif distil.context == "records" and (group_step := find_rl_step(store, entity.key)) is not None:
            group = load_trajectories(store, load_group_members(store, [entity.key])[entity.key])
            beside = {trajectory.instance.key: {key: episode for key, episode in group.items() if key != entity.key}}
            others = other_episodes(store, group_step[0], beside, until=group_step[1] - 1)[trajectory.instance.key]
        scored_readings = [
            reading
            for reading in readings(env, trajectory, distil, others, num_untrained=0)
            if step - 1 in reading.positions[reading.num_given :]
        ]
    if not scored_readings:
        why = "its world has no expert for it" if 0 < step <= len(trajectory.steps) else "there is no such reply"
        raise ConfigError(f"the scorer reads nothing of reply {step} of {source}: {why}")
    return _scored_turns(scored_readings[0])


def _scored_turns(reading: Reading) -> list[tuple[str, bool]]:
    replies = count()
    return [
        (f"[{', '.join([message.role, *['scored'] * scored])}]\n{escape_invisible(span.text)}\n", scored)
        for message in reading.messages
        for span in message.parts
        for scored in [span.train and next(replies) >= reading.num_given]
    ]


def _conversations(workspace: Path, store: Store, kind: str, key: str, run_id: str) -> list[Conversation]:
    """Return the one conversation of a sample, or those that the world's transcript builds from a
    trajectory, with the recipe of its run.

    Raises `ConfigError` if the run of the trajectory, and so its recipe, is not known, and if one
    of its conversations is not trained on.
    """
    if kind == "sample":
        return [load_samples(store, [key])[key].messages]
    if not run_id:
        raise ConfigError(f"the store has no run of trajectory {key}, whose recipe says how it is read")
    trajectory = load_trajectories(store, [key])[key]
    recipe = stored_recipe(workspace, run_id)
    with closing(Worlds(recipe, lambda name: make_environment(recipe.in_world(name)))) as worlds:
        results = list(
            whole_samples(worlds.env_of(trajectory.instance), key, trajectory, recipe.data.windowed, stage="preview")
        )
    conversations = list[Conversation]()
    for result in results:
        if isinstance(result, Rejection):
            raise ConfigError(f"trajectory {key} is not trained on as a whole: {result.detail}")
        conversations.append(result.messages)
    return conversations


def _line(source: str) -> Conversation | None:
    """Return the conversation at FILE:LINE; None if `source` does not have that form. Raises
    `ConfigError` if no conversation that can be trained on begins there.
    """
    file, _, number = source.rpartition(":")
    if not file or not number.isdecimal():
        return None
    samples, unusable = read_chat(Path(file))
    for rejection in unusable:
        if rejection.subject.endswith(f":{number}"):
            raise ConfigError(f"{source} is not trained on: {rejection.reason}")
    for sample in samples:
        if sample.provenance.extra["line"] == int(number):
            return sample.messages
    raise ConfigError(f"no conversation begins in line {number} of {file}")


def _entity(store: Store, workspace: Path, prefix: str) -> Entity:
    entities = find_entities(store, prefix, limit=2, kinds=("sample", "trajectory"))
    if len(entities) != 1:
        raise ConfigError(
            f"{'more than one' if entities else 'no'} sample or trajectory in {workspace} begins with {prefix!r}; "
            f'`agentr sql "select sample_id, kind from v_samples limit 10" -w {workspace}` shows some'
        )
    return entities[0]


def _token_lines(conversations: Sequence[Sequence[RenderedToken]]) -> list[tuple[str, bool]]:
    return [
        (
            f"{position:6}  {token.token:7}  {escape_invisible(json.dumps(token.text, ensure_ascii=False)):24} "
            f"{token.writer:19} {'trained' if token.train else ''}".rstrip(),
            token.train,
        )
        for tokens in conversations
        for position, token in enumerate(tokens)
    ]


# The viewer calls this for each page of tokens.
@lru_cache(maxsize=4)
def _renderer(model: Path, at: datetime) -> Renderer:
    from agentr_core.samples.rendering import load_renderer

    return load_renderer(model, at=at)
