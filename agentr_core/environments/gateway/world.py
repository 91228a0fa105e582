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
from agentr_core.environments.agentgym.client import connection
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
from agentr_core.samples.json_records import records
from agentr_core.types import Generation, Instance, StopReason, Transition

_POLL = 5.0
_TRIES = 3
_TIMEOUT = 300.0
_MOST_WITHOUT_ROOM = 10
"""The most calls in a row without room for a reply; one more ends the episode. Agents that can
handle this summarise their history after one or a few.
"""
_PROGRESS_TIMEOUT = 5.0
_SECONDS_WITHOUT_ROOM = 60.0
"""Seconds that an agent has for its next call after one without room for a reply."""


class _Presence:
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
        atexit.register(self._leave)
        self._lock = threading.Lock()
        self.name = "none"

    def renew(self, unknown: str) -> None:
        """Ask the gateway for a new name if `unknown` is the present one. Raises
        `EnvironmentUnavailable` if the connection breaks, and `EnvironmentServerError` if this is
        not a gateway or wants another token.
        """
        with self._lock:
            if self.name == unknown:
                self._leave()
                url = f"{self._url}/run/arrive"
                try:
                    client = self._exit_stack.enter_context(httpx.Client(headers=self._headers, timeout=_TIMEOUT))
                    answer = self._exit_stack.enter_context(client.stream("POST", url))
                    # The answer stays open while this process lives; dropping its iterator would
                    # close it.
                    self._lines = answer.iter_lines()
                    name = next(self._lines, "")
                except httpx.HTTPError as error:
                    raise EnvironmentUnavailable(
                        f"{url} broke the connection ({error or type(error).__name__})"
                    ) from error
                if answer.status_code != httpx.codes.OK:
                    raise EnvironmentServerError(
                        f"{url} answered {answer.status_code} ({name[:300]}): this is not a gateway of agentr of "
                        "this version, or it wants another token; correct the address, or set AGENTR_GATEWAY_TOKEN"
                    )
                self.name = name

    def _leave(self) -> None:
        self._lines = iter(())
        self._exit_stack.close()


@cache
def _presence(url: str, token: str, process: int) -> _Presence:
    """Return the presence of the process with an id; a forked process has its own."""
    return _Presence(url, token)


class _Texts:
    """A sender of partial replies to a gateway: for each episode the latest text, as soon as
    earlier requests are done. Texts may be lost without harm, since the whole replies follow.
    """

    def __init__(self, url: str, token: str) -> None:
        self._where = f"{url}/run/progress"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(headers=headers, timeout=_PROGRESS_TIMEOUT)
        self._texts: dict[str, str] = {}
        self._change, self._sending = threading.Lock(), threading.Lock()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def tell(self, episode: str, text: str) -> None:
        """Schedule the partial text of an episode's reply for sending."""
        with self._change:
            self._texts[episode] = text
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name="texts", daemon=True)
                self._thread.start()
        self._news.set()

    def drop(self, episode: str) -> None:
        """Drop the unsent text of an episode, waiting for a request that is under way."""
        with self._sending, self._change:
            self._texts.pop(episode, None)

    def _send(self) -> None:
        while self._news.wait():
            self._news.clear()
            # A text with a lone surrogate cannot be encoded.
            with self._sending, suppress(httpx.HTTPError, UnicodeError):
                with self._change:
                    texts, self._texts = self._texts, {}
                self._client.post(self._where, json={"texts": texts})


