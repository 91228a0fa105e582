"""An environment that is played by an agent in its own process: the agent's calls of the policy are
the observations, and it reports the reward.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, get_args

import httpx

from agentr_core.environment import Environment, Instances, Repeatability, Undelivered
from agentr_core.environments.agentgym.client import shared_connection
from agentr_core.environments.gateway.conversations import CallTurn, Conversations, OutsideTurns, Prompt, SideCalls
from agentr_core.errors import (
    AgentrError,
    ConfigError,
    EnvironmentFault,
    EnvironmentServerError,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    PromptTooLong,
)
from agentr_core.fingerprint import canonical
from agentr_core.recipes.models import url_fault
from agentr_core.samples.record_files import records
from agentr_core.types import Generation, Instance, StopReason, Transition

_POLL_SECONDS = 5.0
_NUM_TRIES = 3
_TIMEOUT_SECONDS = 300.0
_MAX_CALLS_WITHOUT_ROOM = 10
"""The most calls in a row without room for a reply; one more ends the episode. Agents that can
handle this summarise their history after one or a few.
"""
_PROGRESS_TIMEOUT_SECONDS = 5.0
_SECONDS_WITHOUT_ROOM = 60.0
"""Seconds that an agent has for its next call after one without room for a reply."""


class _Registration:
    """The name by which a gateway knows this process, and the connection that keeps the name valid.
    If the connection breaks, the gateway ends the episodes of the process, so that no agent waits
    for a run that was killed.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._exit_stack = ExitStack()
        self._lines: Iterator[str] = iter(())
        # Closed explicitly: at interpreter shutdown, what would close the connection is already
        # gone.
        atexit.register(self._disconnect)
        self._lock = threading.Lock()
        self.name = "none"

    def renew(self, unknown_name: str) -> None:
        """Ask the gateway for a new name if `unknown_name` is the present one. Raises
        `EnvironmentUnavailable` if the connection breaks, and `EnvironmentServerError` if this is
        not a gateway or wants another token.
        """
        with self._lock:
            if self.name == unknown_name:
                self._disconnect()
                url = f"{self._url}/run/arrive"
                try:
                    client = self._exit_stack.enter_context(
                        httpx.Client(headers=self._headers, timeout=_TIMEOUT_SECONDS)
                    )
                    response = self._exit_stack.enter_context(client.stream("POST", url))
                    # The answer stays open while this process lives; dropping its iterator would
                    # close it.
                    self._lines = response.iter_lines()
                    first_line = next(self._lines, "")
                except httpx.HTTPError as error:
                    raise EnvironmentUnavailable(
                        f"{url} broke the connection ({error or type(error).__name__})"
                    ) from error
                if response.status_code != httpx.codes.OK:
                    raise EnvironmentServerError(
                        f"{url} answered {response.status_code} ({first_line[:300]}): this is not a gateway of agentr "
                        "of this version, or it wants another token; correct the address, or set AGENTR_GATEWAY_TOKEN"
                    )
                self.name = first_line

    def _disconnect(self) -> None:
        self._lines = iter(())
        self._exit_stack.close()


@cache
def _registration(url: str, token: str, pid: int) -> _Registration:
    """Return the presence of the process with an id; a forked process has its own."""
    return _Registration(url, token)


class _PartialReplySender:
    """A sender of partial replies to a gateway: for each episode the latest text, as soon as
    earlier requests are done. Texts may be lost without harm, since the whole replies follow.
    """

    def __init__(self, url: str, token: str) -> None:
        self._progress_url = f"{url}/run/progress"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(headers=headers, timeout=_PROGRESS_TIMEOUT_SECONDS)
        self._texts_by_episode: dict[str, str] = {}
        self._texts_lock, self._sending_lock = threading.Lock(), threading.Lock()
        self._has_texts = threading.Event()
        self._thread: threading.Thread | None = None

    def schedule(self, episode: str, text: str) -> None:
        """Schedule the partial text of an episode's reply for sending."""
        with self._texts_lock:
            self._texts_by_episode[episode] = text
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_texts, name="texts", daemon=True)
                self._thread.start()
        self._has_texts.set()

    def discard(self, episode: str) -> None:
        """Drop the unsent text of an episode, waiting for a request that is under way."""
        with self._sending_lock, self._texts_lock:
            self._texts_by_episode.pop(episode, None)

    def _send_texts(self) -> None:
        while self._has_texts.wait():
            self._has_texts.clear()
            # A text with a lone surrogate cannot be encoded.
            with self._sending_lock, suppress(httpx.HTTPError, UnicodeError):
                with self._texts_lock:
                    texts_by_episode, self._texts_by_episode = self._texts_by_episode, {}
                self._client.post(self._progress_url, json={"texts": texts_by_episode})


