"""The place where runs and outside agents meet: a run offers episodes, an agent takes one, its
calls go to the run, and the run's replies to the agent.

    run     open ------------ next ---------- next(reply) ------ ... next: reward
    agent         take, call ------- (waits) ------------- call ...  reward

Nothing important is kept here: steps, tokens and rewards are in the store of the run. Everything
happens on one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentr_core.environments.gateway.wire import Refused

_REMEMBERED = 10_000
"""The number of ended episodes whose reason for ending is remembered."""

_RUN_SECONDS = 30.0
"""Seconds after which a run counts as gone if it no longer asks about an episode that it
offered.
"""
_REPLY_SECONDS = 900.0
"""Seconds that a run has for a reply."""

Turns = Sequence[Mapping[str, str]]


@dataclass(slots=True)
class Seat:
    """One episode. `told` holds the events of its agent for the run; `answer` is the reply that the
    agent waits for.

    `heard` is when the agent was last heard from, or the run last replied to it; `asked` is when
    the run last asked for the agent's next event.
    """

    id: str
    offer: Mapping[str, Any]
    heard: float
    asked: float
    taken: bool = False
    told: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    answer: asyncio.Future[Mapping[str, Any]] | None = None
    before: tuple[Turns, Mapping[str, Any]] | None = None
    calling: asyncio.Lock = field(default_factory=asyncio.Lock)


class Desk:
    """The episodes that are offered or under way, by id."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._offers: deque[Seat] = deque()
        self._offered = asyncio.Condition()
        self._over: OrderedDict[str, str] = OrderedDict()
        self._heard = time.monotonic()

    async def open(self, offer: Mapping[str, Any]) -> str:
        """Offer an episode, and return its id."""
        now = time.monotonic()
        seat = Seat(id=secrets.token_hex(8), offer=offer, heard=now, asked=now)
        self._seats[seat.id] = seat
        await self._put(seat)
        return seat.id

    async def next(self, key: str, reply: Mapping[str, Any] | None, wait: float) -> dict[str, Any]:
        """Give the agent of an episode a reply, and return its next event: `call`, `reward` or
        `lost`; or `none` after `wait` seconds, with the seconds for which it has been silent.

        An episode that was ended here is `lost`, with the reason. Raises `KeyError` for an unknown
        episode.
        """
        if key not in self._seats and key in self._over:
            return {"event": "lost", "why": self._over[key]}
        seat = self._seats[key]
        seat.asked = time.monotonic()
        if reply is not None and seat.answer is not None and not seat.answer.done():
            seat.answer.set_result(reply)
            seat.heard = time.monotonic()
        try:
            async with asyncio.timeout(wait):
                return await seat.told.get()
        except TimeoutError:
            # Before an episode is taken, any active agent may take it.
            last = seat.heard if seat.taken else max(seat.heard, self._heard)
            return {"event": "none", "silent": time.monotonic() - last, "taken": seat.taken}

    def close(self, key: str, why: str, code: str) -> None:
        """End an episode on behalf of the run; an agent that waits, or comes back, is told why."""
        if (seat := self._seats.get(key)) is not None:
            self._end(seat, why, code)
            seat.told.put_nowait({"event": "lost", "why": why})

    async def take(self, wait: float, gone: Callable[[], Awaitable[bool]]) -> Seat | None:
        """Return the episode that was offered first, for an agent to play; None if there is none
        within `wait` seconds. If the agent no longer waits, the episode is offered again.
        """
        self._heard = time.monotonic()
        try:
            async with asyncio.timeout(wait), self._offered:
                while (seat := self._first()) is None:
                    await self._offered.wait()
        except TimeoutError:
            return None
        if await gone():
            await self._put(seat)
            return None
        seat.taken, self._heard = True, time.monotonic()
        seat.heard = self._heard
        return seat

    async def ask(self, key: str, turns: Turns, *, again: bool) -> Mapping[str, Any]:
        """Return the run's reply to a call; calls of one episode are answered one by one.

        `again` says that a client repeats a call to which it got no answer: if a reply was given,
        it is returned again. Raises `Refused` when the episode is over.
        """
        seat = self.seat(key)
        async with seat.calling:
            if again and seat.before is not None and seat.before[0] == turns:
                return seat.before[1]
            self._present(seat)
            seat.answer = asyncio.get_running_loop().create_future()
            seat.told.put_nowait({"event": "call", "turns": list(turns)})
            try:
                async with asyncio.timeout(_REPLY_SECONDS):
                    reply = await seat.answer
            except TimeoutError:
                why = f"the run gave no reply within {_REPLY_SECONDS:.0f} s"
                self._end(seat, why, "episode_over")
                raise Refused(410, f"episode {seat.id} is over: {why}; see whether it lives", "episode_over") from None
            seat.before = turns, reply
            return reply

    def reward(self, key: str, reward: float, success: bool) -> None:
        """End an episode with the reward that its agent reports. Raises `Refused`."""
        seat = self._present(self.seat(key))
        seat.told.put_nowait({"event": "reward", "reward": reward, "success": success})
        self._end(seat, "its reward was reported", "episode_over", told=True)

    def failed(self, key: str, reason: str) -> None:
        """Record that an agent gave an episode up; its run offers it again. Raises `Refused`."""
        seat = self._present(self.seat(key))
        seat.told.put_nowait({"event": "lost", "why": f"the agent gave it up: {reason}"})
        self._end(seat, "it was given up", "episode_over", told=True)

    def seat(self, key: str) -> Seat:
        """Return an episode that is under way. Raises `Refused`."""
        if (seat := self._seats.get(key)) is None or key in self._over:
            why = f"is over: {self._over[key]}" if key in self._over else "is not known here"
            raise Refused(410, f"episode {key[:40]} {why}; take another one with POST /episodes", "episode_over")
        return seat

    def _first(self) -> Seat | None:
        while self._offers:
            seat = self._offers.popleft()
            if seat.id in self._over:
                continue
            if time.monotonic() - seat.asked < _RUN_SECONDS:
                return seat
            self._end(seat, f"its run did not ask about it for {_RUN_SECONDS:.0f} s", "episode_over")
        return None

    async def _put(self, seat: Seat) -> None:
        async with self._offered:
            self._offers.append(seat)
            self._offered.notify()

    def _present(self, seat: Seat) -> Seat:
        self.seat(seat.id)
        seat.heard = self._heard = time.monotonic()
        return seat

    def _end(self, seat: Seat, why: str, code: str, *, told: bool = False) -> None:
        """End an episode; `told` says that the run has yet to fetch the agent's last event."""
        if seat.id not in self._over:
            self._over[seat.id] = why
        if not told:
            self._seats.pop(seat.id, None)
        while len(self._over) > _REMEMBERED:
            forgotten, _ = self._over.popitem(last=False)
            self._seats.pop(forgotten, None)
        if seat.answer is not None and not seat.answer.done():
            seat.answer.set_exception(Refused(400, f"episode {seat.id} is over: {why}", code))
