"""The expert's episodes on the training instances of an iteration: its replies are played in the
environment, and episodes that are trained on also become samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import EpisodeTimer, play_replies
from agentr_core.episodes.transcript import AlternatingTurns, transcript_of, whole_episode
from agentr_core.episodes.units import num_allowed_failures, run_all
from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault, IllTypedAnswer, PromptTooLong, Transient
from agentr_core.exchange.imports import Demonstration, read_demonstrations
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.eto import ThoughtsConfig
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.replies import LABEL, answer_text
from agentr_core.runtime.context import Method, RunContext, answer
from agentr_core.runtime.equipment import ReplyCount, Worlds, concurrency_for, count_units
from agentr_core.runtime.instances import chosen_instances
from agentr_core.samples.chat_file import World
from agentr_core.samples.identity import sample_id
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.samples import derivation_rows, edit_rows, load_edits, sample_rows
from agentr_core.store.codec.trajectories import load_trajectories, trajectory_rows
from agentr_core.store.database import Writer
from agentr_core.store.tables import Rows, merge
from agentr_core.system import raise_if_cancelled, run_in_thread
from agentr_core.types import (
    Answer,
    Derivation,
    Instance,
    Message,
    Provenance,
    Question,
    Rejection,
    Sample,
    SampleKind,
    Step,
    StopReason,
    Trajectory,
)

# Thoughts before bare actions: what the editor is asked, and what becomes of its replies.
#
# An episode whose expert gave only actions gets a thought before each. The action stays the same to
# the byte, and so does its outcome. The editor sees what the expert had seen by then, and no later
# step, so that no thought anticipates what follows. Source: ETO (arXiv 2403.02502, section 4),
# whose authors had a large model write thoughts around given actions.

VERSION = 1
"""Increase it when the same configuration would ask something else."""
THOUGHT = "Thought:"
PROMPT = """\
An expert did a task step by step, and of each step only the action was written down. Below are what the expert was \
told, the task, what was done so far, and the next action.
Write what the expert thought before that action: one or two sentences in the first person that lead from what was \
known by then to this action. Say nothing that only later steps can show. Write the thought alone, without a label \
and without the action."""
PROMPT_NAME = f"expert-thought@{fingerprint(PROMPT)[:8]}"
"""The name of the prompt with a hash of its text, as it is stored."""
_LABEL = re.compile(r"Action[ \t]*\d*[ \t]*:")
_MAX_ANSWER_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class BareEpisode:
    """An expert's episode in which replies may lack a thought; `name` tells it apart from others of
    its run, and `seed` is the recipe's.
    """

    env: Environment
    trajectory: Trajectory
    name: str
    run_id: str
    config: ThoughtsConfig
    seed: int


class StepQuestion(NamedTuple):
    """A question to the editor about a step, with the id of its answer."""

    answer_id: str
    subject: str
    question: Question
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtfulEpisode:
    """An episode with a thought in each reply. `position` is the first step that had none, None if
    all had one; `prompt_hash` is the hash of all prompts.
    """

    trajectory: Trajectory
    position: int | None
    prompt_hash: str


class NoThoughts(NamedTuple):
    """The reason why an episode gets no thoughts: a slug, and details."""

    reason: str
    detail: str


ThoughtOutcome = ThoughtfulEpisode | NoThoughts


def with_label(env: Environment, reply: str) -> str:
    """Return a reply with the label of its action: a bare action gets one, in the form that the
    world's instruction uses.
    """
    if _LABEL.search(reply):
        return reply
    return LABEL + ("\n" if f"{LABEL}\n" in env.instruction else " ") + reply.strip()


def is_bare(reply: str) -> bool:
    """Return whether a labelled reply has no thought before its action."""
    return not reply[: _action_start(reply)].strip().removeprefix(THOUGHT).strip()


def with_thought(reply: str, thought: str) -> str:
    """Return a labelled reply without a thought with `thought` before its action, which stays the
    same to the byte.
    """
    action = reply[_action_start(reply) :]
    if action.partition(":")[2].startswith("\n"):
        return f"{THOUGHT}\n{thought}\n\n{action}"
    return f"{THOUGHT} {thought}\n{action}"


def thought_in(answer: Answer) -> str:
    """Return the thought in an editor's reply as one paragraph: labels, and an action that follows,
    are left out, and so is what the editor itself thought. The result is empty if there is no
    thought, or if the reply was cut.
    """
    if answer.finish_reason == "length":
        return ""
    text = (answer_text(answer) or "").strip().removeprefix(THOUGHT)
    label = _LABEL.search(text)
    return " ".join(text[: label.start() if label else None].split())


# One question a step, with what the expert had seen by then: thoughts that are asked for together
# may know later steps, and a model that learns from them learns to guess.
def thought_questions(episode: BareEpisode) -> Generator[StepQuestion, Answer, ThoughtOutcome]:
    """Generate the questions to the editor about one episode, step by step: each is sent its
    answer. The return value is the episode with its thoughts, or the reason why it gets none.
    """
    steps: list[Step] = []
    prompt_hashes: list[str] = []
    first_position: int | None = None
    for position, step in enumerate(episode.trajectory.steps):
        labelled_reply = with_label(episode.env, step.reply)
        if not is_bare(labelled_reply):
            steps.append(step)
            continue
        first_position = position if first_position is None else first_position
        for attempt in range(episode.config.tries):
            answer = yield _thought_question(episode, steps, step, attempt)
            prompt_hashes.append(answer.prompt_hash)
            thought = thought_in(answer)
            reply = with_thought(labelled_reply, thought)
            if thought and episode.env.parse(reply) == step.action:
                break
        else:
            return NoThoughts("no-thought", f"step {position}: {answer.role}: {answer.text[:_MAX_ANSWER_CHARS]}")
        steps.append(replace(step, reply=reply))
    trajectory = replace(episode.trajectory, steps=tuple(steps))
    return ThoughtfulEpisode(
        trajectory=trajectory, position=first_position, prompt_hash=fingerprint(*prompt_hashes) if prompt_hashes else ""
    )


def outcome_of_answers(episode: BareEpisode, answers: Mapping[str, Answer]) -> ThoughtOutcome | None:
    """Return the outcome of `thought_questions` for an episode, given answers by their ids; None
    if an answer that it needs is missing.
    """
    questions = thought_questions(episode)
    try:
        request = next(questions)
        while request.answer_id in answers:
            request = questions.send(answers[request.answer_id])
    except StopIteration as end:
        outcome: ThoughtOutcome = end.value
        return outcome
    return None


def _action_start(reply: str) -> int:
    """Return the index in a reply at which its last action label begins, the one that worlds parse;
    its length if it has none.
    """
    return max((label.start() for label in _LABEL.finditer(reply)), default=len(reply))


def _thought_question(episode: BareEpisode, earlier_steps: list[Step], step: Step, attempt: int) -> StepQuestion:
    history = (
        "\n".join(f"{previous.reply}\nObservation: {previous.observation}" for previous in earlier_steps)
        or "Nothing yet."
    )
    text_by_title = {
        "What the expert was told": episode.env.instruction,
        "Task": episode.trajectory.first_observation,
        "Done so far": history,
        "Next action": step.action,
    }
    text = "\n\n".join([PROMPT, *(f"{title}:\n{words}" for title, words in text_by_title.items())])
    config = episode.config
    question = Question(
        role="editor",
        messages=(Message(role="user", text=text),),
        sampling=sampling_of(config),
    )
    subject = f"{episode.name} step {len(earlier_steps)}" + (f" try {attempt + 1}" if attempt else "")
    seed = derive_seed(episode.seed, "thoughts", episode.name, len(earlier_steps), attempt)
    answer_id = fingerprint("thought", VERSION, episode.run_id, subject, text, question.sampling, seed)
    return StepQuestion(answer_id, subject, question, seed)


STAGE = "expert"
BARE_SOURCE = "bare"
"""The source of the expert's episodes as they were played, where thoughts are written for them."""
NUM_CHECKED_INSTANCES = 20
"""How many training instances are asked for an expert before anything is started."""