@cache
def _partial_reply_sender(url: str, token: str, pid: int) -> _PartialReplySender:
    return _PartialReplySender(url, token)


# An agent cannot choose its instance: groups and held-out sets need to know which one is played
# before the episode begins. As a world, the gateway shares the plans, seeds, retries and lineage of
# all worlds.
class Gateway(Environment):
    """Episodes played by outside agents, which connect to a gateway (`agentr gateway`) at `url`.

    A reset offers an episode, which begins with the first call of the agent that takes it. The
    agent's world is not known here: its next call shows what it did with a reply, and at the end it
    reports a reward in [0, 1]. If the agent falls silent or gives up, the episode is offered again,
    as the recipe's section `errors` says.

    Args:
        url: the address of the gateway, such as http://127.0.0.1:8170; by default the value of the
            variable AGENTR_GATEWAY.
        splits: for each split, the number of its instances, or a JSON Lines file with one task on
            each line, which the agent gets with the episode.
        patience_s: seconds for which an agent may be silent when it is its turn, and for which all
            agents may be silent while an episode is offered.
        token: the token of a gateway that other machines can reach; set it in the variable
            AGENTR_GATEWAY_TOKEN, since a recipe is stored.
        repeatability: how exactly an agent repeats itself when it gets the same replies: exact,
            unordered or never. Search replays episodes, and compares them accordingly.
        side_calls: what becomes of calls that are not about the agent's task, such as those for
            titles and summaries: `leave` keeps them out of training, `train` trains them with the
            episode's reward. See `OutsideTurns`.
    """

    name = "gateway"
    instruction = "The conversation is that of an agent outside."
    acknowledgement = ""
    step_limit = 40
    variables: ClassVar[Mapping[str, str]] = {"url": "AGENTR_GATEWAY", "token": "AGENTR_GATEWAY_TOKEN"}
    blocking = True
    transcript = OutsideTurns()

    def __init__(
        self,
        *,
        url: str = "",
        splits: Mapping[str, int | str] | None = None,
        patience_s: float = 600.0,
        repeatability: str = "exact",
        side_calls: SideCalls = "leave",
        token: str = "",
    ) -> None:
        if not url:
            raise ConfigError(
                "gateway needs the address of one: set the option url, or the variable AGENTR_GATEWAY; "
                "`agentr gateway` starts one"
            )
        if fault := url_fault(url, example="http://127.0.0.1:8170"):
            raise ConfigError(f"gateway: option url: {fault}")
        if not splits:
            raise ConfigError("gateway needs the option splits, such as {train: 300, test: 100} or files of tasks")
        if not isinstance(self.transcript, OutsideTurns):
            raise ConfigError("environment.transcript: agents bring their own conversation; leave native out")
        if repeatability not in tuple(Repeatability):
            raise ConfigError(f"gateway: repeatability must be {', '.join(Repeatability)}, not {repeatability!r}")
        self.repeatability = Repeatability(repeatability)
        if side_calls not in get_args(SideCalls):
            raise ConfigError(f"gateway: side_calls must be {' or '.join(get_args(SideCalls))}, not {side_calls!r}")
        self.transcript = OutsideTurns(side_calls)
        self._tasks_by_split = {split: _load_tasks(split, value) for split, value in splits.items()}
        self._url, self._token = url.rstrip("/"), token
        server_description = "a gateway of agentr"
        self._connection = shared_connection(
            self._url, timeout_s=_TIMEOUT_SECONDS, patience_s=30.0, description=server_description, token=token
        )
        self._patience_s = patience_s
        self._episode_id = ""
        self._is_over = True
        self._is_closed = False
        self._conversations = Conversations()
        # The conversation that the next reply answers.
        self._prompt: Prompt = ()
        self._generation_info: dict[str, Any] = {}
        self._refusal_reason = ""
        self._num_calls_without_room = 0
        self._is_streamed = False

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the task files of the option `splits`."""
        return tuple(value for value in (options.get("splits") or {}).values() if isinstance(value, str))

    def reach(self) -> None:
        """Wait until the gateway answers. Raises `EnvironmentServerError` if it does not, or wants
        another token.
        """
        try:
            self._connection.reach()
            _registration(self._url, self._token, os.getpid()).renew("none")
        except EnvironmentUnavailable as fault:
            raise EnvironmentServerError(f"gateway: {fault}; {self.start_hint()}") from fault

    def start_hint(self) -> str:
        """Return how a gateway is started; see `Environment.start_hint`."""
        return "`agentr gateway` starts one"

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._tasks_by_split)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split, numbered from 0."""
        if split not in self._tasks_by_split:
            raise ConfigError(f"gateway has no split {split!r}; it has {', '.join(self.splits())}")
        return Instances(self.name, split, range(len(self._tasks_by_split[split])))

    def identity(self, instance: Instance) -> str:
        """Return the task of an instance as JSON, or its key if only the agent knows its task."""
        task = self._task(instance)
        return instance.key if task is None else canonical(task)

    def reset(self, instance: Instance) -> str:
        """Offer an episode, wait until an agent takes it and calls, and return its first call.
        Raises `EnvironmentUnavailable` if the episode is lost or ends before a call, and
        `EnvironmentTimeout` if agents stay silent.
        """
        task = self._task(instance)
        self.release()
        offer = {"environment": self.name, "split": instance.split, "index": instance.index, "task": task}
        registration = _registration(self._url, self._token, os.getpid())
        for _ in range(_NUM_TRIES):
            run_name = registration.name
            episode_id = self._connection.post("/run/open", {**offer, "run": run_name}, retries_connecting=True)[
                "episode"
            ]
            if episode_id is not None:
                break
            registration.renew(run_name)
        else:
            raise EnvironmentUnavailable(f"{self._url} forgets this run; see whether the connection to it is stable")
        self._episode_id, self._is_over = str(episode_id), False
        event = self._next_event(None)
        if event["event"] != "call":
            raise EnvironmentUnavailable(
                f"{instance.key}: the agent reported a reward before it asked the policy anything"
            )
        self._conversations, self._num_calls_without_room = Conversations(), 0
        return self._read_call(event)

    def step(self, action: str) -> Transition:
        """Give the agent a reply, wait, and return the transition: its next call, or the reward
        that it reports. Raises `Undelivered` if the agent went on without the reply, and otherwise
        as `reset`.
        """
        if self._is_over:
            raise EnvironmentFault("gateway: a step before the reset, or after the end")
        generation_info, self._generation_info = self._generation_info, {}
        self._num_calls_without_room = 0
        if self._is_streamed:
            _partial_reply_sender(self._url, self._token, os.getpid()).discard(self._episode_id)
        ids = self._conversations.add(self._prompt, action)
        event = self._next_event({"text": action, "ids": ids, **generation_info})
        # A reply that is in the history of the next call has arrived, even if its connection broke.
        if not event["delivered"] and not (
            event["event"] == "call" and self._conversations.has_last_reply(_call_turns(event))
        ):
            self._conversations.drop_last()
            self._raise_undelivered(event, "a reply was not delivered")
        return self._transition_to(event)

    def decline(self, fault: AgentrError) -> NoReturn:
        """Tell the agent why its call gets no reply, wait, and raise `Undelivered` with the
        transition to what it does next; see `Environment.decline`.

        If the history leaves no room for a reply, the agent may go on with a shorter one; if it
        does not, the episode is over.
        """
        refusal: dict[str, Any] = {"refused": str(fault), "code": "invalid_request"}
        if not isinstance(fault, PromptTooLong):
            self._raise_undelivered(self._next_event(refusal), f"a call was refused ({fault})")
        self._num_calls_without_room += 1
        transition = Transition("", 0.0, False, True, {"success": False})
        if self._num_calls_without_room > _MAX_CALLS_WITHOUT_ROOM:
            self.release(str(fault))
            raise Undelivered(str(fault), transition, StopReason.CONTEXT_LIMIT)
        refusal["code"] = "context_length_exceeded"
        if fault.context_length:
            refusal |= {"prompt_tokens": fault.tokens, "context": fault.context_length}
        try:
            event = self._next_event(refusal, max_silence_s=min(self._patience_s, _SECONDS_WITHOUT_ROOM))
        except EnvironmentUnavailable as unavailable:
            if not (self._is_over or isinstance(unavailable, EnvironmentTimeout)):
                # The gateway is gone, and the agent might have gone on.
                raise
            self.release(str(fault))
            raise Undelivered(str(fault), transition, StopReason.CONTEXT_LIMIT) from unavailable
        self._raise_undelivered(event, f"a call was refused ({fault})")

    def relay(self, generation: Generation) -> None:
        """Record how the reply of the next step was sampled, for the agent; see
        `Environment.relay`.
        """
        self._generation_info = {
            "finish_reason": generation.finish_reason,
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.completion_tokens,
        }

    def listener(self) -> Callable[[str], None] | None:
        """Return a function that sends the agent the text of its next reply so far; None if the
        agent waits for the whole reply. See `Environment.listener`.
        """
        return (
            partial(_partial_reply_sender(self._url, self._token, os.getpid()).schedule, self._episode_id)
            if self._is_streamed
            else None
        )

    def refuse(self, why: str) -> None:
        """Record why there is no reply; `release` tells the agent. See `Environment.refuse`."""
        self._refusal_reason = why

    def release(self, why: str = "it has had all its steps, or its run was ended") -> None:
        """End the episode, if there is one, and tell the agent why; see `Environment.release`."""
        episode_id, self._episode_id = self._episode_id, ""
        why, self._refusal_reason = self._refusal_reason or why, ""
        self._generation_info, self._is_over = {}, True
        if episode_id:
            self._connection.close("/run/close", {"episode": episode_id, "why": why})

    def parse(self, reply: str) -> str:
        """Return the reply itself: the agent parses it."""
        return reply

    def close(self) -> None:
        """End the episode, and tell an agent that still plays it."""
        self._is_closed = True
        self.release()

    def _task(self, instance: Instance) -> Any:
        tasks = self._tasks_by_split.get(instance.split, ())
        if instance.environment != self.name or not 0 <= instance.index < len(tasks):
            raise EnvironmentFault(f"gateway has no instance {instance.key}")
        return tasks[instance.index]

    def _read_call(self, event: Mapping[str, Any]) -> str:
        """Return what a call adds to the known conversations, as the text of an observation."""
        self._is_streamed = bool(event.get("stream"))
        self._prompt, observation = self._conversations.match_call(_call_turns(event))
        return observation

    def _transition_to(self, event: Mapping[str, Any]) -> Transition:
        """Return the transition to an agent's event: a call, or a reward."""
        if event["event"] == "reward":
            self._is_over = True
            return Transition("", event["reward"], True, False, {"success": event["success"]})
        return Transition(self._read_call(event), 0.0, False, False, {"success": False})

    def _raise_undelivered(self, event: Mapping[str, Any], reason: str) -> NoReturn:
        message = f"episode {self._episode_id}: {reason}, and the agent went on without a reply"
        raise Undelivered(message, self._transition_to(event))

    def _next_event(self, reply: dict[str, Any] | None, *, max_silence_s: float = math.inf) -> dict[str, Any]:
        """Send a reply, if there is one, wait for the agent's next event, and return it: a call or
        a reward. Raises `EnvironmentTimeout` if it is silent for longer than `patience_s` or
        `patience_s` seconds, and `EnvironmentUnavailable` if the episode is lost.
        """
        episode_id, max_silence_s = self._episode_id, min(max_silence_s, self._patience_s)
        while not self._is_closed:
            body = {"episode": episode_id, "reply": reply, "wait": min(_POLL_SECONDS, max_silence_s)}
            event: dict[str, Any] = self._connection.post("/run/next", body)
            reply = None
            if event["event"] in ("call", "reward"):
                return event
            if event["event"] == "lost":
                self._is_over = True
                raise EnvironmentUnavailable(f"episode {episode_id} was lost: {event['why']}")
            if event["silent"] > max_silence_s:
                subject = f"the agent of episode {episode_id}" if event["taken"] else "every agent"
                raise EnvironmentTimeout(
                    f"{subject} was silent for {event['silent']:.0f} s; see whether it lives, or raise patience_s"
                )
        raise EnvironmentFault("gateway: this environment is closed")


def _call_turns(event: Mapping[str, Any]) -> list[CallTurn]:
    return [CallTurn.read(turn) for turn in event["turns"]]


# Hundreds of environments are made for one recipe.
@lru_cache(maxsize=16)
def _load_tasks(split: str, source: int | str) -> Sequence[Any]:
    """Return the tasks of a split, one for each instance; each is None if only their number is
    known. Raises `ConfigError` for a source that is neither a file nor a number of at least 1.
    """
    if isinstance(source, str):
        return [record for _, record in records(Path(source), setting=f"environment.options.splits.{split}")]
    if isinstance(source, bool) or not isinstance(source, int) or source < 1:
        raise ConfigError(f"gateway: splits.{split} must be a number of instances or a file of tasks, not {source!r}")
    return [None] * source
