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
import json
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentr_core.environment import Environment
from agentr_core.episodes.native_calls import NativeCall, read_call
from agentr_core.episodes.transcript import reply_turn
from agentr_core.errors import IllTypedAnswer
from agentr_core.models.openai.wire import ToldCall, argument_text, reply_text
from agentr_core.types import Message, Role, Sampling, Step

# The conversation of an outside agent, as it sends it: as messages, and as the text of an
# observation.
#
# Each call of an agent has its whole history. If the history continues the previous call, the
# observation is the added turns; if not, for example after the agent summarised its history or
# began another thread, a new conversation begins, and the observation has all of it.

_LIST: Final = '[{"role": '
_ANEW: Final = {"role": "anew"}


@dataclass(frozen=True, slots=True)
class OutsideTurns:
    """The agent's own messages and the policy's replies, exactly as they were read.

    An episode may have several conversations, one after the other. `prompt` and `sample` return the
    last one; `begins` says where each begins, and training sees all of them.
    """

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation that the next reply answers."""
        return self._turns(first_observation, steps, [False] * len(steps))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the last conversation up to its last reply."""
        if not steps:
            return self._turns(first_observation, steps, train)
        before = self._turns(first_observation, steps[:-1], train[:-1])
        return (*before, reply_turn(steps[-1], train[-1]))

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings as they are: the recipe says how replies are drawn."""
        return sampling

    def begins(self, steps: Sequence[Step]) -> tuple[int, ...]:
        """Return the positions of the steps at which conversations begin, 0 first."""
        later = (position + 1 for position, step in enumerate(steps[:-1]) if _is_anew(step.observation))
        return (0, *later)

    def _turns(self, first_observation: str, steps: Sequence[Step], train: Sequence[bool]) -> tuple[Message, ...]:
        turns = list(read_turns(first_observation))
        for step, flag in zip(steps, train, strict=True):
            if _is_anew(step.observation):
                turns.clear()
            else:
                turns.append(reply_turn(step, flag))
            turns += read_turns(step.observation)
        return tuple(turns)


def written(turns: Sequence[Message], *, anew: bool = False) -> str:
    """Return turns as the text of an observation: a single turn of the user as it is, anything else
    as JSON.

    `anew` says that they are a whole conversation, not an addition to the one before.
    """
    plain = len(turns) == 1 and turns[0].role == "user" and turns[0].text and not turns[0].text.startswith(_LIST)
    if plain and not anew:
        return turns[0].text
    told = [{"role": turn.role, "content": turn.text} for turn in turns]
    return json.dumps([*([_ANEW] if anew else []), *told], ensure_ascii=False)


def read_turns(text: str) -> tuple[Message, ...]:
    """Return the turns in the text of an observation; none in an empty one."""
    if not text.startswith(_LIST):
        return (Message(role="user", text=text),) if text else ()
    told: list[dict[str, Any]] = [turn for turn in json.loads(text) if turn != _ANEW]
    return tuple(Message(role=turn["role"], text=turn["content"]) for turn in told)


def observed(history: Sequence[Message], now: Sequence[Message]) -> str:
    """Return what an agent's call adds to the conversation so far, as the text of an observation.

    Replies count as the same if they differ only in white space at their ends and in the spelling
    of a tool call, which OpenAI's protocol splits into parts.
    """
    return written(now[len(history) :]) if continues(history, now) else written(now, anew=True)


def continues(history: Sequence[Message], now: Sequence[Message]) -> bool:
    """Return whether an agent's call goes on from a conversation."""
    return len(now) > len(history) and all(
        ours.role == theirs.role and (ours.text == theirs.text or _normal(ours) == _normal(theirs))
        for ours, theirs in zip(history, now, strict=False)
    )


def turn_of(told: Any) -> Message:
    """Return the message for a turn that the gateway sent. Raises `IllTypedAnswer` for anything
    else.
    """
    if not isinstance(told, dict) or not isinstance(told.get("text"), str):
        raise IllTypedAnswer(f"the gateway told {str(told)[:80]} in place of a turn; start the one of this version")
    role: Role = told["role"]
    return Message(role=role, text=told["text"])


def _normal(turn: Message) -> Any:
    if turn.role != "assistant":
        return turn.text
    call = read_call(turn.text)
    return (call.name, call.arguments, call.beside) if isinstance(call, NativeCall) else turn.text.strip()


def _is_anew(observation: str) -> bool:
    return observation.startswith(_LIST + json.dumps(_ANEW["role"]))


# The requests of agents to the gateway, and its answers: chat completions in OpenAI's protocol.

MODEL: Final = "policy"
"""The name by which agents ask for the model."""


_CODES: Final = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class Refused(Exception):
    """A request that is answered with an error: one sentence, a status, a code, and perhaps the
    field at fault.
    """

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        code = code or _CODES.get(status, kind)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    function: _Function


