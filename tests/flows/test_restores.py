"""Kills, prunes and restored backups, in any order and over all methods: at the end there are the
rows and weights of an undisturbed run, or a sentence says why not and what to do.

`make test-kills` does 40 rounds and prints each, and ends 50 commands in their midst;
AGENTR_TEST_KILLS scales these numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from wheel import PATIENCE, RECIPE, kill_group, remove_locks, sentence, started

from agentr_core.errors import StoreError
from agentr_core.store.database import Store
from agentr_core.store.tables import TABLES
from flows.cli import cli
from flows.commands.exporting import export_folder
from flows.commands.stores import back_up, faults, pruned
from flows.flywheel import flywheel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
ROUNDS = 2 * int(os.environ.get("AGENTR_TEST_KILLS", "2"))
KILLS_OF_COMMANDS = ROUNDS * 5 // 4
FIRST = int(os.environ.get("AGENTR_TEST_FIRST", "0"))
"""The number of the first round: a round depends on its number alone."""
SEED = 51
REFUSALS = 3
"""So many refusals in a row may follow each other while one does what they say."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "agent-r": {},
    "eto": {
        "eto": {
            "phases": ["dpo"],
            "explore": {"samples": 4, "max_steps": 4, "max_new_tokens": 6},
            "preferences": {"against": "own"},
            "dpo": {"learning_rate": [1.0e-3], "num_train_epochs": [2], "per_device_train_batch_size": 2},
        },
        "training": {"bf16": False, "num_threads": 1},
    },
    "et-agent": {
        "et_agent": {
            "phases": ["rft"],
            "flywheel": {
                "fresh": 2,
                "rounds": 1,
                "policy": "expand-all",
                "correct": ["C0", "C1"],
                "most_members": 8,
                "max_steps": 3,
                "max_new_tokens": 6,
                "reflector": {"max_new_tokens": 8},
                "editor": {"max_new_tokens": 8},
            },
        },
    },
    "grpo": {
        "grpo": {
            "steps": 6,
            "groups": 3,
            "num_generations": 4,
            "resample": 1,
            "max_steps": 3,
            "max_new_tokens": 6,
            "minibatches": 2,
            "save_steps": 1,
        },
        "training": {"learning_rate": 1.0e-3, "bf16": False, "num_threads": 1},
    },
}
"""What each method says beside the common recipe."""
OF_AGENT_R = ("search", "critique", "pairs", "splice")
CHAT = [{"role": "user", "content": "What does the sign say?"}, {"role": "assistant", "content": "Closed."}]
TIMES = ("created_at", "finished_at", "environment_seconds", "sampling_seconds", "logprobs", "config")
ANEW = ("run", "event", "timing", "metric", "training_step", "rl_step", "tree", "text", "answered_call", "instance")
"""Tables with times, with facts of a machine, or with more rows where there was a kill."""


@dataclass(frozen=True)
class Site:
    """A recipe whose runs take place in one folder, with variables of processes."""

    recipe: Path
    root: Path
    env: Mapping[str, str]

    @property
    def store(self) -> Store:
        return Store(self.root / "store.duckdb")


@dataclass(frozen=True)
class Calm:
    """The rows of an undisturbed run by table, and how many there are in all."""

    rows: Mapping[str, list[tuple[Any, ...]]]
    count: int


@pytest.fixture(scope="module")
def sites(
    door_model: Path, served_env: dict[str, str], door_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Site]:
    """Where the runs of each method take place."""
    by_method = {}
    for method, more in METHODS.items():
        folder = tmp_path_factory.mktemp(method)
        recipe = yaml.safe_load(RECIPE.format(name=method, workspace=folder / "runs", model=door_model))
        recipe = {name: value for name, value in recipe.items() if method == "agent-r" or name not in OF_AGENT_R}
        recipe["model"] |= {"dtype": "float32", "workers": 1}
        recipe["environment"]["options"] = {"pause": 0.01}
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe | {"method": method, **more}), encoding="utf-8")
        by_method[method] = Site(file, folder / "runs", served_env)
    return by_method


