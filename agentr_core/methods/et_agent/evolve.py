"""The flywheel of an iteration: the policy answers the training questions, and operators make
variants of its trajectories.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

from agentr_core.environment import Environment
from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import (
    EnvironmentPool,
    EpisodeTimer,
    Helper,
    Reply,
    SampleReplies,
    act_with_helper,
    call_env,
    restore_state,
    roll_out_episode,
)
from agentr_core.episodes.transcript import CountTokens, FitsContext
from agentr_core.episodes.units import phase, run_all
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.et_agent.operators import (
    OPERATORS,
    Case,
    Draft,
    NoChild,
    PromptName,
    StepForm,
    TaggedForm,
    prompt_version,
    step_form_of,
)
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.et_agent import FlywheelConfig
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext, helpers
from agentr_core.runtime.episode_shard import UNGRADED, ungraded_id
from agentr_core.runtime.equipment import (
    Checkpoint,
    Effort,
    Equipment,
    Sink,
    concurrency_for,
    count_units,
    effort_of,
    token_counter,
    window_test,
    with_backpressure,
)
from agentr_core.runtime.instances import chosen_instances
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.samples import (
    FLYWHEEL,
    copy_families,
    derivation_rows,
    edit_rows,
    family_rows,
    load_edits,
    load_flywheel_trajectories,
    sampled_token_counts,
)
from agentr_core.store.codec.trajectories import load_draws, load_trajectories, runs_with_same_input, trajectory_rows
from agentr_core.store.tables import Draw, Rows, merge
from agentr_core.types import Answer, Derivation, Grading, Instance, Question, Rejection, Trajectory

# The family of a question: its members, and which of them a round varies by which operators. Pure
# functions.


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A trajectory of a family.

    `name` says how it was made, and is the same in every run: `0`, `1` and so on before the first
    round, then the parent's name, the round and the operator, such as `0.1C1`. `cost` is the number
    of its tool calls or steps, `num_tokens` that of the tokens that were sampled for it.
    """

    name: str
    id: str
    trajectory: Trajectory
    cost: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChild:
    """A child that an operator may make in a round; one planned before the first round has no
    parent.
    """

    name: str
    round: int = 0
    operator: str = "C0"
    parent: Member | None = None


def subject_of(plan: PlannedChild, operator: str) -> str:
    """Return the name of an operator's request to a model: the parent's name, the round and the
    operator.
    """
    parent = "" if plan.parent is None else plan.parent.name
    return f"{parent}.{plan.round}{operator}"


def round_of(subject: str) -> int:
    """Return the round of a request to a model, read from its name by `subject_of`."""
    return int("".join(takewhile(str.isdigit, subject.rpartition(".")[2])))


def first_children(config: FlywheelConfig) -> tuple[PlannedChild, ...]:
    """Return the plans of the fresh trajectories, which are made before the first round."""
    return tuple(PlannedChild(name=str(number)) for number in range(config.fresh))


def operators_for(member: Member, config: FlywheelConfig) -> Sequence[str]:
    """Return the operators that vary a member: those for right or those for wrong ones."""
    return config.correct if member.trajectory.success else config.incorrect


def parents(members: Sequence[Member], used_names: Collection[str], config: FlywheelConfig) -> list[Member]:
    """Return the members that a round varies, best first: by highest reward, then lowest cost, then
    order in `members`. Members for which the recipe has no operator are left out.

    With `best-one`, return only the best one whose name is not in `used_names`, or the best of all
    if all of them are.
    """
    candidates = [member for member in members if operators_for(member, config)]
    ranking = sorted(candidates, key=lambda member: (-member.trajectory.reward, member.cost))
    if config.policy == "expand-all":
        return ranking
    return [next((member for member in ranking if member.name not in used_names), ranking[0])] if ranking else []


