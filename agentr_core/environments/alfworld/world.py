"""ALFWorld in this process: household tasks as text, on the real engine and with the original
games.

Source: ALFWorld (arXiv 2010.03768). Texts are as AgentGym (arXiv 2406.04151) and ETO (arXiv
2403.02502) show them: without the banner, and without the number of the location on arrival. The
reward is 1 if the task is done, otherwise 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from agentr_core.environment import Environment, Instances
from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault
from agentr_core.fingerprint import fingerprint
from agentr_core.system import content_sha256
from agentr_core.texts import path_for_message
from agentr_core.types import Instance, Transition

if TYPE_CHECKING:
    from agentr_core.environments.alfworld.engine import HouseGame, SavedState


# The games of ALFWorld in their original folders, and lists of games that are cached on disk.
#
# A split is a folder of tasks, a task a folder of trials, a trial a folder with `traj_data.json`
# and `game.tw-pddl`. To find the playable games, thousands of files must be read, so the list of a
# split is cached under the hash of its files.
#
# Source: ALFWorld (arXiv 2010.03768), its public data, and the rules of its text environment for
# which games are playable.

LIST_VERSION = 2
"""Raise it when the same folders would give a different list."""

TASK_KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""The six kinds of tasks, in the order in which the benchmark numbers them from 1."""

GAME_FILE = "game.tw-pddl"
_UNSUPPORTED_WORDS = ("movable", "Sliced")
REINSTALL_HINT = "get it again with `alfworld-download`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A playable game: the names of its task and trial folders, its kind, and the SHA-256 of its
    file.
    """

    task: str
    trial: str
    kind: str
    sha256: str


_GAMES_ADAPTER = TypeAdapter(tuple[Game, ...])


def find_root(folder: Path) -> Path:
    """Return the folder with the splits: the given one, or a `json_...` in it. Raises `ConfigError`
    if none of them has a folder `train`.
    """
    for root in (folder, *sorted(folder.glob("json_*"))):
        if (root / "train").is_dir():
            return root
    raise ConfigError(
        f"environment.options.data_dir: {path_for_message(folder)} has no folder train, nor json_2.1.1/train; "
        "name the folder "
        "that `alfworld-download` filled"
    )


def list_games(root: Path, split: str, cache: Path) -> tuple[Game, ...]:
    """Return the playable games of a split, sorted by task and trial; from the cache if no file
    changed.

    Raises:
        ConfigError: there is no such split, or the list cannot be cached.
        DataFileError: a file is cut off or malformed, or no game is playable.
        DiskError: the hashes of files cannot be cached.
    """
    folder = root / split
    try:
        tasks = sorted(path.name for path in folder.iterdir() if path.is_dir())
        content_hash = content_sha256(folder, cache)
    except OSError as error:
        raise ConfigError(f"environment.options.data_dir: {folder} cannot be read ({error.strerror})") from error
    cache_file = cache / f"{fingerprint('alfworld', LIST_VERSION, content_hash)}.json"
    if not cache_file.is_file():
        games = _read_games(folder, tasks)
        try:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            temporary_file = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
            temporary_file.write_bytes(_GAMES_ADAPTER.dump_json(games))
            temporary_file.replace(cache_file)
        except OSError as error:
            raise ConfigError(
                f"environment.options.cache_dir: {cache_file.parent} cannot be written ({error}); name another"
            ) from error
    try:
        return _GAMES_ADAPTER.validate_json(cache_file.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataFileError(f"the list of games {cache_file} is damaged; delete it to have it rebuilt") from error


def games_by_number(root: Path, split: str, mapping_file: Path, cache: Path) -> dict[int, Game]:
    """Return the games that one of AgentGym's mapping files names, keyed by their numbers in it.
    Raises `DataFileError` if the file is malformed or names a game that the split does not have.
    """
    game_by_trial = {(game.task, game.trial): game for game in list_games(root, split, cache)}
    try:
        trial_by_number = {
            int(entry["item_id"]): (entry["task_type"], entry["task_id"])
            for entry in json.loads(mapping_file.read_bytes())
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataFileError(
            f"{mapping_file} cannot be read ({error}); it must be a file of AgentGym's configs"
        ) from error
    missing = [f"{task}/{trial}" for task, trial in trial_by_number.values() if (task, trial) not in game_by_trial]
    if missing:
        raise DataFileError(
            f"{mapping_file} names {len(missing)} games that {root / split} does not have, such as {missing[0]}; "
            f"{REINSTALL_HINT}"
        )
    return {number: game_by_trial[key] for number, key in trial_by_number.items()}


def read_game(path: Path, game: Game) -> Mapping[str, Any]:
    """Return the content of a game file. Raises `EnvironmentFault` if it is missing, malformed or
    has changed since it was listed.
    """
    try:
        content, sha256 = _read_object(path)
    except DataFileError as error:
        raise EnvironmentFault(f"{error}") from error
    if sha256 != game.sha256:
        raise EnvironmentFault(
            f"game file {path} changed since the games were listed; bring it back, or run the recipe anew"
        )
    missing = [key for key in ("pddl_domain", "pddl_problem", "grammar") if not isinstance(content.get(key), str)]
    if missing:
        raise EnvironmentFault(f"game file {path} has no {', '.join(missing)}; {REINSTALL_HINT}")
    return content


def _read_games(folder: Path, tasks: list[str]) -> tuple[Game, ...]:
    """Return the playable games of a split: solvable ones of a known kind, with nothing to slice
    and without movable containers. Raises `DataFileError` if there are none.
    """
    games = []
    for task in tasks:
        for trial in sorted(path.name for path in (folder / task).iterdir()):
            trial_folder = folder / task / trial
            if (
                any(word in f"{task}/{trial}" for word in _UNSUPPORTED_WORDS)
                or not (trial_folder / GAME_FILE).is_file()
            ):
                continue
            kind = _read_object(trial_folder / "traj_data.json")[0].get("task_type")
            if kind not in TASK_KINDS:
                continue
            content, sha256 = _read_object(trial_folder / GAME_FILE)
            if content.get("solvable"):
                games.append(Game(task=task, trial=trial, kind=kind, sha256=sha256))
    if not games:
        raise DataFileError(
            f"{folder} has no game that can be played: no {GAME_FILE} that is solvable; {REINSTALL_HINT}"
        )
    return tuple(games)


def _read_object(path: Path) -> tuple[Mapping[str, Any], str]:
    """Return the JSON object in a file, and the file's SHA-256. Raises `DataFileError`."""
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
    except OSError as error:
        raise DataFileError(f"game file {path} cannot be read ({error.strerror}); {REINSTALL_HINT}") from error
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"game file {path} is cut off or not JSON ({error}); {REINSTALL_HINT}") from error
    if not isinstance(content, dict):
        raise DataFileError(f"game file {path} is not a JSON object; {REINSTALL_HINT}")
    return content, hashlib.sha256(raw).hexdigest()


