"""The conversations of an outside agent: how its calls form a tree, and how they are stored as the
texts of observations.

Each call of an agent brings a whole history. Agents rewrite earlier turns, drop or summarise them,
and have several threads, so a call continues the known conversation with which it shares the
longest beginning:

    tools, system, user | reply 0 | tool | reply 1 | user | reply 2          one conversation
                                  | user (thread without the result) | ...   another, from reply 0
    system, user (a title) | reply 3                                         a third

A reply is recognised by the ids of its calls, which every agent sends back unchanged, else by its
text. The policy reads a recognised reply, and is trained on it, as the tokens that it sampled, not
as it came back; all other turns are read as the agent sent them.
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

from agentr_core.environment import Conversation, Environment
from agentr_core.episodes.transcript import NEW_CONVERSATION, TURN_LIST_START, readable_calls, reply_turn
from agentr_core.errors import IllTypedAnswer
from agentr_core.texts import blank_thoughts
from agentr_core.types import Message, Role, Sampling, Step

Turn: TypeAlias = Message | int
"""A turn of a prompt: a message as the agent sent it, or the number of the step whose reply it
is.
"""
Prompt: TypeAlias = tuple[Turn, ...]
SideCalls: TypeAlias = Literal["leave", "train"]

_CALL_ID = re.compile(r"call_\d+_\d+_[0-9a-f]{8}")
_SPACE = re.compile(r"\s+")


# The text of an observation holds the turns that a call adds to the conversation of the reply
# before it. A single user turn is its plain text, anything else is a JSON list. If the call
# continues another conversation, the list begins with a head, which says how much of an earlier one
# it shares. A turn that is a known reply is stored as the number of its step.


def format_observation(
    turns: Sequence[Turn], *, parent_step: int | None = None, num_shared: int = 0, num_respelled: int = 0
) -> str:
    """Return the turns that a call adds as the text of an observation.

    Args:
        parent_step: None if the call continues the conversation of the last reply. Otherwise it
            shares its first `num_shared` turns with another conversation: the prompt of step
            `parent_step` and its reply.
        num_respelled: how many replies came back with such changes that only the ids of their calls
            identified them.
    """
    if parent_step is None and len(turns) == 1 and isinstance(turns[0], Message) and turns[0].role == "user":
        text = turns[0].text
        if text and not text.startswith(TURN_LIST_START):
            return text
    head: dict[str, Any] = {"role": NEW_CONVERSATION}
    if num_shared:
        head |= {"after": parent_step, "turns": num_shared}
    if num_respelled:
        head["respelled"] = num_respelled
    records = [
        {"role": "assistant", "step": turn} if isinstance(turn, int) else {"role": turn.role, "content": turn.text}
        for turn in turns
    ]
    return json.dumps([*([] if parent_step is None else [head]), *records], ensure_ascii=False)


def read_prompt(observation: str, prompts: Sequence[Prompt] = ()) -> Prompt:
    """Return the prompt that an observation leads to. `prompts` are those of the replies so far;
    the observation follows the last of them. An empty text adds only that last reply.
    """
    prefix: Prompt = (*prompts[-1], len(prompts) - 1) if prompts else ()
    if not observation.startswith(TURN_LIST_START):
        return (*prefix, Message(role="user", text=observation)) if observation else prefix
    records: list[dict[str, Any]] = json.loads(observation)
    if records[0]["role"] == NEW_CONVERSATION:
        head = records.pop(0)
        num_shared = head.get("turns", 0)
        prefix = (*prompts[head["after"]], head["after"])[:num_shared] if num_shared else ()
    new_turns = (
        turn["step"] if "step" in turn else Message(role=turn["role"], text=turn["content"]) for turn in records
    )
    return (*prefix, *new_turns)


def prompts_of(first_observation: str, steps: Sequence[Step]) -> list[Prompt]:
    """Return the prompts of all replies of an episode, in order, and that of the next reply."""
    prompts = [read_prompt(first_observation)]
    for step in steps:
        prompts.append(read_prompt(step.observation, prompts))
    return prompts


# For an episode under way: the known conversation that a call continues.


class CallTurn(NamedTuple):
    """A turn of a call as an agent sends it. `ids` are the ids of the tool calls in an assistant's
    turn, or the one id of the call that a tool's turn answers.
    """

    role: Role
    text: str
    ids: tuple[str, ...] = ()

    @classmethod
    def read(cls, raw: Any) -> CallTurn:
        """Return a turn that the gateway sent. Raises `IllTypedAnswer` if it is not one."""
        if not isinstance(raw, dict) or not isinstance(raw.get("text"), str):
            raise IllTypedAnswer(f"the gateway told {str(raw)[:80]} in place of a turn; start the one of this version")
        return cls(raw["role"], raw["text"], tuple(raw.get("ids", ())))


class Conversations:
    """The conversations of an episode so far."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._replies: list[str] = []
        self._steps_by_call_id: dict[str, int] = {}
        """The step of each tool call, by the call's id."""
        self._respelled_steps: set[int] = set()

    def add(self, prompt: Prompt, reply: str) -> tuple[str, ...]:
        """Add the next reply to the conversation that it answers, and return the ids of its tool
        calls.
        """
        step = len(self._prompts)
        self._prompts.append(prompt)
        self._replies.append(reply)
        ids = call_ids(step, reply)
        self._steps_by_call_id |= dict.fromkeys(ids, step)
        return ids

    def drop_last(self) -> None:
        """Forget the last reply, which did not reach the agent."""
        self._prompts.pop()
        self._replies.pop()
        self._steps_by_call_id = {
            call_id: step for call_id, step in self._steps_by_call_id.items() if step < len(self._prompts)
        }

    def has_last_reply(self, call_turns: Sequence[CallTurn]) -> bool:
        """Return whether the last reply is in the history of a call."""
        last = len(self._prompts) - 1
        return last in self._longest_match(_order_results(call_turns), range(last, -1, -1))[0]

    def match_call(self, call_turns: Sequence[CallTurn]) -> tuple[Prompt, str]:
        """Find the known conversation that a call continues. Return the prompt for the policy, and
        the text of the observation that leads to it.
        """
        ordered_turns, last = _order_results(call_turns), len(self._prompts) - 1
        if last < 0:
            messages = tuple(Message(role=turn.role, text=turn.text) for turn in ordered_turns)
            return messages, format_observation(messages)
        prompt, parent_step, num_shared = self._longest_match(ordered_turns, [last])
        if num_shared <= len(self._prompts[last]):
            prompt, parent_step, num_shared = self._longest_match(ordered_turns, range(last, -1, -1))
        respelled_steps = {
            turn
            for turn, call_turn in zip(prompt, ordered_turns, strict=True)
            if isinstance(turn, int) and _normalise_reply(call_turn.text) != _normalise_reply(self._replies[turn])
        } - self._respelled_steps
        self._respelled_steps |= respelled_steps
        continues_last = (parent_step, num_shared) == (last, len(self._prompts[last]) + 1) and not respelled_steps
        observation = format_observation(
            prompt[num_shared:],
            parent_step=None if continues_last else parent_step,
            num_shared=num_shared,
            num_respelled=len(respelled_steps),
        )
        return prompt, observation

    def _longest_match(self, call_turns: Sequence[CallTurn], steps: Iterable[int]) -> tuple[Prompt, int, int]:
        """Return a call as a prompt, then the step whose conversation, including its reply, shares
        the most turns with it (of equal ones, the first in `steps`), and the number of shared
        turns.
        """
        candidates, parent_step, num_shared = list(steps), 0, 0
        prompt: list[Turn] = []
        for position, call_turn in enumerate(call_turns):
            matches = [
                (step, turn)
                for step in candidates
                if (turn := self._turn_at(step, position)) is not None and self._is_same_turn(turn, call_turn)
            ]
            if matches:
                # Equal replies may have been given twice; the conversation that comes first in
                # `steps` decides.
                (parent_step, turn), num_shared = matches[0], position + 1
                candidates = [step for step, candidate_turn in matches if candidate_turn == turn]
            else:
                candidates, turn = [], self._unmatched_turn(call_turn, prompt)
            prompt.append(turn)
        return tuple(prompt), parent_step, num_shared

    def _turn_at(self, step: int, position: int) -> Turn | None:
        """Return a turn of the conversation that ends with the reply of a step; None beyond its
        end.
        """
        prompt = self._prompts[step]
        return prompt[position] if position < len(prompt) else step if position == len(prompt) else None

    def _is_same_turn(self, turn: Turn, call_turn: CallTurn) -> bool:
        """Return whether a turn of a call is this known turn."""
        if isinstance(turn, Message):
            return (turn.role, turn.text) == (call_turn.role, call_turn.text)
        if call_turn.role != "assistant":
            return False
        identified_step = self._identified_step(call_turn)
        return (
            turn == identified_step
            if identified_step is not None
            else _normalise_reply(self._replies[turn]) == _normalise_reply(call_turn.text)
        )

    def _unmatched_turn(self, call_turn: CallTurn, prompt: Sequence[Turn]) -> Turn:
        """Return a turn that continues no known conversation: the step of a reply that it repeats,
        or else the message as it was sent.
        """
        if call_turn.role == "assistant":
            if (identified_step := self._identified_step(call_turn)) is not None:
                return identified_step
            normal_reply = _normalise_reply(call_turn.text)
            last_step = max((turn for turn in prompt if isinstance(turn, int)), default=-1)
            for step in range(last_step + 1, len(self._replies)):
                if normal_reply and _normalise_reply(self._replies[step]) == normal_reply:
                    return step
        return Message(role=call_turn.role, text=call_turn.text)

    def _identified_step(self, call_turn: CallTurn) -> int | None:
        """Return the step that an id in an assistant's turn names, or None. Some agents write the
        ids of calls into the text.
        """
        for call_id in (*call_turn.ids, *_CALL_ID.findall(call_turn.text)):
            if call_id in self._steps_by_call_id:
                return self._steps_by_call_id[call_id]
        return None


