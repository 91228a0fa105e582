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

_MAX_REMEMBERED = 10_000
"""The number of ended episodes that are remembered, with the reason why each ended."""

_RUN_SECONDS = 30.0
"""Seconds after which an offered episode is dropped if its run no longer asks about it."""
_REPLY_SECONDS = 900.0
"""Seconds that a run has for a reply; after that its episode ends."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of an agent, which several requests may share: clients repeat requests that were not
    answered.

    Its reply always has the same id and time, however often it is sent. `partial_text` is the text
    of the reply so far, if the run sends it. `num_clients` is the number of requests that wait for
    the reply or are being sent it, and `num_delivered` the number that got it.
    """

    turns: Sequence[Turn]
    reply: asyncio.Future[Mapping[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    partial_text: str = ""
    is_streamed: bool = False
    reply_id: str = field(default_factory=lambda: secrets.token_hex(12))
    timestamp: int = field(default_factory=lambda: int(time.time()))
    num_clients: int = 0
    num_delivered: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_refused(self) -> bool:
        """Whether the call was refused, so that it gets no reply."""
        return self.reply.done() and self.reply.exception() is not None

    async def wait_for_text(self, num_chars: int, timeout_s: float) -> None:
        """Wait until there is a reply, or more than `num_chars` characters of its text, but at most
        for `timeout_s` seconds.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.reply.done() and len(self.partial_text) <= num_chars:
                    await self._changed.wait()

    def set_partial_text(self, text: str) -> None:
        """Set the text of the reply so far."""
        self.partial_text = text
        self._wake_waiters()

    def set_reply(self, reply: Mapping[str, Any]) -> None:
        """Set the reply."""
        self.reply.set_result(reply)
        self._wake_waiters()

    def refuse(self, refusal: Refused) -> None:
        """Set a refusal in place of the reply, unless there is a reply or refusal already."""
        if not self.reply.done():
            self.reply.set_exception(refusal)
            # Retrieved at once, in case no client is left to do so: asyncio would log it.
            self.reply.exception()
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        # Present waiters hold the old event; later ones wait for the new one.
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True)
class Episode:
    """One episode. `events` holds the events of its agent for the run.

    `current_call` is the last call that the run was told of, and `queued_calls` the later ones.
    `last_request_time` is when the agent was last heard from, or the run last replied to it;
    `last_poll_time` is when the run last asked for the agent's next event. `session_id` is the
    harness's own id of the session.
    """

    id: str
    run_name: str
    offer: Mapping[str, Any]
    last_request_time: float
    last_poll_time: float
    is_taken: bool = False
    session_id: str = ""
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    current_call: Call | None = None
    queued_calls: list[Call] = field(default_factory=list)
    reply_timer: asyncio.TimerHandle | None = None

    @property
    def is_delivered(self) -> bool:
        """Whether the agent has the reply to the last call that the run was told of."""
        return self.current_call is None or self.current_call.num_delivered > 0


@dataclass(slots=True)
class Ending:
    """Why an episode is over, and the reward and success that its agent reported, if it did.

    `is_delivered` is False if the agent may not know that its reward was accepted.
    """

    reason: str
    reward_and_success: tuple[float, bool] | None = None
    is_delivered: bool = True


class Broker:
    """The episodes that are offered or under way, by id."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._offered_episodes: deque[Episode] = deque()
        self._has_offers = asyncio.Event()
        self._endings: OrderedDict[str, Ending] = OrderedDict()
        self._run_names: set[str] = set()
        self._last_request_time = time.monotonic()

    def register_run(self) -> str:
        """Register a run and return its name, with which it offers episodes until it leaves."""
        self._run_names.add(run_name := secrets.token_hex(8))
        return run_name

    def unregister_run(self, run_name: str) -> None:
        """Unregister a run whose process is gone, and end its episodes; waiting agents are told
        why.
        """
        self._run_names.discard(run_name)
        for episode in [episode for episode in self._episodes.values() if episode.run_name == run_name]:
            self.close_episode(episode.id, "the process of its run ended", "episode_over")

    def open_episode(self, offer: Mapping[str, Any], run_name: str) -> str | None:
        """Offer an episode and return its id; None if its run is not registered here. `run_name` is
        empty for a run that is not registered and so cannot leave.
        """
        if run_name and run_name not in self._run_names:
            return None
        now = time.monotonic()
        # The id alone lets an agent in.
        episode = Episode(
            id=secrets.token_hex(16), run_name=run_name, offer=offer, last_request_time=now, last_poll_time=now
        )
        self._episodes[episode.id] = episode
        self._offered_episodes.append(episode)
        self._has_offers.set()
        return episode.id

    async def next_event(self, episode_id: str, reply: Mapping[str, Any] | None, wait_s: float) -> dict[str, Any]:
        """Give the agent of an episode a reply, if there is one, and return its next event: `call`,
        `reward` or `lost`; after `wait_s` seconds without one, `none` with the seconds of silence.

        If the call gets no reply, `reply` has the reason as a sentence in `refused`, its `code`
        and, if the prompt is too long, its length in `prompt_tokens` and the model's limit in
        `context`. The events `call` and `reward` say in `delivered` whether the agent got the reply
        to its last call. `lost` means that the episode ended without a reward, for the reason in
        `why`. Raises `KeyError` for an unknown episode.
        """
        if episode_id not in self._episodes and episode_id in self._endings:
            return {"event": "lost", "why": self._endings[episode_id].reason}
        episode = self._episodes[episode_id]
        episode.last_poll_time = time.monotonic()
        if reply is not None:
            if episode.reply_timer is not None:
                episode.reply_timer.cancel()
            if episode.current_call is not None and not episode.current_call.reply.done():
                episode.last_request_time = time.monotonic()
                if (reason := reply.get("refused")) is not None:
                    code, sizes = reply.get("code", "invalid_request"), ("prompt_tokens", "context")
                    episode.current_call.refuse(Refused(400, reason, code, **{size: reply.get(size) for size in sizes}))
                else:
                    episode.current_call.set_reply(reply)
                self._pass_next_call(episode)
        try:
            async with asyncio.timeout(wait_s):
                event = await episode.events.get()
        except TimeoutError:
            # Before an episode is taken, any active agent may take it.
            last_time = (
                episode.last_request_time
                if episode.is_taken
                else max(episode.last_request_time, self._last_request_time)
            )
            return {"event": "none", "silent": time.monotonic() - last_time, "taken": episode.is_taken}
        if episode_id in self._endings and episode.events.empty():
            self._episodes.pop(episode_id, None)
        return event

    def set_partial_texts(self, partial_texts: Mapping[str, str]) -> None:
        """Set the texts so far of replies that are being sampled, by episode id."""
        for episode_id, text in partial_texts.items():
            episode = self._episodes.get(episode_id)
            if episode is not None and episode.current_call is not None and not episode.current_call.reply.done():
                episode.current_call.set_partial_text(text)

    def close_episode(self, episode_id: str, reason: str, code: str) -> None:
        """End an episode on behalf of its run; an agent that waits or calls again is told why."""
        if (episode := self._episodes.get(episode_id)) is not None:
            self._end_episode(episode, Ending(reason), code)
            episode.events.put_nowait({"event": "lost", "why": reason})

    async def take_episode(self, wait_s: float) -> Episode | None:
        """Return the episode that was offered first and mark it as taken by an agent; None if there
        is none within `wait_s` seconds.
        """
        self._last_request_time = time.monotonic()
        try:
            async with asyncio.timeout(wait_s):
                while (episode := self._next_offer()) is None:
                    self._has_offers.clear()
                    await self._has_offers.wait()
        except TimeoutError:
            return None
        episode.is_taken, self._last_request_time = True, time.monotonic()
        episode.last_request_time = self._last_request_time
        return episode

    def offer_again(self, episode: Episode) -> None:
        """Offer a taken episode to other agents, unless it was used: the agent that took it never
        got it.
        """
        if (
            episode.is_taken
            and episode.id not in self._endings
            and episode.current_call is None
            and not episode.queued_calls
        ):
            episode.is_taken = False
            self._offered_episodes.append(episode)
            self._has_offers.set()

    def ask(
        self, episode_id: str, turns: Sequence[Turn], *, is_repeat: bool = False, is_streamed: bool = False
    ) -> Call:
        """Return an agent's call with one more client: an open call with the same turns that is not
        yet delivered, or else a new one. The client must end with `release_call`.

        Args:
            is_repeat: the client repeats its request, so it did not get the reply to its last call,
                even if that counts as delivered here: there may be a proxy in between.
            is_streamed: the client reads the reply as it is sampled.

        Calls of one episode are answered one at a time. If the episode ends first, the call's
        `reply` raises `Refused`. Raises `Refused` if it is over or unknown.
        """
        episode = self._record_request(self.episode(episode_id))
        open_calls = (
            *episode.queued_calls,
            *(
                [episode.current_call]
                if episode.current_call and (is_repeat or not episode.current_call.num_delivered)
                else ()
            ),
        )
        call = next((call for call in open_calls if call.turns == turns), None)
        if call is None:
            call = Call(turns)
            episode.queued_calls.append(call)
        call.num_clients += 1
        call.is_streamed |= is_streamed
        self._pass_next_call(episode)
        return call

    def estimate_num_tokens(self, episode_id: str, turns: Sequence[Turn]) -> int:
        """Return an estimate of the number of tokens in a prompt. Raises `Refused` if the episode
        is over or unknown.

        Only the run has the policy's tokenizer. So the token count of the last answered prompt is
        scaled by the number of characters; before there is one, four characters count as a token.
        """
        call = self.episode(episode_id).current_call
        num_characters, num_tokens = 4, 1
        is_answered = call is not None and call.reply.done() and not call.is_refused
        if call is not None and is_answered and (num_prompt_tokens := call.reply.result().get("prompt_tokens")):
            num_characters, num_tokens = max(1, _num_characters(call.turns)), num_prompt_tokens
        return -(-_num_characters(turns) * num_tokens // num_characters)

    def release_call(self, episode_id: str, call: Call, *, is_delivered: bool) -> None:
        """Record that a client of a call has its reply, or left without it."""
        call.num_clients -= 1
        call.num_delivered += is_delivered
        if (episode := self._episodes.get(episode_id)) is not None:
            self._pass_next_call(episode)

    def mark_undelivered(self, call: Call) -> None:
        """Record that a client to which the reply was sent did not read it."""
        call.num_delivered -= 1

    def end_with_reward(self, episode_id: str, reward: float, success: bool) -> None:
        """End an episode with the reward that its agent reports, even if its calls still wait.

        A repeated report of the same reward is accepted if the agent may not know that the first
        was. Raises `Refused` otherwise if the episode is over or unknown.
        """
        ending = self._endings.get(episode_id)
        if ending is not None and not ending.is_delivered and ending.reward_and_success == (reward, success):
            return
        episode = self._record_request(self.episode(episode_id))
        episode.events.put_nowait(
            {"event": "reward", "reward": reward, "success": success, "delivered": episode.is_delivered}
        )
        self._end_episode(
            episode,
            Ending("its reward was reported", (reward, success), is_delivered=False),
            "episode_over",
            has_pending_event=True,
        )

    def mark_reward_delivered(self, episode_id: str, *, is_delivered: bool) -> None:
        """Record whether an agent knows that its reward was accepted."""
        if (ending := self._endings.get(episode_id)) is not None:
            ending.is_delivered = is_delivered

    def end_with_failure(self, episode_id: str, reason: str) -> None:
        """End an episode that its agent gave up; its run offers it again. Raises `Refused` if it is
        over or unknown.
        """
        episode = self._record_request(self.episode(episode_id))
        episode.events.put_nowait({"event": "lost", "why": f"the agent gave it up: {reason}"})
        self._end_episode(episode, Ending("it was given up"), "episode_over", has_pending_event=True)

    def knows(self, episode_id: str) -> bool:
        """Return whether there is, or was, an episode of this id."""
        return episode_id in self._episodes or episode_id in self._endings

    def describe(self, episode_id: str) -> dict[str, Any]:
        """Return what is known of an episode: whether its agent has `asked` the policy or, if it is
        over, why (`over`) and the `reward` that was reported, or None. Raises `Refused` if it is
        unknown.
        """
        if (ending := self._endings.get(episode_id)) is not None:
            reward, _ = ending.reward_and_success or (None, None)
            return {"episode": episode_id, "over": ending.reason, "reward": reward}
        episode = self.episode(episode_id)
        return {"episode": episode_id, "asked": episode.current_call is not None or bool(episode.queued_calls)}

    def episode(self, episode_id: str) -> Episode:
        """Return an episode that is under way. Raises `Refused` if it is over or unknown."""
        if (episode := self._episodes.get(episode_id)) is None or episode_id in self._endings:
            hint = "take another one with POST /episodes"
            if episode_id in self._endings:
                raise Refused(
                    410, f"episode {episode_id} is over: {self._endings[episode_id].reason}; {hint}", "episode_over"
                )
            raise Refused(404, f"episode {episode_id[:40]} is not known here; {hint}", "episode_not_found")
        return episode

    def _next_offer(self) -> Episode | None:
        while self._offered_episodes:
            episode = self._offered_episodes.popleft()
            if episode.id in self._endings:
                continue
            if time.monotonic() - episode.last_poll_time < _RUN_SECONDS:
                return episode
            self._end_episode(episode, Ending(f"its run did not ask about it for {_RUN_SECONDS:.0f} s"), "episode_over")
        return None

    def _record_request(self, episode: Episode) -> Episode:
        episode.last_request_time = self._last_request_time = time.monotonic()
        return episode

    def _pass_next_call(self, episode: Episode) -> None:
        """Pass the first call that a client waits for to the run, once the call before is
        settled.
        """
        episode.queued_calls = [call for call in episode.queued_calls if call.num_clients]
        if not episode.queued_calls or (
            episode.current_call is not None
            and (not episode.current_call.reply.done() or episode.current_call.num_clients)
        ):
            return
        call = episode.queued_calls.pop(0)
        content = {"turns": list(call.turns), "stream": call.is_streamed, "delivered": episode.is_delivered}
        episode.events.put_nowait({"event": "call", **content})
        episode.current_call = call
        episode.reply_timer = asyncio.get_running_loop().call_later(
            _REPLY_SECONDS, self._end_unanswered, episode, _REPLY_SECONDS
        )

    def _end_unanswered(self, episode: Episode, timeout_s: float) -> None:
        if episode.current_call is not None and not episode.current_call.reply.done():
            reason = f"the run gave no reply within {timeout_s:.0f} s; see whether it lives"
            self._end_episode(episode, Ending(reason), "episode_over")

    def _end_episode(self, episode: Episode, ending: Ending, code: str, *, has_pending_event: bool = False) -> None:
        """End an episode and refuse its open calls. With `has_pending_event`, it is kept until the
        run has fetched the agent's last event.
        """
        self._endings.setdefault(episode.id, ending)
        if not has_pending_event:
            self._episodes.pop(episode.id, None)
        while len(self._endings) > _MAX_REMEMBERED:
            oldest, _ = self._endings.popitem(last=False)
            self._episodes.pop(oldest, None)
        if episode.reply_timer is not None:
            episode.reply_timer.cancel()
        refusal = Refused(400, f"episode {episode.id} is over: {ending.reason}", code)
        for call in (*([episode.current_call] if episode.current_call else ()), *episode.queued_calls):
            call.refuse(refusal)
        episode.queued_calls = []


def _num_characters(turns: Sequence[Turn]) -> int:
    return sum(len(turn["text"]) for turn in turns)
