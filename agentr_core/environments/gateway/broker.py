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

from agentr_core.episodes.transcript import NativeCall, read_call
from agentr_core.models.openai.wire import ToldCall, argument_text, reply_text

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

    def as_dict(self) -> dict[str, str]:
        """Return the turn as role and text."""
        text = self.content or ""
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        calls = [ToldCall(call.function.name, argument_text(call.function.arguments)) for call in self.tool_calls or ()]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "text": reply_text(text, calls) if calls else text}


class _FunctionName(BaseModel):
    name: Annotated[str, Field(min_length=1)]


class _Tool(BaseModel):
    type: Literal["function"]
    function: _FunctionName


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
        return [*offered, *(turn.as_dict() for turn in self.messages)]


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
    is_unsupported = where.startswith("messages.") or where == "n"
    reason = f"{where or 'the body'}: {nearest['msg']}" + (
        "; the gateway takes text, and one reply at a time" if is_unsupported else ""
    )
    return Refused(400, reason, "invalid_request", where or None)


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
    for number, tool_call in enumerate(message.get("tool_calls", ())):
        tool_call["index"] = number
    head = _head("chat.completion.chunk", name, created)
    events: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in ((message, None), ({}, finish))
    ]
    if call.stream_options and call.stream_options.include_usage:
        events.append({**head, "choices": [], "usage": _usage(reply)})
    for content in events:
        yield f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


def model() -> dict[str, Any]:
    """Return the one model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentr"}


def _message(call: ChatCall, reply: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str]:
    native_call = read_call(reply["text"]) if call.tools else None
    if not isinstance(native_call, NativeCall):
        return {"role": "assistant", "content": reply["text"]}, reply.get("finish_reason") or "stop"
    function = {"name": native_call.name, "arguments": json.dumps(dict(native_call.arguments), ensure_ascii=False)}
    tool_call = {"id": f"call{name[:8]}", "type": "function", "function": function}
    return {"role": "assistant", "content": native_call.beside or None, "tool_calls": [tool_call]}, "tool_calls"


def _usage(reply: Mapping[str, Any]) -> dict[str, int] | None:
    if "prompt_tokens" not in reply:
        return None
    prompt, completion = reply["prompt_tokens"], reply["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(kind: str, name: str, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": created, "model": MODEL}


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
    wait for it or are being sent it, `num_delivered` how many have it.
    """

    turns: Turns
    reply: asyncio.Future[Mapping[str, Any]]
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    clients: int = 0
    num_delivered: int = 0


