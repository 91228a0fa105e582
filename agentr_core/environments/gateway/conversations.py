"""The conversations of an outside agent: a tree, as it calls; and as stored, the texts of
observations.

Each call of an agent brings a whole history. Agents respell what they were told, drop it, sum it
up, and have several threads, so a call goes on from whichever known beginning is the longest:

    tools, system, user | reply 0 | tool | reply 1 | user | reply 2          one conversation
                                  | user (thread without the result) | ...   another, from reply 0
    system, user (a title) | reply 3                                         a third

A reply is known again by the ids of its calls, which every agent sends back as they were, else by
its text. The policy reads it, and is trained on it, as the tokens that it sampled, not as it came
back; all other turns are read as the agent sent them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

from agentr_core.environment import Environment, Part
from agentr_core.episodes.transcript import ANEW, TURNS, calls_in, reply_turn
from agentr_core.errors import IllTypedAnswer
from agentr_core.texts import outside_thoughts
from agentr_core.types import Message, Role, Sampling, Step

Turn: TypeAlias = Message | int
"""A turn of a prompt: a message as the agent sent it, or the step whose reply it is."""
Prompt: TypeAlias = tuple[Turn, ...]
SideCalls: TypeAlias = Literal["leave", "train"]

_CALL_ID = re.compile(r"call_\d+_\d+_[0-9a-f]{8}")
_SPACE = re.compile(r"\s+")


# What the text of an observation says: the turns that a call adds to the conversation of the reply
# before it. It is the text of a single user turn as it is, anything else is JSON. A conversation
# that begins anew has a head, which says how much of an earlier one it shares; an assistant's turn
# of it that is a known reply is the number of its step.


def format_turns(
    turns: Sequence[Turn], *, after: int | None = None, num_shared: int = 0, num_respelled: int = 0
) -> str:
    """Return the turns that a call adds as the text of an observation.

    Args:
        after: None if they go on from the last reply. Otherwise a conversation begins with the
            first `num_shared` turns of another one: the prompt of step `after` and its reply.
        num_respelled: how many replies came back so changed that only the ids of their calls told
            them.
    """
    if after is None and len(turns) == 1 and isinstance(turns[0], Message) and turns[0].role == "user":
        plain = turns[0].text
        if plain and not plain.startswith(TURNS):
            return plain
    head: dict[str, Any] = {"role": ANEW}
    if num_shared:
        head |= {"after": after, "turns": num_shared}
    if num_respelled:
        head["respelled"] = num_respelled
    records = [
        {"role": "assistant", "step": turn} if isinstance(turn, int) else {"role": turn.role, "content": turn.text}
        for turn in turns
    ]
    return json.dumps([*([] if after is None else [head]), *records], ensure_ascii=False)


def read_turns(text: str, prompts: Sequence[Prompt] = ()) -> Prompt:
    """Return the prompt to which an observation leads, given those of the replies before it, the
    last of which it answers. An empty text adds nothing.
    """
    before: Prompt = (*prompts[-1], len(prompts) - 1) if prompts else ()
    if not text.startswith(TURNS):
        return (*before, Message(role="user", text=text)) if text else before
    records: list[dict[str, Any]] = json.loads(text)
    if records[0]["role"] == ANEW:
        head = records.pop(0)
        num_shared = head.get("turns", 0)
        before = (*prompts[head["after"]], head["after"])[:num_shared] if num_shared else ()
    new_turns = (
        turn["step"] if "step" in turn else Message(role=turn["role"], text=turn["content"]) for turn in records
    )
    return (*before, *new_turns)


def prompts_of(first_observation: str, steps: Sequence[Step]) -> list[Prompt]:
    """Return the prompt of each reply of an episode, and that of the next one."""
    prompts = [read_turns(first_observation)]
    for step in steps:
        prompts.append(read_turns(step.observation, prompts))
    return prompts


# An episode that is under way: what a call goes on from.


class CallTurn(NamedTuple):
    """A turn of a call as an agent sends it: `ids` are those of the calls that an assistant's turn
    makes, or the one of the call that a tool's turn answers.
    """

    role: Role
    text: str
    ids: tuple[str, ...] = ()

    @classmethod
    def read(cls, raw: Any) -> CallTurn:
        """Return a turn that the gateway sent. Raises `IllTypedAnswer` for anything else."""
        if not isinstance(raw, dict) or not isinstance(raw.get("text"), str):
            raise IllTypedAnswer(f"the gateway told {str(raw)[:80]} in place of a turn; start the one of this version")
        return cls(raw["role"], raw["text"], tuple(raw.get("ids", ())))


class Conversations:
    """The conversations of an episode so far."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._replies: list[str] = []
        self._steps: dict[str, int] = {}
        """The step of each call's id."""
        self._respelled: set[int] = set()

    def add(self, prompt: Prompt, reply: str) -> tuple[str, ...]:
        """Add the next reply to the conversation that it answers, and return the ids of its
        calls.
        """
        step = len(self._prompts)
        self._prompts.append(prompt)
        self._replies.append(reply)
        ids = call_ids(step, reply)
        self._steps |= dict.fromkeys(ids, step)
        return ids

    def drop_last(self) -> None:
        """Forget the last reply, which did not reach the agent."""
        self._prompts.pop()
        self._replies.pop()
        self._steps = {key: step for key, step in self._steps.items() if step < len(self._prompts)}

    def has_last(self, call: Sequence[CallTurn]) -> bool:
        """Return whether a call has the last reply in its history."""
        last = len(self._prompts) - 1
        return last in self._follow(_ordered(call), range(last, -1, -1))[0]

    def place(self, call: Sequence[CallTurn]) -> tuple[Prompt, str]:
        """Return what the policy reads of a call, and the call as the text of an observation."""
        turns, last = _ordered(call), len(self._prompts) - 1
        if last < 0:
            first = tuple(Message(role=turn.role, text=turn.text) for turn in turns)
            return first, format_turns(first)
        prompt, after, num_shared = self._follow(turns, [last])
        if num_shared <= len(self._prompts[last]):
            prompt, after, num_shared = self._follow(turns, range(last, -1, -1))
        respelled_steps = {
            turn
            for turn, call_turn in zip(prompt, turns, strict=True)
            if isinstance(turn, int) and _normal(call_turn.text) != _normal(self._replies[turn])
        } - self._respelled
        self._respelled |= respelled_steps
        goes_on = (after, num_shared) == (last, len(self._prompts[last]) + 1) and not respelled_steps
        text = format_turns(
            prompt[num_shared:],
            after=None if goes_on else after,
            num_shared=num_shared,
            num_respelled=len(respelled_steps),
        )
        return prompt, text

    def _follow(self, call: Sequence[CallTurn], steps: Iterable[int]) -> tuple[Prompt, int, int]:
        """Return a call as a prompt, and the step among some whose conversation it shares most of,
        the first if there are several, with the number of shared turns.
        """
        rivals, after, num_shared = list(steps), 0, 0
        prompt: list[Turn] = []
        for position, call_turn in enumerate(call):
            matches = [
                (step, turn)
                for step in rivals
                if (turn := self._turn(step, position)) is not None and self._is(turn, call_turn)
            ]
            if matches:
                # A reply may have been given twice; the latest conversation has the say.
                (after, turn), num_shared = matches[0], position + 1
                rivals = [step for step, candidate in matches if candidate == turn]
            else:
                rivals, turn = [], self._elsewhere(call_turn, prompt)
            prompt.append(turn)
        return tuple(prompt), after, num_shared

    def _turn(self, step: int, position: int) -> Turn | None:
        """Return a turn of the conversation that the reply of a step ends."""
        prompt = self._prompts[step]
        return prompt[position] if position < len(prompt) else step if position == len(prompt) else None

    def _is(self, turn: Turn, call_turn: CallTurn) -> bool:
        """Return whether a turn came back."""
        if isinstance(turn, Message):
            return (turn.role, turn.text) == (call_turn.role, call_turn.text)
        if call_turn.role != "assistant":
            return False
        named_step = self._named(call_turn)
        return turn == named_step if named_step is not None else _normal(self._replies[turn]) == _normal(call_turn.text)

    def _elsewhere(self, call_turn: CallTurn, prompt: Sequence[Turn]) -> Turn:
        """Return a turn that follows on no known beginning: a known reply all the same, or the turn
        as it was sent.
        """
        if call_turn.role == "assistant":
            if (named_step := self._named(call_turn)) is not None:
                return named_step
            key = _normal(call_turn.text)
            before = max((turn for turn in prompt if isinstance(turn, int)), default=-1)
            for step in range(before + 1, len(self._replies)):
                if key and _normal(self._replies[step]) == key:
                    return step
        return Message(role=call_turn.role, text=call_turn.text)

    def _named(self, call_turn: CallTurn) -> int | None:
        """Return the step that the ids in an assistant's turn name; some agents write their calls
        into the text.
        """
        for key in (*call_turn.ids, *_CALL_ID.findall(call_turn.text)):
            if key in self._steps:
                return self._steps[key]
        return None


