"""The wire formats of AgentGym's servers, one entry for each world. The client reads by them, and
our own server writes by them.

Source: the endpoint table of the AgentGym platform (arXiv 2406.04151) in its late-2025 state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from agentr_core.environments.remote import Turn
from agentr_core.errors import ConfigError, DataFileError, MalformedAnswer
from agentr_core.texts import abbreviate, placed
from agentr_core.types import Transition

# The instances of a split, from ranges or from an AgentGym data file.

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_ITEM = re.compile(r".*_(\d+)")


def read_ids(spec: str, setting: str) -> Sequence[int]:
    """Return the numbers of instances, in their order, from ranges such as "0-99,120" or from a
    JSON file whose entries have an "item_id".

    `setting` names the option in errors. Raises `ConfigError` for ranges that overlap or run
    backwards, and `DataFileError` for a file that is missing, malformed or empty, or has an
    instance twice.
    """
    if names_file(spec):
        path = Path(spec)
        try:
            items = [entry["item_id"] for entry in json.loads(path.read_text(encoding="utf-8"))]
            ids = [int(match[1]) for item in items if (match := _ITEM.fullmatch(item))]
        except FileNotFoundError:
            raise DataFileError(
                f"{setting}: {placed(path)} is neither ranges such as 0-99,120 nor a file that exists"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataFileError(
                f"{setting}: {path} is not a data file of AgentGym ({type(error).__name__}: {error})"
            ) from error
        if not ids or len(set(ids)) != len(items):
            raise DataFileError(
                f"{setting}: {path} must have each instance once, as an item_id such as webshop_12; of {len(items)} "
                f"items {len(set(ids))} are that"
            )
        return ids
    spaceless = str(spec).replace(" ", "")
    ids = []
    for part in spaceless.split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise ConfigError(f"{setting}: the range {part} runs backwards")
        ids += range(int(first), int(last or first) + 1)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{setting}: the ranges {spec} overlap")
    return ids


def names_file(spec: str) -> bool:
    """Return whether an option's value is the path of a data file, neither empty nor ranges."""
    spaceless = str(spec).replace(" ", "")
    return bool(spaceless) and not _RANGES.fullmatch(spaceless)


def check_apart(train: Sequence[int], test: Sequence[int], setting: str) -> None:
    """Raise `ConfigError` if an instance is in both splits."""
    if overlap := set(train) & set(test):
        raise ConfigError(f"{setting}: instance {min(overlap)} is in both train and test ({len(overlap)} are)")


# The instructions of the worlds: their actions and the form of a reply, in our own words.

_FORM = """\
Reply with one line of thought and one action, nothing else:
Thought: why this action
Action: the action"""

SCIWORLD = f"""\
You do experiments in a simulated house with a laboratory. You are told a task and what you see; do one thing a turn.
The actions are:
open OBJECT, close OBJECT, activate OBJECT, deactivate OBJECT
connect OBJECT to OBJECT, disconnect OBJECT
use OBJECT, use OBJECT on OBJECT
look around, look at OBJECT, look in CONTAINER, read OBJECT, examine OBJECT
move OBJECT to CONTAINER, pick up OBJECT, put down OBJECT
pour LIQUID into CONTAINER, dunk CONTAINER into LIQUID, mix CONTAINER
go to PLACE, eat OBJECT, flush OBJECT, wait, wait1, task, inventory
focus on OBJECT, which says that this is the object the task asks for; a wrong one ends all
{_FORM}"""

WEBSHOP = f"""\
You buy in a web shop what an instruction asks for. Each turn you see a page, its parts set apart by [SEP].
The actions are:
search[WORDS], on a page with a search bar
click[VALUE], where VALUE is a button, a product or an option of the page
Anything else does nothing. Choose the options that are wanted before you click[buy now].
{_FORM}"""

ALFWORLD = f"""\
You act in a household. You see where you are and what you are to do; each turn, do one thing.
At first you are shown which actions are possible; they change with what you do. "Nothing happened" means that an action
was not possible.
{_FORM}"""

BABYAI = f"""\
You walk through rooms to reach a goal. Each turn you see what is near, and which actions are possible.
The actions are:
turn left, turn right, move forward, toggle, which opens what is in front of you
go to OBJECT NUMBER, pickup OBJECT NUMBER
go through DOOR NUMBER, if it is open; toggle and go through DOOR NUMBER otherwise
A locked door needs a key of its colour.
{_FORM}"""

SEARCHQA = """\
You answer a question with the help of a search engine. Each turn, think first, then write one of the two:
<search>words to search for</search>
<answer>the answer, as short as can be</answer>
After a search you are shown passages. An answer ends the task."""

SQLGYM = """\
You are shown a database and a question. Think, then answer with one SQLite query on one line:
Thought: how the query finds it
Action: ```sql
SELECT ...
```"""

MAZE = f"""\
You look for the goal of a maze. Each turn you see where the goal is, where you are, and the walls around you. Positions
count rows downwards and columns to the right.
The actions are: move up, move down, move left, move right
{_FORM}"""

WORDLE = f"""\
You guess a hidden word of five letters, in six tries. Write a guess with spaces between its letters, such as c r a n e.
After each guess you see a letter for each letter: g for right, y for one that belongs elsewhere, b for one that is not
in the word.
{_FORM}"""