def planned_children(
    round_parents: Sequence[Member], round_: int, config: FlywheelConfig, *, max_children: int
) -> tuple[PlannedChild, ...]:
    """Return the children that a round may make, by parent and then by operator, at most
    `max_children`.
    """
    children = [
        PlannedChild(name=f"{parent.name}.{round_}{operator}", round=round_, operator=operator, parent=parent)
        for parent in round_parents
        for operator in operators_for(parent, config)
    ]
    return tuple(children[: max(max_children, 0)])


# Carries out a draft: its reply, if it has one, is sent to the world; then the policy goes on to
# the end of the episode.


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTrajectory:
    """A trajectory, and the draw of each reply that was sampled for it, by position of the step."""

    trajectory: Trajectory
    draws: dict[int, Draw] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were sampled for the trajectory."""
        return sum(draw.generation.completion_tokens for draw in self.draws.values())


async def play_draft(
    draft: Draft,
    instance: Instance,
    env: Environment,
    sample: SampleReplies,
    config: FlywheelConfig,
    *,
    seed: int,
    fits: FitsContext | None,
    timer: EpisodeTimer,
    helper: Helper,
    count_tokens: CountTokens,
) -> DrawnTrajectory:
    """Play a draft to the end of its episode and return the trajectory, not graded yet. Raises as
    `rollout.roll_out_episode`.
    """
    prefix = draft.prefix
    if draft.reply:
        with phase("restore"):
            first_observation = await call_env(env, timer, lambda: restore_state(env, instance, prefix))
        outcome = await act_with_helper(env, timer, draft.reply, helper, seed=seed, session=f"{instance.key}#{seed}")
        prefix = (*prefix, outcome.step)
        if outcome.stop is not None:
            return DrawnTrajectory(trajectory=Trajectory.ended(instance, first_observation, prefix, outcome.stop))
    replies: list[Reply] = []
    trajectory = await roll_out_episode(
        instance,
        env,
        sample,
        max_steps=config.max_steps,
        sampling=sampling_of(config),
        seed=seed,
        prefix=prefix,
        fits=fits,
        on_reply=replies.append,
        timer=timer,
        helper=helper,
        limits=config.limits,
        count_tokens=count_tokens,
    )
    draws = {
        position: Draw(seed=reply.seed, number=0, generation=reply.generation)
        for position, reply in enumerate(replies, start=len(prefix))
    }
    return DrawnTrajectory(trajectory=trajectory, draws=draws)


# The flywheel of one question, from its fresh trajectories through its rounds.
#
# The result depends on the children alone, so an interrupted family continues with those already
# made.

MakeChild = Callable[[PlannedChild], Awaitable[Member | None]]
"""A function that returns a planned child, made now or earlier; None if its operator makes none."""


class FinishedFamily(NamedTuple):
    """A finished family: its members in the order in which they were planned, the number of rounds
    that began, and what ended it: `tokens`, `members`, `no-child` or `rounds`.
    """

    members: tuple[Member, ...]
    rounds: int
    ended_by: str


async def grow_family(
    config: FlywheelConfig, make_child: MakeChild, num_answer_tokens: Callable[[int], int]
) -> FinishedFamily:
    """Make the fresh trajectories and all rounds of a question; return its family.

    Args:
        make_child: makes a child, or returns the one made earlier.
        num_answer_tokens: returns the number of tokens of models' answers for the family before a
            round. Answers for later rounds, from an earlier try, must not count, so that the family
            ends where it would have without the interruption.

    Raises what `make_child` raises, once the other children of the round are made.
    """
    members = await _make_all(first_children(config), make_child)
    used_names: set[str] = set()
    for round_ in range(1, config.rounds + 1):
        num_tokens = sum(member.num_tokens for member in members) + num_answer_tokens(round_)
        if config.most_tokens and num_tokens >= config.most_tokens:
            return FinishedFamily(tuple(members), round_ - 1, "tokens")
        round_parents = parents(members, used_names, config)
        plans = planned_children(round_parents, round_, config, max_children=config.most_members - len(members))
        if not plans and len(members) >= config.most_members:
            return FinishedFamily(tuple(members), round_ - 1, "members")
        used_names |= {parent.name for parent in round_parents}
        children = await _make_all(plans, make_child)
        if not children:
            return FinishedFamily(tuple(members), round_, "no-child")
        members += children
    return FinishedFamily(tuple(members), config.rounds, "rounds")


async def _make_all(plans: Sequence[PlannedChild], make_child: MakeChild) -> list[Member]:
    """Return the children that could be made, in the order of their plans. An error does not stop
    the making of the others; the first error is raised once all have ended.
    """
    results = await asyncio.gather(*map(make_child, plans), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Member)]


# The families of a shard: their children are made, or taken from what is stored.

STAGE = "evolve"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMember:
    """A stored trajectory, and how many tokens were sampled for it."""

    trajectory: Trajectory
    num_tokens: int


class RoundAnswer(NamedTuple):
    """A model's answer, and the round in which it was asked."""

    answer: Answer
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyWork:
    """A question whose flywheel is not finished, with what is stored of it, each by id: its
    members, models' answers (`answers_by_id`), and trajectories that have no grade yet.
    """

    family_id: str
    instance: Instance
    members: Mapping[str, StoredMember] = field(default_factory=dict)
    answers_by_id: Mapping[str, RoundAnswer] = field(default_factory=dict)
    ungraded: Mapping[str, DrawnTrajectory] = field(default_factory=dict)