class _Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    def told(self) -> dict[str, str]:
        """Return the turn as role and text."""
        text = self.content or ""
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        calls = [ToldCall(call.function.name, argument_text(call.function.arguments)) for call in self.tool_calls or ()]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "text": reply_text(text, calls) if calls else text}


class _Named(BaseModel):
    name: Annotated[str, Field(min_length=1)]


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Named


_TOOLS: Final = TypeAdapter(list[_Tool])


class _StreamOptions(BaseModel):
    include_usage: bool = False


class ChatCall(BaseModel):
    """A chat completion that an agent asks for. The recipe decides how it is drawn, so the agent's
    temperature, limits and stop strings have no effect.
    """

    model: str
    messages: Annotated[list[_Turn], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def turns(self) -> list[dict[str, str]]:
        """Return the turns as roles and texts; the tools that are offered come first."""
        offered = [{"role": "tools", "text": json.dumps(self.tools, ensure_ascii=False)}] if self.tools else []
        return [*offered, *(turn.told() for turn in self.messages)]


class Rewarded(BaseModel):
    """An agent's report at the end of an episode. Without `success`, a reward of 1 is a success.

    The text "1" and `true` are no rewards.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    reward: Annotated[float, Field(ge=0, le=1)]
    success: bool | None = None


class Failed(BaseModel):
    """A report that an agent gave its episode up for a fault of its own, which is not a reward of
    0.
    """

    reason: str = "it gave no reason"


_KINDS: Final = ("str", "list[_Part]", "dict[str,any]")
"""Names of kinds of content among the fields of an error."""


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raise `Refused` for tools that have no names, which no model's template can show."""
    try:
        _TOOLS.validate_python(tools)
        json.dumps(tools, allow_nan=False)
    except ValidationError as error:
        raise refusal_of(error, within=("tools",)) from error
    except ValueError as error:
        raise Refused(400, f"tools: {error}", "invalid_request", "tools") from error


def refusal_of(error: ValidationError, *, within: tuple[str, ...] = ()) -> Refused:
    """Return the answer to a body with an error: a sentence that does not quote the body. `within`
    is the field that has the error, if not the body as a whole was read.
    """
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    # Where a field may be of several kinds, the one that the body comes nearest to.
    nearest = max(faults, key=lambda fault: len(fault["loc"])) if faults[0]["loc"][-1:] == ("str",) else faults[0]
    where = ".".join(str(part) for part in (*within, *nearest["loc"]) if part not in _KINDS)
    ours = where.startswith("messages.") or where == "n"
    why = f"{where or 'the body'}: {nearest['msg']}" + (
        "; the gateway takes text, and one reply at a time" if ours else ""
    )
    return Refused(400, why, "invalid_request", where or None)


def completion(call: ChatCall, reply: Mapping[str, Any], *, name: str = "", created: int = 0) -> dict[str, Any]:
    """Return the answer to a call; the reply has a text and, if a model generated it, a finish
    reason and token counts. Ids are made of its name.
    """
    message, finish = _message(call, reply, name)
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {**_head("chat.completion", name, created), "choices": [choice], "usage": _usage(reply)}


def chunks(call: ChatCall, reply: Mapping[str, Any], *, name: str, created: int) -> Iterator[str]:
    """Yield the answer to a call as events of a stream. The reply is in one piece, since it was
    checked and counted as a whole.
    """
    message, finish = _message(call, reply, name)
    for number, told in enumerate(message.get("tool_calls", ())):
        told["index"] = number
    head = _head("chat.completion.chunk", name, created)
    for delta, reason in ((message, None), ({}, finish)):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    if call.stream_options and call.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def model() -> dict[str, Any]:
    """Return the one model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentr"}


def _message(call: ChatCall, reply: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str]:
    found = read_call(reply["text"]) if call.tools else None
    if not isinstance(found, NativeCall):
        return {"role": "assistant", "content": reply["text"]}, reply.get("finish_reason") or "stop"
    function = {"name": found.name, "arguments": json.dumps(dict(found.arguments), ensure_ascii=False)}
    told = {"id": f"call{name[:8]}", "type": "function", "function": function}
    return {"role": "assistant", "content": found.beside or None, "tool_calls": [told]}, "tool_calls"


def _usage(reply: Mapping[str, Any]) -> dict[str, int] | None:
    if "prompt_tokens" not in reply:
        return None
    prompt, made = reply["prompt_tokens"], reply["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _head(kind: str, name: str, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": created, "model": MODEL}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


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
        self._offers.append(seat)
        self._offered.set()
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
            if seat.overdue is not None:
                seat.overdue.cancel()
            if seat.call is not None and not seat.call.reply.done():
                seat.heard = time.monotonic()
                if (why := reply.get("refused")) is not None:
                    _refuse(seat.call, Refused(400, why, "invalid_request"))
                else:
                    seat.call.reply.set_result(reply)
                self._advance(seat)
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
            self._offers.append(seat)
            self._offered.set()

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
