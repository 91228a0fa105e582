"""The lists of ALFWorld's games, and what is said when packages, folders or files are missing. No
engine is needed.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from houses import write

from agentr_core import http_server
from agentr_core.environments import registry
from agentr_core.environments.agentgym.server import number_instances
from agentr_core.environments.agentgym.worlds import check_numbers
from agentr_core.environments.alfworld import world
from agentr_core.environments.alfworld.world import AlfWorld, Game, games_by_number, list_games, read_game
from agentr_core.errors import AgentrError, ConfigError, DataFileError, EnvironmentFault
from agentr_core.types import Instance
from flows.commands import environments

SPLITS = ("train", "valid_seen", "valid_unseen")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "json_2.1.1"
    for split in SPLITS:
        write(root, f"{split}/task-b-{split}/trial_2", "pick_two_obj_and_place")
        write(root, f"{split}/task-a-{split}/trial_1")
    return root


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "version", lambda name: "1.7.0")


def places(games: tuple[Game, ...]) -> list[str]:
    return [f"{game.task}/{game.trial}" for game in games]


def test_games_that_cannot_be_played_do_not_count(root: Path, tmp_path: Path) -> None:
    write(root, "train/task-movable/trial_1")
    write(root, "train/task-Sliced/trial_1")
    write(root, "train/task-c/trial_1", "pick_and_fly")
    write(root, "train/task-c/trial_2", solvable=False)
    (write(root, "train/task-c/trial_3") / "game.tw-pddl").unlink()
    games = list_games(root, "train", tmp_path / "cache")
    assert places(games) == ["task-a-train/trial_1", "task-b-train/trial_2"]
    assert [game.kind for game in games] == ["pick_and_place_simple", "pick_two_obj_and_place"]


def test_the_list_is_kept_until_a_file_changes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    games = list_games(root, "train", cache)
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", lambda _: pytest.fail("games were read again"))
        assert list_games(root, "train", cache) == games
    write(root, "train/task-a-train/trial_0")
    assert len(list_games(root, "train", cache)) == 3
    # The folders of tasks have the same times before and after that.
    write(root, "train/task-a-train/trial_0", solvable=False)
    assert list_games(root, "train", cache) == games

    for path in cache.iterdir():
        path.write_text("[", encoding="utf-8")
    with pytest.raises(DataFileError, match=r"list of games .* is damaged; delete it"):
        list_games(root, "train", cache)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_file_is_named(root: Path, tmp_path: Path, text: str) -> None:
    broken = root / "train" / "task-a-train" / "trial_1" / "game.tw-pddl"
    broken.write_text(text, encoding="utf-8")
    with pytest.raises(DataFileError, match=rf"{broken} is .*; get it again with `alfworld-download`"):
        list_games(root, "train", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changed_after_it_was_listed_is_not_played(root: Path, tmp_path: Path) -> None:
    game = list_games(root, "train", tmp_path / "cache")[0]
    path = root / "train" / game.task / game.trial / "game.tw-pddl"
    assert read_game(path, game)["walkthrough"] == ["look"]
    write(root, "train/task-a-train/trial_1", walkthrough=["look", "look"])
    with pytest.raises(EnvironmentFault, match=rf"{path} changed since the games were listed; bring it back"):
        read_game(path, game)
    path.unlink()
    with pytest.raises(EnvironmentFault, match=rf"{path}"):
        read_game(path, game)


@pytest.mark.parametrize("splits", [(), ("test",)])
def test_games_with_other_numbers_than_agentgyms_are_not_served(
    root: Path, tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch, splits: tuple[str, ...]
) -> None:
    """Clients were given training games for their test games."""
    monkeypatch.setattr(http_server, "serve", lambda *_, **__: pytest.fail("it was served"))
    options = {"data_dir": str(root), "cache_dir": str(tmp_path / "cache")}

    pattern = r"number \d is in split train for clients and would be alfworld/.*: set the option ids_dir"
    with pytest.raises(ConfigError, match=pattern):
        environments.serve("alfworld", options, host="", port=0, splits=splits, idle_s=60, most=1, say=pytest.fail)


def test_agentgyms_numbers(root: Path, tmp_path: Path, installed: None) -> None:
    write(root, "valid_train/task-d/trial_7")
    mappings = {
        "train": [{"item_id": 3, "task_type": "task-b-train", "task_id": "trial_2"}],
        "test": [{"item_id": 2420, "task_type": "task-d", "task_id": "trial_7"}],
    }
    for split, entries in mappings.items():
        (tmp_path / f"mappings_{split}.json").write_text(json.dumps(entries), encoding="utf-8")
    env = AlfWorld(data_dir=str(root), ids_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert {split: [each.index for each in env.instances(split)] for split in env.splits()} == {
        "train": [3],
        "test": [2420],
    }
    assert env.depth(Instance(environment="alfworld", split="train", index=3)) == 6
    check_numbers("alfworld", number_instances(env, env.splits()))

    mapping = tmp_path / "other.json"
    mapping.write_text(json.dumps([{"item_id": 1, "task_type": "task-e", "task_id": "trial_9"}]), encoding="utf-8")
    with pytest.raises(DataFileError, match=r"names 1 games that .* does not have, such as task-e/trial_9"):
        games_by_number(root, "train", mapping, tmp_path / "cache")
    mapping.write_text("{}[", encoding="utf-8")
    with pytest.raises(DataFileError, match=r"other\.json cannot be read .*AgentGym's configs"):
        games_by_number(root, "train", mapping, tmp_path / "cache")


def test_instances_and_texts_are_had_without_the_engine(root: Path, tmp_path: Path, installed: None) -> None:
    env = AlfWorld(data_dir=str(root.parent), cache_dir=str(tmp_path / "cache"))
    assert env.splits() == ("train", "seen", "test")
    assert [instance.key for instance in env.instances("seen")] == ["alfworld/seen/0", "alfworld/seen/1"]
    assert [env.depth(instance) for instance in env.instances("test")] == [1, 6]
    assert "\nput THING in/on PLACE\n" in env.instruction
    assert env.expert(env.instances("train")[0]) == ("Thought: I look closer.\nAction: look",)
    env.close()


def test_misuse_is_told_in_one_sentence(
    root: Path, tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_text(kind: type[AgentrError], act: object) -> str:
        assert callable(act)
        with pytest.raises(kind) as caught:
            act()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    cache = str(tmp_path / "cache")
    assert "ALFWORLD_DATA" in error_text(ConfigError, AlfWorld)
    assert f"{tmp_path} has no folder train" in error_text(ConfigError, lambda: AlfWorld(data_dir=str(tmp_path)))
    env = AlfWorld(data_dir=str(root), cache_dir=cache)
    assert "no split 'dev'; it has train, seen, test" in error_text(ConfigError, lambda: env.instances("dev"))
    for wrong in ("alfworld/test/2", "alfworld/test/-1", "alfworld/attic/0", "textcraft/test/0"):
        name, split, index = wrong.split("/")
        instance = Instance(environment=name, split=split, index=int(index))
        assert f"alfworld has no instance {wrong}; it has" in error_text(
            EnvironmentFault, lambda i=instance: env.reset(i)
        )
    assert "call reset first" in error_text(EnvironmentFault, lambda: env.step("look"))
    (root / "valid_seen").rename(root / "elsewhere")
    assert f"{root / 'valid_seen'} cannot be read" in error_text(ConfigError, lambda: env.instances("seen"))

    for wrong in ("1.5.4", "1.8.0"):
        monkeypatch.setattr(world, "version", lambda name, found=wrong: found)
        assert f"TextWorld 1.6 or 1.7, but {wrong} is installed" in error_text(ConfigError, AlfWorld)

    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(world, "version", none)
    message = error_text(ConfigError, AlfWorld)
    assert "needs the package textworld: in the checkout, pip install -c constraints.txt -e '.[alfworld]'" in message


def test_the_variable_stands_in_for_the_folder(root: Path, installed: None) -> None:
    assert registry.make("alfworld", {}, {"ALFWORLD_DATA": str(root.parent)}).splits() == ("train", "seen", "test")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Thought: x\nAction: go to desk 1", "go to desk 1"),
        ("Thought: x\n\nAction:\ngo to desk 1\nmore", "go to desk 1"),
        ("Action: look\nAction: inventory", "inventory"),
        ("go to desk 1", ""),
        ("", ""),
    ],
)
def test_parser(root: Path, installed: None, reply: str, action: str) -> None:
    assert AlfWorld(data_dir=str(root)).parse(reply) == action