@cache
def _texts(url: str, token: str, process: int) -> _Texts:
    return _Texts(url, token)


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
        self._tasks = {split: _tasks(split, value) for split, value in splits.items()}
        self._url, self._token = url.rstrip("/"), token
        kind = "a gateway of agentr"
        self._server = connection(self._url, timeout_s=_TIMEOUT, patience_s=30.0, kind=kind, token=token)
        self._patience = patience_s
        self._episode = ""
        self._over = True
        self._closed = False
        self._conversations = Conversations()
        # The conversation that the next reply answers.
        self._prompt: Prompt = ()
        self._generation_info: dict[str, Any] = {}
        self._refused = ""
        self._num_without_room = 0
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
            self._server.reach()
            _presence(self._url, self._token, os.getpid()).renew("none")
        except EnvironmentUnavailable as fault:
            raise EnvironmentServerError(f"gateway: {fault}; {self.start_hint()}") from fault

    def start_hint(self) -> str:
        """Return how a gateway is started; see `Environment.start_hint`."""
        return "`agentr gateway` starts one"

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._tasks)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split, numbered from 0."""
        if split not in self._tasks:
            raise ConfigError(f"gateway has no split {split!r}; it has {', '.join(self.splits())}")
        return Instances(self.name, split, range(len(self._tasks[split])))

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
        presence = _presence(self._url, self._token, os.getpid())
        for _ in range(_TRIES):
            name = presence.name
            episode = self._server.post("/run/open", {**offer, "run": name}, patient=True)["episode"]
            if episode is not None:
                break
            presence.renew(name)
        else:
            raise EnvironmentUnavailable(f"{self._url} forgets this run; see whether the connection to it is stable")
        self._episode, self._over = str(episode), False
        event = self._next(None)
        if event["event"] != "call":
            raise EnvironmentUnavailable(
                f"{instance.key}: the agent reported a reward before it asked the policy anything"
            )
        self._conversations, self._num_without_room = Conversations(), 0
        return self._called(event)

    def step(self, action: str) -> Transition:
        """Give the agent a reply, wait, and return the transition: its next call, or the reward
        that it reports. Raises `Undelivered` if the agent went on without the reply, and otherwise
        as `reset`.
        """
        if self._over:
            raise EnvironmentFault("gateway: a step before the reset, or after the end")
        generation_info, self._generation_info = self._generation_info, {}
        self._num_without_room = 0
        if self._is_streamed:
            _texts(self._url, self._token, os.getpid()).drop(self._episode)
        ids = self._conversations.add(self._prompt, action)
        event = self._next({"text": action, "ids": ids, **generation_info})
        # A reply that is in the history of the next call has arrived, even if its connection broke.
        if not event["delivered"] and not (event["event"] == "call" and self._conversations.has_last(_turns(event))):
            self._conversations.drop_last()
            self._without_reply(event, "a reply was not delivered")
        return self._following(event)

    def decline(self, fault: AgentrError) -> NoReturn:
        """Tell the agent why its call gets no reply, wait, and raise `Undelivered` with the
        transition to what it does next; see `Environment.decline`.

        If the history leaves no room for a reply, the agent may go on with a shorter one; if it
        does not, the episode is over.
        """
        refusal: dict[str, Any] = {"refused": str(fault), "code": "invalid_request"}
        if not isinstance(fault, PromptTooLong):
            self._without_reply(self._next(refusal), f"a call was refused ({fault})")
        self._num_without_room += 1
        transition = Transition("", 0.0, False, True, {"success": False})
        if self._num_without_room > _MOST_WITHOUT_ROOM:
            self.release(str(fault))
            raise Undelivered(str(fault), transition, StopReason.CONTEXT_LIMIT)
        refusal["code"] = "context_length_exceeded"
        if fault.context_length:
            refusal |= {"prompt_tokens": fault.tokens, "context": fault.context_length}
        try:
            event = self._next(refusal, patience=min(self._patience, _SECONDS_WITHOUT_ROOM))
        except EnvironmentUnavailable as unavailable:
            if not (self._over or isinstance(unavailable, EnvironmentTimeout)):
                # The gateway is gone, and the agent might have gone on.
                raise
            self.release(str(fault))
            raise Undelivered(str(fault), transition, StopReason.CONTEXT_LIMIT) from unavailable
        self._without_reply(event, f"a call was refused ({fault})")

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
        return partial(_texts(self._url, self._token, os.getpid()).tell, self._episode) if self._is_streamed else None

    def refuse(self, why: str) -> None:
        """Record why there is no reply; `release` tells the agent. See `Environment.refuse`."""
        self._refused = why

    def release(self, why: str = "it has had all its steps, or its run was ended") -> None:
        """End the episode, if there is one, and tell the agent why; see `Environment.release`."""
        episode, self._episode = self._episode, ""
        why, self._refused = self._refused or why, ""
        self._generation_info, self._over = {}, True
        if episode:
            self._server.close("/run/close", {"episode": episode, "why": why})

    def parse(self, reply: str) -> str:
        """Return the reply itself: the agent parses it."""
        return reply

    def close(self) -> None:
        """End the episode, and tell an agent that still plays it."""
        self._closed = True
        self.release()

    def _task(self, instance: Instance) -> Any:
        tasks = self._tasks.get(instance.split, ())
        if instance.environment != self.name or not 0 <= instance.index < len(tasks):
            raise EnvironmentFault(f"gateway has no instance {instance.key}")
        return tasks[instance.index]

    def _called(self, event: Mapping[str, Any]) -> str:
        """Return what a call adds to the known conversations, as the text of an observation."""
        self._is_streamed = bool(event.get("stream"))
        self._prompt, observation = self._conversations.place(_turns(event))
        return observation

    def _following(self, event: Mapping[str, Any]) -> Transition:
        """Return the transition to an agent's event: a call, or a reward."""
        if event["event"] == "reward":
            self._over = True
            return Transition("", event["reward"], True, False, {"success": event["success"]})
        return Transition(self._called(event), 0.0, False, False, {"success": False})

    def _without_reply(self, event: Mapping[str, Any], reason: str) -> NoReturn:
        message = f"episode {self._episode}: {reason}, and the agent went on without a reply"
        raise Undelivered(message, self._following(event))

    def _next(self, reply: dict[str, Any] | None, *, patience: float = math.inf) -> dict[str, Any]:
        """Send a reply, if there is one, wait for the agent's next event, and return it: a call or
        a reward. Raises `EnvironmentTimeout` if it is silent for longer than `patience` or
        `patience_s` seconds, and `EnvironmentUnavailable` if the episode is lost.
        """
        episode, patience = self._episode, min(patience, self._patience)
        while not self._closed:
            body = {"episode": episode, "reply": reply, "wait": min(_POLL, patience)}
            event: dict[str, Any] = self._server.post("/run/next", body)
            reply = None
            if event["event"] in ("call", "reward"):
                return event
            if event["event"] == "lost":
                self._over = True
                raise EnvironmentUnavailable(f"episode {episode} was lost: {event['why']}")
            if event["silent"] > patience:
                subject = f"the agent of episode {episode}" if event["taken"] else "every agent"
                raise EnvironmentTimeout(
                    f"{subject} was silent for {event['silent']:.0f} s; see whether it lives, or raise patience_s"
                )
        raise EnvironmentFault("gateway: this environment is closed")


def _turns(event: Mapping[str, Any]) -> list[CallTurn]:
    return [CallTurn.read(turn) for turn in event["turns"]]


# Hundreds of environments are made for one recipe.
@lru_cache(maxsize=16)
def _tasks(split: str, source: int | str) -> Sequence[Any]:
    """Return the tasks of a split, one for each instance; each is None if only their number is
    known. Raises `ConfigError` for a source that is neither a file nor a number of at least 1.
    """
    if isinstance(source, str):
        return [record for _, record in records(Path(source), setting=f"environment.options.splits.{split}")]
    if isinstance(source, bool) or not isinstance(source, int) or source < 1:
        raise ConfigError(f"gateway: splits.{split} must be a number of instances or a file of tasks, not {source!r}")
    return [None] * source
