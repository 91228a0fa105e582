"""The worlds of AgentGym as environments: their instructions, how replies are parsed, and which
instances there are.

Step limits and numbers of instances are AgentGym's (arXiv 2406.04151); the wording of the
instructions is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentr_core import replies
from agentr_core.environment import Repeatability
from agentr_core.environments.agentgym import wire
from agentr_core.environments.agentgym.client import AgentGymWorld
from agentr_core.environments.crafting import textcraft
from agentr_core.environments.crafting.game import INSTRUCTION, goal_line
from agentr_core.environments.crafting.recipes import load_splits
from agentr_core.errors import ConfigError, EnvironmentServerError
from agentr_core.replies import LabelStyle
from agentr_core.texts import blank_thoughts
from agentr_core.types import Instance

_SEARCH_OR_ANSWER = re.compile(r"<(search|answer)>.*?</\1>", re.DOTALL)
_SQL_BLOCK = re.compile(r"```sql(.*?)```", re.DOTALL)
_FENCED_BLOCK = re.compile(r"```(.*?)```", re.DOTALL)


class _LabelledWorld(AgentGymWorld):
    """A world whose actions follow a label."""

    labels: LabelStyle = "lenient"


class TextCraft(_LabelledWorld, world="textcraft"):
    """TextCraft on a server, with the instruction, parser, expert and depths of the world in this
    process.
    """

    instruction = INSTRUCTION
    step_limit = 20
    # The useless commands of an instance depend on the hash seed of the server's process, and on
    # the resets of other clients.
    repeatability = Repeatability.NEVER

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the data files of AgentGym, and the files of the world in this process."""
        return *AgentGymWorld.files_of(options), *textcraft.TextCraft.files_of({})

    def published_ids(self) -> Mapping[str, Sequence[int]]:
        """Return the published splits."""
        return load_splits()

    def parse(self, reply: str) -> str:
        """Return the line after the last "Action:" of a reply, in lower case, with letters, digits,
        commas and spaces only.
        """
        return textcraft.parse_action(reply, self.labels)

    def depth(self, instance: Instance) -> int | None:
        """Return the length of the longest chain of crafts to the goal."""
        return _native_world().depth(_native_instance(instance))

    def facts(self, instance: Instance) -> Mapping[str, Any]:
        """Return the number of crafts on the shortest way."""
        return _native_world().facts(_native_instance(instance))

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of the expert of the world in this process, in which the same number
        has the same goal and recipes.
        """
        return _native_world().expert(_native_instance(instance))

    def probes(self) -> Sequence[Instance]:
        """Return up to four instances of each split: on a server that does not sort its recipes,
        nearly all goals have other numbers.
        """
        return [
            instances[quarter * (len(instances) - 1) // 3]
            for split in self.splits()
            if (instances := self.instances(split))
            for quarter in range(4)
        ]

    def check_first_observation(self, instance: Instance, first_observation: str) -> None:
        """Raise `EnvironmentServerError` if the goal of an instance is not the one of its number in
        our table.
        """
        _, label, goal = first_observation.rpartition("\nGoal: ")
        goals = _native_world().book.goals
        table_goal = goal_line(goals[instance.index % len(goals)][0]).removeprefix("Goal: ")
        if label and goal.strip() != table_goal:
            raise EnvironmentServerError(
                f"{self.name}: at {self.url}, number {instance.index} has the goal {goal.strip()!r} and should have "
                f"{table_goal!r}, so that splits and numbers mean other goals there: its recipe files are listed in "
                f"another order; have the server sort them by name, or use another: {self.start_hint()}"
            )

    def start_hint(self) -> str:
        """Return how a server of this world is started."""
        return "`agentr env serve textcraft` starts one"


@lru_cache(maxsize=1)
def _native_world() -> textcraft.TextCraft:
    return textcraft.TextCraft()


def _native_instance(instance: Instance) -> Instance:
    return Instance(environment=textcraft.TextCraft.name, split=instance.split, index=instance.index)


class SciWorld(_LabelledWorld, world="sciworld"):
    """ScienceWorld without simplifications; the reward is the score so far, and a focus on a wrong
    object is a disaster.
    """

    instruction = wire.SCIWORLD
    step_limit = 30
    # The unmodified simulator lists animals, among other things, in another order in each episode.
    repeatability = Repeatability.UNORDERED


class WebShop(_LabelledWorld, world="webshop"):
    """WebShop on AgentGym's 1,000 products with synthetic goals."""

    instruction = wire.WEBSHOP
    step_limit = 10
    # Prices within a range, and so the bounds in instructions, are drawn anew when the server
    # starts.
    repeatability = Repeatability.NEVER

    def parse(self, reply: str) -> str:
        """Return the `search[...]` or `click[...]` after the last "Action:" of a reply, or in a
        reply without the label; see `replies.shopping_action`.
        """
        return replies.shopping_action(reply, self.labels)


_ALFWORLD_IDS = {"train": range(2420), "test": range(2420, 2620)}


class AlfWorld(_LabelledWorld, world="alfworld"):
    """ALFWorld as text; the test games are in rooms that also occur in training."""

    instruction = wire.ALFWORLD
    step_limit = 30

    def published_ids(self) -> Mapping[str, Sequence[int]]:
        """Return the numbers of the games in the server's two mapping files."""
        return _ALFWORLD_IDS