Expert = Callable[[Environment, Instance], Sequence[Trajectory | Rejection]]
"""Returns the expert's episodes of an instance, played live, or why there is none."""


def expert_id(iteration_id: str, instance: Instance, number: int = 0) -> str:
    """Return the trajectory id of one of the expert's episodes of an instance in an iteration."""
    return fingerprint("expert", iteration_id, instance.key, *([number] if number else []))


def bare_id(iteration_id: str, instance: Instance, number: int = 0) -> str:
    """Return the trajectory id of one of the expert's episodes before it has its thoughts."""
    return fingerprint("bare", iteration_id, instance.key, *([number] if number else []))


def best_expert_episodes(ctx: RunContext, iteration: int) -> dict[str, tuple[str, Trajectory]]:
    """Return the id and the trajectory of the expert's best episode of each instance in an
    iteration, by the instance's key: that with the highest reward, of equals the one with the
    fewest steps, then the first in the order of its replies.
    """

    def rank(trajectory: Trajectory) -> tuple[float, int, list[str]]:
        return -trajectory.reward, len(trajectory.steps), [step.reply for step in trajectory.steps]

    episodes = load_trajectories(ctx.store, iteration_id=ctx.iteration_id(iteration), source="expert")
    best: dict[str, tuple[str, Trajectory]] = {}
    for key, episode in sorted(episodes.items(), key=lambda item: rank(item[1])):
        best.setdefault(episode.instance.key, (key, episode))
    return best