def call_ids(step: int, reply: str) -> tuple[str, ...]:
    """Return the ids of the tool calls in the reply of a step. They depend on step and reply only,
    so that an agent which gets the same replies again sends the same texts; an id of another reply
    identifies nothing.
    """
    digest = hashlib.sha256(reply.encode()).hexdigest()[:8]
    return tuple(f"call_{step}_{number}_{digest}" for number in range(len(readable_calls(reply))))


def _order_results(call_turns: Sequence[CallTurn]) -> list[CallTurn]:
    """Return the turns of a call with the results of tool calls in the order of these calls: a chat
    template does not show which result belongs to which call.
    """
    turns = list(call_turns)
    for position, turn in enumerate(turns):
        if turn.role == "assistant" and len(turn.ids) > 1:
            ranks_by_id = {call_id: rank for rank, call_id in enumerate(turn.ids)}
            results = list(takewhile(lambda next_turn: next_turn.role == "tool", turns[position + 1 :]))
            results.sort(key=lambda result: ranks_by_id.get("".join(result.ids), len(ranks_by_id)))
            turns[position + 1 : position + 1 + len(results)] = results
    return turns


@lru_cache(maxsize=4096)
def _normalise_reply(reply: str) -> str:
    """Return the part of a reply that an agent may not change if it is to be recognised: its calls,
    and its text without thoughts and white space.
    """
    if not (calls := readable_calls(reply)):
        return _SPACE.sub("", blank_thoughts(reply))
    beside = _SPACE.sub("", blank_thoughts(calls[0].text_outside))
    return json.dumps([beside, *([call.name, dict(call.arguments)] for call in calls)], sort_keys=True)


