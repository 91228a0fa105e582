"""The broker between runs and outside agents: a run offers episodes, an agent takes one, its calls
are passed to the run, and the run's replies to the agent.

    run     open ------------ next ---------- next(reply) ------ ... next: reward
    agent         take, call ------- (waits) ------------- call ...  reward

Each event of an agent says whether the reply before it was delivered; an undelivered reply is not a
step. Nothing important is kept here: steps, tokens and rewards are in the run's store. Everything
runs on one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentr_core.environments.gateway.dialects.base import Refused, Turn

# The episodes that are offered or under way.

_REMEMBERED = 10_000
"""The number of ended episodes that are remembered, with the reason why each ended."""

_RUN_SECONDS = 30.0
"""Seconds after which an offered episode is dropped if its run no longer asks about it."""
_REPLY_SECONDS = 900.0
"""Seconds that a run has for a reply; after that its episode ends."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of an agent, which several requests may share: clients repeat requests that were not
    answered.

    Its reply always has the same name and time, however often it is sent. `partial` is the text of
    the reply so far, if the run sends it. `clients` is the number of requests that wait for the
    reply or are being sent it, and `num_delivered` the number that got it.
    """

    turns: Sequence[Turn]
    reply: asyncio.Future[Mapping[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    partial: str = ""
    is_streamed: bool = False
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    clients: int = 0
    num_delivered: int = 0
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_refused(self) -> bool:
        """Whether the call was refused, so that it gets no reply."""
        return self.reply.done() and self.reply.exception() is not None

    async def change(self, size: int, seconds: float) -> None:
        """Wait until there is a reply, or more than `size` characters of its text, but at most for
        `seconds`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.reply.done() and len(self.partial) <= size:
                    await self._change.wait()

    def grow(self, text: str) -> None:
        """Set the text of the reply so far."""
        self.partial = text
        self._wake()

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Set the reply."""
        self.reply.set_result(reply)
        self._wake()

    def refuse(self, refusal: Refused) -> None:
        """Set a refusal in place of the reply, unless there is a reply or refusal already."""
        if not self.reply.done():
            self.reply.set_exception(refusal)
            # Retrieved at once, in case no client is left to do so: asyncio would log it.
            self.reply.exception()
            self._wake()

    def _wake(self) -> None:
        # Present waiters hold the old event; later ones wait for the new one.
        self._change.set()
        self._change = asyncio.Event()


@dataclass(slots=True)
class Episode:
    """One episode. `events` holds the events of its agent for the run.

    `call` is the last call that the run was told of, and `queue` the later ones. `last_request` is
    when the agent was last heard from, or the run last replied to it; `last_poll` is when the run
    last asked for the agent's next event. `session` is the harness's own id of the session.
    """

    id: str
    run: str
    offer: Mapping[str, Any]
    last_request: float
    last_poll: float
    taken: bool = False
    session: str = ""
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    call: Call | None = None
    queue: list[Call] = field(default_factory=list)
    reply_timer: asyncio.TimerHandle | None = None

    @property
    def delivered(self) -> bool:
        """Whether the agent has the reply to the last call that the run was told of."""
        return self.call is None or self.call.num_delivered > 0


@dataclass(slots=True)
class Ending:
    """Why an episode is over, and the reward and success that its agent reported, if it did.

    `delivered` is False if the agent may not know that its reward was accepted.
    """

    reason: str
    reward: tuple[float, bool] | None = None
    delivered: bool = True


class Broker:
    """The episodes that are offered or under way, by id."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._offers: deque[Episode] = deque()
        self._offered = asyncio.Event()
        self._over: OrderedDict[str, Ending] = OrderedDict()
        self._runs: set[str] = set()
        self._last_request = time.monotonic()

    def arrive(self) -> str:
        """Register a run and return its name, with which it offers episodes until it leaves."""
        self._runs.add(name := secrets.token_hex(8))
        return name

    def leave(self, run: str) -> None:
        """Unregister a run whose process is gone, and end its episodes; waiting agents are told
        why.
        """
        self._runs.discard(run)
        for episode in [episode for episode in self._episodes.values() if episode.run == run]:
            self.close(episode.id, "the process of its run ended", "episode_over")

    def open(self, offer: Mapping[str, Any], run: str) -> str | None:
        """Offer an episode and return its id; None if its run is not registered here. `run` is
        empty for a run that is not registered and so cannot leave.
        """
        if run and run not in self._runs:
            return None
        now = time.monotonic()
        # The id alone lets an agent in.
        episode = Episode(id=secrets.token_hex(16), run=run, offer=offer, last_request=now, last_poll=now)
        self._episodes[episode.id] = episode
        self._offers.append(episode)
        self._offered.set()
        return episode.id

    async def next(self, key: str, reply: Mapping[str, Any] | None, wait: float) -> dict[str, Any]:
        """Give the agent of an episode a reply, if there is one, and return its next event: `call`,
        `reward` or `lost`; after `wait` seconds without one, `none` with the seconds of silence.

        If the call gets no reply, `reply` has the reason as a sentence in `refused`, its `code`
        and, if the prompt is too long, its length in `prompt_tokens` and the model's limit in
        `context`. The events `call` and `reward` say in `delivered` whether the agent got the reply
        to its last call. `lost` means that the episode ended without a reward, for the reason in
        `why`. Raises `KeyError` for an unknown episode.
        """
        if key not in self._episodes and key in self._over:
            return {"event": "lost", "why": self._over[key].reason}
        episode = self._episodes[key]
        episode.last_poll = time.monotonic()
        if reply is not None:
            if episode.reply_timer is not None:
                episode.reply_timer.cancel()
            if episode.call is not None and not episode.call.reply.done():
                episode.last_request = time.monotonic()
                if (reason := reply.get("refused")) is not None:
                    code, sizes = reply.get("code", "invalid_request"), ("prompt_tokens", "context")
                    episode.call.refuse(Refused(400, reason, code, **{size: reply.get(size) for size in sizes}))
                else:
                    episode.call.answer(reply)
                self._advance(episode)
        try:
            async with asyncio.timeout(wait):
                event = await episode.events.get()
        except TimeoutError:
            # Before an episode is taken, any active agent may take it.
            last = episode.last_request if episode.taken else max(episode.last_request, self._last_request)
            return {"event": "none", "silent": time.monotonic() - last, "taken": episode.taken}
        if key in self._over and episode.events.empty():
            self._episodes.pop(key, None)
        return event

    def progress(self, texts: Mapping[str, str]) -> None:
        """Set the texts so far of replies that are being sampled, by episode id."""
        for key, text in texts.items():
            episode = self._episodes.get(key)
            if episode is not None and episode.call is not None and not episode.call.reply.done():
                episode.call.grow(text)

    def close(self, key: str, reason: str, code: str) -> None:
        """End an episode on behalf of its run; an agent that waits or calls again is told why."""
        if (episode := self._episodes.get(key)) is not None:
            self._end(episode, Ending(reason), code)
            episode.events.put_nowait({"event": "lost", "why": reason})

    async def take(self, wait: float) -> Episode | None:
        """Return the episode that was offered first and mark it as taken by an agent; None if there
        is none within `wait` seconds.
        """
        self._last_request = time.monotonic()
        try:
            async with asyncio.timeout(wait):
                while (episode := self._first()) is None:
                    self._offered.clear()
                    await self._offered.wait()
        except TimeoutError:
            return None
        episode.taken, self._last_request = True, time.monotonic()
        episode.last_request = self._last_request
        return episode

    def offer_again(self, episode: Episode) -> None:
        """Offer a taken episode to other agents, unless it was used: the agent that took it never
        got it.
        """
        if episode.taken and episode.id not in self._over and episode.call is None and not episode.queue:
            episode.taken = False
            self._offers.append(episode)
            self._offered.set()

    def ask(self, key: str, turns: Sequence[Turn], *, again: bool = False, stream: bool = False) -> Call:
        """Return an agent's call with one more client: an open call with the same turns that is not
        yet delivered, or else a new one. The client must end with `settle`.

        Args:
            again: the client repeats its request, so it did not get the reply to its last call,
                even if that counts as delivered here: there may be a proxy in between.
            stream: the client reads the reply as it is sampled.

        Calls of one episode are answered one at a time. If the episode ends first, the call's
        `reply` raises `Refused`. Raises `Refused` if it is over or unknown.
        """
        episode = self._touch(self.episode(key))
        open_calls = (
            *episode.queue,
            *([episode.call] if episode.call and (again or not episode.call.num_delivered) else ()),
        )
        call = next((call for call in open_calls if call.turns == turns), None)
        if call is None:
            call = Call(turns)
            episode.queue.append(call)
        call.clients += 1
        call.is_streamed |= stream
        self._advance(episode)
        return call

    def estimate(self, key: str, turns: Sequence[Turn]) -> int:
        """Return an estimate of the number of tokens in a prompt. Raises `Refused` if the episode
        is over or unknown.

        Only the run has the policy's tokenizer. So the token count of the last answered prompt is
        scaled by the number of characters; before there is one, four characters count as a token.
        """
        call = self.episode(key).call
        characters, tokens = 4, 1
        is_answered = call is not None and call.reply.done() and not call.is_refused
        if call is not None and is_answered and (count := call.reply.result().get("prompt_tokens")):
            characters, tokens = max(1, _characters(call.turns)), count
        return -(-_characters(turns) * tokens // characters)

    def settle(self, key: str, call: Call, *, delivered: bool) -> None:
        """Record that a client of a call has its reply, or left without it."""
        call.clients -= 1
        call.num_delivered += delivered
        if (episode := self._episodes.get(key)) is not None:
            self._advance(episode)

    def lose(self, call: Call) -> None:
        """Record that a client to which the reply was sent did not read it."""
        call.num_delivered -= 1

    def reward(self, key: str, reward: float, success: bool) -> None:
        """End an episode with the reward that its agent reports, even if its calls still wait.

        A repeated report of the same reward is accepted if the agent may not know that the first
        was. Raises `Refused` otherwise if the episode is over or unknown.
        """
        ending = self._over.get(key)
        if ending is not None and not ending.delivered and ending.reward == (reward, success):
            return
        episode = self._touch(self.episode(key))
        episode.events.put_nowait(
            {"event": "reward", "reward": reward, "success": success, "delivered": episode.delivered}
        )
        self._end(
            episode,
            Ending("its reward was reported", (reward, success), delivered=False),
            "episode_over",
            event_pending=True,
        )

    def rewarded(self, key: str, *, delivered: bool) -> None:
        """Record whether an agent knows that its reward was accepted."""
        if (ending := self._over.get(key)) is not None:
            ending.delivered = delivered

    def failed(self, key: str, reason: str) -> None:
        """End an episode that its agent gave up; its run offers it again. Raises `Refused` if it is
        over or unknown.
        """
        episode = self._touch(self.episode(key))
        episode.events.put_nowait({"event": "lost", "why": f"the agent gave it up: {reason}"})
        self._end(episode, Ending("it was given up"), "episode_over", event_pending=True)

    def knows(self, key: str) -> bool:
        """Return whether there is, or was, an episode of this id."""
        return key in self._episodes or key in self._over

    def state(self, key: str) -> dict[str, Any]:
        """Return what is known of an episode: whether its agent has `asked` the policy or, if it is
        over, why (`over`) and the `reward` that was reported, or None. Raises `Refused` if it is
        unknown.
        """
        if (ending := self._over.get(key)) is not None:
            reward, _ = ending.reward or (None, None)
            return {"episode": key, "over": ending.reason, "reward": reward}
        episode = self.episode(key)
        return {"episode": key, "asked": episode.call is not None or bool(episode.queue)}

    def episode(self, key: str) -> Episode:
        """Return an episode that is under way. Raises `Refused` if it is over or unknown."""
        if (episode := self._episodes.get(key)) is None or key in self._over:
            hint = "take another one with POST /episodes"
            if key in self._over:
                raise Refused(410, f"episode {key} is over: {self._over[key].reason}; {hint}", "episode_over")
            raise Refused(404, f"episode {key[:40]} is not known here; {hint}", "episode_not_found")
        return episode

    def _first(self) -> Episode | None:
        while self._offers:
            episode = self._offers.popleft()
            if episode.id in self._over:
                continue
            if time.monotonic() - episode.last_poll < _RUN_SECONDS:
                return episode
            self._end(episode, Ending(f"its run did not ask about it for {_RUN_SECONDS:.0f} s"), "episode_over")
        return None

    def _touch(self, episode: Episode) -> Episode:
        episode.last_request = self._last_request = time.monotonic()
        return episode

    def _advance(self, episode: Episode) -> None:
        """Pass the first call that a client waits for to the run, once the call before is
        settled.
        """
        episode.queue = [call for call in episode.queue if call.clients]
        if not episode.queue or (episode.call is not None and (not episode.call.reply.done() or episode.call.clients)):
            return
        call = episode.queue.pop(0)
        content = {"turns": list(call.turns), "stream": call.is_streamed, "delivered": episode.delivered}
        episode.events.put_nowait({"event": "call", **content})
        episode.call = call
        episode.reply_timer = asyncio.get_running_loop().call_later(
            _REPLY_SECONDS, self._give_up, episode, _REPLY_SECONDS
        )

    def _give_up(self, episode: Episode, seconds: float) -> None:
        if episode.call is not None and not episode.call.reply.done():
            reason = f"the run gave no reply within {seconds:.0f} s; see whether it lives"
            self._end(episode, Ending(reason), "episode_over")

    def _end(self, episode: Episode, ending: Ending, code: str, *, event_pending: bool = False) -> None:
        """End an episode and refuse its open calls. With `event_pending`, it is kept until the run
        has fetched the agent's last event.
        """
        self._over.setdefault(episode.id, ending)
        if not event_pending:
            self._episodes.pop(episode.id, None)
        while len(self._over) > _REMEMBERED:
            oldest, _ = self._over.popitem(last=False)
            self._episodes.pop(oldest, None)
        if episode.reply_timer is not None:
            episode.reply_timer.cancel()
        refusal = Refused(400, f"episode {episode.id} is over: {ending.reason}", code)
        for call in (*([episode.call] if episode.call else ()), *episode.queue):
            call.refuse(refusal)
        episode.queue = []


def _characters(turns: Sequence[Turn]) -> int:
    return sum(len(turn["text"]) for turn in turns)
