"""What is needed to grow trees and play episodes, here or on another machine, without a store; and
the shards of such work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import SampleReplies
from agentr_core.episodes.transcript import CountTokens, FitsContext, SummaryLimits
from agentr_core.episodes.units import UnitError, num_allowed_failures
from agentr_core.errors import AgentrError, ConfigError, ErrorBudgetSpent, ModelDirectoryError, Transient
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import weights_sha256
from agentr_core.models.samplers import Sampler, sampler_of
from agentr_core.protocols import Abandoning, Caching, ChatModel, Counting, Starting
from agentr_core.recipes.alarms import Crossing
from agentr_core.recipes.models import ModelConfig, ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.replies import is_cut_within_thought
from agentr_core.store.codec.ledger import event_rows
from agentr_core.store.database import Writer
from agentr_core.store.tables import TABLES, Alarm, Rows, merge, merge_by_key, row_of
from agentr_core.system import run_in_thread
from agentr_core.types import Answer, Generation, Instance, Message, Request, Sampling

# The open worlds of a recipe: the environment of each, and of any instance.

MakeEnvironment = Callable[[str], Environment]
"""Makes a new environment of a world, given the name that its instances use."""


class Worlds:
    """An environment for each world of a recipe, made when it is first needed."""

    def __init__(self, recipe: Recipe, make_environment: MakeEnvironment) -> None:
        self._recipe = recipe
        self._make_environment = make_environment
        self._open_environments: dict[str, Environment] = {}

    def __iter__(self) -> Iterator[tuple[Recipe, Environment]]:
        """Yield for each world, in order, the recipe as that world sees it and the world's
        environment.
        """
        for name, recipe in self._recipe.worlds().items():
            yield recipe, self.env_named(name)

    def env_of(self, instance: Instance) -> Environment:
        """Return the environment of an instance. Raises `DataFault` if the recipe has none."""
        return self.env_named(instance.environment)

    def env_named(self, environment: str) -> Environment:
        """Return the environment by the name that its instances use. Raises as `env_of`."""
        name = self._recipe.world_name(environment)
        if name not in self._open_environments:
            self._open_environments[name] = self._make_environment(name)
        return self._open_environments[name]

    def close(self) -> None:
        """Close the environments. Calling it twice is harmless."""
        while self._open_environments:
            self._open_environments.popitem()[1].close()


Progress = Callable[[int, int, str], None]
"""Called with (done, total, note) as a stage goes on."""
_MIN_CONCURRENCY = 512
_CALL_INTERVAL_S = 1.0


class Sink(Protocol):
    """A receiver of rows, to be stored now or later. `Writer` is one."""

    def add(self, unit: Rows) -> None:
        """Take the rows of one unit."""
        ...

    async def room(self) -> None:
        """Return once the sink can take more rows without its memory growing indefinitely."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model that the store knows, usually a directory. The model a run starts from is a
    checkpoint too, and so is a teacher: for a served model, `path` is its name and `weights_sha256`
    a hash of that name.
    """

    id: str
    path: Path
    weights_sha256: str
    role: ModelRole = "actor"
    """The role whose model plays: the actor, with the weights at `path`, or the teacher."""

    def absolute(self) -> Checkpoint:
        """Return the same checkpoint with a path that does not depend on the working directory."""
        return replace(self, path=self.path.absolute())


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """A run's recipe, and how its environments and models are made. The caller chooses the
    adapters.
    """

    recipe: Recipe
    run_id: str
    make_environment: MakeEnvironment
    load_model: Callable[[ModelRole, Path], ChatModel]
    """Makes the model of a role. The path is that of the acting policy, used for roles without a
    model of their own.
    """
    progress: Progress
    on_alarm: Callable[[Alarm], None] = lambda alarm: None
    """Called with each alarm that is raised in this process, to notify people; perhaps more than
    once for one alarm.
    """

    def iteration_id(self, iteration: int) -> str:
        """Return the id of an iteration; 0 is the evaluation of the model the run starts from."""
        return fingerprint("iteration", self.run_id, iteration)

    def source_run(self, iteration: int) -> str:
        """Return the id of the run whose samples an iteration trains on: its own, or for an arm of
        a comparison that of the pool.

        All arms begin with the model of the comparison, so its iteration 0 is theirs, too.
        """
        compare = self.recipe.compare
        return (compare.samples if iteration else "") or compare.pool or self.run_id

    def source_id(self, iteration: int) -> str:
        """Return the id of the iteration whose samples an iteration trains on."""
        return fingerprint("iteration", self.source_run(iteration), iteration)

    def worlds(self) -> AbstractContextManager[Worlds]:
        """Yield the recipe's worlds, which are closed after the block."""
        return closing(Worlds(self.recipe, self.make_environment))

    @asynccontextmanager
    async def sampling(self, policy_path: Path, role: ModelRole = "actor") -> AsyncIterator[Sampler]:
        """Yield a sampler for the model of a role, which is closed after the block; `policy_path`
        is that of the acting policy.
        """
        model = await run_in_thread(self.load_model, role, policy_path)
        sampler = sampler_of(model, self.recipe.model_of(role))
        try:
            if isinstance(model, Starting):
                await model.ready()
            yield sampler
        except BaseException:
            # Do not wait for requests under way: a batch may take minutes, and a worker that hangs
            # never answers.
            if isinstance(model, Abandoning):
                model.abandon()
            raise
        finally:
            await sampler.close()
            await model.close()

    def on_error(self, sink: Sink, stage: str, iteration: int) -> Callable[[UnitError], None]:
        """Return a callback that stores each failed attempt at a unit as an event, and checks the
        alarm on the error budget of the stage.
        """
        context = {"run_id": self.run_id, "iteration_id": self.iteration_id(iteration), "stage": stage}

        def store(error: UnitError) -> None:
            sink.add(event_rows(error, **context))
            self.check_error_budget(sink, stage, iteration, error.spent)

        return store

    def check_error_budget(self, sink: Sink, stage: str, iteration: int, spent_share: float) -> None:
        """Check `spent_share`, the part of a stage's error budget that is used up, against the
        alarm on it; if it is crossed, notify people and store the alarm.
        """
        sink.add(
            self.raise_alarms(stage, iteration, self.recipe.alarms.find_crossings([{"error_budget": spent_share}]))
        )

    def raise_alarms(self, stage: str, iteration: int, crossings: Sequence[Crossing]) -> Rows:
        """Notify people of each threshold that was crossed in a stage; return the rows of table
        `alarm`, which the caller stores.
        """
        iteration_id, reaction = self.iteration_id(iteration), self.recipe.alarms.reaction
        alarms = [
            Alarm(iteration_id=iteration_id, stage=stage, reaction=reaction, **asdict(crossing))
            for crossing in crossings
        ]
        for alarm in alarms:
            self.on_alarm(alarm)
        return {"alarm": [row_of("alarm", alarm, alarm_id=alarm.id) for alarm in alarms]}


