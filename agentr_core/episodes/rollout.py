"""One episode: a model acts until the environment, or a limit, ends it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar

from agentr_core.environment import (
    Environment,
    Repeatability,
    Undelivered,
    checked_text,
    checked_transition,
    is_repetition,
)
from agentr_core.episodes.transcript import (
    CountTokens,
    Diagnosis,
    FitsContext,
    SummaryLimits,
    max_droppable,
    min_dropped_to_fit,
    next_request,
    summarisable_transcript,
    summary_positions,
    transcript_of,
    with_summary_request,
    without_exchanges,
    without_summaries,
)
from agentr_core.episodes.units import phase
from agentr_core.errors import (
    ConfigError,
    DataFault,
    EnvironmentTimeout,
    ModelFault,
    PromptTooLong,
    ReplayDiverged,
    ReplayDrifted,
)
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.replies import answer_text
from agentr_core.system import start_in_thread
from agentr_core.texts import error_summary, quoted
from agentr_core.types import (
    NO_LIMITS,
    Answer,
    EpisodeLimits,
    Generation,
    Instance,
    Message,
    Question,
    Request,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    Transition,
)

# Environments that many episodes share, one episode at a time.


class EnvironmentPool:
    """A pool of environments, made on demand: a new one only when all others of the same name are
    in use. One whose block raised an exception is closed and not reused.

    `make` returns a new environment by its name (`Instance.environment`); it runs in a thread.
    """

    def __init__(self, make: Callable[[str], Environment]) -> None:
        self._make = make
        self._idle: dict[str, list[Environment]] = {}

    @asynccontextmanager
    async def lend(self, instance: Instance) -> AsyncIterator[Environment]:
        """Yield an environment for an instance; it returns to the pool at the end of the block."""
        idle = self._idle.setdefault(instance.environment, [])
        with phase("environment start"):
            env = idle.pop() if idle else await asyncio.to_thread(self._make, instance.environment)
        try:
            yield env
        except BaseException as error:
            why = f"its run had a fault: {error_summary(error)}" if isinstance(error, Exception) else "its run ended"
            env.release(why)
            env.close()
            raise
        if env.has(Environment.relay):
            await asyncio.to_thread(env.release)
        idle.append(env)

    def close(self) -> None:
        """Close the environments that are not in use. Calling it twice is harmless."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


# Questions to models of other roles: for a grade after the episode, or by a step that cannot go on
# without an answer.


class Helper(Protocol):
    """A function that puts questions to the models of other roles."""

    def __call__(self, question: Question, *, seed: int, session: str) -> Awaitable[Answer]:
        """Return the answer. Raises as `ChatModel.generate` does."""
        ...


def steps_may_ask(env: Environment) -> bool:
    """Return whether the steps of an environment, with its current options, may ask models of other
    roles questions.

    An environment that has `answer` but asks only with some options sets `asks_in_steps` to False
    without these.
    """
    return env.has(Environment.answer) and bool(env.asks_in_steps)


