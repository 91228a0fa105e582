"""What a world reads is part of a run's id: another content is another run, for every world."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import houses
import pytest
import shop
from asked import run_id_of

from agentr_core import system
from agentr_core.environments import registry
from agentr_core.fingerprint import file_sha256
from agentr_core.methods.faults import parse
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.start import SHIPPED_SHA256, input_files, world_paths
from agentr_core.system import DISTRIBUTION, content_sha256

SERVED = [name for name in registry.names() if name.startswith("agentgym-")]
QUESTION = {"id": "1", "split": "train", "question": "1+1", "answer": "2", "source": "s", "domain": "math"}


def _lists(folder: Path, prefix: str) -> None:
    for split in ("train", "test"):
        folder.joinpath(f"{prefix}_{split}.json").write_text(json.dumps([{"item_id": "a_1"}]), encoding="utf-8")


def textcraft(folder: Path) -> dict[str, Any]:
    folder.joinpath("planks.json").write_text("{}", encoding="utf-8")
    return {"recipes_dir": str(folder)}


def gateway(folder: Path) -> dict[str, Any]:
    folder.joinpath("train.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    folder.joinpath("test.jsonl").write_text('{"a": 2}\n', encoding="utf-8")
    return {"splits": {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl"), "more": 3}}


def reasoning(folder: Path) -> dict[str, Any]:
    folder.joinpath("set").mkdir()
    folder.joinpath("set", "train.jsonl").write_text(json.dumps(QUESTION), encoding="utf-8")
    folder.joinpath("corpus.jsonl").write_text('{"id": "1", "contents": "a"}', encoding="utf-8")
    return {"questions": [str(folder / "set"), "numbers"], "corpus": str(folder / "corpus.jsonl")}


def webshop(folder: Path) -> dict[str, Any]:
    shop.write(folder / "shop", [shop.entry("B01")], suffix="_1")
    _lists(folder, "webshop")
    return {"data_dir": str(folder / "shop"), "suffix": "_1", "ids_dir": str(folder)}


def alfworld(folder: Path) -> dict[str, Any]:
    for split in ("train", "valid_train"):
        houses.write(folder / "json_2.1.1", f"{split}/task-{split}/trial_1")
    _lists(folder, "mappings")
    return {"data_dir": str(folder), "ids_dir": str(folder)}


def sciworld(folder: Path) -> dict[str, Any]:
    _lists(folder, "sciworld")
    return {"ids_dir": str(folder)}


def gymnasium(folder: Path) -> dict[str, Any]:
    folder.joinpath("rooms.txt").write_text("a", encoding="utf-8")
    return {"id": "Rooms-v0", "make_options": {"map": str(folder / "rooms.txt")}, "files": [str(folder / "rooms.txt")]}


def agentgym(folder: Path) -> dict[str, Any]:
    _lists(folder, "list")
    return {"url": "http://127.0.0.1:1", "train": str(folder / "list_train.json"), "test": "7-9"}


def openenv(folder: Path) -> dict[str, Any]:
    return {"url": "http://127.0.0.1:1", "success": "reward >= 1", "train": "0-3", "test": "7-9"}


WORLDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "alfworld": alfworld,
    "gateway": gateway,
    "gymnasium": gymnasium,
    "openenv": openenv,
    "reasoning": reasoning,
    "sciworld": sciworld,
    "textcraft": textcraft,
    "webshop": webshop,
    **dict.fromkeys(SERVED, agentgym),
}
UNREAD = {"list_test.json"}
"""What the functions above write and do not name."""


def recipe(world: str, options: dict[str, Any], model: Path, workspace: Path) -> Recipe:
    return parse(
        {
            "name": "r",
            "method": "agent-r",
            "model": {"path": str(model)},
            "workspace": str(workspace),
            "environment": {"name": world, "options": options},
        }
    )


@pytest.fixture
def run_of(tiny_model_dir: Path, tmp_path: Path) -> Callable[[str, dict[str, Any]], str]:
    return lambda world, options: run_id_of(recipe(world, options, tiny_model_dir, tmp_path / "runs"))


def test_every_world_has_files_here() -> None:
    entry_points = distribution(DISTRIBUTION).entry_points.select(group=registry.ENTRY_POINT_GROUP)
    assert set(WORLDS) == {world.name for world in entry_points}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in UNREAD)


@pytest.mark.parametrize("world", WORLDS)
def test_a_file_that_changes_makes_another_run(
    world: str, tmp_path: Path, run_of: Callable[[str, dict[str, Any]], str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    options = WORLDS[world](folder)
    run, files = run_of(world, options), list(_files(folder))
    assert run_of(world, options) == run
    for path in files:
        before, times = path.read_bytes(), path.stat()
        # Of the same length, with the same time of modification.
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert run_of(world, options) != run, f"{path} is no part of the run"
        path.write_bytes(before)
        assert run_of(world, options) == run, f"the content of {path} is back"


@pytest.mark.parametrize("world", ["textcraft", "agentgym-textcraft", "reasoning", "webshop"])
def test_shipped_files_are_in_no_id_until_they_change(
    world: str, tmp_path: Path, run_of: Callable[[str, dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(world, {})
    paths = world_paths(parse({"name": "r", "model": {"path": "m"}, "environment": {"name": world}}))
    assert paths
    assert set(paths) <= set(SHIPPED_SHA256)
    elsewhere = tmp_path / "data"
    for name, path in paths.items():
        target = elsewhere / Path(name).relative_to("data")
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if Path(path).is_dir() else shutil.copy)(path, target)
    monkeypatch.setattr(system, "DATA_ROOTS", (elsewhere,))
    monkeypatch.setattr(registry, "DATA_ROOTS", (elsewhere,))
    assert run_of(world, {}) == run, "an installed package has them elsewhere"
    ids = {run}
    for file in _files(elsewhere):
        file.write_bytes(file.read_bytes() + b"\n")
        ids.add(run_of(world, {}))
    assert len(ids) == 1 + len(list(_files(elsewhere)))


def test_a_folder_that_a_variable_names_may_move(
    tmp_path: Path, run_of: Callable[[str, dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for place in ("one", "two"):
        houses.write(tmp_path / place, "train/task/trial_1")
        monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / place))
        ids.append(run_of("alfworld", {}))
    assert ids[0] == ids[1]
    houses.write(tmp_path / "two", "train/task/trial_2")
    assert run_of("alfworld", {}) != ids[0]


def test_a_run_of_questions_keeps_its_id(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("{}", encoding="utf-8")
    options = {"questions": [str(file), "numbers"], "corpus": f"{tmp_path}/./q.jsonl"}
    run_recipe = recipe("reasoning", options, tmp_path, tmp_path)
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert input_files(run_recipe) == {str(file): digest, f"{tmp_path}/./q.jsonl": digest}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose content is read; all files are large, and old after a
    millisecond.
    """
    names: list[str] = []
    original = file_sha256

    def recorded_sha256(file: Path) -> str:
        names.append(file.name)
        return original(file)

    monkeypatch.setattr(system, "_MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(system, "file_sha256", recorded_sha256)
    return names


def _old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_MIN_AGE_NS", -(10**12))


def test_a_large_folder_is_read_once(tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    for name in ("a", "b"):
        folder.joinpath(name).write_text(name, encoding="utf-8")
    digest = content_sha256(folder, cache)
    assert content_sha256(folder, cache) == digest
    assert hashed == ["a", "b"] * 2, "what is young is read again"
    _old(monkeypatch)
    assert content_sha256(folder, cache) == digest
    del hashed[:]
    assert content_sha256(folder, cache) == digest
    assert hashed == []
    target = folder.rename(tmp_path / "moved")
    assert content_sha256(target, cache) == digest


def test_no_other_content_is_taken_for_a_known_one(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _old(monkeypatch)
    file, cache = tmp_path / "file", tmp_path / "cache"

    def write(text: str) -> None:
        # The clock of a file system may stand still for some milliseconds.
        time.sleep(0.02)
        file.write_text(text, encoding="utf-8")
        os.utime(file, ns=(5, 5))

    def replace(text: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text(text, encoding="utf-8")
        shutil.copystat(file, draft)
        draft.replace(file)

    def link(text: str) -> None:
        target = tmp_path / text
        target.write_text(text, encoding="utf-8")
        file.unlink()
        file.symlink_to(target)
        os.utime(file, ns=(5, 5))

    write("one")
    digests = {content_sha256(file, cache)}
    for number, change in enumerate((write, replace, link, write), start=1):
        change(f"t{number}o")
        digests.add(content_sha256(file, cache))
        assert len(digests) == number + 1, change


@pytest.mark.parametrize("content", ["", "[", "[]", "{}", '{".": []}'])
def test_a_damaged_memory_is_made_anew(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    _old(monkeypatch)
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_text("one", encoding="utf-8")
    digest = content_sha256(file, cache)
    (memory,) = (cache / "hashes").iterdir()
    text = memory.read_text(encoding="utf-8")
    memory.write_text(content, encoding="utf-8")
    assert content_sha256(file, cache) == digest
    assert memory.read_text(encoding="utf-8") == text


def test_links_in_a_folder_are_followed_and_may_go_round(tmp_path: Path) -> None:
    folder, beside = tmp_path / "data", tmp_path / "beside"
    folder.mkdir()
    beside.mkdir()
    beside.joinpath("file").write_text("one", encoding="utf-8")
    folder.joinpath("linked").symlink_to(beside)
    folder.joinpath("back").symlink_to(folder)
    folder.joinpath("nowhere").symlink_to(tmp_path / "missing")
    digest = content_sha256(folder, tmp_path / "cache")
    beside.joinpath("file").write_text("two", encoding="utf-8")
    assert content_sha256(folder, tmp_path / "cache") != digest
