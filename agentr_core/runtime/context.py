"""`RunContext`, which has all that a stage needs, and `Method`, by which a method describes itself:
the stages of each iteration, what each needs, and what is trained.

A method's own modules are imported when their functions are called (`lazy_import`), so that its
description imports neither torch nor the code of its stages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentr_core.errors import ConfigError, DataFault, IllTypedAnswer
from agentr_core.fingerprint import fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.models import ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime.equipment import (
    Checkpoint,
    Distribute,
    Effort,
    Equipment,
    ReplyCount,
    Shard,
    Sink,
    count_replies,
    effort_of,
    run_shard,
    teacher_of,
)
from agentr_core.store.codec.ledger import run_start_time, timing_rows
from agentr_core.store.database import Store, Writer
from agentr_core.store.queries.runs import StoredCheckpoint, checkpoint_of_iteration, promoted_checkpoint
from agentr_core.training.job import Objective
from agentr_core.types import NO_LIMITS, Answer, EpisodeLimits, Question, Request, Sampling

if TYPE_CHECKING:
    from agentr_core.environment import Environment
    from agentr_core.evaluation.metrics import Estimate, Headroom, Judge, Prospect
    from agentr_core.reports.document import FunnelStage, Section
    from agentr_core.store.codec.trajectories import Episode
    from agentr_core.types import Instance, Sample


Need = Literal["gpu", "env"]
"""A resource that a stage occupies, as a tag that Prefect limits: a GPU for a model, or
environments.
"""
Product = Literal["dataset", "checkpoint"]
Position = Literal["data", "samples", "run"]
"""Where a report shows sections: after the funnel of data construction, before the recipe, or on
the page of the whole run, which shows those of its last iteration.
"""
Check = Callable[["Recipe", "Environment", "Sequence[Instance]"], None]
"""Raises `UserError` for what would stop a stage; the instances are training instances."""


def lazy_import(reference: str) -> Callable[..., Any]:
    """Return a function that, when called, imports the function `module:name` and calls that."""

    def call(*args: Any, **options: Any) -> Any:
        return resolve_name(reference)(*args, **options)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of an iteration.

    Two methods may have stages of the same name that do different work.
    """

    name: str
    about: str
    """What the stage does, as one sentence."""
    work: Callable[[RunContext, int], Awaitable[Any]]
    """Does the part of an iteration that is not yet done, and returns a short summary."""
    reads: tuple[str, ...] = ()
    """The sections and fields of a recipe that affect it, as `section` or `section.field`."""
    needs: tuple[Need, ...] = ()
    roles: tuple[ModelRole, ...] = ()
    """The roles whose models it asks."""
    spreads: bool = False
    """Whether it hands shards to the workers of a cluster."""
    gathers: bool = False
    """Whether it adds to the experience of an iteration, as a collection does."""
    chooses: bool = False
    """Whether it chooses, of all that was gathered right before it, what is trained on."""
    makes: Product | None = None
    """What an iteration has once this stage has ended. The stages before it then do nothing more.
    """
    check: Check = lambda recipe, env, instances: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training of an iteration: what it trains, and how."""

    objective: Objective
    config: TrainingConfig
    section: str = "training"
    """The section of the recipe that has its schedule."""
    num_train_epochs: float = 1.0
    from_base: bool = False
    """Whether it trains the model that the run began with, not the latest policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """The section of a report that counts what came out of each stage of data construction."""

    title: str
    """A heading that says from what to what the funnel leads."""
    stages: Callable[[RunContext, int], tuple[FunnelStage, ...]]
    """Returns the counts of an iteration, read from the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one iteration: its stages and its training."""

    stages: tuple[Stage, ...]
    """The stages, in order."""
    training: Training | None = None
    """None where nothing is trained."""
    phase: str = ""
    """The kind of iteration, where a method has several."""
    takes_sample: Callable[[Sample], bool] | None = None
    """Returns whether a sample becomes part of the dataset; None: all do."""
    funnel: Funnel | None = None
    """None where no training data is made."""

    @property
    def has_pairs(self) -> bool:
        """Whether the dataset is made of preference pairs."""
        return self.training is not None and self.training.objective.row_type == "pairs"

    @property
    def gathering_stages(self) -> tuple[Stage, ...]:
        """The stages up to the last one that gathers, and the choice right after it; none where
        training samples for itself.
        """
        last = max((position for position, stage in enumerate(self.stages, start=1) if stage.gathers), default=0)
        return self.stages[: last + any(stage.chooses for stage in self.stages[last : last + 1])]

    def settled_stages(self, products: Collection[Product]) -> tuple[Stage, ...]:
        """Return the stages before the last stage whose product exists: anything they added now
        would not be in that product.
        """
        last = max((position for position, stage in enumerate(self.stages) if stage.makes in products), default=0)
        return self.stages[:last]

    def stage(self, name: str) -> Stage:
        """Return the stage of a given name. Raises `ConfigError` if the iteration has none of that
        name.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(
            f"this iteration has no stage {name}; it has {', '.join(stage.name for stage in self.stages)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart:
    """Sections that a method adds to the report of an iteration.

    The key of a section is the anchor of its heading: no two sections of a page share one.
    """

    sections: Callable[[RunContext, int], Sequence[Section]]
    """Returns the sections, read from the store; none where there is nothing to say."""
    position: Position = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The way in which a policy acts where a method collects experience."""

    sampling: Sampling
    max_steps: int
    repeats: int = 0
    """As `evaluation.repeats`; 0: an episode that repeats itself goes on."""
    limits: EpisodeLimits = NO_LIMITS