async def no_helper(question: Question, *, seed: int, session: str) -> Answer:
    """Raise `ConfigError`: the `Helper` for where no model can be asked."""
    raise ConfigError(f"the environment asks a model of role {question.role}, but no model can be asked here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one reply. `stop` is None while the episode goes on."""

    step: Step
    stop: StopReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply drawn with `seed`, and its outcome."""

    seed: int
    generation: Generation
    outcome: Outcome


@dataclass(slots=True)
class EpisodeTimer:
    """Seconds spent in environment calls and seconds spent waiting for replies, summed over all
    calls that were given this timer.
    """

    environment_seconds: float = 0.0
    sampling_seconds: float = 0.0

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Count the time of the block as environment time."""
        start = perf_counter()
        try:
            yield
        finally:
            self.environment_seconds += perf_counter() - start

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the time of the block as waiting for the model."""
        start = perf_counter()
        try:
            yield
        finally:
            self.sampling_seconds += perf_counter() - start


def act(env: Environment, reply: str | Step | Generation, *, answers: Sequence[Answer] = ()) -> Outcome:
    """Take one step of the environment with a reply, whose action is that of `text_and_action`, and
    return the outcome. `answers` are recorded answers to the questions of the step.

    Raises `IllTypedAnswer` if the transition is malformed (see `Transition`), and `ConfigError` if
    the step asks more questions than there are answers.
    """
    text, action = text_and_action(env, reply)
    env.hear(text)
    generation, state = reply if isinstance(reply, Generation) else None, state_key(env)
    return _make_outcome(text, action, take_step(env, action, answers), generation, answers, state_key=state)


def take_step(env: Environment, action: str, answers: Sequence[Answer] = ()) -> Transition:
    """Take a step of the environment with an action, and return the transition. `answers` are
    recorded answers to the questions of the step; raises `ConfigError` if it asks more, since no
    model can be asked here.
    """
    transition = repeat_step(env, action, answers)
    if transition.info.get("question") is not None:
        raise ConfigError(f"environment {env.name} asks a model in its steps, but no model can be asked here")
    return transition


def repeat_step(env: Environment, action: str, answers: Sequence[Answer]) -> Transition:
    """Take a step of the environment with an action, answer its questions with recorded answers,
    and return the transition. If they do not suffice, `info["question"]` has the next question.
    """
    transition = env.step(action)
    for answer in answers:
        if transition.info.get("question") is not None:
            transition = env.answer(answer_text(answer) or "")
    return transition


def text_and_action(env: Environment, reply: str | Step | Generation) -> tuple[str, str]:
    """Return the text of a reply and the action in it; for a recorded step, its recorded action.

    A reply that was cut within the thought that its prompt opened has no action, whatever that
    thought considers; an agent outside parses it itself.
    """
    if isinstance(reply, Step):
        return reply.reply, reply.action
    text = reply if isinstance(reply, str) else reply.text
    is_thought = isinstance(reply, Generation) and reply.unfinished_thought and not env.has(Environment.relay)
    return text, "" if is_thought else env.parse(text)


def _make_outcome(
    reply: str,
    action: str,
    transition: Transition,
    generation: Generation | None,
    answers: Sequence[Answer] = (),
    *,
    state_key: str | None = None,
) -> Outcome:
    """Return the outcome of a completed step.

    A negative reward is a disaster: the step gets reward 0 and no success, and the episode ends.
    """
    observation, reward, terminated, truncated, info = transition
    disaster = reward < 0
    success = info["success"] and not disaster
    step = Step(
        reply=reply,
        action=action,
        observation=observation,
        reward=0.0 if disaster else reward,
        matched=info.get("matched"),
        valid=info.get("valid"),
        terminated=terminated or truncated,
        success=success,
        disaster=disaster,
        token_ids=generation.token_ids if generation else (),
        logprobs=generation.logprobs if generation else None,
        finish_reason=generation.finish_reason if generation else None,
        tokenizer=generation.tokenizer if generation else None,
        tool_calls=info.get("tool_calls", ()),
        answers=tuple(answers),
        state_key=state_key,
    )
    stop: StopReason | None
    if disaster:
        stop = StopReason.DISASTER
    elif terminated:
        stop = StopReason.SUCCESS if success else StopReason.FAILURE
    else:
        stop = StopReason.STEP_LIMIT if truncated else None
    return Outcome(step=step, stop=stop)


def with_other_outcome(reply: Reply, undelivered: Undelivered) -> Reply:
    """Return a reply with its outcome replaced by `undelivered.instead`: the reply after it did not
    reach an agent outside. Raises `IllTypedAnswer` if that transition is malformed.
    """
    step = reply.outcome.step
    transition = checked_transition(undelivered.instead, "what an agent did without a reply")
    outcome = _make_outcome(
        step.reply, step.action, transition, reply.generation, step.answers, state_key=step.state_key
    )
    return replace(reply, outcome=outcome)


async def act_with_helper(
    env: Environment,
    timer: EpisodeTimer,
    generation: Generation | str,
    helper: Helper = no_helper,
    *,
    seed: int = 0,
    session: str = "",
) -> Outcome:
    """Take one step of the environment with a sampled reply, or with the text of one that was not
    sampled, and return the outcome.

    `helper` answers the questions of the step; question i, from 0, is asked with seed
    `derive_seed(seed, "ask", i)`. Raises `IllTypedAnswer` for a malformed transition,
    `EnvironmentTimeout` as `call_env` does, and what `helper` raises.
    """
    answers: list[Answer] = []
    with phase("step"):
        reply, action = text_and_action(env, generation)
        env.hear(reply)
        sampled_generation = None if isinstance(generation, str) else generation
        if sampled_generation is not None:
            env.relay(sampled_generation)
        # In one call, since each call of a blocking environment starts a thread.
        state, transition = await call_env(env, timer, lambda: (state_key(env), env.step(action)))
        while (question := transition.info.get("question")) is not None:
            with phase("ask"), timer.sampling():
                answers.append(await helper(question, seed=derive_seed(seed, "ask", len(answers)), session=session))
            transition = await call_env(env, timer, partial(env.answer, answer_text(answers[-1]) or ""))
        return _make_outcome(reply, action, transition, sampled_generation, answers, state_key=state)


async def call_env(env: Environment, timer: EpisodeTimer, function: Callable[[], T]) -> T:
    """Run a function that uses the environment, and return its result. If the environment is
    `blocking`, the function runs in a thread of its own. Its time is added to `timer`.

    A pool of threads would not do: slow calls would hold up other episodes, and the call that a
    thread waits for might never get one. Raises `EnvironmentTimeout` if the call of a blocking
    environment takes longer than its `time_limit`; the thread is not stopped.
    """

    def run_timed() -> T:
        with timer.environment():
            return function()

    if not env.blocking:
        return run_timed()
    time_limit = env.time_limit
    try:
        async with asyncio.timeout(time_limit) as timeout:
            # Without a limit the process waits for the call before it exits: an environment that
            # is closed during a call may release its resources only after it.
            return await asyncio.wrap_future(start_in_thread(run_timed, name=env.name, daemon=time_limit is not None))
    except TimeoutError:
        if not timeout.expired():
            raise
        raise EnvironmentTimeout(f"{env.name} gave no answer within {time_limit:g} seconds, its time_limit") from None


# Replies of a model, sampled from prompts that fit its context.

SampleReplies = Callable[[Request], Awaitable[list[Generation]]]
"""Returns `request.n` replies. Raises `PromptTooLong` only if this request is too long, not if
another one in the same batch is.
"""


async def sample_within_context(
    sample: SampleReplies, request: Request, timer: EpisodeTimer, fits: FitsContext | None, *, min_dropped: int = 0
) -> tuple[list[Generation], int]:
    """Sample the replies to a request. Return them, and how many of the oldest exchanges were left
    out of the prompt to make it fit.

    With `fits` None nothing is left out. `min_dropped` is the least number to leave out: that of
    the previous reply. Raises as `sample_replies`; `PromptTooLong` only if no further exchange can
    be left out.
    """
    max_dropped = 0 if fits is None else max_droppable(request.messages)
    num_dropped = 0 if fits is None else min_dropped_to_fit(request.messages, fits, minimum=min_dropped)
    while True:
        messages = without_exchanges(request.messages, num_dropped)
        try:
            return await sample_replies(sample, replace(request, messages=messages), timer), num_dropped
        except PromptTooLong:
            # A server may count more tokens than we do.
            if num_dropped >= max_dropped:
                raise
            num_dropped += 1


def with_num_dropped(outcome: Outcome, num_dropped: int) -> Outcome:
    """Return an outcome with the number of exchanges that the prompt lacked in its step."""
    return replace(outcome, step=replace(outcome.step, dropped=num_dropped)) if num_dropped else outcome


async def sample_replies(sample: SampleReplies, request: Request, timer: EpisodeTimer) -> list[Generation]:
    """Sample the replies to a request, and return them; the wait is added to `timer`. Raises
    `ModelFault` if there are not `request.n` of them, and what `sample` raises.
    """
    with phase("generate"), timer.sampling():
        generations = await sample(request)
        if len(generations) != request.n:
            raise ModelFault(f"session {request.session}: {request.n} replies were asked for, {len(generations)} came")
        return generations


# Replies and recorded steps, played again: to see where they lead, or to get back to a state.


def play_replies(
    env: Environment, instance: Instance, replies: Sequence[str | Step], *, recorded: Sequence[Step] = ()
) -> tuple[str, tuple[Outcome, ...]]:
    """Play given replies in a fresh episode. Return the first observation and the outcome of each
    reply, up to the one that ends the episode.

    The outcomes are not compared with recorded ones, and may differ: this is how a spliced path is
    verified. The first `len(recorded)` replies are those of the `recorded` steps, whose recorded
    answers are given to the questions of these steps. Raises what `act` raises.
    """
    first_observation = env.reset(instance)
    outcomes: list[Outcome] = []
    for position, reply in enumerate(replies):
        answers = recorded[position].answers if position < len(recorded) else ()
        outcomes.append(act(env, reply, answers=answers))
        if outcomes[-1].stop is not None:
            break
    return first_observation, tuple(outcomes)


def restore_state(env: Environment, instance: Instance, steps: Sequence[Step], *, first_observation: str = "") -> str:
    """Put the environment into the state after recorded steps, and return the first observation.

    An environment with its own `resume` is given the steps; otherwise their actions are replayed,
    and each observation is compared as `environment.is_repetition` does. An empty
    `first_observation` is not compared. Steps that are summaries are skipped.

    Raises `ReplayDiverged` if an observation differs, a step asks a model more questions than were
    recorded, or the episode ends at one of the steps; if the environment is not exactly repeatable,
    `ReplayDrifted`, which is transient.
    """
    repeatability, steps = Repeatability(env.repeatability), without_summaries(steps)
    can_resume = env.has(Environment.resume)
    actual_observation = env.resume(instance, steps) if can_resume else env.reset(instance)
    if first_observation and not is_repetition(actual_observation, first_observation, repeatability):
        raise divergence_error(
            env, f"{instance.key}: first observation {_difference(actual_observation, first_observation)}"
        )
    for position, step in enumerate(() if can_resume else steps):
        # With the recorded answers of models.
        transition = repeat_step(env, step.action, step.answers)
        if transition.info.get("question") is not None:
            raise divergence_error(env, f"{step.action!r} asks a model more often than when it was recorded")
        observation, _, terminated, truncated, _ = transition
        if not is_repetition(observation, step.observation, repeatability):
            context = f"{instance.key}: observation {position} after {step.action!r}"
            raise divergence_error(env, f"{context} {_difference(observation, step.observation)}")
        if terminated or truncated:
            raise divergence_error(env, f"{instance.key}: the episode ended at step {position} of a replay")
    return actual_observation


def divergence_error(env: Environment, message: str) -> ReplayDiverged:
    """Return the error for a replay that led elsewhere: `ReplayDiverged` for an environment whose
    repeatability is `EXACT`, else `ReplayDrifted`, which is transient.
    """
    if Repeatability(env.repeatability) is Repeatability.EXACT:
        return ReplayDiverged(
            f"{message}; the environment is not deterministic, or its data or version changed since the recording"
        )
    return ReplayDrifted(f"{message}; {env.name} does not promise to repeat itself to the letter")


def _difference(current: str, recorded_text: str) -> str:
    return f"was recorded as {quoted(recorded_text, 120)} and is now {quoted(current, 120)}"


_MAX_UNDELIVERED = 100
"""How many replies of an episode may fail to reach an agent outside before the episode fails."""
T = TypeVar("T")


async def roll_out_episode(
    instance: Instance,
    env: Environment,
    sample: SampleReplies,
    *,
    max_steps: int,
    sampling: Sampling,
    seed: int,
    prefix: Sequence[Step] = (),
    diagnosis: str = "",
    max_repeats: int = 0,
    fits: FitsContext | None = None,
    summaries: SummaryLimits | None = None,
    on_reply: Callable[[Reply], None] | None = None,
    on_step: Callable[[str, Sequence[Step]], None] = lambda first_observation, steps: None,
    timer: EpisodeTimer | None = None,
    helper: Helper = no_helper,
    limits: EpisodeLimits = NO_LIMITS,
    count_tokens: CountTokens | None = None,
) -> Trajectory:
    """Roll out one episode: restore the state after `prefix`, let the model act until the episode
    ends, and return the trajectory, with the steps of the prefix first.

    Args:
        max_steps: the most replies of the model, summaries included; the prefix is not counted.
        max_repeats: end the episode once the model has given the same reply in the same state this
            many times; 0 never does. Any other number needs an environment with a `state`.
        seed: the reply after n steps, those of the prefix included, is drawn with seed
            `derive_seed(seed, "step", n)`.
        prefix: recorded steps, restored as `restore_state` does.
        diagnosis: a text on an earlier attempt that the model reads after the prefix; it is stored
            in no step.
        fits: whether a prompt fits. If given, the oldest exchanges of a prompt that does not fit
            are left out; otherwise such a prompt ends the episode.
        summaries: if given, the model sums up a conversation that does not fit, and goes on from
            its summary, which is one of its replies; an empty one ends the episode.
        on_reply: is called for each reply of the model once the episode is over, except those that
            did not reach an agent outside.
        on_step: is called with the first observation and the steps so far, once before the model's
            first reply and after each step. What the last step led to may still change, if the next
            reply does not reach an agent outside.
        helper: answers the questions of steps to models of other roles.
        limits: the most tokens, those of the prefix included, and the most seconds.
        count_tokens: counts the tokens of a prompt; needed if the tokens are limited.

    Raises `ConfigError` if an argument does not suit the environment, `ReplayDiverged` as
    `restore_state` does, and `Undelivered` as `_Progress.handle_undelivered` does. Faults of the
    environment, of `sample` and of `helper` are raised as they are.
    """
    if max_repeats:
        require_state(env)
    bounds, timer = _Bounds(env, limits, count_tokens, fits, summaries), timer or EpisodeTimer()
    with phase("restore" if prefix else "reset"):
        progress = _Progress(await call_env(env, timer, lambda: restore_state(env, instance, prefix)), prefix)
    session = f"{instance.key}#{seed}"
    prompt_diagnosis = Diagnosis(text=diagnosis, after=len(prefix)) if diagnosis else None
    stop: StopReason | None = None
    on_step(progress.first_observation, progress.steps())
    while stop is None and len(progress.replies) < max_steps:
        steps = progress.steps()
        first_observation = progress.first_observation
        reply_seed = derive_seed(seed, "step", len(steps))
        request = next_request(
            env, first_observation, steps, sampling, seed=reply_seed, session=session, diagnosis=prompt_diagnosis
        )
        try:
            request = bounds.cap_tokens(request, first_observation, steps)
            is_last = len(progress.replies) + 1 == max_steps
            reply = await _next_reply(env, request, sample, timer, bounds, helper, progress, is_last=is_last)
        except Undelivered as error:
            stop = progress.handle_undelivered(error)
            continue
        except _CutOff as cut_off:
            stop = cut_off.report_to_agent(env)
            continue
        num_repeats = progress.add(reply)
        on_step(progress.first_observation, progress.steps())
        stop = reply.outcome.stop
        # A failure whose reply was cut at the last token of the episode is due to the token limit.
        is_capped = request.sampling.max_new_tokens < sampling.max_new_tokens
        if stop is StopReason.FAILURE and is_capped and reply.generation.finish_reason == "length":
            stop = StopReason.TOKEN_LIMIT
        if stop is None and 0 < max_repeats <= num_repeats:
            stop = StopReason.REPEATS
    progress.report_replies(on_reply)
    return Trajectory.ended(instance, progress.first_observation, progress.steps(), stop or StopReason.STEP_LIMIT)


@dataclass(slots=True)
class _Progress:
    """An episode so far: its first observation, the recorded steps, and the model's replies."""

    first_observation: str
    prefix: Sequence[Step]
    replies: list[Reply] = field(default_factory=list)
    reply_counts: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    num_undelivered: int = 0

    def steps(self) -> list[Step]:
        """Return all steps."""
        return [*self.prefix, *(reply.outcome.step for reply in self.replies)]

    def num_dropped(self) -> int:
        """Return how many exchanges the prompt of the last reply lacked; 0 without a reply."""
        return self.replies[-1].outcome.step.dropped if self.replies else 0

    def add(self, reply: Reply) -> int:
        """Add a reply. Return how often it has now been given in its state; 0 for a summary."""
        self.replies.append(reply)
        if reply.outcome.step.summary_of is not None:
            return 0
        state_and_reply = reply.outcome.step.state_key, reply.generation.text
        self.reply_counts[state_and_reply] += 1
        return self.reply_counts[state_and_reply]

    def handle_undelivered(self, error: Undelivered) -> StopReason | None:
        """Go on after a reply that did not reach an agent outside: what the agent did instead
        (`error.instead`) becomes the outcome of the reply before, or the first observation if there
        is none. Return the stop reason, None if the episode goes on.

        Raises the error as it is, so that the unit is retried, if more than `_MAX_UNDELIVERED`
        were lost, or if there is no reply and the episode has a prefix or is over.
        """
        self.num_undelivered += 1
        if error.stop is not None:
            return error.stop
        is_over = error.instead.terminated
        if self.num_undelivered > _MAX_UNDELIVERED or (not self.replies and (self.prefix or is_over)):
            raise error
        if self.replies:
            self.replies[-1] = with_other_outcome(self.replies[-1], error)
            return self.replies[-1].outcome.stop
        self.first_observation = error.instead.observation
        return None

    def report_replies(self, on_reply: Callable[[Reply], None] | None) -> None:
        """Call a function for each reply; None calls nothing."""
        if on_reply is not None:
            for reply in self.replies:
                on_reply(reply)


class _CutOff(Exception):
    """An episode can have no further reply; `stop` is its stop reason."""

    def __init__(self, stop: StopReason, reason: str) -> None:
        super().__init__(reason)
        self.stop = stop

    def report_to_agent(self, env: Environment) -> StopReason:
        """Tell an agent outside why it gets no further reply, and return the stop reason."""
        env.refuse(str(self))
        return self.stop


class _Bounds:
    """The limits of one episode: what fits a prompt, its tokens, and its seconds, counted from the
    creation of this object.

    When the time is over only a wait for a model is cancelled, never a call of the environment: it
    would go on in its thread, and the next episode needs the environment.
    """

    def __init__(
        self,
        env: Environment,
        limits: EpisodeLimits,
        count_tokens: CountTokens | None,
        fits: FitsContext | None,
        summaries: SummaryLimits | None,
    ) -> None:
        if env.has(Environment.relay) and fits is not None:
            raise ConfigError("context: an agent outside sends the history that it wants read; leave window out")
        if summaries is not None:
            summarisable_transcript(env)
        if env.has(Environment.relay) and limits.tokens:
            raise ConfigError("max_episode_tokens: an agent outside has conversations of its own; leave it out")
        self.fits, self.summaries = fits, summaries
        self._env, self._limits, self._count_tokens = env, limits, count_tokens
        self._deadline = asyncio.get_running_loop().time() + limits.seconds if limits.seconds else None
        self._num_opening_tokens: int | None = None

    def cap_tokens(self, request: Request, first_observation: str, steps: Sequence[Step]) -> Request:
        """Return a request with `max_new_tokens` reduced to the tokens that the episode has left
        after `steps`; those of the opening are not counted. Raises `_CutOff` if none are
        left or the time is over, `ConfigError` if tokens are limited and nothing counts them.
        """
        self._check_time()
        if not self._limits.tokens:
            return request
        transcript = transcript_of(self._env)
        if self._num_opening_tokens is None:
            self._num_opening_tokens = self._num_tokens(transcript.prompt(self._env, first_observation, ()))
        num_tokens = self._num_tokens(request.messages)
        if summaries := summary_positions(steps):
            # Steps that were summed up still count, and so do the summaries.
            num_tokens = self._num_tokens(transcript.prompt(self._env, first_observation, without_summaries(steps)))
            num_tokens += sum(
                self._num_tokens((Message(role="user", text=steps[position].reply),)) for position in summaries
            )
        remaining = self._limits.tokens - (num_tokens - self._num_opening_tokens)
        if remaining < 1:
            raise _CutOff(StopReason.TOKEN_LIMIT, f"the episode has had its {self._limits.tokens:,} tokens")
        sampling = request.sampling
        return replace(request, sampling=replace(sampling, max_new_tokens=min(remaining, sampling.max_new_tokens)))

    def sampling(self, sample: SampleReplies) -> SampleReplies:
        """Return `sample` with the time limit: it raises `_CutOff` when the time is over."""

        async def sample_in_time(request: Request) -> list[Generation]:
            return await self._await_in_time(sample(request))

        return sample_in_time

    def limit_helper_time(self, helper: Helper) -> Helper:
        """Return `helper` with the time limit: it raises `_CutOff` when the time is over."""

        async def ask_in_time(question: Question, *, seed: int, session: str) -> Answer:
            return await self._await_in_time(helper(question, seed=seed, session=session))

        return ask_in_time

    async def _await_in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._deadline) as timeout:
                return await work
        except TimeoutError:
            if timeout.expired():
                self._check_time()
            raise

    def _check_time(self) -> None:
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            raise _CutOff(StopReason.TIME_LIMIT, f"the episode has had its {self._limits.seconds:g} seconds")

    def _num_tokens(self, messages: tuple[Message, ...]) -> int:
        if self._count_tokens is None:
            raise ConfigError("max_episode_tokens: nothing counts the tokens here; leave it out")
        return self._count_tokens(messages)


