"""The wire formats of AgentGym's servers, one row for each; the client reads by them, and our own
server writes by them.

Source: the endpoint table of the AgentGym platform (arXiv 2406.04151) in its late-2025 state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from agentr_core.answers import shown
from agentr_core.errors import MalformedAnswer
from agentr_core.types import Transition

T = TypeVar("T")


class Turn(NamedTuple):
    """The outcome of a step. `reward` is in [0, 1], or negative for a disaster; `success` follows
    the rule of the world.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The form of ids, resets and steps on the server of one world.

    Args:
        item: the field of a reset's body with the number of the instance.
        id_key: the field of a body with the id of the environment. It also decides how the server
            reports errors: with `id`, as status 200 with a field "error"; with `env_idx`, as status
            500.
        prefix: what comes before the paths, for a server of several worlds.
        bare_id: whether the answer to a create is the id alone.
        item_at_create: whether a create needs the number of the instance, too.
        created_ready: whether a created environment is already at the beginning of an instance.
        fixed: further fields of the body of a reset.
        first: the form of the answer to a reset: an object, a list whose first element is the text,
            or the text.
        introduction: the field of that object with a text that goes before the first observation.
        choices: the field of that object with the list of possible actions, which goes after the
        first observation.
        observation, reward, done: fields of the answer to a step.
        scale: the reward of a success on the wire; only a scale of 100 has negative rewards, for a
            disaster.
        failure: the reward on the wire with which a failed episode ends; it counts as 0.
        finished: the lowest reward, scaled to 1, with which an episode that ended is a success.
        before, after: the text around an action on the wire.
        closes: whether the server has a close.
        few: whether the server holds a few environments only, and a create then gives one of them
            again, be it in use or not.
    """

    item: str
    id_key: Literal["id", "env_idx"] = "id"
    prefix: str = ""
    bare_id: bool = False
    item_at_create: bool = False
    created_ready: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()
    first: Literal["object", "pair", "text"] = "object"
    introduction: str = ""
    choices: str = ""
    observation: str = "observation"
    reward: str = "reward"
    done: str = "done"
    scale: float = 1.0
    failure: float = 0.0
    finished: float = 1.0
    before: str = ""
    after: str = ""
    closes: bool = False
    few: bool = False

    def create_body(self, item: int) -> dict[str, Any]:
        """Return the body that asks for an environment in which an instance will be played."""
        return {"id": item} if self.item_at_create else {}

    def reset_body(self, env_id: int, item: int) -> dict[str, Any]:
        """Return the body that asks for the beginning of an instance."""
        return {self.id_key: env_id, self.item: item, **dict(self.fixed)}

    def step_body(self, env_id: int, action: str) -> dict[str, Any]:
        """Return the body of a step."""
        return {self.id_key: env_id, "action": f"{self.before}{action}{self.after}"}

    def read_id(self, answer: Any) -> int:
        """Return the id that a create gave. Raises `MalformedAnswer`."""
        return _as(int, answer) if self.bare_id else _field(answer, self.id_key, int)

    def read_first(self, answer: Any) -> str:
        """Return the first observation, as AgentGym's own clients put it together. Raises
        `MalformedAnswer`.
        """
        if self.first == "text":
            return _as(str, answer)
        if self.first == "pair":
            return _as(str, answer[0] if isinstance(answer, list) and answer else answer)
        text = _field(answer, "observation", str)
        if self.introduction and (introduction := _field(answer, self.introduction, str)):
            text = f"{introduction}\n{text}"
        if self.choices and (choices := _field(answer, self.choices, list)):
            text = f"{text}\nAVAILABLE ACTIONS: {','.join(_as(str, choice) for choice in choices)}"
        return text

    def read_step(self, answer: Any) -> Turn:
        """Return the outcome of a step. Raises `MalformedAnswer`, also for a reward out of
        range.
        """
        raw = _field(answer, self.reward, float)
        done = _field(answer, self.done, bool)
        reward = 0.0 if done and raw == self.failure else raw / self.scale
        if not reward <= 1 or (reward < 0 and self.scale == 1):
            raise MalformedAnswer(f"a reward of {raw:g} is not in [0, {self.scale:g}]")
        return Turn(
            observation=_field(answer, self.observation, str),
            reward=-1.0 if reward < 0 else reward,
            terminated=done,
            truncated="truncated" in answer and _field(answer, "truncated", bool),
            success=reward == 1 or (done and reward >= self.finished),
        )

    def write_id(self, env_id: int) -> Any:
        """Return the answer to a create."""
        return env_id if self.bare_id else {self.id_key: env_id}

    def write_first(self, env_id: int, observation: str) -> Any:
        """Return the answer to a reset, from which `read_first` gets the observation."""
        if self.first != "object":
            return observation if self.first == "text" else [observation, None]
        introduction, line_end, rest = observation.partition("\n")
        # Without a second line, the first one is no introduction.
        parted = (introduction, rest) if self.introduction and line_end else ("", observation)
        answer = {self.id_key: env_id, "observation": parted[1], "reward": 0.0, "done": False}
        answer |= {self.introduction: parted[0]} if self.introduction else {}
        answer |= {self.choices: []} if self.choices else {}
        return answer | ({self.reward: 0.0} if self.reward != "reward" else {})

    def write_step(self, transition: Transition, *, before: float) -> dict[str, Any]:
        """Return the answer to a step, from which `read_step` gets the transition. `before` is the
        reward before the step.
        """
        reward = self._raw(transition.reward)
        answer: dict[str, Any] = {
            self.observation: transition.observation,
            "reward": reward,
            self.done: transition.terminated,
            "truncated": transition.truncated,
        }
        if self.reward != "reward":
            answer |= {self.reward: reward, "reward": reward - self._raw(before)}
        return answer | ({"info": None} if self.id_key == "env_idx" else {})

    def unwrap(self, action: str) -> str:
        """Return an action as it was before `step_body` surrounded it."""
        return action.removeprefix(self.before).removesuffix(self.after)

    def _raw(self, reward: float) -> float:
        return -self.scale if reward < 0 else reward * self.scale


def _field(answer: Any, key: str, kind: type[T]) -> T:
    if not isinstance(answer, Mapping) or key not in answer:
        raise MalformedAnswer(f"{key!r} is missing in {shown(answer)}")
    return _as(kind, answer[key], key)


def _as(kind: type[T], value: Any, key: str = "") -> T:
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds or (kind is float and not _is_finite(value)):
        raise MalformedAnswer(f"{repr(key) + ' is' if key else 'the answer is'} {shown(value)}, not a {kind.__name__}")
    return value  # type: ignore[no-any-return]


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # JSON may have integers that are too large for a float.
        return False


_TOOLS = Wire(item="id", id_key="env_idx", bare_id=True, item_at_create=True, first="text", before="Action: ")

WIRES: Mapping[str, Wire] = {
    "textcraft": Wire(item="data_idx", created_ready=True, closes=True),
    "sciworld": Wire(item="data_idx", introduction="task_description", reward="score", scale=100.0, closes=True),
    "webshop": Wire(item="session_id", id_key="env_idx", bare_id=True, first="pair", observation="state"),
    "alfworld": Wire(item="game", fixed=(("world_type", "Text"),), choices="available_actions"),
    # Its "score" adds up the standing reward at each step; an episode that ends has a reward above
    # 0.5.
    "babyai": Wire(item="data_idx", finished=0.5, closes=True),
    "searchqa": Wire(item="id", id_key="env_idx", bare_id=True, item_at_create=True, first="text", closes=True),
    "sqlgym": Wire(item="item_id", id_key="env_idx", bare_id=True, first="pair", observation="state", few=True),
    "weather": _TOOLS,
    "movie": _TOOLS,
    "academia": _TOOLS,
    "todo": _TOOLS,
    "sheet": _TOOLS,
    # A walk that takes more than 50 steps ends with a reward of -1.
    "maze": Wire(item="game", prefix="/maze", failure=-1.0),
    "wordle": Wire(item="seed", prefix="/wordle"),
    "webarena": Wire(item="idx", id_key="env_idx", fixed=(("seed", 0),), done="terminated", before="```", after="```"),
}
"""The row of each world, by its name in AgentGym."""