async def expert_samples(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Play the expert on the training instances of an iteration and keep each episode as a sample.

    Raises:
        ConfigError: the environment has no expert, and no file of demonstrations is named.
        EnvironmentFault: more instances than `errors.budget` allows cannot be played, or are not
            solved by the expert that claims to solve them.
        DataFileError: the file of demonstrations is malformed, or one of them fails when it is
            replayed.
        DataFault: training and test instances overlap.
    """
    return await _demonstrate(ctx, iteration, samples=True)


async def demonstrate(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Play the expert on the training instances of an iteration. Raises as `expert_samples`."""
    return await _demonstrate(ctx, iteration, samples=False)


async def _demonstrate(ctx: RunContext, iteration: int, *, samples: bool) -> dict[str, Any]:
    instances = await chosen_instances(ctx, iteration)
    with ctx.timed(STAGE, iteration) as clock:
        timer = EpisodeTimer()
        with timer.environment():
            units, rejections = await run_in_thread(_expert_units, ctx, iteration, instances, samples=samples)
        clock.add({"environment": timer.environment_seconds})
        iteration_id = ctx.iteration_id(iteration)
        ctx.store.write(merge([*units, rejection_rows(rejections, iteration_id=iteration_id)]))
    return {"expert": len(units), "rejected": len(rejections)}


def _expert_units(
    ctx: RunContext, iteration: int, instances: tuple[Instance, ...], *, samples: bool
) -> tuple[list[Rows], list[Rejection]]:
    iteration_id = ctx.iteration_id(iteration)
    has_thoughts = ctx.recipe.eto.expert.thoughts.enabled
    episode_id, source = (bare_id, BARE_SOURCE) if has_thoughts else (expert_id, "expert")
    episodes = load_trajectories(ctx.store, iteration_id=iteration_id, source=source)
    units: list[Rows] = []
    rejections: list[Rejection] = []
    faults: list[Rejection] = []
    max_losses = num_allowed_failures(ctx.recipe.errors, len(instances))
    with ctx.worlds() as worlds:
        experts = {env.name: expert_of(recipe, env) for recipe, env in worlds}
        for position, instance in enumerate(instances, start=1):
            raise_if_cancelled()
            ctx.progress(position, len(instances), "expert episodes")
            env = worlds.env_of(instance)
            ids = (episode_id(iteration_id, instance, number) for number in count())
            stored_episodes = [episodes[key] for key in takewhile(episodes.__contains__, ids)]
            outcomes = stored_episodes or _expert_outcomes(experts[env.name], env, instance, faults, max_losses)
            trajectories = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
            rejections += [outcome for outcome in outcomes if isinstance(outcome, Rejection)]
            rows = bare_rows if has_thoughts else partial(expert_rows, env=env, samples=samples)
            units += [rows(iteration_id, trajectory, number) for number, trajectory in enumerate(trajectories)]
    if not units:
        file = ctx.recipe.eto.expert.file
        reasons = ", ".join(sorted({rejection.reason for rejection in rejections}))
        raise ConfigError(
            f"{file} has no sound demonstration of any training instance ({reasons}); its ids must be those of split "
            f"{ctx.recipe.instances.train}"
            if file
            else _no_expert_message(ctx.recipe, ctx.method)
        )
    return units, rejections


def _expert_outcomes(
    expert: Expert, env: Environment, instance: Instance, faults: list[Rejection], max_losses: int
) -> Sequence[Trajectory | Rejection]:
    """Return the expert's episodes of an instance, or a rejection that says why there is none. A
    fault of the environment is added to `faults`; it is raised if it is transient or `faults`
    already holds `max_losses`.
    """
    try:
        return expert(env, instance)
    except IllTypedAnswer as error:
        return [Rejection(stage=STAGE, subject=instance.key, reason="ill-typed-answer", detail=str(error))]
    except EnvironmentFault as fault:
        if isinstance(fault, Transient) or len(faults) == max_losses:
            raise
        faults.append(Rejection(stage=STAGE, subject=instance.key, reason="environment-fault", detail=str(fault)))
        return faults[-1:]


def expert_of(recipe: Recipe, env: Environment) -> Expert:
    """Return the expert of a recipe: the environment's, or the file's. Raises `DataFileError` for a
    malformed file.
    """
    config = recipe.eto.expert
    if not config.file:

        def environment_expert(env: Environment, instance: Instance) -> Sequence[Trajectory | Rejection]:
            trajectory = expert_trajectory(env, instance)
            return [trajectory or Rejection(stage=STAGE, subject=instance.key, reason="no-expert-solution")]

        return environment_expert
    demonstrations = _demonstrations(recipe, env)

    def file_expert(env: Environment, instance: Instance) -> Sequence[Trajectory | Rejection]:
        if instance.key not in demonstrations:
            return [Rejection(stage=STAGE, subject=instance.key, reason="no-demonstration")]
        return [replay(demonstration, number) for number, demonstration in enumerate(demonstrations[instance.key])]

    def replay(demonstration: Demonstration, number: int) -> Trajectory | Rejection:
        if config.thoughts.enabled:
            demonstration = replace(
                demonstration, replies=tuple(with_label(env, reply) for reply in demonstration.replies)
            )
        trajectory, fault = replay_demonstration(env, demonstration)
        if not fault:
            return trajectory
        if config.failed_replay == "error":
            raise DataFileError(f"{fault}; leave it out of the file, or set eto.expert.failed_replay=reject")
        subject = demonstration.instance.key + (f"#{number}" if number else "")
        return Rejection(stage=STAGE, subject=subject, reason="failed-replay", detail=fault)

    return file_expert


def _demonstrations(recipe: Recipe, env: Environment) -> dict[str, tuple[Demonstration, ...]]:
    config = recipe.eto.expert
    world = World(env.name, recipe.environment.name)
    return read_demonstrations(Path(config.file), world=world, split=recipe.instances.train, opening=config.opening)


def expert_trajectory(env: Environment, instance: Instance) -> Trajectory | None:
    """Return the episode of the environment's expert, played live, or None where it knows no
    solution.

    Raises `EnvironmentFault` when the expert fails its own replay.
    """
    replies = env.expert(instance)
    if replies is None:
        return None
    trajectory = replay_replies(env, instance, replies)
    if trajectory.stop is not StopReason.SUCCESS:
        raise EnvironmentFault(
            f"the expert of {env.name} does not solve {instance.key}: after {len(trajectory.steps)} steps the "
            f"environment says {trajectory.steps[-1].observation!r}"
        )
    return trajectory


# Only the replies of a file count: what they lead to is the world's word, not the file's.
def replay_demonstration(env: Environment, demonstration: Demonstration) -> tuple[Trajectory, str]:
    """Return the episode of a demonstration as the environment plays it, and a sentence on how it
    falls short of the reward that its file claims, empty if it does not.

    A demonstration that claims the full reward must also be a success according to the environment.
    """
    trajectory = replay_replies(env, demonstration.instance, demonstration.replies)
    falls_short = trajectory.reward < demonstration.reward - 1e-6
    if not falls_short and (trajectory.success or demonstration.reward < 1):
        return trajectory, ""
    return trajectory, (
        f"{demonstration.where}: played again, the demonstration of {demonstration.instance.key} reaches reward "
        f"{trajectory.reward:g} and not {demonstration.reward:g}; after {len(trajectory.steps)} steps the environment "
        f"says {trajectory.steps[-1].observation!r}"
    )


def replay_replies(env: Environment, instance: Instance, replies: Sequence[str]) -> Trajectory:
    """Return the episode that the given replies lead to in the environment, up to the reply that
    ends it. Raises `EnvironmentFault` if there are no replies.
    """
    first_observation, outcomes = play_replies(env, instance, replies)
    if not outcomes:
        raise EnvironmentFault(f"the expert of {env.name} says nothing about {instance.key}")
    steps = tuple(outcome.step for outcome in outcomes)
    return Trajectory.ended(instance, first_observation, steps, outcomes[-1].stop or StopReason.STEP_LIMIT)


def check_expert(recipe: Recipe, env: Environment, instances: Sequence[Instance], method: Method) -> None:
    """Raise `UserError` when the file of demonstrations is malformed, there is no expert without
    one, or thoughts are wanted in a world that has no place for them.
    """
    config = recipe.eto.expert
    in_text = isinstance(transcript_of(env), AlternatingTurns) and not env.has(Environment.called)
    if config.thoughts.enabled and not in_text:
        raise ConfigError(
            f"eto.expert.thoughts: replies in {env.name} are not a thought and an action after a label; leave it out, "
            "or choose the world's transcript of text"
        )
    if config.file:
        _demonstrations(recipe, env)
    elif lacks_expert(env, instances):
        raise ConfigError(_no_expert_message(recipe, method))


def require_expert(env: Environment, instances: Sequence[Instance], setting: str) -> None:
    """Raise `ConfigError`, which names the setting that needs an expert, if there is none."""
    if lacks_expert(env, instances):
        raise ConfigError(f"{setting}: environment {env.name} has no expert; leave it out")


def lacks_expert(env: Environment, instances: Sequence[Instance]) -> bool:
    """Return whether an environment solves none of the first few instances itself."""
    return all(env.expert(instance) is None for instance in instances[:NUM_CHECKED_INSTANCES])


def _no_expert_message(recipe: Recipe, method: Method) -> str:
    return f"environment {', '.join(recipe.world_names)} has no expert; {method.without_expert}"


def bare_rows(iteration_id: str, trajectory: Trajectory, number: int) -> Rows:
    """Return the rows of one of the expert's episodes before it has its thoughts."""
    key = bare_id(iteration_id, trajectory.instance, number)
    return trajectory_rows(key, trajectory, source=BARE_SOURCE, iteration_id=iteration_id)


def expert_rows(iteration_id: str, trajectory: Trajectory, number: int, *, env: Environment, samples: bool) -> Rows:
    """Return the rows of one of the expert's episodes and, with `samples`, of the sample made of
    it.
    """
    trajectory_id = expert_id(iteration_id, trajectory.instance, number)
    episode = trajectory_rows(trajectory_id, trajectory, source="expert", iteration_id=iteration_id)
    if not samples:
        return episode
    # The expert's replies are the same in every iteration and run; the trajectory's id keeps their
    # samples apart.
    sample = Sample(
        kind=SampleKind.EXPERT,
        messages=whole_episode(env, trajectory),
        instance=trajectory.instance,
        provenance=Provenance(extra={"trajectory": trajectory_id}),
    )
    return merge(
        [episode, sample_rows(sample_id(sample), sample, iteration_id=iteration_id, trajectory_id=trajectory_id)]
    )


# Thoughts for the expert's episodes of an iteration: the editor is asked for missing ones.

THINK_STAGE = "think"


async def think(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Have a thought written before each bare action of the expert's episodes of an iteration.

    Questions that the run answered before, in this iteration or an earlier one, are not asked
    again.

    Raises:
        ConfigError: no episode got its thoughts, or most answers of the editor are unreadable.
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was answered is kept.
    """
    return await _store_thoughts(ctx, iteration, samples=False)


async def think_and_clone(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Do as `think`, and keep each episode as a sample."""
    return await _store_thoughts(ctx, iteration, samples=True)


async def _store_thoughts(ctx: RunContext, iteration: int, *, samples: bool) -> dict[str, Any]:
    answers = {
        edit.edit_id: edit.answer
        for number in range(1, iteration + 1)
        for edit in load_edits(ctx.store, ctx.iteration_id(number))
    }
    with ctx.worlds() as worlds:
        bare_episodes = await run_in_thread(_bare_episodes, ctx, iteration, worlds)
        stored_outcomes = {key: outcome_of_answers(episode, answers) for key, episode in bare_episodes.items()}
        outcomes = {key: outcome for key, outcome in stored_outcomes.items() if outcome is not None}
        missing = {key: episode for key, episode in bare_episodes.items() if key not in outcomes}
        if missing:
            outcomes |= await _write_thoughts(ctx, iteration, missing, answers, total=len(bare_episodes))
        accepted_episodes = {
            key: outcome for key, outcome in outcomes.items() if isinstance(outcome, ThoughtfulEpisode)
        }
        rejections = [
            Rejection(stage=STAGE, subject=bare_episodes[key].name, reason=outcome.reason, detail=outcome.detail)
            for key, outcome in outcomes.items()
            if isinstance(outcome, NoThoughts)
        ]
        iteration_id = ctx.iteration_id(iteration)
        units: list[Rows] = []
        for key, thoughtful in accepted_episodes.items():
            episode, instance = bare_episodes[key], thoughtful.trajectory.instance
            number = int(episode.name.rpartition("#")[2])
            derivation = Derivation(
                child=key,
                parent=bare_id(iteration_id, instance, number),
                operator="thoughts",
                position=thoughtful.position,
                prompt_hash=thoughtful.prompt_hash,
                seed=ctx.recipe.seed,
            )
            units += [
                expert_rows(iteration_id, thoughtful.trajectory, number, env=episode.env, samples=samples),
                derivation_rows([derivation], iteration_id=iteration_id),
            ]
        ctx.store.write(merge([*units, rejection_rows(rejections, iteration_id=iteration_id)]))
    if bare_episodes and not accepted_episodes:
        raise ConfigError(
            f"no thought could be read from what the editor wrote for any of {len(bare_episodes)} demonstrations; name "
            "another model in models.editor, or raise eto.expert.thoughts.max_new_tokens or .tries"
        )
    return {"expert": len(accepted_episodes), "rejected": len(rejections), "asked": len(missing)}


def _bare_episodes(ctx: RunContext, iteration: int, worlds: Worlds) -> dict[str, BareEpisode]:
    """Return the expert's episodes as they were played, by the id that the episode with its
    thoughts will have.
    """
    iteration_id = ctx.iteration_id(iteration)
    trajectories = load_trajectories(ctx.store, iteration_id=iteration_id, source=BARE_SOURCE)
    episodes: dict[str, BareEpisode] = {}
    for instance in {trajectory.instance.key: trajectory.instance for trajectory in trajectories.values()}.values():
        ids = (bare_id(iteration_id, instance, number) for number in count())
        for number, key in enumerate(takewhile(trajectories.__contains__, ids)):
            episodes[expert_id(iteration_id, instance, number)] = BareEpisode(
                env=worlds.env_of(instance),
                trajectory=trajectories[key],
                name=instance.episode(number),
                run_id=ctx.run_id,
                config=ctx.recipe.eto.expert.thoughts,
                seed=ctx.recipe.seed,
            )
    return episodes


async def _write_thoughts(
    ctx: RunContext, iteration: int, missing: Mapping[str, BareEpisode], answers: dict[str, Answer], *, total: int
) -> dict[str, ThoughtOutcome]:
    """Ask the editor about episodes, add its answers to `answers`, and return the outcomes by
    episode id. An episode that fails for good has no outcome; its errors are stored as events.
    """
    # All iterations have the thoughts of one model: without an editor, the run's first model.
    async with ctx.role_sampler("editor", ctx.trained_checkpoint(0).path, THINK_STAGE, iteration) as (
        sampler,
        writer,
        reply_count,
    ):
        num_stored = total - len(missing)
        async with count_units(ctx.progress, sampler, "episodes with thoughts", total=total, done=num_stored) as count:
            outcomes = await run_all(
                list(missing.items()),
                lambda item: _write_episode_thoughts(
                    item[1], answers, Editor(sampler, writer, reply_count, ctx.iteration_id(iteration))
                ),
                key=lambda item: item[0],
                errors=ctx.recipe.errors,
                on_error=ctx.on_error(writer, THINK_STAGE, iteration),
                concurrency=concurrency_for(sampler, 1, configured=ctx.recipe.scale.concurrency),
                on_result=count,
                num_units=total,
            )
    return outcomes


class Editor(NamedTuple):
    """The sampler of the editor's model, the writer that stores its answers, and the count of its
    replies, for one iteration.
    """

    sampler: Sampler
    writer: Writer
    reply_count: ReplyCount
    iteration_id: str


async def _write_episode_thoughts(episode: BareEpisode, answers: dict[str, Answer], editor: Editor) -> ThoughtOutcome:
    questions = thought_questions(episode)
    try:
        request = next(questions)
        while True:
            if request.answer_id not in answers:
                answers[request.answer_id] = await _ask_editor(request, episode, editor)
            request = questions.send(answers[request.answer_id])
    except StopIteration as end:
        outcome: ThoughtOutcome = end.value
        return outcome
    except PromptTooLong as error:
        return NoThoughts("prompt-too-long", str(error))


async def _ask_editor(request: StepQuestion, episode: BareEpisode, editor: Editor) -> Answer:
    session = f"{episode.name}#editor"
    reply = await answer(editor.sampler, request.question, seed=request.seed, session=session)
    editor.writer.add(
        edit_rows(
            request.answer_id,
            reply,
            subject=request.subject,
            prompt=PROMPT_NAME,
            instance=episode.trajectory.instance,
            iteration_id=editor.iteration_id,
        )
    )
    # An editor is a large model: each answer is stored before the next question, and is never
    # requested again.
    await editor.writer.flush()
    editor.reply_count.count(reply)
    return reply