async def _next_reply(
    env: Environment,
    request: Request,
    sample: SampleReplies,
    timer: EpisodeTimer,
    bounds: _Bounds,
    helper: Helper,
    progress: _Progress,
    *,
    is_last: bool,
) -> Reply:
    """Sample the reply to a request, take the step, and return both. If the history must be summed
    up first, return the summary instead, unless this is the last reply that the episode may have.

    Raises `_CutOff` if the time is over, or the context has no room for a reply; in the
    second case an agent outside is told, and `Undelivered` is raised instead.
    """
    request, min_dropped = replace(request, on_text=env.listener()), progress.num_dropped()
    summaries = None if is_last else bounds.summaries
    if summaries and not summaries.fits_summary_and_reply(with_summary_request(request.messages, env.summary_prompt)):
        summary = await _sample_summary(env, request, sample, timer, bounds, summaries, progress)
        if summary is not None:
            return summary
    try:
        replies, num_dropped = await sample_within_context(
            bounds.sampling(sample), request, timer, bounds.fits, min_dropped=min_dropped
        )
    except (PromptTooLong, DataFault) as error:
        # The conversation is the outside agent's own: it is told, and may go on with another.
        if env.has(Environment.relay):
            await call_env(env, timer, partial(env.decline, error))
        if isinstance(error, PromptTooLong):
            # A server may count more tokens than we do.
            summary = (
                await _sample_summary(env, request, sample, timer, bounds, summaries, progress) if summaries else None
            )
            if summary is not None:
                return summary
            raise _CutOff(StopReason.CONTEXT_LIMIT, str(error)) from None
        raise
    outcome = await act_with_helper(
        env, timer, replies[0], bounds.limit_helper_time(helper), seed=request.seed, session=request.session
    )
    return Reply(seed=request.seed, generation=replies[0], outcome=with_num_dropped(outcome, num_dropped))


