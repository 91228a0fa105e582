"""The place where runs and outside agents meet: a run offers episodes, an agent takes one, its
calls go to the run, and the run's replies to the agent.

    run     open ------------ next ---------- next(reply) ------ ... next: reward
    agent         take, call ------- (waits) ------------- call ...  reward

Each event of an agent says whether the reply before it was delivered; one that was not is no step.
Nothing important is kept here: steps, tokens and rewards are in the store of the run. Everything
happens on one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
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


@dataclass(slots=True, eq=False)
class Call:
    """One call of an agent, which several requests may make: clients repeat what was not answered.

    Its reply has one name and one time, however often it is sent. `clients` is how many requests
    wait for it or are being sent it, `reached` how many have it.
    """

    turns: Turns
    reply: asyncio.Future[Mapping[str, Any]]
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    clients: int = 0
    reached: int = 0


@dataclass(slots=True)
class Seat:
    """One episode. `told` holds the events of its agent for the run.

    `call` is the last call that the run was told of, and `queue` the later ones. `heard` is when
    the agent was last heard from, or the run last replied to it; `asked` is when the run last asked
    for the agent's next event.
    """

    id: str
    run: str
    offer: Mapping[str, Any]
    heard: float
    asked: float
    taken: bool = False
    told: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    call: Call | None = None
    queue: list[Call] = field(default_factory=list)
    overdue: asyncio.TimerHandle | None = None

    @property
    def delivered(self) -> bool:
        """Whether the agent has the reply to the last call that the run was told of."""
        return self.call is None or self.call.reached > 0


@dataclass(slots=True)
class Ending:
    """Why an episode is over, and the reward that ended it, if one did.

    `reached` says whether its agent knows that the reward was taken.
    """

    why: str
    reward: tuple[float, bool] | None = None
    reached: bool = True


class Desk:
    """The episodes that are offered or under way, by id."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._offers: deque[Seat] = deque()
        self._offered = asyncio.Event()
        self._over: OrderedDict[str, Ending] = OrderedDict()
        self._runs: set[str] = set()
        self._heard = time.monotonic()

    def arrive(self) -> str:
        """Return a name for a run, by which it offers episodes until it leaves."""
        self._runs.add(name := secrets.token_hex(8))
        return name

    def leave(self, run: str) -> None:
        """End the episodes of a run whose process is gone: the agents that wait are told so."""
        self._runs.discard(run)
        for seat in [seat for seat in self._seats.values() if seat.run == run]:
            self.close(seat.id, "the process of its run ended", "episode_over")

    def open(self, offer: Mapping[str, Any], run: str) -> str | None:
        """Offer an episode, and return its id; None if its run is not known here. `run` is empty
        for one that does not say when it leaves.
        """
        if run and run not in self._runs:
            return None
        now = time.monotonic()
        seat = Seat(id=secrets.token_hex(8), run=run, offer=offer, heard=now, asked=now)
        self._seats[seat.id] = seat
        self._put(seat)
        return seat.id

    async def next(self, key: str, reply: Mapping[str, Any] | None, wait: float) -> dict[str, Any]:
        """Give the agent of an episode a reply, and return its next event: `call`, `reward` or
        `lost`; or `none` after `wait` seconds, with the seconds for which it has been silent.

        A reply with `refused` is a sentence that says why there is none. `call` and `reward` say in
        `delivered` whether the agent has the reply to its last call. An episode that was ended here
        is `lost`, with the reason. Raises `KeyError` for an unknown episode.
        """
        if key not in self._seats and key in self._over:
            return {"event": "lost", "why": self._over[key].why}
        seat = self._seats[key]
        seat.asked = time.monotonic()
        if reply is not None:
            self._answer(seat, reply)
        try:
            async with asyncio.timeout(wait):
                event = await seat.told.get()
        except TimeoutError:
            # Before an episode is taken, any active agent may take it.
            last = seat.heard if seat.taken else max(seat.heard, self._heard)
            return {"event": "none", "silent": time.monotonic() - last, "taken": seat.taken}
        if key in self._over and seat.told.empty():
            self._seats.pop(key, None)
        return event

    def close(self, key: str, why: str, code: str) -> None:
        """End an episode on behalf of the run; an agent that waits, or comes back, is told why."""
        if (seat := self._seats.get(key)) is not None:
            self._end(seat, Ending(why), code)
            seat.told.put_nowait({"event": "lost", "why": why})

    async def take(self, wait: float) -> Seat | None:
        """Return the episode that was offered first, for an agent to play; None if there is none
        within `wait` seconds.
        """
        self._heard = time.monotonic()
        try:
            async with asyncio.timeout(wait):
                while (seat := self._first()) is None:
                    self._offered.clear()
                    await self._offered.wait()
        except TimeoutError:
            return None
        seat.taken, self._heard = True, time.monotonic()
        seat.heard = self._heard
        return seat

    def offer_again(self, seat: Seat) -> None:
        """Offer an episode to others, unless it was used: the agent that took it does not know."""
        if seat.taken and seat.id not in self._over and seat.call is None and not seat.queue:
            seat.taken = False
            self._put(seat)

    def ask(self, key: str, turns: Turns, *, again: bool = False) -> Call:
        """Return an agent's call, for one client more: a new one, or one of the same turns whose
        reply nobody has yet. It ends with `settle`. `again` says that its client knows of no reply
        to its last call, whatever is known here: there may be a proxy between.

        Calls of one episode are answered one by one. The reply is `Refused` when the episode ends
        first. Raises `Refused` when it is over.
        """
        seat = self._present(self.seat(key))
        known = (*seat.queue, *([seat.call] if seat.call and (again or not seat.call.reached) else ()))
        call = next((call for call in known if call.turns == turns), None)
        if call is None:
            call = Call(turns, asyncio.get_running_loop().create_future())
            seat.queue.append(call)
        call.clients += 1
        self._advance(seat)
        return call

    def settle(self, key: str, call: Call, *, reached: bool) -> None:
        """Note that a client of a call has its reply, or left without it."""
        call.clients -= 1
        call.reached += reached
        if (seat := self._seats.get(key)) is not None:
            self._advance(seat)

    def lose(self, call: Call) -> None:
        """Note that a client which was sent its reply did not read it."""
        call.reached -= 1

    def reward(self, key: str, reward: float, success: bool) -> None:
        """End an episode with the reward that its agent reports, whatever its calls still wait for.

        The same reward once more is taken if the agent does not know that it was. Raises `Refused`.
        """
        ending = self._over.get(key)
        if ending is not None and not ending.reached and ending.reward == (reward, success):
            return
        seat = self._present(self.seat(key))
        seat.told.put_nowait({"event": "reward", "reward": reward, "success": success, "delivered": seat.delivered})
        self._end(seat, Ending("its reward was reported", (reward, success), reached=False), "episode_over", told=True)

    def rewarded(self, key: str, *, reached: bool) -> None:
        """Note whether an agent knows that its reward was taken."""
        if (ending := self._over.get(key)) is not None:
            ending.reached = reached

    def failed(self, key: str, reason: str) -> None:
        """Record that an agent gave an episode up; its run offers it again. Raises `Refused`."""
        seat = self._present(self.seat(key))
        seat.told.put_nowait({"event": "lost", "why": f"the agent gave it up: {reason}"})
        self._end(seat, Ending("it was given up"), "episode_over", told=True)

    def seat(self, key: str) -> Seat:
        """Return an episode that is under way. Raises `Refused`."""
        if (seat := self._seats.get(key)) is None or key in self._over:
            another = "take another one with POST /episodes"
            if key in self._over:
                raise Refused(410, f"episode {key} is over: {self._over[key].why}; {another}", "episode_over")
            raise Refused(404, f"episode {key[:40]} is not known here; {another}", "episode_not_found")
        return seat

    def _first(self) -> Seat | None:
        while self._offers:
            seat = self._offers.popleft()
            if seat.id in self._over:
                continue
            if time.monotonic() - seat.asked < _RUN_SECONDS:
                return seat
            self._end(seat, Ending(f"its run did not ask about it for {_RUN_SECONDS:.0f} s"), "episode_over")
        return None

    def _put(self, seat: Seat) -> None:
        self._offers.append(seat)
        self._offered.set()

    def _present(self, seat: Seat) -> Seat:
        seat.heard = self._heard = time.monotonic()
        return seat

    def _advance(self, seat: Seat) -> None:
        """Tell the run of the first call that a client waits for, once the one before is
        settled.
        """
        seat.queue = [call for call in seat.queue if call.clients]
        if not seat.queue or (seat.call is not None and (not seat.call.reply.done() or seat.call.clients)):
            return
        call = seat.queue.pop(0)
        seat.told.put_nowait({"event": "call", "turns": list(call.turns), "delivered": seat.delivered})
        seat.call = call
        seat.overdue = asyncio.get_running_loop().call_later(_REPLY_SECONDS, self._give_up, seat, _REPLY_SECONDS)

    def _answer(self, seat: Seat, reply: Mapping[str, Any]) -> None:
        if seat.overdue is not None:
            seat.overdue.cancel()
        if seat.call is None or seat.call.reply.done():
            return
        seat.heard = time.monotonic()
        if (why := reply.get("refused")) is not None:
            _refuse(seat.call, Refused(400, why, "invalid_request"))
        else:
            seat.call.reply.set_result(reply)
        self._advance(seat)

    def _give_up(self, seat: Seat, seconds: float) -> None:
        if seat.call is not None and not seat.call.reply.done():
            why = f"the run gave no reply within {seconds:.0f} s; see whether it lives"
            self._end(seat, Ending(why), "episode_over")

    def _end(self, seat: Seat, ending: Ending, code: str, *, told: bool = False) -> None:
        """End an episode; `told` says that the run has yet to fetch the agent's last event."""
        self._over.setdefault(seat.id, ending)
        if not told:
            self._seats.pop(seat.id, None)
        while len(self._over) > _REMEMBERED:
            forgotten, _ = self._over.popitem(last=False)
            self._seats.pop(forgotten, None)
        if seat.overdue is not None:
            seat.overdue.cancel()
        refusal = Refused(400, f"episode {seat.id} is over: {ending.why}", code)
        for call in (*([seat.call] if seat.call else ()), *seat.queue):
            _refuse(call, refusal)
        seat.queue = []


def _refuse(call: Call, refusal: Refused) -> None:
    if not call.reply.done():
        call.reply.set_exception(refusal)
        # Perhaps no client is left to fetch it.
        call.reply.exception()