def call_ids(step: int, reply: str) -> tuple[str, ...]:
    """Return the ids of the calls in the reply of a step. Equal replies have equal ids, so that an
    agent which is given the same replies again sends the same texts; an id of another episode names
    nothing.
    """
    digest = hashlib.sha256(reply.encode()).hexdigest()[:8]
    return tuple(f"call_{step}_{number}_{digest}" for number in range(len(calls_in(reply))))


def _ordered(call: Sequence[CallTurn]) -> list[CallTurn]:
    """Return the turns of a call with the results of calls in the order of the calls: a template
    does not show which result is whose.
    """
    turns = list(call)
    for position, turn in enumerate(turns):
        if turn.role == "assistant" and len(turn.ids) > 1:
            order = {key: rank for rank, key in enumerate(turn.ids)}
            results = list(takewhile(lambda later: later.role == "tool", turns[position + 1 :]))
            results.sort(key=lambda result: order.get("".join(result.ids), len(order)))
            turns[position + 1 : position + 1 + len(results)] = results
    return turns


@lru_cache(maxsize=4096)
def _normal(reply: str) -> str:
    """Return what of a reply its agent may not change: its calls, and its text without thoughts and
    white space.
    """
    if not (calls := calls_in(reply)):
        return _SPACE.sub("", outside_thoughts(reply))
    beside = _SPACE.sub("", outside_thoughts(calls[0].beside))
    return json.dumps([beside, *([call.name, dict(call.arguments)] for call in calls)], sort_keys=True)