@dataclass(slots=True)
class Episode:
    """One episode. `events` holds the events of its agent for the run.

    `call` is the last call that the run was told of, and `queue` the later ones. `last_request`
    is when the agent was last heard from, or the run last replied to it; `last_poll` is when the
    run last asked for the agent's next event.
    """

    id: str
    run: str
    offer: Mapping[str, Any]
    last_request: float
    last_poll: float
    taken: bool = False
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
    """Why an episode is over, and the reward that ended it, if one did.

    `delivered` says whether its agent knows that the reward was taken.
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
        """Return a name for a run, by which it offers episodes until it leaves."""
        self._runs.add(name := secrets.token_hex(8))
        return name

    def leave(self, run: str) -> None:
        """End the episodes of a run whose process is gone: the agents that wait are told so."""
        self._runs.discard(run)
        for episode in [episode for episode in self._episodes.values() if episode.run == run]:
            self.close(episode.id, "the process of its run ended", "episode_over")

    def open(self, offer: Mapping[str, Any], run: str) -> str | None:
        """Offer an episode, and return its id; None if its run is not known here. `run` is empty
        for one that does not say when it leaves.
        """
        if run and run not in self._runs:
            return None
        now = time.monotonic()
        episode = Episode(id=secrets.token_hex(8), run=run, offer=offer, last_request=now, last_poll=now)
        self._episodes[episode.id] = episode
        self._offers.append(episode)
        self._offered.set()
        return episode.id

    async def next(self, key: str, reply: Mapping[str, Any] | None, wait: float) -> dict[str, Any]:
        """Give the agent of an episode a reply, and return its next event: `call`, `reward` or
        `lost`; or `none` after `wait` seconds, with the seconds for which it has been silent.

        A reply with `refused` is a sentence that says why there is none. `call` and `reward` say in
        `delivered` whether the agent has the reply to its last call. An episode that was ended here
        is `lost`, with the reason. Raises `KeyError` for an unknown episode.
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
                    _refuse(episode.call, Refused(400, reason, "invalid_request"))
                else:
                    episode.call.reply.set_result(reply)
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

    def close(self, key: str, reason: str, code: str) -> None:
        """End an episode on behalf of the run; an agent that waits, or comes back, is told why."""
        if (episode := self._episodes.get(key)) is not None:
            self._end(episode, Ending(reason), code)
            episode.events.put_nowait({"event": "lost", "why": reason})

    async def take(self, wait: float) -> Episode | None:
        """Return the episode that was offered first, for an agent to play; None if there is none
        within `wait` seconds.
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
        """Offer an episode to others, unless it was used: the agent that took it does not know."""
        if episode.taken and episode.id not in self._over and episode.call is None and not episode.queue:
            episode.taken = False
            self._offers.append(episode)
            self._offered.set()

    def ask(self, key: str, turns: Turns, *, again: bool = False) -> Call:
        """Return an agent's call, for one client more: a new one, or one of the same turns whose
        reply nobody has yet. It ends with `settle`. `again` says that its client knows of no reply
        to its last call, whatever is known here: there may be a proxy between.

        Calls of one episode are answered one by one. The reply is `Refused` when the episode ends
        first. Raises `Refused` when it is over.
        """
        episode = self._touch(self.episode(key))
        open_calls = (
            *episode.queue,
            *([episode.call] if episode.call and (again or not episode.call.num_delivered) else ()),
        )
        call = next((call for call in open_calls if call.turns == turns), None)
        if call is None:
            call = Call(turns, asyncio.get_running_loop().create_future())
            episode.queue.append(call)
        call.clients += 1
        self._advance(episode)
        return call

    def settle(self, key: str, call: Call, *, delivered: bool) -> None:
        """Note that a client of a call has its reply, or left without it."""
        call.clients -= 1
        call.num_delivered += delivered
        if (episode := self._episodes.get(key)) is not None:
            self._advance(episode)

    def lose(self, call: Call) -> None:
        """Note that a client which was sent its reply did not read it."""
        call.num_delivered -= 1

    def reward(self, key: str, reward: float, success: bool) -> None:
        """End an episode with the reward that its agent reports, whatever its calls still wait for.

        The same reward once more is taken if the agent does not know that it was. Raises `Refused`.
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
        """Note whether an agent knows that its reward was taken."""
        if (ending := self._over.get(key)) is not None:
            ending.delivered = delivered

    def failed(self, key: str, reason: str) -> None:
        """Record that an agent gave an episode up; its run offers it again. Raises `Refused`."""
        episode = self._touch(self.episode(key))
        episode.events.put_nowait({"event": "lost", "why": f"the agent gave it up: {reason}"})
        self._end(episode, Ending("it was given up"), "episode_over", event_pending=True)

    def state(self, key: str) -> dict[str, Any]:
        """Return what is known of an episode: whether its agent has `asked` the policy; once it is
        over, why (`over`), and the `reward` that was reported, if one was. Raises `Refused`.
        """
        if (ending := self._over.get(key)) is not None:
            reward, _ = ending.reward or (None, None)
            return {"episode": key, "over": ending.reason, "reward": reward}
        episode = self.episode(key)
        return {"episode": key, "asked": episode.call is not None or bool(episode.queue)}

    def episode(self, key: str) -> Episode:
        """Return an episode that is under way. Raises `Refused`."""
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
        """Tell the run of the first call that a client waits for, once the one before is
        settled.
        """
        episode.queue = [call for call in episode.queue if call.clients]
        if not episode.queue or (episode.call is not None and (not episode.call.reply.done() or episode.call.clients)):
            return
        call = episode.queue.pop(0)
        episode.events.put_nowait({"event": "call", "turns": list(call.turns), "delivered": episode.delivered})
        episode.call = call
        episode.reply_timer = asyncio.get_running_loop().call_later(
            _REPLY_SECONDS, self._give_up, episode, _REPLY_SECONDS
        )

    def _give_up(self, episode: Episode, seconds: float) -> None:
        if episode.call is not None and not episode.call.reply.done():
            reason = f"the run gave no reply within {seconds:.0f} s; see whether it lives"
            self._end(episode, Ending(reason), "episode_over")

    def _end(self, episode: Episode, ending: Ending, code: str, *, event_pending: bool = False) -> None:
        """End an episode; `event_pending`: the run has yet to fetch the agent's last event."""
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
            _refuse(call, refusal)
        episode.queue = []


def _refuse(call: Call, refusal: Refused) -> None:
    if not call.reply.done():
        call.reply.set_exception(refusal)
        # Perhaps no client is left to fetch it.
        call.reply.exception()
