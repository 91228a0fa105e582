"""One game of ALFWorld at a time, on TextWorld's engine for PDDL games.

Unlike with the engine alone, a state can be saved and restored: Fast Downward's library keeps every
state that it has seen under a number. This module needs the packages of the extra `alfworld`, and
is imported only when a game is played.

Source: things are named as in ALFWorld (arXiv 2010.03768), so that walkthroughs and transcripts can
be used.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from textworld.core import EnvInfos, GameState
from textworld.envs import PddlEnv

# The problem translator and the grammar parser keep state in module globals.
_ENGINE_LOCK = threading.Lock()
_LOOKED_AT_PREDICATE = "checked"
"""The predicate that no action and no goal of ALFWorld's domain needs."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state of the open game: its number, and the facts added and removed since the start."""

    state_id: int
    added: frozenset[Any]
    removed: frozenset[Any]


# The package `alfworld` is not used: it sets variables and makes folders on import. The members of
# TextWorld that are overridden and read here are not public, so pyproject.toml bounds its versions.
class HouseGame(PddlEnv):  # type: ignore[misc]
    """A game, with things named as ALFWorld names them. Each object has its own copy of Fast
    Downward's library (33 MB).
    """

    def __init__(self) -> None:
        """Load the library. Raises `AttributeError` if it is too old to number its states."""
        super().__init__(EnvInfos(admissible_commands=True))
        self._get_state_id = self.downward_lib.get_state_id
        self._set_state_id = self.downward_lib.set_state_id
        self._start_facts: frozenset[Any] = frozenset()
        self._grammar = ""
        self._text_by_action: dict[tuple[str, ...], str] = {}

    def open(self, content: Mapping[str, Any]) -> str:
        """Open a game from the content of its file, and return its first text."""
        with _ENGINE_LOCK:
            arguments = sys.argv
            try:
                self.load(dict(content))
            finally:
                # The translator parses the process's arguments as its own.
                sys.argv = arguments
            for entity_id, name in display_names(self._entity_infos).items():
                self._entity_infos[entity_id].name = name
            self._start_facts = frozenset(self._pddl_state.facts)
            self._grammar = str(content["grammar"])
            self._text_by_action = {}
            text = str(self._logic.grammar.derive("#intro#", self._context({})))
        # `reset` would translate the problem a second time.
        self._moves = 0
        self.restore_state(SavedState(self._get_state_id(), frozenset(), frozenset()))
        return text

    def act(self, command: str) -> str:
        """Carry out a command and return the game's answer; it says so if the command is
        impossible.
        """
        with _ENGINE_LOCK:
            self.step(command)
        return str(self.state.feedback)

    @property
    def is_won(self) -> bool:
        """Whether the task is done in the present state."""
        return bool(self.state["won"])

    @property
    def commands(self) -> list[str]:
        """The commands that are possible in the present state, sorted."""
        return list(self.state["admissible_commands"])

    def plan(self) -> list[str]:
        """Return commands that lead from the present state to a won one; empty if there are
        none.
        """
        with _ENGINE_LOCK:
            return list(self._pddl_state.replan(self._entity_infos))

    def save_state(self) -> SavedState:
        """Return the present state, which `restore_state` brings back until another game is
        opened.
        """
        facts = frozenset(self._pddl_state.facts)
        return SavedState(self._get_state_id(), facts - self._start_facts, self._start_facts - facts)

    def changed_facts(self) -> str:
        """Return the facts that differ between the present state and the start, one on each line,
        sorted: "+" before a fact that holds now, "-" before one that no longer holds.

        Facts without an effect are left out: that a thing was looked at, and negated facts, unless
        the game's grammar reads them.
        """
        state = self.save_state()
        signed_facts = [*(("+", fact) for fact in state.added), *(("-", fact) for fact in state.removed)]
        return "\n".join(
            sorted(
                f"{sign} {fact}"
                for sign, fact in signed_facts
                if fact.name != _LOOKED_AT_PREDICATE and (not fact.is_negation or fact.name in self._grammar)
            )
        )

    def restore_state(self, saved_state: SavedState) -> None:
        """Put the game into a state that `save_state` returned."""
        facts = defaultdict(set)
        for fact in (self._start_facts - saved_state.removed) | saved_state.added:
            facts[fact.signature].add(fact)
        with _ENGINE_LOCK:
            self._set_state_id(saved_state.state_id)
            # The engine's own `remove_fact` is not used: it miscounts the objects of facts that an
            # effect has made false.
            self._pddl_state._facts = facts
            self.state = GameState()
            self._last_action = None
            self._gather_infos()

    def release(self) -> None:
        """Make the game available to the next caller of `acquire_game`.

        Its library is never unloaded: all copies share registries, and after an unload the next
        copy to be loaded would crash.
        """
        _IDLE_GAMES.append(self)

    def _gather_infos(self) -> None:
        """Fill in the parts of the state that `step` needs.

        The text of each command is made only once; the engine's own method makes all texts again in
        each state, which takes nearly all of its time. A text may name what stands at a place, but
        that never changes.
        """
        actions = list(self._pddl_state.all_applicable_actions())
        commands = []
        for action in actions:
            key = (action.name, *(entity_id.name for entity_id in action.mapping.values()))
            if key not in self._text_by_action:
                context = self._context(action.mapping)
                name_by_entity = {entity_id: info.name for entity_id, info in self._entity_infos.items()}
                action.command_template = self._logic.grammar.derive(action.command_template, context)
                self._text_by_action[key] = str(action.format_command(name_by_entity))
            commands.append(self._text_by_action[key])
        self.state["won"] = self._pddl_state.check_goal()
        self.state["lost"] = False
        self.state["_valid_actions"] = actions
        self.state["_valid_commands"] = commands
        self.state["admissible_commands"] = sorted(set(commands))

    def _context(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        """Return what TextWorld's grammar needs to word an action; `mapping` gives the entity for
        each of its placeholders.
        """
        return {
            "state": self._pddl_state,
            "facts": list(self._pddl_state.facts),
            "variables": {placeholder.name: self._entity_infos[entity.name] for placeholder, entity in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entity_infos,
        }


_IDLE_GAMES: list[HouseGame] = []


def acquire_game() -> HouseGame:
    """Return a released game, or a new one if there is none."""
    try:
        return _IDLE_GAMES.pop()
    except IndexError:
        return HouseGame()


def display_names(ids: Iterable[str]) -> dict[str, str]:
    """Return the names of things by id: `Cabinet_bar__minus_00...` becomes `cabinet 2`, for
    example.

    Things of a kind are numbered from 1, in descending order of their ids. Ids that do not belong
    to a thing in the room stay unchanged.
    """
    num_by_kind: Counter[str] = Counter()
    name_by_id = {}
    for entity_id in sorted(ids, reverse=True):
        kind, separator, _ = entity_id.partition("_bar_")
        if separator:
            kind += "basin" if "basin" in entity_id else ""
            num_by_kind[kind] += 1
        name_by_id[entity_id] = f"{kind} {num_by_kind[kind]}" if separator else entity_id
    return name_by_id