_INSTRUCTION = """\
You act in a household. You see where you are and what your task is. Each turn, reply with a thought and one action:
Thought: what to do next, and why
Action: one of the actions
The actions are:
go to PLACE
open PLACE
close PLACE
take THING from PLACE
{put}
use THING
heat THING with PLACE
clean THING with PLACE
cool THING with PLACE
slice THING with THING
examine THING or PLACE
look
inventory
Things and places have numbers, as in "mug 1" or "drawer 2". You carry one thing at a time. What you do not see may be
in something that is closed. "Nothing happens." means that an action was not possible."""

_ARRIVAL = re.compile(r"^You arrive at loc \d+\. ")
_PUT_TEMPLATE = re.compile(r'action\s+PutObject\s*\{\s*template\s*::\s*"([\w /]*\{o\}[\w /]*\{r\})"')
_INSTALL_COMMAND = "in the checkout, pip install -c constraints.txt -e '.[alfworld]'"
_FOLDER_BY_SPLIT = {"train": "train", "seen": "valid_seen", "test": "valid_unseen"}
_AGENTGYM_FOLDER_BY_SPLIT = {"train": "train", "test": "valid_train"}
_THOUGHT_BY_VERB = {
    "go": "I go to where I need to be, or where it may be.",
    "open": "It is closed; I open it.",
    "close": "I close it again.",
    "take": "This is what I need; I take it.",
    "move": "It belongs here.",
    "put": "It belongs here.",
    "use": "I turn it on.",
    "heat": "It must be hot.",
    "clean": "It must be clean.",
    "cool": "It must be cool.",
    "slice": "It must be sliced.",
}
_LOOK_THOUGHT = "I look closer."


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state: the instance, the actions that led to it, and the saved state, valid while
    `num_openings` is the number of the game that is open.
    """

    instance: Instance
    actions: tuple[str, ...]
    num_openings: int
    saved_state: SavedState


class AlfWorld(Environment):
    """Household tasks of six kinds, as text, from a folder that `alfworld-download` filled.

    Splits: `train`, `seen` (the benchmark's `valid_seen`: other tasks in rooms of `train`) and
    `test` (`valid_unseen`: other rooms). An instance's index is its position among the playable
    games of the split, sorted by task and trial.

    Args:
        data_dir: the folder with `json_2.1.1`, or that folder itself; by default the value of the
            variable ALFWORLD_DATA.
        ids_dir: a folder with AgentGym's `mappings_train.json` and `mappings_test.json`, which then
            define the splits `train` and `test` and their numbers; AgentGym's test games are in the
            folder `valid_train`.
        admissible_commands: whether each observation ends with the line `AVAILABLE ACTIONS: ...`.
        cache_dir: the folder in which the lists of games are cached.
    """

    name = "alfworld"
    step_limit = 30
    variables: ClassVar[Mapping[str, str]] = {"data_dir": "ALFWORLD_DATA"}

    def __init__(
        self,
        *,
        data_dir: str = "",
        ids_dir: str = "",
        admissible_commands: bool = False,
        cache_dir: str = "runs/cache/alfworld",
    ) -> None:
        """Check the installed packages and find the folder of games; the games are listed when
        first needed. Raises `ConfigError`.
        """
        try:
            textworld_version = version("textworld")
            version("fast-downward-textworld")
        except PackageNotFoundError as error:
            raise ConfigError(f"alfworld needs the package {error.name}: {_INSTALL_COMMAND}") from error
        if not (1, 6) <= tuple(int(part) for part in textworld_version.split(".")[:2] if part.isdecimal()) < (1, 8):
            raise ConfigError(
                f"alfworld needs TextWorld 1.6 or 1.7, but {textworld_version} is installed: {_INSTALL_COMMAND}"
            )
        if not data_dir:
            raise ConfigError(
                "alfworld needs a folder of games: set environment.options.data_dir or the variable ALFWORLD_DATA; "
                "`alfworld-download` fills one, `python data/alfworld/make.py runs/alfworld` makes a small one"
            )
        self._root = find_root(Path(data_dir))
        self._list_arguments = (self._root, ids_dir, Path(cache_dir))
        self._folder_by_split = _AGENTGYM_FOLDER_BY_SPLIT if ids_dir else _FOLDER_BY_SPLIT
        self._shows_commands = admissible_commands
        self._game: HouseGame | None = None
        self._num_openings = 0
        self._instance: Instance | None = None
        self._first_text = ""
        self._start_state: SavedState | None = None
        self._actions: tuple[str, ...] = ()

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the folders of the splits, and AgentGym's files in `ids_dir`. Raises `ConfigError`
        if `data_dir` has no games.
        """
        if not options.get("data_dir"):
            return ()
        root, ids_dir = find_root(Path(options["data_dir"])), options.get("ids_dir")
        folder_by_split = _AGENTGYM_FOLDER_BY_SPLIT if ids_dir else _FOLDER_BY_SPLIT
        splits = (root / folder for folder in folder_by_split.values() if (root / folder).is_dir())
        return tuple(map(str, (*splits, *(_mapping_file(ids_dir, split) for split in folder_by_split if ids_dir))))

    @cached_property
    def instruction(self) -> str:  # type: ignore[override]
        """The first user message. Its wording depends on the games: older ones have the action `put
        ... in/on ...`, newer ones `move ... to ...`.
        """
        first_game = next(iter(self._games_of("train").values()))
        template = _PUT_TEMPLATE.search(self._game_content("train", first_game)["grammar"])
        phrase = template[1] if template else "move {o} to {r}"
        return _INSTRUCTION.format(put=phrase.format(o="THING", r="PLACE"))

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._folder_by_split)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split. Raises `ConfigError` if there is no such split, and
        `DataFileError` for a malformed file.
        """
        if split not in self._folder_by_split:
            raise ConfigError(f"alfworld has no split {split!r}; it has {', '.join(self.splits())}")
        return Instances(self.name, split, tuple(self._games_of(split)))

    def reset(self, instance: Instance) -> str:
        """Begin an episode and return the description of the room and the task. Raises
        `EnvironmentFault` for an unknown or broken game, and `ConfigError` if the engine cannot be
        loaded.
        """
        if instance == self._instance and self._game is not None and self._start_state is not None:
            self._game.restore_state(self._start_state)
        else:
            game = self._game_of(instance)
            content = self._game_content(instance.split, game)
            self._instance = None
            self._num_openings += 1
            if self._game is None:
                try:
                    from agentr_core.environments.alfworld.engine import acquire_game

                    self._game = acquire_game()
                except (ImportError, AttributeError, OSError) as error:
                    raise ConfigError(
                        f"the engine of alfworld cannot be loaded ({error}): {_INSTALL_COMMAND}"
                    ) from error
            try:
                text = self._game.open(content)
            # The parsers raise many types of errors, and the problem translator even tries to exit
            # the process.
            except (Exception, SystemExit) as error:
                detail = " ".join(str(error).split())[:200] or type(error).__name__
                path = self._game_path(instance.split, game)
                raise EnvironmentFault(f"game file {path} is broken ({detail}); {REINSTALL_HINT}") from error
            self._first_text = "\n".join(text.split("\n\n")[1:])
            self._start_state = self._game.save_state()
            self._instance = instance
        self._actions = ()
        return self._with_actions(self._first_text)

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition; completing the task gives reward 1 and
        ends the episode.
        """
        game = self._current_game()
        valid = action.strip() in game.commands
        observation = game.act(action)
        self._actions += (action,)
        return Transition(
            self._with_actions(observation),
            float(game.is_won),
            game.is_won,
            False,
            {"success": game.is_won, "valid": valid},
        )

    def state(self) -> str:
        """Return the facts that differ from the start of the game; the facts decide all texts and
        what is possible. Nothing that has an effect is left out; see `HouseGame.changed_facts`.
        """
        return self._current_game().changed_facts()

    def snapshot(self) -> Any:
        """Return the present state as a `Snapshot`, which is small and immutable."""
        game = self._current_game()
        assert self._instance is not None
        return Snapshot(self._instance, self._actions, self._num_openings, game.save_state())

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a snapshot; if another game was opened since, by replay."""
        if snapshot.num_openings == self._num_openings:
            self._current_game().restore_state(snapshot.saved_state)
            self._actions = snapshot.actions
            return
        self.reset(snapshot.instance)
        for action in snapshot.actions:
            self.step(action)

    def depth(self, instance: Instance) -> int | None:
        """Return the number of the task's kind, from 1 to 6 as in the benchmark."""
        return TASK_KINDS.index(self._game_of(instance).kind) + 1

    def facts(self, instance: Instance) -> Mapping[str, Any]:
        """Return the name of the task's kind, whose number is `depth`."""
        return {"kind": self._game_of(instance).kind}

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the game's walkthrough as replies, or None if its file has none."""
        commands = self._game_content(instance.split, self._game_of(instance)).get("walkthrough")
        if not commands:
            return None
        return [
            f"Thought: {_THOUGHT_BY_VERB.get(command.split()[0], _LOOK_THOUGHT)}\nAction: {command}"
            for command in commands
        ]

    def close(self) -> None:
        """Release the engine for other environments."""
        if self._game is not None:
            self._game.release()
        self._game = self._instance = self._start_state = None
        self._num_openings += 1

    def _with_actions(self, text: str) -> str:
        observation = _ARRIVAL.sub("", text)
        return (
            f"{observation}\nAVAILABLE ACTIONS: {','.join(self._current_game().commands)}"
            if self._shows_commands
            else observation
        )

    def _current_game(self) -> HouseGame:
        if self._game is None or self._instance is None:
            raise EnvironmentFault("alfworld: there is no episode; call reset first")
        return self._game

    def _games_of(self, split: str) -> Mapping[int, Game]:
        return _games_by_index(*self._list_arguments, split)

    def _game_of(self, instance: Instance) -> Game:
        is_listed = instance.environment == self.name and instance.split in self._folder_by_split
        games = self._games_of(instance.split) if is_listed else {}
        if instance.index not in games:
            raise EnvironmentFault(
                f"alfworld has no instance {instance.key}; it has the splits {', '.join(self.splits())}"
                + (f", and {len(games)} games in {instance.split}" if is_listed else "")
            )
        return games[instance.index]

    def _game_path(self, split: str, game: Game) -> Path:
        return self._root / self._folder_by_split[split] / game.task / game.trial / GAME_FILE

    def _game_content(self, split: str, game: Game) -> Mapping[str, Any]:
        return read_game(self._game_path(split, game), game)


# A run has hundreds of environments, and a list may have thousands of games.
@lru_cache(maxsize=8)
def _games_by_index(root: Path, ids_dir: str, cache: Path, split: str) -> Mapping[int, Game]:
    if ids_dir:
        return games_by_number(root, _AGENTGYM_FOLDER_BY_SPLIT[split], _mapping_file(ids_dir, split), cache)
    return dict(enumerate(list_games(root, _FOLDER_BY_SPLIT[split], cache)))


def _mapping_file(ids_dir: str, split: str) -> Path:
    return Path(ids_dir) / f"mappings_{split}.json"