@pytest.fixture(scope="module")
def calm(sites: dict[str, Site]) -> Callable[[str], Calm]:
    """Return what an undisturbed run of a method leaves; it is made when it is first asked for."""
    cache: dict[str, Calm] = {}

    def of(method: str) -> Calm:
        if method not in cache:
            site = sites[method]
            finish(site)
            cache[method] = Calm(rows_of(site.store), progress(site.store))
            shutil.rmtree(site.root)
        return cache[method]

    return of


@pytest.fixture(autouse=True)
def _emptied(sites: dict[str, Site]) -> Iterator[None]:
    yield
    for site in sites.values():
        shutil.rmtree(site.root, ignore_errors=True)


def finish(site: Site) -> None:
    """Take the run to its end, in this process."""
    done = asyncio.run(flywheel(str(site.recipe)))
    assert Path(done["report"]).is_file()


def rows_of(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of a store by table, without times."""
    rows_by_table = {}
    with store.reading() as con:
        for table in sorted({*TABLES} - {*ANEW}):
            columns = [name for name, *_ in con.execute(f"describe {table}").fetchall() if name not in TIMES]
            rows_by_table[table] = con.execute(f"select {', '.join(columns)} from {table} order by all").fetchall()
    return rows_by_table


def progress(store: Store) -> int:
    """Return the number of all rows."""
    return store.count(f"select {' + '.join(f'(select count(*) from {name})' for name in TABLES)}")


@pytest.mark.parametrize("number", range(FIRST, FIRST + ROUNDS))
def test_killed_pruned_and_restored_it_ends_as_if_nothing_had_been(
    number: int, sites: dict[str, Site], calm: Callable[[str], Calm], tmp_path: Path
) -> None:
    method, rng = [*METHODS][number % len(METHODS)], random.Random(f"{SEED} {number}")
    site, expected = sites[method], calm(method)
    began, refusals, history = time.monotonic(), Counter[str](), []
    backups: list[Path] = []
    for _ in range(rng.randint(2, 3)):
        history.append(run_and_kill(site, expected, rng, refusals))
        if site.store.path.exists():
            history.append(meddle(site, rng, backups, tmp_path))
    for _ in range(REFUSALS + 1):
        try:
            finish(site)
        except StoreError as refusal:
            obey(site, str(refusal), refusals)
        else:
            break
    tables = rows_of(site.store)
    for table, rows in expected.rows.items():
        assert tables[table] == rows, (method, history, table)
    assert faults(site.root) == []
    tell(
        f"round {number}, {method}: {', '.join(history)}; {sum(refusals.values())} refusals; equal rows and weights, "
        f"{time.monotonic() - began:.0f} s"
    )


def test_commands_that_are_ended_at_any_moment_leave_every_row_and_whole_files(
    sites: dict[str, Site], tmp_path: Path
) -> None:
    site = sites["agent-r"]
    finish(site)
    store, rng, endings = site.store, random.Random(SEED), Counter[str]()
    other_file, before = tmp_path / "other.duckdb", everything(store)
    store.backup(other_file)
    ((run,),) = store.rows("select run_id from run")
    chat = tmp_path / "chat.jsonl"
    chat.write_text(2000 * (json.dumps({"messages": CHAT}) + "\n"), encoding="utf-8")
    expected = export_run(site, run, tmp_path / "wanted"), import_chat(chat, tmp_path / "wanted.jsonl")
    durations: dict[str, float] = {}
    for number in range(KILLS_OF_COMMANDS):
        file, folder, target = (tmp_path / f"{number}{ending}" for ending in (".duckdb", "", ".jsonl"))
        commands: dict[str, tuple[Any, ...]] = {
            "backup": ("store", "backup", file),
            "compact": ("store", "compact"),
            "merge": ("store", "merge", other_file),
            "check": ("store", "check"),
            "sizes": ("store", "sizes"),
            "export": ("export", run, folder, "--format", "trl"),
            "import": ("import", chat, target, "--as", "general"),
        }
        name, words = rng.choice([*commands.items()])
        options = () if name == "import" else ("--workspace", site.root)
        if name not in durations:
            began = time.monotonic()
            with started(
                *(f"{word}-calm" if word in (file, folder, target) else word for word in words), *options, env=site.env
            ) as process:
                assert process.wait(PATIENCE) == 0
            durations[name] = time.monotonic() - began
        number_of_signal = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        with started(*words, *options, env=site.env) as process:
            time.sleep(rng.uniform(0.1, 1) * durations[name])
            over = process.poll() is not None
            process.send_signal(number_of_signal)
            _, err = process.communicate(timeout=PATIENCE)
        assert "Traceback" not in err, err
        if rng.random() < 0.3:
            remove_locks(store)
        assert everything(store) == before, (number, name)
        assert not file.exists() or everything(Store(file)) == before
        assert not folder.exists() or files_of(folder) == expected[0]
        assert not target.exists() or target.read_bytes() == expected[1]
        endings["after its end" if over else number_of_signal.name] += 1
    assert faults(site.root) == []
    tell(f"{KILLS_OF_COMMANDS} commands ended: {dict(endings)}; every row is there, and no file in part")


def export_run(site: Site, run: str, folder: Path) -> dict[str, bytes]:
    export_folder(site.root, run, folder, "trl")
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def import_chat(chat: Path, target: Path) -> bytes:
    done = CliRunner().invoke(cli, ["import", str(chat), str(target), "--as", "general"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return target.read_bytes()


def everything(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    with store.reading() as con:
        return {table: con.execute(f"select * from {table} order by all").fetchall() for table in sorted(TABLES)}


def run_and_kill(site: Site, wanted: Calm, rng: random.Random, refused: Counter[str]) -> str:
    """Run the recipe as a process and kill it at a random moment, if it does not end before."""
    share, pause = rng.random() * 1.1, rng.uniform(0, 1.5)
    with started("run", site.recipe, env=site.env) as process:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            if site.store.path.exists() and progress(site.store) >= share * wanted.count:
                break
            time.sleep(0.2)
        time.sleep(pause)
        over = process.poll()
        if over is None:
            kill_group(process)
            return f"killed at {share:.0%}"
        _, err = process.communicate()
    if over == 0:
        return "ended"
    assert over == 2, err
    obey(site, sentence(err.splitlines()[-1]), refused)
    return "refused"


def meddle(site: Site, rng: random.Random, backups: list[Path], folder: Path) -> str:
    """Make a backup, put one back, take the run out of the store, or do nothing."""
    action = rng.choice(["backup", "prune", "restore", "prune", "restore", "nothing"])
    if action == "backup" or (action == "restore" and not backups):
        file = folder / f"backup-{len(backups)}.duckdb"
        back_up(site.root, str(file))
        backups.append(file)
        return "backup"
    if action == "restore":
        put_back(rng.choice(backups), site.store)
    elif action == "prune":
        take_out(site)
    return action


def put_back(backup: Path, store: Store) -> None:
    """Put a copy of a backup in the place of a store."""
    store.path.with_name(f"{store.path.name}.wal").unlink(missing_ok=True)
    shutil.copyfile(backup, store.path)


def take_out(site: Site) -> None:
    """Prune all runs of a store."""
    for (run_id,) in site.store.rows("select run_id from run"):
        pruned(site.root, [run_id], dry_run=False)


def obey(site: Site, refusal: str, refused: Counter[str]) -> None:
    """Do what a refusal says, if it is one of those that are about weights; fail if not."""
    refused[refusal] += 1
    assert sum(refused.values()) <= REFUSALS, refused
    (folder,) = re.findall(r"(\S+/checkpoints/\w+)", refusal)
    if "agentr store prune" in refusal:
        take_out(site)
    assert "move that folder away" in refusal, refusal
    shutil.move(folder, site.root.parent / f"away-{random.randrange(10**9)}")


def tell(line: str) -> None:
    """Say a line of the long series, for its log."""
    sys.stderr.write(f"{line}\n")