# For a stored episode: its conversations as training samples.


@dataclass(frozen=True, slots=True)
class OutsideTurns:
    """The transcript of the agent's own messages and the policy's replies, as the policy read them.

    `side_calls` says whether side conversations, which are not about the agent's task, are trained:
    those that were offered no tools if others were, and those of a single reply whose first message
    differs from that of the longest conversation, unless these make up half of the replies or more.
    """

    side_calls: SideCalls = "leave"

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation that the next reply answers."""
        return _to_messages(prompts_of(first_observation, steps)[-1], steps, [False] * len(steps))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation of the last reply, up to that reply."""
        prompts = prompts_of(first_observation, steps)
        last = len(steps) - 1
        return _to_messages((*prompts[last], last) if steps else prompts[0], steps, train)

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings unchanged: the recipe decides how replies are sampled."""
        return sampling

    def parts(self, first_observation: str, steps: Sequence[Step]) -> tuple[Conversation, ...]:
        """Return the conversations; see `Dividing`. Each reply belongs to one of them: if two
        conversations continue it, it is trained in the first, and is part of the other without
        loss.
        """
        prompts = prompts_of(first_observation, steps)
        # The steps of each conversation: the prompt of each step continues the prompt and reply of
        # the step before.
        chains: list[list[int]] = []
        for step, prompt in enumerate(prompts[:-1]):
            reply_positions = [position for position, turn in enumerate(prompt) if isinstance(turn, int)]
            parent_step = prompt[reply_positions[-1]] if reply_positions else None
            chain = next(
                (
                    candidate
                    for candidate in chains
                    if candidate[-1] == parent_step and prompt[: reply_positions[-1]] == prompts[candidate[-1]]
                ),
                [],
            )
            if not chain:
                chains.append(chain)
            chain.append(step)
        parts = []
        for chain, is_side in zip(chains, _side_flags(chains, prompts), strict=True):
            train = [step in chain and (not is_side or self.side_calls == "train") for step in range(len(steps))]
            parts.append(
                Conversation(tuple(chain), _to_messages((*prompts[chain[-1]], chain[-1]), steps, train), is_side)
            )
        return tuple(parts)


def _to_messages(prompt: Prompt, steps: Sequence[Step], train: Sequence[bool]) -> tuple[Message, ...]:
    return tuple(reply_turn(steps[turn], train[turn]) if isinstance(turn, int) else turn for turn in prompt)


def _side_flags(chains: Sequence[Sequence[int]], prompts: Sequence[Prompt]) -> list[bool]:
    """Return for each conversation whether it is a side conversation; see `OutsideTurns`."""
    openings = [[turn for turn in prompts[chain[0]] if isinstance(turn, Message)][:2] for chain in chains]
    have_tools = [bool(opening) and opening[0].role == "tools" for opening in openings]
    first_messages = [
        opening[has_tools : has_tools + 1] for opening, has_tools in zip(openings, have_tools, strict=True)
    ]
    candidates = [number for number, has_tools in enumerate(have_tools) if has_tools or not any(have_tools)]
    longest_chain = max(candidates, key=lambda number: len(chains[number]), default=0)
    deviating = [
        number
        for number in candidates
        if len(chains[number]) == 1 and first_messages[number] != first_messages[longest_chain]
    ]
    # Some agents open a new conversation for nearly every reply; these are not side conversations.
    are_few = 2 * len(deviating) < sum(len(chains[number]) for number in candidates)
    return [number not in candidates or (are_few and number in deviating) for number in range(len(chains))]