async def _sample_summary(
    env: Environment,
    request: Request,
    sample: SampleReplies,
    timer: EpisodeTimer,
    bounds: _Bounds,
    summaries: SummaryLimits,
    progress: _Progress,
) -> Reply | None:
    """Sample a summary of as many steps as the context has room for, and return it as a reply. None
    if there is no step to sum up, or no room. Raises `_CutOff` as `_Bounds.cap_tokens` does.

    A summary that was cut by its token limit is used as it is. One that is empty or only a thought
    ends the episode: the history does not fit, and there is nothing to replace it.
    """
    first_observation, steps = progress.first_observation, progress.steps()
    earlier_lengths = [steps[position].summary_of or 0 for position in summary_positions(steps)]
    sampling = replace(request.sampling, max_new_tokens=summaries.max_new_tokens, stop=(), include_stop=False, until="")
    for position in range(len(steps) - 1, (earlier_lengths or [0])[-1] - 1, -1):
        prompt = summarisable_transcript(env).summary_prompt(env, first_observation, steps, position + 1)
        if steps[position].summary_of is not None or not summaries.fits_summary(prompt):
            continue
        summary_request = bounds.cap_tokens(
            replace(request, messages=prompt, sampling=sampling), first_observation, steps
        )
        try:
            (generation,) = await sample_replies(bounds.sampling(sample), summary_request, timer)
        except PromptTooLong:
            continue
        transition = Transition("", steps[-1].reward, False, False, {"success": steps[-1].success})
        outcome = _make_outcome(generation.text, "", transition, generation)
        is_empty = not (answer_text(generation) or "").strip()
        stop = StopReason.CONTEXT_LIMIT if is_empty else None
        outcome = Outcome(step=replace(outcome.step, summary_of=position + 1), stop=stop)
        return Reply(seed=request.seed, generation=generation, outcome=outcome)
    return None


def state_key(env: Environment) -> str | None:
    """Return a key of the environment's current state: 16 hexadecimal digits, equal for equal
    states of one instance. None if the environment has no `state`. Raises `IllTypedAnswer` if its
    state is not a text.
    """
    return fingerprint(checked_text(env.state(), f"{env.name}: its state")) if env.has(Environment.state) else None


def require_state(env: Environment, setting: str = "repeats", *, remedy: str = "") -> None:
    """Raise `ConfigError` if an environment has no `state`. The message says what to do `remedy`;
    by default, to leave out `setting`.
    """
    if not env.has(Environment.state):
        raise ConfigError(f"environment {env.name} does not tell its state; {remedy or f'leave {setting} out'}")
