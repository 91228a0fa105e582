"""The training set of an iteration, written in the format of another program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentr_core.environment import Environment
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.environments.registry import licence_of
from agentr_core.episodes.transcript import conversations, transcript_of
from agentr_core.errors import ConfigError
from agentr_core.exchange.formats import FORMATS, export
from agentr_core.exchange.training_set import Launch, Origin, PairRow, Question, SampleRow, TrainingSet
from agentr_core.exchange.verl import ABILITIES, SCRIPT, SOURCES
from agentr_core.methods.et_agent.reward import EfficiencyReward
from agentr_core.runtime.context import RunContext
from agentr_core.samples.identity import sample_id
from agentr_core.stages.dataset import load_token_rows
from agentr_core.store.codec.ledger import load_groups
from agentr_core.store.codec.samples import load_dataset, load_preferences
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import (
    DatasetHead,
    RlInstance,
    SampleHead,
    calls_by_sample,
    count_preferences,
    count_samples,
    episodes_by_source,
    find_datasets,
    find_rl_instances,
    rejection_counts,
    rl_step_numbers,
    sample_heads,
    tree_counts,
)
from agentr_core.store.queries.runs import checkpoint_of_iteration
from agentr_core.texts import escape_invisible
from agentr_core.training.job import GroupRelative
from agentr_core.types import Instance, Sample, Trajectory, grown_turn
from flows.commands.pushing import check_push, push
from tasks.wiring import RunRef, quiet_context
from tasks.workspaces import open_store

Head = TypeVar("Head", bound=DatasetHead | RlInstance)
_OF_EPISODES = ("atif", "claude-code", "codex", "pi")
"""The formats that take the episodes of group RL."""
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
    push_to: str = "",
    licence: str = "",
) -> str:
    """Write a training set of a workspace into a new folder; return lines that say what is there.

    Args:
        prefix: the beginning of the id of a dataset, an iteration or a run. An iteration of group
            RL has no dataset: for the formats of episodes its episodes are written, and for verl
            the prompts of the instances that its selection chose, else of those that were played.
        form: the name of one of `formats.FORMATS`.
        iteration: which iteration of a run; None: its last one.
        sources: for verl: the data source for each domain of questions; None: those of ET-Agent.
        push_to: the dataset of the hub to which the finished folder is pushed; empty: none.
        licence: the identifier of a licence for the head of the card; empty: it has none.

    Raises:
        ConfigError: there is no such training set, no token to push with, or as `formats.export`
            raises it.
        DiskError: the folder cannot be written; nothing is left of it.
        EndpointError: the hub refuses, or cannot be reached; the folder is there.
    """
    if push_to:
        check_push(push_to)
    store = open_store(workspace, must_exist=True)
    with_dataset, groups = find_datasets(store, prefix), find_rl_instances(store, prefix)
    takes_groups = form == "verl" or form in _OF_EPISODES
    if not takes_groups and not _of(with_dataset, iteration) and (online := _of(groups, iteration)):
        raise ConfigError(
            f"iteration {online[-1].iteration} of run {online[-1].run_id} is group RL, which has no dataset; "
            f"only --format verl, {', '.join(_OF_EPISODES[:-1])} and {_OF_EPISODES[-1]} take it"
        )
    heads: list[DatasetHead | RlInstance] = [*with_dataset, *(groups if takes_groups else [])]
    head = _choose(heads, workspace, prefix, iteration)
    if isinstance(head, RlInstance) and form in _OF_EPISODES:
        training_set = _episodes(store, workspace, head)
    elif isinstance(head, RlInstance):
        training_set = _prompts(store, workspace, groups, head)
    else:
        training_set = _training_set(store, workspace, head)
    if form == "verl":
        ctx = quiet_context(RunRef(workspace=str(workspace), run_id=head.run_id))
        training_set = _for_verl(ctx, training_set, head.iteration, sources or SOURCES)
    files = export(replace(training_set, licence=licence), folder, form, without_mask=without_mask)
    names = files if len(files) <= 5 else (*files[:3], f"and {len(files) - 3} more")
    summary = f"{FORMATS[form].contents_text(training_set)} of {training_set.name} in {folder}: {', '.join(names)}"
    lines = [summary, *FORMATS[form].notes_on(training_set)]
    if push_to:
        address = push(folder, push_to, message=f"{training_set.name}, exported by agentr as {form}")
        lines.append(f"pushed to {address}{f', without {SCRIPT}' if SCRIPT in files else ''}")
    return "\n".join(lines)


def data_sources(options: Sequence[str]) -> dict[str, str]:
    """Return the data source for each domain of questions: that of an option `DOMAIN=NAME`, else
    that of ET-Agent. Raises `ConfigError` for an option of another form.
    """
    sources = dict(SOURCES)
    for option in options:
        domain, equals, name = option.partition("=")
        if domain not in SOURCES or not equals or not name.strip():
            raise ConfigError(f"--data-source {option}: write {' or '.join(f'{source}=NAME' for source in SOURCES)}")
        sources[domain] = name.strip()
    return sources


def _of(heads: Sequence[Head], iteration: int | None) -> list[Head]:
    return [head for head in heads if iteration in (None, head.iteration)]


def _choose(heads: Sequence[Head], workspace: Path, prefix: str, iteration: int | None) -> Head:
    runs = {head.run_id for head in heads}
    if len(runs) != 1:
        raise ConfigError(
            f"{prefix!r} begins the id of {'more than one' if runs else 'no'} run in {workspace} that has a dataset, "
            f"or of its dataset or iteration; `agentr runs -w {workspace}` lists all runs"
        )
    matching = sorted(_of(heads, iteration), key=lambda head: head.iteration)
    if not matching:
        iterations = ", ".join(map(str, sorted({head.iteration for head in heads})))
        raise ConfigError(f"run {heads[0].run_id} has no dataset of iteration {iteration}; it has {iterations}")
    return matching[-1]


def _training_set(store: Store, workspace: Path, head: DatasetHead) -> TrainingSet:
    ctx = quiet_context(RunRef(workspace=str(workspace), run_id=head.run_id))
    rows = load_dataset(store, head.dataset_id)
    name = f"{head.recipe}-{head.iteration}"
    facts = {**head._asdict(), "counts": json.dumps(json.loads(head.counts), sort_keys=True)}
    heads = sample_heads(store, [key for key, _ in rows])
    about = {
        "What it is": f"What iteration {head.iteration} of a run of recipe {head.recipe} was trained on, with method "
        f"{head.method}, in the order of training.",
        "How it was made": _history(store, head),
        "Counts": _list(_flat(json.loads(head.counts))),
        "Licence of the world": _licences(ctx),
    }
    if ctx.plan(head.iteration).has_pairs:
        pairs = _pairs(store, ctx.source_id(head.iteration), head, rows)
        return TrainingSet(name=name, facts=facts, pairs=pairs, card_sections=about)
    tokens = load_token_rows(ctx, head.iteration)
    calls = calls_by_sample(store, list(heads))
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
    return TrainingSet(name=name, facts=facts, samples=samples, card_sections=about)


def _history(store: Store, head: DatasetHead) -> str:
    """Return, as a Markdown list, how many trees, episodes, pairs and samples the iteration of a
    dataset made, and how many each stage left out for which reason.
    """
    trees, episode_counts = tree_counts(store, head.iteration_id), episodes_by_source(store, head.iteration_id)
    steps = {
        **({"trees grown": trees.trees, "paths in them that ended": trees.paths} if trees and trees.trees else {}),
        **({"pairs of a bad and a good path": trees.pairs, "first errors judged": trees.critiques} if trees else {}),
        **{f"episodes of source {source}": count for source, count in episode_counts.items()},
        "preference pairs": count_preferences(store, head.iteration_id),
        "samples": count_samples(store, head.iteration_id),
        **{
            f"left out by {stage}: {reason}": count
            for stage, reasons in rejection_counts(store, head.iteration_id).items()
            for reason, count in reasons.items()
        },
    }
    return _list({name: count for name, count in steps.items() if count})


def _flat(counts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in counts.items():
        flat |= _flat(value, f"{prefix}{name}, ") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _list(counts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name.replace('_', ' ')}: {escape_invisible(str(count))}" for name, count in counts.items())


def _licences(ctx: RunContext) -> str:
    """Return, as a Markdown list, what each world of a run says about the licence of its texts."""
    unsaid = "it names none; ask its authors before you give its texts away"
    return _list({name: licence_of(recipe.environment.name) or unsaid for name, recipe in ctx.recipe.worlds().items()})


def _prompts(store: Store, workspace: Path, groups: Sequence[RlInstance], choice: RlInstance) -> TrainingSet:
    """Return the prompts that begin the episodes of each instance of an iteration of group RL."""
    ctx = quiet_context(RunRef(workspace=str(workspace), run_id=choice.run_id))
    heads = {head.trajectory_id: head for head in groups if head.iteration_id == choice.iteration_id}
    rows = []
    with ctx.worlds() as worlds:
        for key, trajectory in load_trajectories(store, list(heads)).items():
            env = worlds.env_of(trajectory.instance)
            prompt = transcript_of(env).prompt(env, trajectory.first_observation, ())
            sample = Sample(kind="rollout", messages=prompt, instance=trajectory.instance)
            rows.append(SampleRow(id=key, sample=sample, origin=heads[key]._asdict()))
    facts = {name: getattr(choice, name) for name in ("run_id", "recipe", "iteration", "iteration_id")}
    return TrainingSet(name=f"{choice.recipe}-{choice.iteration}", facts=facts, samples=rows)


def _episodes(store: Store, workspace: Path, choice: RlInstance) -> TrainingSet:
    """Return the conversations of the episodes that an iteration of group RL was trained on, each
    with the reward of its episode. Raises `ConfigError` if there are none yet.
    """
    ctx = quiet_context(RunRef(workspace=str(workspace), run_id=choice.run_id))
    rows: list[SampleRow] = []
    groups = [
        (step, group)
        for step in rl_step_numbers(store, choice.iteration_id)
        for group in load_groups(store, choice.iteration_id, step)
    ]
    with ctx.worlds() as worlds:
        for step, group in groups:
            env = worlds.env_of(group.instance)
            for number, (key, trajectory) in enumerate(group.episodes.items()):
                origin = {
                    **{name: getattr(choice, name) for name in ("run_id", "recipe", "iteration", "iteration_id")},
                    **{"instance_id": group.instance.key, "trajectory_id": key, "policy": group.policy},
                    **{"step": step, "group": group.number, "episode": number},
                    **{"reward": trajectory.reward, "success": trajectory.success, "stop": str(trajectory.stop)},
                    **({} if group.shaped_rewards is None else {"shaped": group.shaped_rewards[number]}),
                }
                num_given = group.given.get(key, group.prefix)
                rows += _conversations(env, key, trajectory, num_given, origin)
    if not rows:
        raise ConfigError(f"iteration {choice.iteration} of run {choice.run_id} has no episodes of group RL yet")
    facts = {name: getattr(choice, name) for name in ("run_id", "recipe", "iteration", "iteration_id")}
    return TrainingSet(name=f"{choice.recipe}-{choice.iteration}", facts=facts, samples=rows)


def _conversations(
    env: Environment, key: str, trajectory: Trajectory, num_given: int, origin: Origin
) -> Iterator[SampleRow]:
    """Yield a row for each conversation of an episode. Replies of its first `num_given` steps,
    which the policy did not sample, are not trained on.
    """
    parts = conversations(env, trajectory) if trajectory.steps else ()
    for part in parts:
        own = list(part.positions)
        logprobs: list[Sequence[float] | None] = []
        messages = []
        for message in part.messages:
            spans = list(message.parts) if message.role == "assistant" else []
            for number in range(0, len(spans), 2):
                # An untrained reply belongs to another conversation, unless it is empty.
                is_own = own and (spans[number].train or not spans[number].text)
                position = own.pop(0) if is_own else None
                logprobs.append(None if position is None else trajectory.steps[position].logprobs)
                if position is not None and position < num_given:
                    spans[number] = replace(spans[number], train=False)
            if message.spans:
                messages.append(grown_turn(spans))
            else:
                messages.append(replace(message, train=any(span.train for span in spans)))
        extra = {"conversation": part.positions[0]} if len(parts) > 1 else {}
        sample = Sample(kind="rollout", messages=tuple(messages), instance=trajectory.instance)
        name = f"{key}-{part.positions[0]}" if extra else key
        yield SampleRow(id=name, sample=sample, origin={**origin, **extra}, logprobs=logprobs)


def _for_verl(ctx: RunContext, training_set: TrainingSet, iteration: int, sources: Mapping[str, str]) -> TrainingSet:
    """Return a training set with the questions of its instances, and with the model and settings
    that a training by verl can start with.
    """
    with ctx.worlds() as worlds:
        samples = [
            replace(row, question=_question(worlds.env_of(row.sample.instance), row.sample.instance, sources))
            if row.sample.instance is not None
            else row
            for row in training_set.samples
        ]
    return replace(training_set, samples=samples, launch=_launch(ctx, iteration))


def _launch(ctx: RunContext, iteration: int) -> Launch | None:
    """Return the model and settings that group RL by verl can start with: for an iteration of group
    RL its policy and its settings, else the checkpoint that the iteration made, if any, or its
    policy. None for a model behind an OpenAI server, which has no directory.
    """
    training = ctx.plan(iteration).training
    online = training is not None and isinstance(training.objective, GroupRelative)
    checkpoint = checkpoint_of_iteration(ctx.store, ctx.iteration_id(iteration))
    start = ctx.policy(iteration) if online or checkpoint is None else ctx.trained_checkpoint(iteration)
    if ctx.recipe.model.backend == "openai":
        return None
    launch = Launch(model=str(start.path.resolve()), workspace=str(ctx.root.resolve()), run_id=ctx.run_id)
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
    """Return the question of an instance and its gold answers; None if its world has none."""
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
    preferences = {
        (sample_id(preference.chosen), sample_id(preference.rejected)): (key, preference)
        for key, preference in load_preferences(store, source_id).items()
    }
    pairs = []
    for position, ((chosen, _), (rejected, _)) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        key, preference = preferences[chosen, rejected]
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