def _evaluation_rollouts(recipe: Recipe) -> RolloutConfig:
    evaluation = recipe.evaluation
    sampling = evaluation.sampling(temperature=1.0, max_new_tokens=evaluation.max_new_tokens)
    return RolloutConfig(sampling=sampling, max_steps=evaluation.max_steps, limits=evaluation.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """An upper bound on what an iteration asks of a model for one purpose: `replies`, with at most
    `steps` of them one after the other, and at most `tokens` generated tokens in total.
    """

    replies: int
    tokens: int
    steps: int = 1
    role: ModelRole = "actor"

    @classmethod
    def episodes(
        cls, num_episodes: int, *, steps: int, max_new_tokens: int, limits: EpisodeLimits = NO_LIMITS
    ) -> Demand:
        """Return what episodes ask, of `steps` replies of `max_new_tokens` tokens each, within
        limits.
        """
        tokens = min(steps * max_new_tokens, limits.tokens or steps * max_new_tokens)
        return cls(replies=num_episodes * steps, tokens=num_episodes * tokens, steps=steps)

    @classmethod
    def questions(cls, role: ModelRole, num_questions: int, max_new_tokens: int) -> Demand:
        """Return what single questions to a helper ask, each answered with `max_new_tokens`
        tokens.
        """
        return cls(replies=num_questions, tokens=num_questions * max_new_tokens, role=role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way of learning, described once: flows, tasks, plans, checks, estimates and reports read
    it.
    """

    name: str
    """The name, as recipes give it in `method`."""
    title: str
    flow: Literal["flywheel", "compare"] = "flywheel"
    """Which flow runs its recipes."""
    sections: tuple[str, ...] = ()
    """The sections of a recipe that it reads, among those that not every method reads
    (`recipes.recipe.OPTIONAL_SECTIONS`).
    """
    stages: tuple[Stage, ...]
    """Every stage that an iteration may have, in order."""
    plan: Callable[[Recipe, int], Plan]
    """Returns what an iteration, counted from 1, does."""
    before: tuple[Stage, ...] = ()
    """Stages for the model that a run begins with, before the first iteration."""
    faults: Callable[[Recipe], list[str]] = lambda recipe: []
    """Returns what is wrong with a recipe, one sentence each, beyond the faults that are checked
    for all methods.
    """
    check_recipe: Callable[[Recipe], None] = lambda recipe: None
    """Raises `ConfigError` for faults that only the parsed recipe as a whole shows."""
    trained_recipes: Callable[[Recipe], Sequence[Recipe]] = lambda recipe: [recipe]
    """Returns the recipes whose trainings a run does: its own, or those of its arms."""
    trim_identity: Callable[[Recipe, dict[str, Any]], None] = lambda recipe, plain: None
    """Removes from the plain data of a recipe what is not part of its run's id."""
    describe: Callable[[Recipe, int, int], list[str]] = lambda recipe, train, test: []
    """Returns lines for `agentr plan`, given a recipe and the numbers of training instances and of
    held-out episodes.
    """
    demands: Callable[[Recipe, int, int], dict[str, Demand]] = lambda recipe, train, test: {}
    """Returns the most that an iteration asks of models, by purpose, given a recipe and the numbers
    of training instances and of held-out episodes; its evaluation is added to that."""
    shared_stages: tuple[str, ...] = ("collect", "critique", "explore", "evaluate")
    """The stages, by name, whose inputs are stored with a run, so that runs with equal inputs take
    over each other's work. The default also names them for a method that has none of them, since
    runs have been stored that way.
    """
    rollout_config: Callable[[Recipe], RolloutConfig] = _evaluation_rollouts
    """Returns how the policy acts where experience is collected."""
    prospect: Callable[[Recipe, Headroom], Prospect] | None = None
    """Forecasts the training data that an iteration of a recipe would make from a policy's
    experience, and whether a model can learn from it; None where this cannot be told.
    """
    measure_judges: Callable[[RunContext, Sequence[Episode], Sequence[Path]], Awaitable[tuple[Judge, ...]]] | None = (
        None
    )
    """Measures how reliable the verdicts of a recipe's judge on failed episodes are, and those of
    other models, given their directories; None where nothing is judged.
    """
    has_reflection: Callable[[str], bool] | None = None
    """Returns whether a reply contains one of the sentences with which samples of this method
    reflect on a mistake; None if the method has no such sentences.
    """
    drawn_on_stages: Callable[[RunContext], Collection[Stage]] = lambda ctx: ()
    """Returns the stages of a run whose output other runs have trained on: they add nothing more,
    so that a run that trains on it later gets the same data.
    """
    measures: Callable[[RunContext, int, str, Sequence[Episode]], dict[str, Estimate]] = lambda *_: {}
    """Returns the metrics of episodes, by name, beyond those of all methods, given the iteration
    and the name of their evaluation.
    """
    report: tuple[ReportPart, ...] = ()
    """What it adds to the report of an iteration, in order."""
    without_expert: str = "choose an environment that has one"
    """What to do about an environment that has no expert."""

    def plan_of(self, recipe: Recipe, iteration: int) -> Plan:
        """Return the plan of an iteration of a recipe; iteration 0 comes before the first one."""
        return self.plan(recipe, iteration) if iteration else Plan(stages=self.before)


@dataclass(frozen=True, kw_only=True)
class RunContext(Equipment):
    """A run with everything that its stages need: recipe, method, store and folders. Made by the
    caller.
    """

    # Given by the caller: this module cannot import the methods, which import it.
    method: Method
    """The method of the recipe."""
    root: Path
    """Folder of the store, checkpoints and reports."""
    store: Store
    distribute: Distribute | None = None
    """Hands shards to the workers of a cluster; None: everything is done in this process."""
    limit: int | None = None
    """The most trees, episodes or questions that a gathering stage begins; None: all."""

    def started_at(self) -> datetime | None:
        """Return the moment whose date chat templates print: the start of the run, or for what
        belongs to a comparison the start of its pool.

        None before the run is stored.
        """
        compare = self.recipe.compare
        return run_start_time(self.store, compare.pool or compare.trees or self.run_id)

    def plan(self, iteration: int) -> Plan:
        """Return what an iteration does; iteration 0 comes before the first one."""
        return self.method.plan_of(self.recipe, iteration)

    def policy(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that acts in an iteration: the one that the previous iteration
        promoted. That is the one it made or, with `promote: best`, the best so far.

        Raises `DataFault` if there is none yet.
        """
        previous = iteration - 1
        if self.recipe.promote == "last":
            return self.trained_checkpoint(previous)
        checkpoint = promoted_checkpoint(self.store, self.iteration_id(previous))
        if checkpoint is None:
            raise DataFault(
                f"run {self.run_id} has promoted no checkpoint in iteration {previous} yet; evaluate it first"
            )
        return self._checkpoint_of(checkpoint)

    def collector(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that plays the training instances of an iteration: the teacher
        while it collects, else the policy. Raises as `policy`.
        """
        asks_teacher = any("teacher" in stage.roles for stage in self.plan(iteration).stages)
        teacher = teacher_of(self.recipe) if asks_teacher and self.recipe.is_taught(iteration) else None
        return teacher or self.policy(iteration)

    def trained_checkpoint(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that an iteration made; for 0, the model that the run starts from.

        Raises `DataFault` if there is none yet.
        """
        checkpoint = checkpoint_of_iteration(self.store, self.iteration_id(iteration))
        if checkpoint is None:
            raise DataFault(f"run {self.run_id} has no checkpoint of iteration {iteration} yet; run its training first")
        return self._checkpoint_of(checkpoint)

    def _checkpoint_of(self, checkpoint: StoredCheckpoint) -> Checkpoint:
        # Another run may begin with the same weights in another directory, with another chat
        # template: what this run reads is what its own recipe names.
        path = checkpoint.path if checkpoint.trained else Path(self.recipe.model.label)
        return Checkpoint(id=checkpoint.checkpoint_id, path=path, weights_sha256=checkpoint.weights_sha256)

    @contextmanager
    def timed(self, stage: str, iteration: int) -> Iterator[Clock]:
        """Yield a clock for the block, and store its parts as timings of the stage, also if the
        block raises; the rest of the wall time is stored as `other`.
        """
        clock = Clock()
        start = time.perf_counter()
        try:
            yield clock
        finally:
            seconds = time.perf_counter() - start
            parts = {**clock.seconds, "other": max(0.0, seconds - sum(clock.seconds.values()))}
            self.store.write(timing_rows(self.iteration_id(iteration), stage, parts, tokens=clock.tokens))

    @asynccontextmanager
    async def role_sampler(
        self, role: ModelRole, policy_path: Path, stage: str, iteration: int
    ) -> AsyncIterator[tuple[Sampler, Writer, ReplyCount]]:
        """Yield a sampler for the model of a role, as `sampling` does, a writer to the store, and
        the count of the model's replies; time and tokens are stored as a timing of the stage.
        """
        with self.timed(stage, iteration) as clock:
            async with self.sampling(policy_path, role) as sampler, Writer(self.store) as writer:
                with count_replies(role, sampler.model.name) as reply_count:
                    yield sampler, writer, reply_count
                clock.add_sampler(sampler)
            clock.add({"store": writer.seconds})

    async def work_through(self, shard: Shard, stage: str, iteration: int, units: str) -> None:
        """Work through a shard, store its rows, and record its effort as a timing of the stage.

        `units` names the units of the shard in progress lines. Raises as `equipment.run_shard`.
        """
        with self.timed(stage, iteration) as clock:
            async with Writer(self.store) as writer:
                effort = await run_shard(shard, self, self.distribute, writer, units)
                clock.add_effort(effort)
                if effort.num_lost:
                    # Each worker knew of its own losses alone.
                    self.check_error_budget(
                        writer, stage, iteration, effort.num_lost / (self.recipe.errors.budget * shard.total)
                    )
            clock.add({"store": writer.seconds})


@dataclass(slots=True)
class Clock:
    """Seconds of a stage by part (generate, environment, train, store), and the tokens generated or
    trained in it.

    The seconds of shards are summed over their workers.
    """

    seconds: dict[Any, float] = field(default_factory=dict)
    tokens: int | None = None

    def add(self, parts: Mapping[str, float]) -> None:
        """Add seconds to parts."""
        for part, value in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + value

    def add_sampler(self, sampler: Sampler) -> None:
        """Add the seconds and tokens that a sampler has spent so far; call it once per sampler, at
        the end.
        """
        stats = sampler.stats()
        self.add({"generate": stats.generate_seconds})
        self.tokens = (self.tokens or 0) + stats.completion_tokens

    def add_effort(self, effort: Effort) -> None:
        """Add the seconds and tokens that the work of a shard took."""
        self.add({"generate": effort.generate_seconds, "environment": effort.environment_seconds})
        self.tokens = (self.tokens or 0) + effort.tokens


# Models of roles other than the actor, which are asked during an episode, for example to grade it.


async def answer(sampler: Sampler, question: Question, *, seed: int, session: str) -> Answer:
    """Return a model's answer to a question. Raises as `ChatModel.generate`."""
    request = Request(messages=question.messages, sampling=question.sampling, seed=seed, session=session, helper=True)
    (generation,) = await sampler.sample(request)
    return Answer(
        role=question.role,
        model=sampler.model.fingerprint,
        prompt_hash=fingerprint([(message.role, message.text) for message in question.messages]),
        seed=seed,
        text=generation.text,
        finish_reason=generation.finish_reason,
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=generation.completion_tokens,
        thinks=generation.thinks,
    )


class Helpers:
    """The models of a recipe that are asked by role; each is loaded when it is first asked.

    A role without a model of its own is answered by the actor's model: through the sampler `actor`,
    or, if that is None, through one that is loaded here. Roles with equal models share one sampler.
    """

    def __init__(
        self, equipment: Equipment, policy_path: Path, actor: Sampler | None, sink: Sink, stack: AsyncExitStack
    ) -> None:
        self._equipment = equipment
        self._policy_path = policy_path
        self._actor = actor
        self._sink = sink
        self._stack = stack
        self._samplers: dict[ModelRole, Sampler] = {}
        self._reply_counts: dict[str, ReplyCount] = {}
        self._load_lock = asyncio.Lock()

    async def ask(self, question: Question, *, seed: int, session: str) -> Answer:
        """Return the answer of a role's model to a question.

        Raises `IllTypedAnswer` for an unknown role, else as `ChatModel.generate` and
        `Readings.count`.
        """
        sampler = await self._sampler(question.role)
        await self._sink.room()
        reply = await answer(sampler, question, seed=seed, session=session)
        if question.role not in self._reply_counts:
            reply_count = count_replies(question.role, sampler.model.name)
            self._reply_counts[question.role] = self._stack.enter_context(reply_count)
        self._reply_counts[question.role].count(reply)
        return reply

    def effort(self) -> Effort:
        """Return the effort of the models that were loaded here, so without that of the given
        actor.
        """
        return effort_of(*self._samplers.values())

    async def _sampler(self, name: str) -> Sampler:
        role = next((role for role in get_args(ModelRole) if role == name), None)
        if role is None:
            raise IllTypedAnswer(
                f"an environment asks a model of role {name!r}; the roles are {', '.join(get_args(ModelRole))}"
            )
        models, config = self._equipment.recipe.own_models(), self._equipment.recipe.model_of(role)
        sampler_role: ModelRole = "actor"
        if role != "actor" and role in models:
            sampler_role = next(
                candidate for candidate, model in models.items() if candidate != "actor" and model == config
            )
        elif self._actor is not None:
            return self._actor
        async with self._load_lock:
            if sampler_role not in self._samplers:
                new_sampler = self._equipment.sampling(self._policy_path, sampler_role)
                self._samplers[sampler_role] = await self._stack.enter_async_context(new_sampler)
        return self._samplers[sampler_role]


@asynccontextmanager
async def helpers(equipment: Equipment, policy_path: Path, actor: Sampler | None, sink: Sink) -> AsyncIterator[Helpers]:
    """Yield the models of other roles, closed after the block.

    `policy_path` is that of the acting policy, and `actor` its sampler, or None if no policy acts.
    """
    async with AsyncExitStack() as stack:
        yield Helpers(equipment, policy_path, actor, sink, stack)