def with_backpressure(sampler: Sampler, sink: Sink) -> SampleReplies:
    """Return a `SampleReplies` that waits until a sink has room, so that a model never outruns the
    store.
    """

    async def sample(request: Request) -> list[Generation]:
        await sink.room()
        return await sampler.sample(request)

    return sample


def window_test(recipe: Recipe, sampler: Sampler, sampling: Sampling) -> FitsContext | None:
    """Return a test for whether a prompt leaves a model room for a whole reply; None if the recipe
    has no window. Raises `ConfigError` when no prompt could.
    """
    if recipe.context != "window":
        return None
    model = sampler.model
    if sampling.max_new_tokens >= model.context_length:
        raise ConfigError(
            f"context: a window keeps room for a whole reply, and one of {sampling.max_new_tokens:,} tokens fills the "
            f"model's context of {model.context_length:,}, so nothing would be left of any history; lower "
            "max_new_tokens"
        )

    return _leaves_room(model, sampling, sampling.max_new_tokens)


def summary_tests(recipe: Recipe, sampler: Sampler, sampling: Sampling) -> SummaryLimits | None:
    """Return the tests that decide when a model must summarise its history; None unless the
    recipe's `context` is `summary`. Raises `ConfigError` if a reply and a summary together fill the
    context.
    """
    if recipe.context != "summary":
        return None
    model, summary_tokens = sampler.model, recipe.summary.max_new_tokens
    if sampling.max_new_tokens + summary_tokens >= model.context_length:
        raise ConfigError(
            f"summary.max_new_tokens: a reply of {sampling.max_new_tokens:,} tokens and a summary of "
            f"{summary_tokens:,} fill the model's context of {model.context_length:,}, so there would be no history to "
            "sum up; lower one of them"
        )
    return SummaryLimits(
        fits_summary_and_reply=_leaves_room(model, sampling, sampling.max_new_tokens + summary_tokens),
        fits_summary=_leaves_room(model, sampling, summary_tokens),
        max_new_tokens=summary_tokens,
    )


