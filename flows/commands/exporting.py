"""The training set of an iteration, written in the format of another program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentr_core.environment import Environment
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import transcript_of
from agentr_core.errors import ConfigError
from agentr_core.exchange.formats import FORMATS, export
from agentr_core.exchange.training_set import Launch, Origin, PairRow, Question, SampleRow, TrainingSet
from agentr_core.exchange.verl import ABILITIES, SOURCES
from agentr_core.methods.et_agent.reward import EfficiencyReward
from agentr_core.runtime.place import Workplace
from agentr_core.samples.identity import sample_id
from agentr_core.stages.dataset import stored_tokens
from agentr_core.store.codec.samples import load_dataset, load_preferences
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import (
    DatasetHead,
    GroupedInstance,
    SampleHead,
    calls_behind,
    datasets_beginning,
    grouped_beginning,
    sample_heads,
)
from agentr_core.store.queries.runs import checkpoint_made
from agentr_core.training.job import GroupRelative
from agentr_core.types import Instance, Sample
from tasks.wiring import RunRef, quiet_workplace
from tasks.workspaces import open_store

Head = TypeVar("Head", bound=DatasetHead | GroupedInstance)
_OF_SAMPLE = (
    *("instance_id", "pair_id", "trajectory_id", "tree_id", "good_leaf", "bad_leaf", "cut"),
    *("good_reward", "bad_reward"),
)


def export_folder(
    workspace: Path,
    prefix: str,
    folder: Path,
    form: str,
    *,
    iteration: int | None = None,
    without_mask: bool = False,
    sources: Mapping[str, str] | None = None,
) -> str:
    """Write a training set of a workspace into a new folder, and say what is there.

    Args:
        prefix: the beginning of the id of a dataset, an iteration or a run; of an iteration of
            group RL, which has no dataset, the prompts of its instances are written for verl:
            those that its selection chose, else those that were played.
        iteration: which iteration of a run; None: its last one.
        sources: for verl: the data source by the domain of a question; None: those of ET-Agent.

    Raises:
        ConfigError: there is no such training set, or as `formats.export` raises it.
        DiskError: the folder cannot be written; nothing is left of it.
    """
    store = open_store(workspace, must_exist=True)
    found, grouped = datasets_beginning(store, prefix), grouped_beginning(store, prefix)
    if form != "verl" and not _of(found, iteration) and (online := _of(grouped, iteration)):
        raise ConfigError(
            f"iteration {online[-1].iteration} of run {online[-1].run_id} is group RL, which has no dataset; "
            "only --format verl takes it"
        )
    heads: list[DatasetHead | GroupedInstance] = [*found, *(grouped if form == "verl" else [])]
    head = _chosen(heads, workspace, prefix, iteration)
    if isinstance(head, GroupedInstance):
        made = _prompts(store, workspace, grouped, head)
    else:
        made = _training_set(store, workspace, head)
    if form == "verl":
        place = quiet_workplace(RunRef(workspace=str(workspace), run_id=head.run_id))
        made = _for_verl(place, made, head.iteration, sources or SOURCES)
    files = export(made, folder, form, without_mask=without_mask)
    shown = files if len(files) <= 5 else (*files[:3], f"and {len(files) - 3} more")
    done = f"{FORMATS[form].told(made)} of {made.name} in {folder}: {', '.join(shown)}"
    return "\n".join([done, *FORMATS[form].notes_on(made)])


def data_sources(options: Sequence[str]) -> dict[str, str]:
    """Return the data source by the domain of a question, as options say it, each
    `DOMAIN=NAME`; for others those of ET-Agent. Raises `ConfigError`.
    """
    found = dict(SOURCES)
    for option in options:
        domain, equals, name = option.partition("=")
        if domain not in SOURCES or not equals or not name.strip():
            raise ConfigError(f"--data-source {option}: write {' or '.join(f'{one}=NAME' for one in SOURCES)}")
        found[domain] = name.strip()
    return found


def _of(found: Sequence[Head], iteration: int | None) -> list[Head]:
    return [head for head in found if iteration in (None, head.iteration)]


def _chosen(found: Sequence[Head], workspace: Path, prefix: str, iteration: int | None) -> Head:
    runs = {head.run_id for head in found}
    if len(runs) != 1:
        raise ConfigError(
            f"{prefix!r} begins the id of {'more than one' if runs else 'no'} run in {workspace} that has a dataset, "
            f"or of its dataset or iteration; `agentr runs -w {workspace}` lists all runs"
        )
    wanted = sorted(_of(found, iteration), key=lambda head: head.iteration)
    if not wanted:
        known = ", ".join(map(str, sorted({head.iteration for head in found})))
        raise ConfigError(f"run {found[0].run_id} has no dataset of iteration {iteration}; it has {known}")
    return wanted[-1]


def _training_set(store: Store, workspace: Path, head: DatasetHead) -> TrainingSet:
    place = quiet_workplace(RunRef(workspace=str(workspace), run_id=head.run_id))
    rows = load_dataset(store, head.dataset_id)
    name = f"{head.recipe}-{head.iteration}"
    facts = {**head._asdict(), "counts": json.dumps(json.loads(head.counts), sort_keys=True)}
    heads = sample_heads(store, [key for key, _ in rows])
    if place.plan(head.iteration).pairs:
        return TrainingSet(name=name, facts=facts, pairs=_pairs(store, place.source_id(head.iteration), head, rows))
    tokens = stored_tokens(place, head.iteration)
    calls = calls_behind(store, list(heads))
    samples = [
        SampleRow(
            id=key,
            sample=sample,
            origin=_origin(head, position, heads[key]),
            tokens=row,
            tool_calls=calls.get(key, ()),
        )
        for position, ((key, sample), row) in enumerate(zip(rows, tokens, strict=True))
    ]
    return TrainingSet(name=name, facts=facts, samples=samples)


def _prompts(store: Store, workspace: Path, found: Sequence[GroupedInstance], chosen: GroupedInstance) -> TrainingSet:
    """Return the prompts that begin the episodes of each instance of an iteration of group RL."""
    place = quiet_workplace(RunRef(workspace=str(workspace), run_id=chosen.run_id))
    heads = {head.trajectory_id: head for head in found if head.iteration_id == chosen.iteration_id}
    rows = []
    with place.worlds() as worlds:
        for key, trajectory in load_trajectories(store, list(heads)).items():
            env = worlds.of(trajectory.instance)
            read = transcript_of(env).prompt(env, trajectory.first_observation, ())
            sample = Sample(kind="rollout", messages=read, instance=trajectory.instance)
            rows.append(SampleRow(id=key, sample=sample, origin=heads[key]._asdict()))
    facts = {name: getattr(chosen, name) for name in ("run_id", "recipe", "iteration", "iteration_id")}
    return TrainingSet(name=f"{chosen.recipe}-{chosen.iteration}", facts=facts, samples=rows)


def _for_verl(place: Workplace, made: TrainingSet, iteration: int, sources: Mapping[str, str]) -> TrainingSet:
    """Return a training set with the questions of its instances, and what a training of them starts
    from.
    """
    with place.worlds() as worlds:
        samples = [
            replace(row, question=_question(worlds.of(row.sample.instance), row.sample.instance, sources))
            if row.sample.instance is not None
            else row
            for row in made.samples
        ]
    return replace(made, samples=samples, launch=_launch(place, iteration))


def _launch(place: Workplace, iteration: int) -> Launch | None:
    """Return what a training in groups starts from: the policy of an iteration of group RL, else
    what the iteration made; None where that is no directory, but served by name.
    """
    training = place.plan(iteration).training
    online = training is not None and isinstance(training.objective, GroupRelative)
    made = checkpoint_made(place.store, place.iteration_id(iteration))
    start = place.policy(iteration) if online or made is None else place.trained(iteration)
    if place.recipe.model.backend == "openai":
        return None
    launch = Launch(model=str(start.path.resolve()), workspace=str(place.root.resolve()), run_id=place.run_id)
    if training is None or not isinstance(training.objective, GroupRelative):
        return launch
    grpo, reward = training.objective.grpo, training.objective.reward
    return replace(
        launch,
        groups=grpo.groups,
        generations=grpo.num_generations,
        minibatch=max(1, grpo.groups // grpo.minibatches),
        learning_rate=training.config.learning_rate,
        sigma_calls=reward.sigma_calls if isinstance(reward, EfficiencyReward) else 0.0,
        sigma_length=reward.sigma_length if isinstance(reward, EfficiencyReward) else 0.0,
    )


def _question(env: Environment, instance: Instance, sources: Mapping[str, str]) -> Question | None:
    """Return the question of an instance with its golds; None in a world that has none."""
    if not isinstance(env, ReasoningWorld):
        return None
    problem = env.problem(instance)
    return Question(
        text=problem.question,
        golds=problem.golds,
        ability=ABILITIES[problem.domain],
        data_source=sources[problem.domain],
    )


def _pairs(store: Store, source_id: str, head: DatasetHead, rows: list[tuple[str, Sample]]) -> list[PairRow]:
    known = {
        (sample_id(preference.chosen), sample_id(preference.rejected)): (key, preference)
        for key, preference in load_preferences(store, source_id).items()
    }
    pairs = []
    for position, ((chosen, _), (rejected, _)) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        key, preference = known[chosen, rejected]
        instance = preference.chosen.instance
        origin: dict[str, Any] = {
            **_iteration(head, position),
            "instance_id": None if instance is None else instance.key,
            "chosen_sample_id": chosen,
            "rejected_sample_id": rejected,
        }
        pairs.append(PairRow(id=key, preference=preference, origin=origin))
    return pairs


def _origin(head: DatasetHead, position: int, sample: SampleHead) -> Origin:
    return {**_iteration(head, position), **{name: getattr(sample, name) for name in _OF_SAMPLE}}


def _iteration(head: DatasetHead, position: int) -> dict[str, Any]:
    names = ("run_id", "recipe", "dataset_id", "iteration")
    return {**{name: getattr(head, name) for name in names}, "dataset_hash": head.hash, "position": position}
