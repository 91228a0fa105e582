"""The games of ALFWorld in their original folders, and lists of them that are kept on disk.

A split is a folder of tasks, a task a folder of trials, a trial a folder with `traj_data.json` and
`game.tw-pddl`. Finding out which games count means reading thousands of files, so the list of a
split is kept under the hash of its files.

Source: ALFWorld (arXiv 2010.03768), its public data and the rules of its text environment for which
games count.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault
from agentr_core.fingerprint import fingerprint
from agentr_core.system import content_sha256
from agentr_core.texts import placed

VERSION = 2
"""Raise it when the same folders would give a different list."""

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""The six kinds of task, in the order in which the benchmark numbers them from 1."""

GAME_FILE = "game.tw-pddl"
_UNSUPPORTED = ("movable", "Sliced")
AGAIN = "get it again with `alfworld-download`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A game: its task and trial, which are the names of its folders, its kind, and the SHA-256 of
    its file.
    """

    task: str
    trial: str
    kind: str
    sha256: str


_GAMES = TypeAdapter(tuple[Game, ...])


def find_root(folder: Path) -> Path:
    """Return the folder of the splits: the given one, or the `json_...` in it. Raises `ConfigError`
    if neither has `train`.
    """
    for root in (folder, *sorted(folder.glob("json_*"))):
        if (root / "train").is_dir():
            return root
    raise ConfigError(
        f"environment.options.data_dir: {placed(folder)} has no folder train, nor json_2.1.1/train; name the folder "
        "that `alfworld-download` filled"
    )


def list_games(root: Path, split: str, cache: Path) -> tuple[Game, ...]:
    """Return the games of a split that count, sorted by task and trial; they come from the cache if
    nothing changed.

    Raises:
        ConfigError: there is no such split, or the cache folder cannot be made.
        DataFileError: a file is cut off or malformed, or no game counts.
        DiskError: the cache folder cannot be written.
    """
    folder = root / split
    try:
        tasks = sorted(path.name for path in folder.iterdir() if path.is_dir())
        content = content_sha256(folder, cache)
    except OSError as error:
        raise ConfigError(f"environment.options.data_dir: {folder} cannot be read ({error.strerror})") from error
    known = cache / f"{fingerprint('alfworld', VERSION, content)}.json"
    if not known.is_file():
        games = _read_all(folder, tasks)
        try:
            known.parent.mkdir(parents=True, exist_ok=True)
            draft = known.with_name(f"{known.name}.{os.getpid()}")
            draft.write_bytes(_GAMES.dump_json(games))
            draft.replace(known)
        except OSError as error:
            raise ConfigError(
                f"environment.options.cache_dir: {known.parent} cannot be written ({error}); name another"
            ) from error
    try:
        return _GAMES.validate_json(known.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataFileError(f"the list of games {known} is damaged; delete it to have it rebuilt") from error


def listed_games(root: Path, split: str, mapping: Path, cache: Path) -> dict[int, Game]:
    """Return the games that one of AgentGym's mapping files names, by their numbers in it. Raises
    `DataFileError`.
    """
    there = {(game.task, game.trial): game for game in list_games(root, split, cache)}
    try:
        wanted = {
            int(each["item_id"]): (each["task_type"], each["task_id"]) for each in json.loads(mapping.read_bytes())
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataFileError(f"{mapping} cannot be read ({error}); it must be a file of AgentGym's configs") from error
    missing = [f"{task}/{trial}" for task, trial in wanted.values() if (task, trial) not in there]
    if missing:
        raise DataFileError(
            f"{mapping} names {len(missing)} games that {root / split} does not have, such as {missing[0]}; {AGAIN}"
        )
    return {number: there[place] for number, place in wanted.items()}


def read_game(path: Path, listed: Game) -> Mapping[str, Any]:
    """Return the content of a game file. Raises `EnvironmentFault` when it is gone, broken or not
    the listed one.
    """
    try:
        content, sha256 = _object(path)
    except DataFileError as error:
        raise EnvironmentFault(f"{error}") from error
    if sha256 != listed.sha256:
        raise EnvironmentFault(
            f"game file {path} changed since the games were listed; bring it back, or run the recipe anew"
        )
    missing = [key for key in ("pddl_domain", "pddl_problem", "grammar") if not isinstance(content.get(key), str)]
    if missing:
        raise EnvironmentFault(f"game file {path} has no {', '.join(missing)}; {AGAIN}")
    return content


def _read_all(folder: Path, tasks: list[str]) -> tuple[Game, ...]:
    """Return the games that count: solvable ones of a known kind, with nothing to slice and no
    movable containers.
    """
    games = []
    for task in tasks:
        for trial in sorted(each.name for each in (folder / task).iterdir()):
            place = folder / task / trial
            if any(word in f"{task}/{trial}" for word in _UNSUPPORTED) or not (place / GAME_FILE).is_file():
                continue
            kind = _object(place / "traj_data.json")[0].get("task_type")
            if kind not in KINDS:
                continue
            content, sha256 = _object(place / GAME_FILE)
            if content.get("solvable"):
                games.append(Game(task=task, trial=trial, kind=kind, sha256=sha256))
    if not games:
        raise DataFileError(f"{folder} has no game that can be played: no {GAME_FILE} that is solvable; {AGAIN}")
    return tuple(games)


def _object(path: Path) -> tuple[Mapping[str, Any], str]:
    """Return the object in a file, and the file's SHA-256. Raises `DataFileError`."""
    try:
        written = path.read_bytes()
        content = json.loads(written)
    except OSError as error:
        raise DataFileError(f"game file {path} cannot be read ({error.strerror}); {AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"game file {path} is cut off or not JSON ({error}); {AGAIN}") from error
    if not isinstance(content, dict):
        raise DataFileError(f"game file {path} is not a JSON object; {AGAIN}")
    return content, hashlib.sha256(written).hexdigest()