# An episode that is stored: its conversations as samples.


@dataclass(frozen=True, slots=True)
class OutsideTurns:
    """The transcript of the agent's own messages and the policy's replies, as they were read.

    `side_calls` says whether conversations beside the agent's task are trained, too: those that
    were offered no tools where others were, and those of a single reply that begin otherwise than
    the longest, unless these are half of the episode.
    """

    side_calls: SideCalls = "leave"

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation that the next reply answers."""
        return _messages(prompts_of(first_observation, steps)[-1], steps, [False] * len(steps))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation of the last reply up to it."""
        prompts = prompts_of(first_observation, steps)
        last = len(steps) - 1
        return _messages((*prompts[last], last) if steps else prompts[0], steps, train)

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings as they are: the recipe says how replies are drawn."""
        return sampling

    def parts(self, first_observation: str, steps: Sequence[Step]) -> tuple[Part, ...]:
        """Return the conversations; see `Dividing`. Each reply is in one of them alone: where two
        go on from it, it is trained in the first and stands in the other without loss.
        """
        prompts = prompts_of(first_observation, steps)
        # The steps of each conversation: their prompts each go on from the reply before, with all
        # that was read before that.
        chains: list[list[int]] = []
        for step, prompt in enumerate(prompts[:-1]):
            replies = [position for position, turn in enumerate(prompt) if isinstance(turn, int)]
            before = prompt[replies[-1]] if replies else None
            chain = next((c for c in chains if c[-1] == before and prompt[: replies[-1]] == prompts[c[-1]]), [])
            if not chain:
                chains.append(chain)
            chain.append(step)
        parts = []
        for chain, side in zip(chains, _are_side(chains, prompts), strict=True):
            train = [step in chain and (not side or self.side_calls == "train") for step in range(len(steps))]
            parts.append(Part(tuple(chain), _messages((*prompts[chain[-1]], chain[-1]), steps, train), side))
        return tuple(parts)


def _messages(prompt: Prompt, steps: Sequence[Step], train: Sequence[bool]) -> tuple[Message, ...]:
    return tuple(reply_turn(steps[turn], train[turn]) if isinstance(turn, int) else turn for turn in prompt)


def _are_side(chains: Sequence[Sequence[int]], prompts: Sequence[Prompt]) -> list[bool]:
    """Return of each conversation whether it is beside the agent's task; see `OutsideTurns`."""
    openings = [[turn for turn in prompts[chain[0]] if isinstance(turn, Message)][:2] for chain in chains]
    tools = [bool(opening) and opening[0].role == "tools" for opening in openings]
    firsts = [opening[has_tools : has_tools + 1] for opening, has_tools in zip(openings, tools, strict=True)]
    rivals = [number for number, has_tools in enumerate(tools) if has_tools or not any(tools)]
    longest = max(rivals, key=lambda number: len(chains[number]), default=0)
    odd = [number for number in rivals if len(chains[number]) == 1 and firsts[number] != firsts[longest]]
    # An agent may also have a conversation for each reply, and go on with one of them now and then.
    few = 2 * len(odd) < sum(len(chains[number]) for number in rivals)
    return [number not in rivals or (few and number in odd) for number in range(len(chains))]
