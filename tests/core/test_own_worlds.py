"""What is said about a world of somebody else that breaks a rule: which one, and where."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from combination_lock import CombinationLock

from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.errors import ConfigError, EnvironmentFault, IllTypedAnswer
from agentr_core.methods.faults import parse
from agentr_core.runtime.instances import held_out_instances, training_instances
from agentr_core.types import Instance, Transition
from flows.commands import environments
from tasks.wiring import named_environment


def lock(split: str, index: int) -> Instance:
    return Instance(environment=CombinationLock.name, split=split, index=index)


class Listing(CombinationLock):
    """A world whose splits are listed as a test says."""

    def __init__(self, listed: Any) -> None:
        super().__init__()
        self._listed = listed

    def instances(self, split: str) -> Sequence[Instance]:
        listing: Sequence[Instance] = self._listed[split]
        return listing


class Rough(CombinationLock):
    """A parser that takes it for granted that there is an action."""

    def parse(self, reply: str) -> str:
        return reply.split("Action:")[1].strip()


class Costly(CombinationLock):
    """Each try that does not open the lock costs something."""

    def step(self, action: str) -> Transition:
        transition = super().step(action)
        return transition if transition.terminated else transition._replace(reward=-0.1)


class Brittle(CombinationLock):
    def reset(self, instance: Instance) -> str:
        raise KeyError("room")

    def depth(self, instance: Instance) -> int | None:
        raise RuntimeError


def recipe(**instances: Any) -> Any:
    return parse({"name": "r", "model": {"path": "m"}, "instances": instances}, ())


@pytest.mark.parametrize(
    ("listed", "split", "kind", "said"),
    [
        ({}, "tset", ConfigError, "^environment combination-lock has no split 'tset'; it has train, test$"),
        ({"test": []}, "test", ConfigError, "^split test of environment combination-lock is empty; name another one$"),
        ({"test": iter(())}, "test", IllTypedAnswer, "must be a sequence, such as a list"),
        ({"test": [{"index": 0}]}, "test", IllTypedAnswer, r"begin with {'index': 0}; each must be a types.Instance"),
        (
            {},
            "test",
            EnvironmentFault,
            r"its instances of split test \(KeyError: 'test', test_own_worlds.py line \d+\)",
        ),
    ],
)
def test_instances_that_cannot_be_listed(listed: Any, split: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        held_out_instances(recipe(test=split), Listing(listed))
    with pytest.raises(kind, match=said):
        training_instances(recipe(train=split, test="other"), Listing(listed), 1)


def test_an_instance_that_is_listed_twice_is_no_second_episode() -> None:
    world = Listing({"train": [lock("train", 3), lock("train", 4), lock("train", 3)], "test": [lock("test", 800)] * 2})
    with pytest.raises(IllTypedAnswer, match="lists instance combination-lock/train/3 twice"):
        training_instances(recipe(), world, 1)
    with pytest.raises(IllTypedAnswer, match="lists instance combination-lock/test/800 twice"):
        held_out_instances(recipe(), world)
    assert [fault.detail for fault in check(lambda: world)] == [
        "split train has an instance twice",
        "split test has an instance twice",
    ]


def test_the_checker_meets_what_a_model_would_do_to_a_world() -> None:
    assert {fault.rule for fault in check(Rough)} == {"exception"}
    rough = check(Rough)[0].detail
    assert "/train/133: IndexError: list index out of range, test_own_worlds.py line" in rough
    costly = check(Costly)
    assert {fault.rule for fault in costly} == {"expert"}
    assert costly[0].detail.endswith("step 0 has reward -0.1, and one below 0 ends an episode as lost")


def test_an_instance_of_another_name_is_told() -> None:
    world = Listing({"train": [lock("train", 3)], "test": [lock("test", 800)]})
    world.name = "lock"
    assert [fault.detail for fault in check(lambda: world)] == [
        "combination-lock/train/3 is in split train of lock",
        "combination-lock/test/800 is in split test of lock",
    ]


def test_exceptions_of_a_world_say_where_they_were_raised() -> None:
    with pytest.raises(EnvironmentFault, match=r"the beginning of .*/train/3 \(KeyError: 'room', test_own_worlds.py l"):
        Brittle().identity(lock("train", 3))
    with pytest.raises(
        EnvironmentFault, match=r"the depth of .*/train/3 \(RuntimeError, test_own_worlds.py line \d+\)"
    ):
        Brittle().depth(lock("train", 3))


def test_an_entry_point_that_names_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(value="worlds:time", load=lambda: registry, name="world")
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [entry])
    (diagnosis,) = environments.diagnose("world", {})
    assert diagnosis["detail"] == (
        "environment world cannot be made: its entry point worlds:time names a module, no class; correct it in the "
        "package's pyproject.toml"
    )


def test_the_doctor_tells_each_broken_rule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {"world": Costly})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [SimpleNamespace(name="world")])
    (diagnosis,) = environments.diagnose("world", {})
    assert diagnosis["detail"].startswith("expert: ")
    assert diagnosis["detail"].endswith("(and 5 more)")


class MapWorld(CombinationLock):
    """A world that reads files of its user: a map, and what it once made of that."""

    def __init__(self, *, map_file: str = "", cache_dir: str = "cache") -> None:
        super().__init__()
        Path(cache_dir, "made").read_text(encoding="utf-8")
        Path(map_file).read_text(encoding="utf-8")
        with Path(map_file).with_name("log").open("a+") as log:
            log.seek(0)
            log.read()
        os.close(os.open(map_file, os.O_RDONLY))


class MapWorldWithFiles(MapWorld):
    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        return (options["map_file"],)


class Launching(MapWorld):
    def __init__(self, *, map_file: str = "", cache_dir: str = "cache") -> None:
        super().__init__(map_file=map_file, cache_dir=cache_dir)
        subprocess.run([sys.executable, "-c", ""], check=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (MapWorld, "; it read {file}, which files_of does not name: with another content there, a run would go on"),
        (MapWorldWithFiles, ""),
        (Launching, r"a run would go on; it started {python}, .* cannot be seen; it asked 127\.0\.0\.1:\d+,.*"),
    ],
)
def test_the_doctor_says_what_a_world_reads_and_does_not_name(
    kind: type[CombinationLock], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("map", "cache/made"):
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text("a", encoding="utf-8")
    # Temporary files are nobody's data, and a test has no others.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "mapped", kind)
    monkeypatch.setattr(registry, "names", lambda: ("mapped",))
    options = {"map_file": str(tmp_path / "map"), "cache_dir": str(tmp_path / "cache")}
    (diagnosis,) = environments.diagnose("mapped", options)
    assert diagnosis["status"] == "ok"
    expected = said.format(file=tmp_path / "map", python=Path(sys.executable).name)
    assert re.fullmatch(rf"keeps the contract.*{expected}", diagnosis["detail"])
    assert ("files_of" in diagnosis["detail"]) == bool(said)


@pytest.mark.parametrize(
    ("options", "workspace", "expected"),
    [
        ({}, "mine", "mine/cache/rooms"),
        ({}, "", "elsewhere/cache/rooms"),
        ({"cache_dir": "here"}, "mine", "here"),
        ({"own_dir": "there"}, "mine", "mine/cache/rooms"),
    ],
)
def test_what_a_world_keeps_is_kept_in_the_workspace(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], workspace: str, expected: str
) -> None:
    class Keeping(CombinationLock):
        def __init__(self, *, cache_dir: str = "runs/cache/rooms", own_dir: str = "") -> None:
            super().__init__()
            self.cache_dir, self.own_dir = cache_dir, own_dir

    monkeypatch.setitem(registry._FACTORY_BY_NAME, "keeping", Keeping)
    monkeypatch.setenv("AGENTR_WORKSPACE", "elsewhere")
    env: Any = named_environment("keeping", options, workspace=workspace)
    assert (env.cache_dir, env.own_dir) == (expected, options.get("own_dir", ""))