class FamilyState:
    """The parts of a family that exist so far; they grow with it, and a retry goes on from them."""

    def __init__(self, work: FamilyWork) -> None:
        self.work = work
        self.members = dict(work.members)
        self.answers_by_id = dict(work.answers_by_id)
        self.ungraded = dict(work.ungraded)
        self.locks_by_answer: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def num_answer_tokens(self, before_round: int) -> int:
        """Return the number of tokens of all answers from rounds before `before_round`."""
        return sum(
            stored.answer.completion_tokens for stored in self.answers_by_id.values() if stored.round < before_round
        )


@dataclass(frozen=True, slots=True)
class FamilyMaker:
    """The maker of a shard's families, which gives every part to `sink` as soon as it is made."""

    iteration: int
    checkpoint: Checkpoint
    equipment: Equipment
    sink: Sink
    environments: EnvironmentPool
    sampler: Sampler
    helper: Helper
    timer: EpisodeTimer
    episode_slots: asyncio.Semaphore
    """Limits how many episodes are played at once. With the fresh ones of all families together,
    the prompts would not fit into the cache, and each would be computed again for each reply.
    """

    @property
    def config(self) -> FlywheelConfig:
        return self.equipment.recipe.et_agent.flywheel

    @property
    def iteration_id(self) -> str:
        return self.equipment.iteration_id(self.iteration)

    async def grow(self, family: FamilyState) -> None:
        """Grow a family to its end, from the parts that it has, and store that it is finished."""
        work = family.work

        async def make_child(plan: PlannedChild) -> Member | None:
            child_id = fingerprint("member", work.family_id, plan.name)
            async with self.environments.lend(work.instance) as env:
                step_form = step_form_of(env, work.instance)
            if child_id not in family.members and not await self._make(family, plan, child_id, step_form):
                return None
            stored_member = family.members[child_id]
            return Member(
                name=plan.name,
                id=child_id,
                trajectory=stored_member.trajectory,
                cost=step_form.cost(stored_member.trajectory),
                num_tokens=stored_member.num_tokens,
            )

        finished_family = await grow_family(self.config, make_child, family.num_answer_tokens)
        self.sink.add(
            family_rows(
                work.family_id,
                work.instance,
                iteration_id=self.iteration_id,
                checkpoint_id=self.checkpoint.id,
                members=len(finished_family.members),
                rounds=finished_family.rounds,
                ended_by=finished_family.ended_by,
            )
        )

    async def _make(self, family: FamilyState, plan: PlannedChild, child_id: str, step_form: StepForm) -> bool:
        """Make a child and store it. Return whether there is one; if not, store a rejection."""
        seed = self._seed(family, plan.name)
        draft = await self._draft(family, plan, step_form, seed)
        if isinstance(draft, NoChild):
            subject = f"{family.work.instance.key} {plan.name}"
            rejection = Rejection(stage=STAGE, subject=subject, reason=draft.reason, detail=draft.detail)
            self.sink.add(rejection_rows([rejection], iteration_id=self.iteration_id))
            return False
        if draft.finished_child is None:
            # No environment is held while models are asked for the draft.
            async with self.episode_slots, self.environments.lend(family.work.instance) as env:
                drawn_trajectory, grading = await self._play_and_grade(family, draft, child_id, env, seed)
        else:
            drawn_trajectory, grading = DrawnTrajectory(trajectory=draft.finished_child), None
        units = [self._rows(child_id, drawn_trajectory, FLYWHEEL, grading, num_given=draft.num_given)]
        if plan.parent is not None:
            derivation = Derivation(
                child=child_id,
                parent=plan.parent.id,
                operator=plan.operator,
                position=draft.position,
                prompt_hash=draft.prompt_hash,
                seed=seed,
                round=plan.round,
            )
            units.append(derivation_rows([derivation], iteration_id=self.iteration_id))
        self.sink.add(merge(units))
        family.members[child_id] = StoredMember(
            trajectory=drawn_trajectory.trajectory, num_tokens=drawn_trajectory.num_tokens
        )
        return True

    async def _play_and_grade(
        self, family: FamilyState, draft: Draft, child_id: str, env: Environment, seed: int
    ) -> tuple[DrawnTrajectory, Grading | None]:
        """Return the trajectory that a draft becomes, and its grade. If grading fails, store the
        trajectory to be graded later, and raise the error.
        """
        pending_id = ungraded_id(child_id)
        drawn_trajectory = family.ungraded.get(pending_id)
        if drawn_trajectory is None:
            drawn_trajectory = await play_draft(
                draft,
                family.work.instance,
                env,
                with_backpressure(self.sampler, self.sink),
                self.config,
                seed=seed,
                fits=window_test(self.equipment.recipe, self.sampler, sampling_of(self.config)),
                timer=self.timer,
                helper=self.helper,
                count_tokens=token_counter(self.sampler),
            )
        try:
            trajectory, grading = await grade_episode(env, drawn_trajectory.trajectory, self.helper, seed=seed)
        except BaseException:
            family.ungraded[pending_id] = drawn_trajectory
            self.sink.add(self._rows(pending_id, drawn_trajectory, UNGRADED, None, num_given=draft.num_given))
            raise
        return replace(drawn_trajectory, trajectory=trajectory), grading

    async def _draft(self, family: FamilyState, plan: PlannedChild, step_form: StepForm, seed: int) -> Draft | NoChild:
        """Return the draft of a child, or why there is none; a prompt that does not fit a model's
        context is one such reason.
        """
        if plan.parent is None:
            return Draft()

        async def consult(operator: str, name: PromptName, question: Question) -> Answer:
            # A stored answer of a model to the same question is used again.
            subject = subject_of(plan, operator)
            texts = [(message.role, message.text) for message in question.messages]
            answer_id = fingerprint("edit", family.work.family_id, subject, name, texts, question.sampling)
            async with family.locks_by_answer[answer_id]:
                if answer_id not in family.answers_by_id:
                    session = f"{family.work.instance.key}#{question.role}"
                    answer = await self.helper(
                        question, seed=derive_seed(self._seed(family, subject), name), session=session
                    )
                    family.answers_by_id[answer_id] = RoundAnswer(answer, plan.round)
                    self.sink.add(
                        edit_rows(
                            answer_id,
                            answer,
                            subject=subject,
                            prompt=prompt_version(name),
                            instance=family.work.instance,
                            iteration_id=self.iteration_id,
                        )
                    )
            return family.answers_by_id[answer_id].answer

        case = Case(parent=plan.parent.trajectory, step_form=step_form, config=self.config, seed=seed, consult=consult)
        try:
            return await OPERATORS[plan.operator](case)
        except PromptTooLong as error:
            return NoChild("prompt-too-long", str(error))

    def _seed(self, family: FamilyState, name: str) -> int:
        recipe = self.equipment.recipe
        return derive_seed(recipe.seed, STAGE, self.iteration, family.work.instance.key, name)

    def _rows(
        self,
        trajectory_id: str,
        drawn_trajectory: DrawnTrajectory,
        source: str,
        grading: Grading | None,
        *,
        num_given: int,
    ) -> Rows:
        return trajectory_rows(
            trajectory_id,
            drawn_trajectory.trajectory,
            source=source,
            iteration_id=self.iteration_id,
            draws=drawn_trajectory.draws,
            grading=grading,
            num_given_steps=num_given,
        )