WEBARENA = """\
You use web sites to do what you are asked. Each turn you see the page as a tree in which elements have numbers.
The actions are:
click [NUMBER], hover [NUMBER], type [NUMBER] [TEXT] [0 or 1, whether to press enter after it]
press [KEYS], scroll [down or up]
new_tab, tab_focus [NUMBER], close_tab, goto [ADDRESS], go_back, go_forward
stop [ANSWER], when all is done
Think, then write one action between two rows of three backticks, such as ```click [12]```"""


def tools(purpose: str) -> str:
    """Return the instruction of a world with tools for a purpose."""
    return f"""\
You reach a goal with tools for {purpose}. Each turn, call one tool, with its input as JSON:
Thought: why this tool
Action: TOOL with Action Input: {{"NAME": VALUE}}
check_valid_actions with Action Input: {{}} lists the tools.
finish with Action Input: {{"answer": VALUE}} ends the task."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The form of ids, resets and steps on the server of one world.

    Args:
        item: the field for the number of the instance in the body of a reset.
        id_key: the field for the id of the environment in a body. It also decides how the server
            reports errors: with `id`, as status 200 with a field "error"; with `env_idx`, as status
            500.
        prefix: the beginning of all paths, for a server of several worlds.
        bare_id: whether the answer to a create is the id alone.
        item_at_create: whether a create needs the number of the instance, too.
        created_ready: whether a created environment is already at the beginning of an instance.
        fixed: further fields of the body of a reset.
        first: the form of the answer to a reset: an object, a list whose first element is the text,
            or the text.
        introduction: the field of that object for a text that goes before the first observation.
        choices: the field of that object for the list of possible actions, which goes after the
            first observation.
        observation, reward, done: the names of these fields in the answer to a step.
        scale: the full reward on the wire; if it is 1, rewards cannot be negative, otherwise a
            negative reward is a disaster.
        failure: the reward on the wire with which a failed episode ends; it counts as 0.
        finished: the lowest scaled reward with which an episode that ended is a success.
        before, after: the text around an action on the wire.
        closes: whether the server has the path /close.
        few: whether the server has only a few environments; a create then returns one of them,
            which may be in use.
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
        """Return the body of a create, for an environment in which an instance will be played."""
        return {"id": item} if self.item_at_create else {}

    def reset_body(self, env_id: int, item: int) -> dict[str, Any]:
        """Return the body of a reset to an instance."""
        return {self.id_key: env_id, self.item: item, **dict(self.fixed)}

    def step_body(self, env_id: int, action: str) -> dict[str, Any]:
        """Return the body of a step."""
        return {self.id_key: env_id, "action": f"{self.before}{action}{self.after}"}

    def read_id(self, answer: Any) -> int:
        """Return the id in the answer to a create. Raises `MalformedAnswer`."""
        return _as(int, answer) if self.bare_id else _field(answer, self.id_key, int)

    def read_first(self, answer: Any) -> str:
        """Return the first observation in the answer to a reset, composed as by AgentGym's own
        clients. Raises `MalformedAnswer`.
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
        """Return the outcome in the answer to a step. Raises `MalformedAnswer`, also for a reward
        out of range.
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
        """Return the answer to a create; the inverse of `read_id`."""
        return env_id if self.bare_id else {self.id_key: env_id}

    def write_first(self, env_id: int, observation: str) -> Any:
        """Return the answer to a reset; the inverse of `read_first`."""
        if self.first != "object":
            return observation if self.first == "text" else [observation, None]
        introduction, line_end, rest = observation.partition("\n")
        # Without a second line, the first one is no introduction.
        parts = (introduction, rest) if self.introduction and line_end else ("", observation)
        answer = {self.id_key: env_id, "observation": parts[1], "reward": 0.0, "done": False}
        answer |= {self.introduction: parts[0]} if self.introduction else {}
        answer |= {self.choices: []} if self.choices else {}
        return answer | ({self.reward: 0.0} if self.reward != "reward" else {})

    def write_step(self, transition: Transition, *, before: float) -> dict[str, Any]:
        """Return the answer to a step; the inverse of `read_step`. `before` is the reward of the
        episode before the step.
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
        raise MalformedAnswer(f"{key!r} is missing in {abbreviate(answer)}")
    return _as(kind, answer[key], key)


def _as(kind: type[T], value: Any, key: str = "") -> T:
    kinds = (int, float) if kind is float else (kind,)
    try:
        fits = type(value) in kinds and (kind is not float or math.isfinite(value))
    except OverflowError:
        # JSON may have integers that are too large for a float.
        fits = False
    if not fits:
        raise MalformedAnswer(
            f"{repr(key) + ' is' if key else 'the answer is'} {abbreviate(value)}, not a {kind.__name__}"
        )
    return value  # type: ignore[no-any-return]


_TOOLS = Wire(item="id", id_key="env_idx", bare_id=True, item_at_create=True, first="text", before="Action: ")

# An error in an entry affects client and server alike, so tests compare entries with literal
# exchanges.
WIRES: Mapping[str, Wire] = {
    "textcraft": Wire(item="data_idx", created_ready=True, closes=True),
    "sciworld": Wire(item="data_idx", introduction="task_description", reward="score", scale=100.0, closes=True),
    "webshop": Wire(item="session_id", id_key="env_idx", bare_id=True, first="pair", observation="state"),
    "alfworld": Wire(item="game", fixed=(("world_type", "Text"),), choices="available_actions"),
    # Its "score" sums the episode's reward over the steps; an episode that ends has a reward above
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
"""The entry of each world, by its name in AgentGym."""
