"""Agent-R in one file: it is short, it leans on the world alone, and it turns."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from readme import MANUAL, ROOT

from agentr_core.environments.crafting.textcraft import TextCraft

FILE = MANUAL.parent / "wheel.py"
TEXT = FILE.read_text(encoding="utf-8")
PAGE = (MANUAL / "wheel.md").read_text(encoding="utf-8")
LINES = 300
WORLD = "agentr_core.environments.crafting.textcraft"


def imports() -> dict[str, set[str]]:
    """Return the names that the file imports, by module."""
    modules: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(TEXT)):
        if isinstance(node, ast.Import):
            modules |= {alias.name: set() for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules[node.module or "."] = {alias.name for alias in node.names}
    return modules


def start(*words: str, begin: Sequence[str] = (str(FILE),)) -> subprocess.Popen[str]:
    command = [sys.executable, *begin, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= LINES


def test_it_imports_the_world_and_nothing_else_of_agentr() -> None:
    assert imports()[WORLD] == {"TextCraft"}
    modules = {module.partition(".")[0] for module in imports() if module != WORLD}
    assert modules <= sys.stdlib_module_names | {"torch", "transformers"}


def test_the_page_and_the_file_tell_the_same_gains() -> None:
    gains = re.findall(r"[+-]\d+\.\d \([+-]\d+\.\d to [+-]\d+\.\d\)", ast.get_docstring(ast.parse(TEXT)) or "")
    assert gains
    assert all(gain in PAGE for gain in gains)


def test_the_page_names_what_is_there() -> None:
    rows = re.findall(r"^\| (.*`.*) \| (.*`.*) \|$", PAGE, re.M)
    assert len(rows) >= 5
    names = {node.name for node in ast.walk(ast.parse(TEXT)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for code_cell, path_cell in rows:
        assert {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", code_cell)} <= names
        assert all((ROOT / path).is_file() for path in re.findall(r"`([\w/]+\.py)`", path_cell))


@pytest.fixture(scope="module")
def wheel() -> ModuleType:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The paths part after two steps. The error may be the first of them: then the good path goes on at
# the second.
@pytest.mark.slow
@pytest.mark.parametrize(("error", "goes_on"), [(1, 2), (2, 3), (4, 3)])
def test_a_splice_goes_on_where_the_good_path_leaves_what_is_kept(wheel: ModuleType, error: int, goes_on: int) -> None:
    world = TextCraft()
    instance = next(each for each in world.instances("test") if len(world.expert(each) or ()) == 4)
    replies = list(world.expert(instance) or ())
    good = [wheel.Node(world, world.reset(instance))]
    for reply in replies:
        good.append(good[-1].step(reply))
    bad = good[:3]
    for number in range(3):
        bad.append(bad[-1].step(f"Thought: {number}\nAction: inventory"))
    chat, first_turn = wheel.splice(good, bad, error, random.Random(0))
    assert first_turn == error + 1
    texts = [turn["content"] for turn in chat[3::2]]
    assert texts[:error] == [node.reply for node in bad[1 : error + 1]]
    assert texts[error].endswith("Action: wait")
    assert texts[error + 1 :] == replies[goes_on - 1 :]


@pytest.mark.slow
def test_loss_is_on_replies_from_the_reflection_on_and_on_their_ends(wheel: ModuleType) -> None:
    policy = wheel.Policy()
    texts = ["goal", "Ok.", "start", "Thought: 1", "seen", "Thought: 2", "seen", "Thought: 3"]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    ids, labels = wheel.encode(policy, (chat, 2))
    assert policy.tokenizer.decode(ids[labels >= 0]) == "Thought: 2<|end|>Thought: 3<|end|>"
    assert (labels[labels >= 0] == ids[labels >= 0]).all()


@pytest.mark.slow
def test_it_turns_and_repeats_itself_to_the_letter(tmp_path: Path) -> None:
    process = start("--instances", "2", "--test", "2", "--seed", "0", "0", "--out", str(tmp_path))
    out, err = process.communicate()
    assert process.returncode == 0, err
    lines = [line.split("  ", 1)[1] for line in out.splitlines()]
    assert all(len(line) <= 80 for line in out.splitlines())
    half = (len(lines) - 2) // 2
    assert lines[1 : 1 + half] == lines[1 + half : 1 + 2 * half]
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in (tmp_path / "seed-0").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--test", "1"], ["--instances", "0"], ["--seed", "x"]])
def test_wrong_arguments_end_in_one_sentence(
    wheel: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["wheel.py", *words])
    with pytest.raises(SystemExit) as exc_info:
        wheel.main()
    assert exc_info.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(r"wheel\.py: .+\n", err)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_ends_in_one_sentence() -> None:
    process = start("--out", "/dev/null/x")
    out, err = process.communicate()
    assert process.returncode == 1
    assert not out
    assert re.fullmatch(r"wheel\.py: .+\n", err)


@pytest.mark.slow
def test_an_interruption_ends_in_one_sentence() -> None:
    # Where tests run in the background, what they start would not hear of Ctrl-C.
    listening = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = f"runpy.run_path({str(FILE)!r}, run_name='__main__')"
    process = start("--instances", "50", "--test", "2", begin=("-c", f"{listening}; {run}"))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, wrong = process.communicate()
    assert wrong == "wheel.py: interrupted\n"
    assert process.returncode