# Questions of a flywheel as a shard: each starts at the beginning, or where an earlier try stopped.


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyShard:
    """Unfinished families of questions of one iteration. See `equipment.Shard`."""

    iteration: int
    checkpoint: Checkpoint
    families: tuple[FamilyWork, ...]
    done: int
    total: int

    def __len__(self) -> int:
        return len(self.families)

    def split(self, size: int) -> tuple[FamilyShard, ...]:
        """Return the same questions as shards of at most `size`."""
        portable_shard = replace(self, checkpoint=self.checkpoint.absolute())
        return tuple(
            replace(portable_shard, families=self.families[start : start + size])
            for start in range(0, len(self.families), size)
        )

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Grow the families and return the effort; the rows of each child and of each model's
        answer are given to `sink`. Raises as `equipment.Shard.work`.
        """
        recipe, path, timer = equipment.recipe, self.checkpoint.path, EpisodeTimer()
        with closing(EnvironmentPool(equipment.make_environment)) as environments:
            async with (
                equipment.sampling(path, self.checkpoint.role) as sampler,
                helpers(equipment, path, sampler, sink) as helper_models,
                count_units(equipment.progress, sampler, "questions", total=self.total, done=self.done) as count_done,
            ):
                max_concurrency = concurrency_for(sampler, 1, configured=recipe.scale.concurrency)
                maker = FamilyMaker(
                    self.iteration,
                    self.checkpoint,
                    equipment,
                    sink,
                    environments,
                    sampler,
                    helper_models.ask,
                    timer,
                    asyncio.Semaphore(max_concurrency),
                )
                families = {work.family_id: FamilyState(work) for work in self.families}
                results = await run_all(
                    self.families,
                    lambda work: maker.grow(families[work.family_id]),
                    key=lambda work: work.instance.key,
                    errors=recipe.errors,
                    on_error=equipment.on_error(sink, STAGE, self.iteration),
                    concurrency=max_concurrency,
                    on_result=count_done,
                    num_units=self.total,
                )
                effort = effort_of(sampler) + helper_models.effort()
        num_lost = len(self.families) - len(results)
        return effort + Effort(environment_seconds=timer.environment_seconds, num_lost=num_lost)


VERSION = 1
"""Increase it when the same configuration would make different families."""


def family_id(iteration_id: str, collector: Checkpoint, instance: Instance) -> str:
    """Return the id of the family that a collector makes of a question in an iteration."""
    return fingerprint("family", VERSION, iteration_id, collector.id, instance.key)


async def evolve(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Grow the unfinished families of an iteration; return the numbers of its `questions`, of those
    worked on now (`new`), of its `trajectories`, and of the `right` ones.

    Finished families of other runs with the same inputs are copied; `copied` is their number, if
    any.

    Raises:
        ErrorBudgetSpent: more questions failed than the recipe allows; what was made is kept.
        DataFault: training and test instances overlap, or the policy is missing.
        WorkerLost: one worker after another was lost; what they returned is kept.
    """
    instances = await chosen_instances(ctx, iteration)
    collector, iteration_id = ctx.collector(iteration), ctx.iteration_id(iteration)
    family_instances = {family_id(iteration_id, collector, instance): instance for instance in instances}
    num_copied = 0
    for other_run_id in runs_with_same_input(ctx.store, ctx.run_id, STAGE):
        absent_ids = ctx.store.missing("family", list(family_instances))
        if not absent_ids:
            break
        other_iteration_id = replace(ctx, run_id=other_run_id).iteration_id(iteration)
        originals = {key: family_id(other_iteration_id, collector, family_instances[key]) for key in absent_ids}
        num_copied += len(copy_families(ctx.store, originals, iteration_id=iteration_id))
    unfinished_ids = ctx.store.missing("family", list(family_instances))
    new_ids, num_unfinished = unfinished_ids[: ctx.limit], len(unfinished_ids)
    if new_ids:
        # What is stored of the families, to continue with.
        members = load_flywheel_trajectories(ctx.store, iteration_id)
        num_tokens_by_id = sampled_token_counts(ctx.store, list(members))
        members_by_instance: dict[str, dict[str, StoredMember]] = {}
        for key, member in members.items():
            members_by_instance.setdefault(member.instance.key, {})[key] = StoredMember(
                trajectory=member, num_tokens=num_tokens_by_id.get(key, 0)
            )
        answers_by_instance: dict[str, dict[str, RoundAnswer]] = {}
        for edit in load_edits(ctx.store, iteration_id):
            answers_by_instance.setdefault(edit.instance_id, {})[edit.edit_id] = RoundAnswer(
                edit.answer, round_of(edit.subject)
            )
        # Trajectories that wait for their grade.
        ungraded_trajectories = load_trajectories(ctx.store, iteration_id=iteration_id, source=UNGRADED)
        draws = load_draws(ctx.store, "step", list(ungraded_trajectories))
        ungraded_by_instance: dict[str, dict[str, DrawnTrajectory]] = {}
        for key, trajectory in ungraded_trajectories.items():
            trajectory_draws = {position: draw for position, (draw,) in draws.get(key, {}).items()}
            ungraded_by_instance.setdefault(trajectory.instance.key, {})[key] = DrawnTrajectory(
                trajectory=trajectory, draws=trajectory_draws
            )
        families = (
            FamilyWork(
                family_id=key,
                instance=family_instances[key],
                members=members_by_instance.get(family_instances[key].key, {}),
                answers_by_id=answers_by_instance.get(family_instances[key].key, {}),
                ungraded=ungraded_by_instance.get(family_instances[key].key, {}),
            )
            for key in new_ids
        )
        shard = FamilyShard(
            iteration=iteration,
            checkpoint=collector,
            families=tuple(families),
            done=len(family_instances) - num_unfinished,
            total=len(family_instances) - num_unfinished + len(new_ids),
        )
        await ctx.work_through(shard, STAGE, iteration, "questions")
    members = load_flywheel_trajectories(ctx.store, iteration_id)
    num_right = sum(member.success for member in members.values())
    counts = {"questions": len(family_instances), "new": len(new_ids), "trajectories": len(members), "right": num_right}
    return counts | ({"copied": num_copied} if num_copied else {})


def check_operators(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if the recipe has operator C2, which rewrites thoughts, and steps of the
    world have no thoughts apart from the action.
    """
    if not instances or "C2" not in recipe.et_agent.flywheel.correct:
        return
    if not isinstance(step_form_of(env, instances[0]), TaggedForm):
        raise ConfigError(
            f"et_agent.flywheel.correct: C2 rewrites thoughts, but steps of {env.name} have no thought "
            "apart from the action; leave it out"
        )