def _leaves_room(model: ChatModel, sampling: Sampling, num_tokens: int) -> FitsContext:
    """Return a test for whether a prompt leaves `num_tokens` tokens of the model's context free."""

    def fits(messages: tuple[Message, ...]) -> bool:
        return (
            model.count_tokens(Request(messages=messages, sampling=sampling, seed=0)) + num_tokens
            <= model.context_length
        )

    return fits


def token_counter(sampler: Sampler) -> CountTokens:
    """Return a function that counts the tokens of a prompt with the sampler's model."""

    def count_tokens(messages: tuple[Message, ...]) -> int:
        return sampler.model.count_tokens(Request(messages=messages, sampling=Sampling(), seed=0))

    return count_tokens


def concurrency_for(sampler: Sampler, num_replies: int, *, configured: int = 0) -> int:
    """Return how many trees or episodes to have in flight: enough for some to fill the next batch
    while others act.

    Each asks for `num_replies` replies at a time. Unless `configured` sets a number, it is at least
    512.
    """
    return configured or max(_MIN_CONCURRENCY, 2 * sampler.capacity // num_replies)


def sampler_progress(sampler: Sampler, *, resumed: bool = False) -> str:
    """Return a sampler's progress as a phrase for a progress line: finished replies, generated
    tokens (those of unfinished replies too, if the model counts them), tokens a second, and fill of
    batches.

    Args:
        resumed: whether part of the work that the line counts was done before this sampler was
            made.
    """
    stats, tokens = sampler.stats(), _num_generated_tokens(sampler)
    rate = tokens / stats.generate_seconds if stats.generate_seconds else 0.0
    line = "since it was resumed " if resumed else ""
    line += f"{stats.sequences:,} replies, {tokens:,} tokens, {rate:.0f}/s, batches {stats.fill:.0%} full"
    if isinstance(sampler.model, Caching):
        line += f", {sampler.model.cached_share():.0%} of prompts cached"
    return line


def _num_generated_tokens(sampler: Sampler) -> int:
    """Return the number of tokens that a sampler's model has generated so far, those of unfinished
    replies included if the model counts them.
    """
    tokens, model = sampler.stats().completion_tokens, sampler.model
    return max(tokens, model.written()) if isinstance(model, Counting) else tokens


@asynccontextmanager
async def call_while_generating(sampler: Sampler, show: Callable[[], None]) -> AsyncIterator[None]:
    """Call `show` once a second during the block, if the model has generated tokens since: an
    episode of a slow model takes minutes. It is not called while nothing is generated, so that the
    log shows a hang.
    """

    async def follow() -> None:
        last = _num_generated_tokens(sampler)
        while True:
            await asyncio.sleep(_CALL_INTERVAL_S)
            if (now := _num_generated_tokens(sampler)) > last:
                last = now
                show()

    follower = asyncio.create_task(follow())
    try:
        yield
    finally:
        follower.cancel()


@asynccontextmanager
async def count_units(
    progress: Progress, sampler: Sampler, units: str, *, total: int, done: int = 0
) -> AsyncIterator[Callable[..., None]]:
    """Yield a function that counts one more unit as done; it ignores its arguments. Each call shows
    the count and the sampler's speed; both are also shown anew while the model generates.

    Args:
        units: what is counted, in the plural, such as "episodes".
        done: the units that were done before.
    """
    resumed = done > 0

    def show() -> None:
        progress(done, total, f"{units}, {sampler_progress(sampler, resumed=resumed)}")

    def count(*_: object) -> None:
        nonlocal done
        done += 1
        show()

    async with call_while_generating(sampler, show):
        yield count


# The identity of a recipe's models.


def model_identity(model: ModelConfig) -> str:
    """Return the identity of a model: the SHA-256 of its weights or, for a served one, a hash of
    its name on the server.

    Raises `ModelDirectoryError` when there are no sound weights.
    """
    if model.backend == "openai":
        return fingerprint("served", model.server.model)
    return weights_sha256(Path(model.path))


# A role, not a second meaning of `model`: training, evaluation and promotion go on from one actor.
# As a checkpoint of the store it can collect what the actor collects.
def teacher_of(recipe: Recipe) -> Checkpoint | None:
    """Return the teacher of a recipe as the store knows it, or None where it has none. Raises as
    `model_identity`.
    """
    model = recipe.models.teacher
    if model is None:
        return None
    digest = model_identity(model)
    return Checkpoint(
        id=fingerprint("checkpoint", digest), path=Path(model.label), weights_sha256=digest, role="teacher"
    )


# How many replies of helpers are unreadable; a stage in which most are is stopped.

_log = logging.getLogger(__name__)
_MIN_REPLIES = 20
"""Fewer replies stop no stage."""


class ReplyCount:
    """A count of one role's replies in a stage, and of the unreadable ones among them."""

    def __init__(self, role: str, model: str) -> None:
        self._description = f"the {role} ({model})"
        self._replies = 0
        self._unreadable = 0

    def count(self, reply: Answer | Generation) -> None:
        """Count a reply. Raises `ConfigError` once there are at least 20 replies of which more than
        half are unreadable, since the next ones would be, too.
        """
        self._replies += 1
        self._unreadable += is_cut_within_thought(reply)
        if self._replies >= _MIN_REPLIES and 2 * self._unreadable > self._replies:
            raise ConfigError(
                f"{self}; give it more tokens (max_new_tokens of what it is asked for), start its server with a "
                "reasoning parser, or switch its thinking off (server.extra_body)"
            )

    def log(self) -> None:
        """Log how many replies were unreadable, if any were."""
        if self._unreadable:
            _log.warning("%s", self)

    def __str__(self) -> str:
        return (
            f"{self._unreadable:,} of {self._replies:,} replies of {self._description} were cut at their token limit "
            "before their thought had ended, so nothing of them counts"
        )


@contextmanager
def count_replies(role: str, model: str) -> Iterator[ReplyCount]:
    """Yield the count of a model's replies; after the block, log how many were unreadable."""
    reply_count = ReplyCount(role, model)
    try:
        yield reply_count
    finally:
        reply_count.log()


# Shards: work that can be done anywhere, because it contains all it needs and returns all it makes
# as rows.
#
# A stage looks up in the store what is missing and makes one shard of it. In this process, the
# shard is worked through at once and its rows are stored as they are made. If there are workers,
# the shard is split; each worker returns the rows of its part together, and they are stored here as
# they arrive. So there is only one writer, and a worker that is lost loses only the part it was
# working on.


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The time and tokens that the work of a shard took, and how many of its units were lost to
    errors.

    `environment_seconds` are summed over concurrent episodes; for a whole shard they are capped at
    the wall time in which its process generated nothing.
    """

    generate_seconds: float = 0.0
    environment_seconds: float = 0.0
    tokens: int = 0
    num_lost: int = 0

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            generate_seconds=self.generate_seconds + other.generate_seconds,
            environment_seconds=self.environment_seconds + other.environment_seconds,
            tokens=self.tokens + other.tokens,
            num_lost=self.num_lost + other.num_lost,
        )


def effort_of(*samplers: Sampler) -> Effort:
    """Return what samplers have spent so far."""
    stats = [sampler.stats() for sampler in samplers]
    return Effort(
        generate_seconds=sum(sampler_stats.generate_seconds for sampler_stats in stats),
        tokens=sum(sampler_stats.completion_tokens for sampler_stats in stats),
    )


class Shard(Protocol):
    """Trees to grow or episodes to play by one checkpoint: plain data, which can be pickled."""

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def done(self) -> int:
        """Units of the whole stage that were done before."""
        ...

    @property
    def total(self) -> int:
        """Units of the whole stage."""
        ...

    def __len__(self) -> int:
        """Return the number of units to work on."""
        ...

    def split(self, size: int) -> Sequence[Self]:
        """Return the same work as shards of at most `size` units."""
        ...

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Do the work; `sink` is given each unit of rows as soon as it is made.

        Raises `ErrorBudgetSpent` when more units are lost than the whole stage may lose; a
        `UserError` of any unit ends the work at once.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """The rows, as one unit, that a worker returns for a shard of `units` units. `fault` is the
    error that ended its work early.
    """

    rows: Rows
    num_units: int
    effort: Effort
    worker: str
    fault: AgentrError | None = None


Distribute = Callable[[Sequence[Shard]], AsyncGenerator[ShardResult, None]]
"""Hands shards to workers and yields what each returns, in the order in which they are done. Raises
`WorkerLost`.
"""


class _MemorySink:
    """A sink that keeps the rows of a shard in memory until they are sent back; `scale.shard_size`
    bounds them.
    """

    def __init__(self) -> None:
        self.units: list[Rows] = []

    def add(self, unit: Rows) -> None:
        self.units.append(unit)

    async def room(self) -> None:
        pass


async def shard_result(shard: Shard, equipment: Equipment) -> ShardResult:
    """Return the rows of a shard as a batch; this is what a worker runs.

    A transient `AgentrError` is raised; any other is returned in the batch as `fault`.

    A model directory with other weights than those of the checkpoint is an error, since the same
    path may be another folder on this machine.
    """
    sink = _MemorySink()
    effort = Effort()
    fault: AgentrError | None = None
    try:
        checkpoint = shard.checkpoint
        if checkpoint.path.is_dir() and weights_sha256(checkpoint.path) != checkpoint.weights_sha256:
            raise ModelDirectoryError(
                f"{checkpoint.path} does not hold the weights of checkpoint {checkpoint.id} "
                f"({checkpoint.weights_sha256[:12]}); copy the model there again, or share the folder between the "
                "machines"
            )
        effort = await _work_on(shard, equipment, sink)
    except AgentrError as error:
        if isinstance(error, Transient):
            raise
        fault = error
    rows = {
        table: merge_by_key(table, rows, TABLES[table].mutable_columns) for table, rows in merge(sink.units).items()
    }
    return ShardResult(
        rows=rows, num_units=len(shard), effort=effort, worker=f"{platform.node()}/{os.getpid()}", fault=fault
    )


async def run_shard(
    shard: Shard, equipment: Equipment, distribute: Distribute | None, writer: Writer, units: str
) -> Effort:
    """Work through a shard, in this process or on workers, and store its rows; return its effort.

    Args:
        distribute: hands parts of the shard to workers; None: this process does all the work.
        units: the units of the shard, as a word for progress lines.

    Raises:
        ErrorBudgetSpent: more units were lost than the recipe allows; what was made is stored.
        WorkerLost: workers were lost again and again at the same part.
        UserError: as the work raises it; what was made is stored.
    """
    if distribute is None:
        return await _work_on(shard, equipment, writer)
    recipe = equipment.recipe
    parts = shard.split(recipe.scale.shard_size)
    max_losses = num_allowed_failures(recipe.errors, shard.total)
    effort, num_finished, num_done = Effort(), 0, shard.done
    equipment.progress(num_done, shard.total, f"{units}, {len(parts)} shards")
    async with aclosing(distribute(parts)) as results:
        async for result in results:
            writer.add(result.rows)
            await writer.flush()
            if result.fault is not None:
                raise type(result.fault)(f"worker {result.worker}: {result.fault}")
            effort += result.effort
            if effort.num_lost > max_losses:
                raise ErrorBudgetSpent(
                    f"{effort.num_lost} of {shard.total} {units} failed on the workers and {max_losses} may; table "
                    f"event has the errors; fix the cause, or raise errors.budget ({recipe.errors.budget})"
                )
            num_finished += 1
            num_done += result.num_units - result.effort.num_lost
            equipment.progress(
                num_done,
                shard.total,
                f"{units}, {num_finished} of {len(parts)} shards, {effort.tokens} tokens generated",
            )
    return effort


async def _work_on(shard: Shard, equipment: Equipment, sink: Sink) -> Effort:
    """Do the work of a shard in this process; return its effort, with `environment_seconds` capped
    at the wall time in which nothing was generated.
    """
    start = time.perf_counter()
    effort = await shard.work(equipment, sink)
    idle = max(0.0, time.perf_counter() - start - effort.generate_seconds)
    return replace(effort, environment_seconds=min(effort.environment_seconds, idle))