def check_numbers(name: str, instances_by_number: Mapping[int, Instance]) -> None:
    """Raise `ConfigError` if a world has instances of another split at the numbers by which clients
    ask for the published ones: their test games would be training games.

    This can only happen in ALFWorld, which without `ids_dir` numbers the games of each split from
    0.
    """
    for number, instance in instances_by_number.items() if name == "alfworld" else ():
        split = next((split for split, ids in _ALFWORLD_IDS.items() if number in ids), instance.split)
        if split != instance.split:
            raise ConfigError(
                f"alfworld: number {number} is in split {split} for clients and would be {instance.key}; serve it with "
                "AgentGym's numbers: set the option ids_dir to the folder configs of AgentGym's ALFWorld server"
            )


class BabyAI(_LabelledWorld, world="babyai"):
    """BabyAI's 40 levels in words. The reward is that of the episode so far, not the sum over steps
    that the server calls score.
    """

    instruction = wire.BABYAI
    step_limit = 20

    def parse(self, reply: str) -> str:
        """Return the line after the last "Action:" of a reply, with letters, digits, commas and
        spaces only.
        """
        return replies.words_after_label(reply, self.labels)


class SearchQA(AgentGymWorld, world="searchqa"):
    """Questions to answer with a search engine over passages; the reward is exact match."""

    instruction = wire.SEARCHQA
    step_limit = 10

    def published_ids(self) -> Mapping[str, Sequence[int]]:
        """Return the numbers of the seven test sets and of the two training sets."""
        return {"train": range(51713, 221328), "test": range(51713)}

    def parse(self, reply: str) -> str:
        """Return the last search or answer of a reply with its tags; empty if there is none."""
        matches = [match[0] for match in _SEARCH_OR_ANSWER.finditer(blank_thoughts(reply))]
        return matches[-1] if matches else ""


class SqlGym(AgentGymWorld, world="sqlgym"):
    """BIRD: one SQL query for each question. The server has 8 environments: set `scale.concurrency`
    to at most 8.
    """

    instruction = wire.SQLGYM
    step_limit = 1

    def published_ids(self) -> Mapping[str, Sequence[int]]:
        """Return the numbers of the questions in BIRD's training and development sets."""
        return {"train": range(9428), "test": range(9428, 10962)}

    def parse(self, reply: str) -> str:
        """Return the content of the last SQL block of a reply; empty if there is none."""
        matches = _SQL_BLOCK.findall(blank_thoughts(reply))
        return matches[-1].strip() if matches else ""


class _ToolWorld(_LabelledWorld):
    """A world of tools, which are called by name with JSON input."""

    first_action = replies.FIRST_BLOCK

    def parse(self, reply: str) -> str:
        """Return everything after the last "Action:" of a reply, since JSON may take several
        lines.
        """
        return replies.block_after_label(reply, self.labels)


class Weather(_ToolWorld, world="weather"):
    """Questions about the weather at places and on days; any sub-goal that is met gives the full
    reward.
    """

    instruction = wire.tools_instruction("weather records and forecasts")
    step_limit = 10


class Movie(_ToolWorld, world="movie"):
    """Questions about films and people."""

    instruction = wire.tools_instruction("a film database")
    step_limit = 12


class Academia(_ToolWorld, world="academia"):
    """Questions about papers and authors; there are only test instances."""

    instruction = wire.tools_instruction("a graph of papers and authors")
    step_limit = 12


class Todo(_ToolWorld, world="todo"):
    """A list of projects and tasks to ask about and to change."""

    instruction = wire.tools_instruction("a list of projects and things to do")
    step_limit = 15


class Sheet(_ToolWorld, world="sheet"):
    """A spreadsheet to bring into a wanted state; there are only test instances."""

    instruction = wire.tools_instruction("a spreadsheet")
    step_limit = 15


class Maze(_LabelledWorld, world="maze"):
    """The 25 start positions in one maze of LMRL-Gym. Its server lists one more, the goal itself,
    but cannot begin there.
    """

    instruction = wire.MAZE
    step_limit = 15
    playable_ids = range(25)

    def parse(self, reply: str) -> str:
        """Return the line after the last "Action:" of a reply, or the first line of a reply without
        the label; a direction alone becomes a move.
        """
        action = replies.line_after_label(reply, self.labels, allow_unlabelled=True)
        return f"move {action.lower()}" if action.lower() in ("up", "down", "left", "right") else action


class Wordle(_LabelledWorld, world="wordle"):
    """Wordle of LMRL-Gym; an instance is a seed. The vocabulary is not listed to the agent."""

    instruction = wire.WORDLE
    step_limit = 8

    def identity(self, instance: Instance) -> str:
        """Return the seed: every episode begins with the same text, and the server does not reveal
        the word.
        """
        return f"seed {instance.index}"

    def parse(self, reply: str) -> str:
        """Return the letters of the guess in lower case, separated by spaces as the server wants
        them; the label may be missing.
        """
        return " ".join("".join(replies.line_after_label(reply, self.labels, allow_unlabelled=True).lower().split()))


class WebArena(AgentGymWorld, world="webarena"):
    """Web sites, used through their accessibility trees; there are only test instances."""

    instruction = wire.WEBARENA
    step_limit = 25

    def parse(self, reply: str) -> str:
        """Return the content of the last fenced block of a reply; empty if there is none."""
        matches = _FENCED_BLOCK.findall(blank_thoughts(reply))
        return matches[-1].strip() if matches else ""
