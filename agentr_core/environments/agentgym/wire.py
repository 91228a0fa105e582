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

from agentr_core.environments.remote import StepOutcome
from agentr_core.errors import ConfigError, DataFileError, MalformedAnswer
from agentr_core.texts import abbreviate, path_for_message
from agentr_core.types import Transition

# The instances of a split, from ranges or from an AgentGym data file.

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_ITEM_ID = re.compile(r".*_(\d+)")


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
            ids = [int(match[1]) for item in items if (match := _ITEM_ID.fullmatch(item))]
        except FileNotFoundError:
            raise DataFileError(
                f"{setting}: {path_for_message(path)} is neither ranges such as 0-99,120 nor a file that exists"
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
    for number_range in spaceless.split(","):
        first, _, last = number_range.partition("-")
        if last and int(last) < int(first):
            raise ConfigError(f"{setting}: the range {number_range} runs backwards")
        ids += range(int(first), int(last or first) + 1)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{setting}: the ranges {spec} overlap")
    return ids


def names_file(spec: str) -> bool:
    """Return whether an option's value is the path of a data file, neither empty nor ranges."""
    spaceless = str(spec).replace(" ", "")
    return bool(spaceless) and not _RANGES.fullmatch(spaceless)


def check_disjoint(train: Sequence[int], test: Sequence[int], setting: str) -> None:
    """Raise `ConfigError` if an instance is in both splits."""
    if overlap := set(train) & set(test):
        raise ConfigError(f"{setting}: instance {min(overlap)} is in both train and test ({len(overlap)} are)")


# The instructions of the worlds: their actions and the form of a reply, in our own words.

_REPLY_FORM = """\
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
{_REPLY_FORM}"""

WEBSHOP = f"""\
You buy in a web shop what an instruction asks for. Each turn you see a page, its parts set apart by [SEP].
The actions are:
search[WORDS], on a page with a search bar
click[VALUE], where VALUE is a button, a product or an option of the page
Anything else does nothing. Choose the options that are wanted before you click[buy now].
{_REPLY_FORM}"""

ALFWORLD = f"""\
You act in a household. You see where you are and what you are to do; each turn, do one thing.
At first you are shown which actions are possible; they change with what you do. "Nothing happened" means that an action
was not possible.
{_REPLY_FORM}"""

BABYAI = f"""\
You walk through rooms to reach a goal. Each turn you see what is near, and which actions are possible.
The actions are:
turn left, turn right, move forward, toggle, which opens what is in front of you
go to OBJECT NUMBER, pickup OBJECT NUMBER
go through DOOR NUMBER, if it is open; toggle and go through DOOR NUMBER otherwise
A locked door needs a key of its colour.
{_REPLY_FORM}"""

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
{_REPLY_FORM}"""

WORDLE = f"""\
You guess a hidden word of five letters, in six tries. Write a guess with spaces between its letters, such as c r a n e.
After each guess you see a letter for each letter: g for right, y for one that belongs elsewhere, b for one that is not
in the word.
{_REPLY_FORM}"""

WEBARENA = """\
You use web sites to do what you are asked. Each turn you see the page as a tree in which elements have numbers.
The actions are:
click [NUMBER], hover [NUMBER], type [NUMBER] [TEXT] [0 or 1, whether to press enter after it]
press [KEYS], scroll [down or up]
new_tab, tab_focus [NUMBER], close_tab, goto [ADDRESS], go_back, go_forward
stop [ANSWER], when all is done
Think, then write one action between two rows of three backticks, such as ```click [12]```"""


def tools_instruction(purpose: str) -> str:
    """Return the instruction of a world with tools for a purpose."""
    return f"""\
You reach a goal with tools for {purpose}. Each turn, call one tool, with its input as JSON:
Thought: why this tool
Action: TOOL with Action Input: {{"NAME": VALUE}}
check_valid_actions with Action Input: {{}} lists the tools.
finish with Action Input: {{"answer": VALUE}} ends the task."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """The form of ids, resets and steps on the server of one world.

    Args:
        item_key: the field for the number of the instance in the body of a reset.
        id_key: the field for the id of the environment in a body. It also decides how the server
            reports errors: with `id`, as status 200 with a field "error"; with `env_idx`, as status
            500.
        prefix: the beginning of all paths, for a server of several worlds.
        is_bare_id: whether the answer to a create is the id alone.
        create_takes_item: whether a create needs the number of the instance, too.
        is_ready_at_create: whether a created environment is already at the beginning of an
            instance.
        fixed_fields: further fields of the body of a reset.
        first_form: the form of the answer to a reset: an object, a list whose first element is the
            text, or the text.
        introduction_key: the field of that object for a text that goes before the first
            observation.
        choices_key: the field of that object for the list of possible actions, which goes after the
            first observation.
        observation_key, reward_key, done_key: the names of these fields in the answer to a step.
        full_reward: the full reward on the wire; if it is 1, rewards cannot be negative, otherwise
            a negative reward is a disaster.
        failure_reward: the reward on the wire with which a failed episode ends; it counts as 0.
        min_success_reward: the lowest scaled reward with which an episode that ended is a success.
        action_prefix, action_suffix: the text around an action on the wire.
        has_close: whether the server has the path /close.
        has_few_environments: whether the server has only a few environments; a create then returns
            one of them, which may be in use.
    """

    item_key: str
    id_key: Literal["id", "env_idx"] = "id"
    prefix: str = ""
    is_bare_id: bool = False
    create_takes_item: bool = False
    is_ready_at_create: bool = False
    fixed_fields: tuple[tuple[str, Any], ...] = ()
    first_form: Literal["object", "pair", "text"] = "object"
    introduction_key: str = ""
    choices_key: str = ""
    observation_key: str = "observation"
    reward_key: str = "reward"
    done_key: str = "done"
    full_reward: float = 1.0
    failure_reward: float = 0.0
    min_success_reward: float = 1.0
    action_prefix: str = ""
    action_suffix: str = ""
    has_close: bool = False
    has_few_environments: bool = False

    def create_body(self, item: int) -> dict[str, Any]:
        """Return the body of a create, for an environment in which an instance will be played."""
        return {"id": item} if self.create_takes_item else {}

    def reset_body(self, env_id: int, item: int) -> dict[str, Any]:
        """Return the body of a reset to an instance."""
        return {self.id_key: env_id, self.item_key: item, **dict(self.fixed_fields)}

    def step_body(self, env_id: int, action: str) -> dict[str, Any]:
        """Return the body of a step."""
        return {self.id_key: env_id, "action": f"{self.action_prefix}{action}{self.action_suffix}"}

    def read_id(self, answer: Any) -> int:
        """Return the id in the answer to a create. Raises `MalformedAnswer`."""
        return _check_type(int, answer) if self.is_bare_id else _read_field(answer, self.id_key, int)

    def read_first_observation(self, answer: Any) -> str:
        """Return the first observation in the answer to a reset, composed as by AgentGym's own
        clients. Raises `MalformedAnswer`.
        """
        if self.first_form == "text":
            return _check_type(str, answer)
        if self.first_form == "pair":
            return _check_type(str, answer[0] if isinstance(answer, list) and answer else answer)
        text = _read_field(answer, "observation", str)
        if self.introduction_key and (introduction := _read_field(answer, self.introduction_key, str)):
            text = f"{introduction}\n{text}"
        if self.choices_key and (choices := _read_field(answer, self.choices_key, list)):
            text = f"{text}\nAVAILABLE ACTIONS: {','.join(_check_type(str, choice) for choice in choices)}"
        return text

    def read_step(self, answer: Any) -> StepOutcome:
        """Return the outcome in the answer to a step. Raises `MalformedAnswer`, also for a reward
        out of range.
        """
        wire_reward = _read_field(answer, self.reward_key, float)
        done = _read_field(answer, self.done_key, bool)
        reward = 0.0 if done and wire_reward == self.failure_reward else wire_reward / self.full_reward
        if not reward <= 1 or (reward < 0 and self.full_reward == 1):
            raise MalformedAnswer(f"a reward of {wire_reward:g} is not in [0, {self.full_reward:g}]")
        return StepOutcome(
            observation=_read_field(answer, self.observation_key, str),
            reward=-1.0 if reward < 0 else reward,
            terminated=done,
            truncated="truncated" in answer and _read_field(answer, "truncated", bool),
            success=reward == 1 or (done and reward >= self.min_success_reward),
        )

    def write_id(self, env_id: int) -> Any:
        """Return the answer to a create; the inverse of `read_id`."""
        return env_id if self.is_bare_id else {self.id_key: env_id}

    def write_first_observation(self, env_id: int, observation: str) -> Any:
        """Return the answer to a reset; the inverse of `read_first_observation`."""
        if self.first_form != "object":
            return observation if self.first_form == "text" else [observation, None]
        introduction, line_end, remaining_text = observation.partition("\n")
        # Without a second line, the first one is no introduction.
        introduction_and_text = (
            (introduction, remaining_text) if self.introduction_key and line_end else ("", observation)
        )
        answer = {self.id_key: env_id, "observation": introduction_and_text[1], "reward": 0.0, "done": False}
        answer |= {self.introduction_key: introduction_and_text[0]} if self.introduction_key else {}
        answer |= {self.choices_key: []} if self.choices_key else {}
        return answer | ({self.reward_key: 0.0} if self.reward_key != "reward" else {})

    def write_step(self, transition: Transition, *, previous_reward: float) -> dict[str, Any]:
        """Return the answer to a step; the inverse of `read_step`. `previous_reward` is the reward
        of the episode before the step.
        """
        reward = self._wire_reward(transition.reward)
        answer: dict[str, Any] = {
            self.observation_key: transition.observation,
            "reward": reward,
            self.done_key: transition.terminated,
            "truncated": transition.truncated,
        }
        if self.reward_key != "reward":
            answer |= {self.reward_key: reward, "reward": reward - self._wire_reward(previous_reward)}
        return answer | ({"info": None} if self.id_key == "env_idx" else {})

    def unwrap_action(self, action: str) -> str:
        """Return an action as it was before `step_body` surrounded it."""
        return action.removeprefix(self.action_prefix).removesuffix(self.action_suffix)

    def _wire_reward(self, reward: float) -> float:
        return -self.full_reward if reward < 0 else reward * self.full_reward


def _read_field(answer: Any, key: str, expected_type: type[T]) -> T:
    if not isinstance(answer, Mapping) or key not in answer:
        raise MalformedAnswer(f"{key!r} is missing in {abbreviate(answer)}")
    return _check_type(expected_type, answer[key], key)


def _check_type(expected_type: type[T], value: Any, key: str = "") -> T:
    accepted_types = (int, float) if expected_type is float else (expected_type,)
    try:
        is_valid = type(value) in accepted_types and (expected_type is not float or math.isfinite(value))
    except OverflowError:
        # JSON may have integers that are too large for a float.
        is_valid = False
    if not is_valid:
        raise MalformedAnswer(
            f"{repr(key) + ' is' if key else 'the answer is'} {abbreviate(value)}, not a {expected_type.__name__}"
        )
    return value  # type: ignore[no-any-return]


_TOOL_WORLD = WireFormat(
    item_key="id",
    id_key="env_idx",
    is_bare_id=True,
    create_takes_item=True,
    first_form="text",
    action_prefix="Action: ",
)

# An error in an entry affects client and server alike, so tests compare entries with literal
# exchanges.
WIRE_FORMATS: Mapping[str, WireFormat] = {
    "textcraft": WireFormat(item_key="data_idx", is_ready_at_create=True, has_close=True),
    "sciworld": WireFormat(
        item_key="data_idx", introduction_key="task_description", reward_key="score", full_reward=100.0, has_close=True
    ),
    "webshop": WireFormat(
        item_key="session_id", id_key="env_idx", is_bare_id=True, first_form="pair", observation_key="state"
    ),
    "alfworld": WireFormat(item_key="game", fixed_fields=(("world_type", "Text"),), choices_key="available_actions"),
    # Its "score" sums the episode's reward over the steps; an episode that ends has a reward above
    # 0.5.
    "babyai": WireFormat(item_key="data_idx", min_success_reward=0.5, has_close=True),
    "searchqa": WireFormat(
        item_key="id", id_key="env_idx", is_bare_id=True, create_takes_item=True, first_form="text", has_close=True
    ),
    "sqlgym": WireFormat(
        item_key="item_id",
        id_key="env_idx",
        is_bare_id=True,
        first_form="pair",
        observation_key="state",
        has_few_environments=True,
    ),
    "weather": _TOOL_WORLD,
    "movie": _TOOL_WORLD,
    "academia": _TOOL_WORLD,
    "todo": _TOOL_WORLD,
    "sheet": _TOOL_WORLD,
    # A walk that takes more than 50 steps ends with a reward of -1.
    "maze": WireFormat(item_key="game", prefix="/maze", failure_reward=-1.0),
    "wordle": WireFormat(item_key="seed", prefix="/wordle"),
    "webarena": WireFormat(
        item_key="idx",
        id_key="env_idx",
        fixed_fields=(("seed", 0),),
        done_key="terminated",
        action_prefix="```",
        action_suffix="```",
    ),
}
"""The entry of each world, by its name in AgentGym."""
