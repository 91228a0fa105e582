"""Files of others: every layout, each bad record named by its line, all of a file or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.errors import DataFileError
from agentr_core.exchange.imports import Target, import_chat, import_experts, import_pairs, read_demonstrations
from agentr_core.samples.chat_file import World, read_chat
from flows.cli import cli


def make_turns(*texts: str, first: str = "human") -> list[dict[str, Any]]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return [{"from": roles[at % 2], "value": text} for at, text in enumerate(texts)]


def pair(**changes: Any) -> dict[str, Any]:
    sides = {"chosen": make_turns("right", "At 1.", "right", first="gpt"), "rejected": make_turns("stop", first="gpt")}
    return {"id": 1, "prompt": make_turns("Go.", "Ok.", "The goal."), **sides} | changes


PLACE = Target(world=World("line"), split="train")
TEXTS = ("Walk.", "Ok.", "The goal is 2 away.", "right", "You are at 1.", "right", "You are at 2.")
AGENTTRAJ = {
    "item_id": "line_4",
    "conversations": [
        {"from": ("human", "gpt")[n % 2], "loss": None if n % 2 == 0 else n > 1, "value": text}
        for n, text in enumerate(TEXTS)
    ],
}
ATIF = {
    "schema_version": "ATIF-v1.5",
    "session_id": "s",
    "agent": {"name": "other", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "Walk."},
        {"step_id": 2, "source": "agent", "message": "Ok."},
        {"step_id": 3, "source": "user", "message": [{"type": "text", "text": "The goal is 2 away."}]},
        {
            "step_id": 4,
            "source": "agent",
            "message": "right",
            "observation": {"results": [{"content": "You are at 1."}]},
        },
        {"step_id": 5, "source": "agent", "message": "right"},
    ],
    "extra": {"instance_id": "line/train/4"},
}
ETO = {"id": 4, "reward": 1.0, "conversations": make_turns(*TEXTS)}


def write(folder: Path, text: str, name: str = "data.json") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("record", [AGENTTRAJ, ATIF, ETO], ids=["agenttraj", "atif", "eto"])
@pytest.mark.parametrize("form", ["lines", "array", "pretty array", "byte order mark"])
def test_every_layout_gives_the_same_demonstration(tmp_path: Path, record: dict[str, Any], form: str) -> None:
    text = {
        "lines": f"{json.dumps(record)}\n",
        "array": json.dumps([record]),
        "pretty array": json.dumps([record], indent=2),
        "byte order mark": f"\ufeff{json.dumps(record)}\n",
    }[form]
    file = write(tmp_path, text)
    ((demo,),) = read_demonstrations(file, world=World("line"), split="train", opening=2).values()
    assert (demo.instance.key, demo.replies, demo.reward) == ("line/train/4", ("right", "right"), 1.0)
    (line,) = map(json.loads, import_experts(file, PLACE, opening=2).lines)
    assert [turn["content"] for turn in line["messages"]][:6] == list(TEXTS[:6])
    copy = write(tmp_path, json.dumps(line), "again.jsonl")
    assert import_experts(copy, PLACE, opening=2).lines == (json.dumps(line),)


def test_one_trajectory_over_many_lines(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps(ATIF, indent=2))
    assert len(import_experts(file, PLACE, opening=2).lines) == 1


def test_an_instance_may_have_several_demonstrations(tmp_path: Path) -> None:
    shorter = ETO | {"conversations": make_turns(*TEXTS[:4])}
    result = import_experts(write(tmp_path, json.dumps([ETO, shorter, ETO])), PLACE, opening=2)
    assert len(result.lines) == 2
    (fault,) = result.faults
    assert "data.json:1 is the same demonstration of line/train/4 as " in fault


def test_each_bad_record_is_named_by_its_line(tmp_path: Path) -> None:
    bad = ["[1]", "{", json.dumps({"id": 1}), json.dumps(ETO | {"id": "door/train/1"}), json.dumps(ETO | {"reward": 2})]
    calls = {"step_id": 1, "source": "agent", "message": "", "tool_calls": [{"function_name": "f"}]}
    bad += [json.dumps(ATIF | {"steps": [calls]}), json.dumps(ATIF | {"schema_version": "ATIF-v2.0"})]
    flags = [True] * len(TEXTS)
    bad += [json.dumps(ETO | {"train": [*flags[:3], False, *flags[4:]]}), json.dumps(ETO | {"train": flags[1:]})]
    file = write(tmp_path, "\n".join([json.dumps(ETO), *bad]))
    result = import_experts(file, PLACE, opening=2)
    assert len(result.lines) == 1
    faults = [fault.removeprefix(str(tmp_path)) for fault in result.faults]
    assert [text.split(":")[1][:1] for text in faults] == [*"2345678", "9", "1"]
    for text, part in zip(
        faults,
        (
            "is a list",
            "is not JSON",
            "has no list of turns",
            "is of environment door",
            "reward is 2",
            "step 1: each of tool_calls must have",
            "schema_version is 'ATIF-v2.0'",
            "some replies are not to be trained",
            f"train has {len(TEXTS) - 1} flags for {len(TEXTS)} turns",
        ),
        strict=True,
    ):
        assert part in text


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("[\n{},\n{oops}]", 3, "is not JSON"),
        ("[\n{}\n{}]", 2, "is not JSON after its object"),
        ("[{}", 1, "is not JSON after its object"),
        ("[\n\n7]", 3, "is a int; write one JSON object"),
    ],
)
def test_a_broken_array_is_named_by_its_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    *_, last = import_chat(write(tmp_path, text)).faults
    assert f"data.json:{line} {part}" in last


LONG = "9" * 5000


@pytest.mark.parametrize("form", ["lines", "array", "one object"])
def test_a_number_of_thousands_of_digits_is_one_bad_record(tmp_path: Path, form: str) -> None:
    good = json.dumps({"messages": make_turns("Hi", "Ho")})
    bad = f'{{"id": {LONG},\n"messages": []}}'
    text = {"lines": f"{good}\n{bad.replace(chr(10), '')}\n{good}", "array": f"[{good},\n{bad},\n{good}]"}.get(
        form, bad
    )
    result = import_chat(write(tmp_path, text))
    assert len(result.lines) == (0 if form == "one object" else 2)
    (fault,) = result.faults
    assert f"data.json:{1 if form == 'one object' else 2} has a number of 5,000 digits, and 1,000 are the most" in fault
    with pytest.raises(DataFileError, match="has a number of 5,000 digits"):
        read_chat(write(tmp_path, text))


def test_a_key_that_is_there_twice_is_one_bad_record(tmp_path: Path) -> None:
    turns = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0, "weight": 1}]'
    good = json.dumps({"messages": make_turns("Hi", "Ho")})
    result = import_chat(write(tmp_path, f'{good}\n{{"messages": {turns}}}\n{{"x"\n{good}'))
    assert len(result.lines) == 2
    assert "data.json:2 has the key 'weight' twice; correct the record" in result.faults[0]
    assert "data.json:3 is not JSON" in result.faults[1]


def test_an_empty_array_has_no_records(tmp_path: Path) -> None:
    assert import_chat(write(tmp_path, " [ ]\n")) == import_chat(write(tmp_path, ""))


def test_pairs_of_an_array_and_what_is_of_no_use(tmp_path: Path) -> None:
    same = pair(rejected=pair()["chosen"])
    result = import_pairs(write(tmp_path, json.dumps([pair(), same], indent=1)), PLACE)
    assert len(result.lines) == 1
    assert "is of no use: same sides" in result.faults[0]


def test_general_chat_keeps_the_turns_that_are_not_trained(tmp_path: Path) -> None:
    record = {
        "conversations": [turn | ({"train": False} if n == 1 else {}) for n, turn in enumerate(make_turns(*TEXTS[:4]))]
    }
    none = {"conversations": [turn | {"loss": False} for turn in make_turns("Hi", "Ho")]}
    file = write(tmp_path, json.dumps([record, none]))
    result = import_chat(file)
    assert [turn.get("train") for turn in json.loads(result.lines[0])["messages"]] == [None, False, None, None]
    beside = {"messages": make_turns(*TEXTS[:4]), "train": [False, False, False, True]}
    assert import_chat(write(tmp_path, json.dumps(beside))).lines == result.lines
    assert "no assistant turn" in result.faults[0]
    (sample,), _ = read_chat(write(tmp_path, result.lines[0], "general.jsonl"))
    assert [message.train for message in sample.messages] == [False, False, False, True]


def run_import(*words: object) -> Result:
    return CliRunner().invoke(cli, ["import", *map(str, words)])


def test_the_command_writes_all_or_nothing(tmp_path: Path) -> None:
    play = ["Instruction", "Ok.", "Goal", "Action: get 1 oak log"]
    instance = TextCraft().instances("train")[0]
    good = {"item_id": f"textcraft_{instance.index}", "conversations": make_turns(*play)}
    file = write(tmp_path, "\n".join(map(json.dumps, (good, {"item_id": "textcraft_999999999"}, good | {"reward": 9}))))
    target = tmp_path / "out.jsonl"
    words = (file, target, "--as", "expert", "--environment", "textcraft")

    failure = run_import(*words)
    assert "2 of 3 records of " in str(failure.exception)
    assert [line.split(":")[1][:1] for line in failure.stderr.splitlines()] == ["2", "3"]
    assert not target.exists()

    result = run_import(*words, "--skip-bad")
    assert result.exit_code == 0
    assert "1 record in " in result.output
    assert "2 left out; a recipe takes them as eto.expert.file" in result.output
    assert "eto.expert.opening" not in result.output, "the usual number of turns"
    assert json.loads(target.read_text("utf-8"))["id"] == instance.key
    assert "is there already" in str(run_import(*words).exception)
    assert "name it with --environment" in str(run_import(file, tmp_path / "x", "--as", "pairs").exception)


def test_at_most_twenty_unsound_records_are_told_one_by_one_and_the_others_counted(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "x" * 10_000, "content": "a"}]}] * 23
    result = run_import(write(tmp_path, "\n".join(map(json.dumps, records))), tmp_path / "o", "--as", "general")
    *lines, rest = result.stderr.splitlines()
    assert (len(lines), rest) == (20, "and 3 more records are not sound")
    assert max(map(len, lines)) < 1000
    assert "23 of 23 records of " in str(result.exception)


def test_an_import_with_another_opening_says_what_the_recipe_must_set(tmp_path: Path) -> None:
    instance = TextCraft().instances("train")[0]
    record = {"id": instance.index, "conversations": [{"from": "human", "value": "Goal"}, *make_turns("a", "b")[1:]]}
    words = ("--as", "expert", "--environment", "textcraft", "--opening", 0)
    result = run_import(write(tmp_path, json.dumps(record)), tmp_path / "o", *words)
    assert result.output.endswith("; a recipe takes them as eto.expert.file, with eto.expert.opening: 0\n")


def test_an_instance_of_another_split_is_no_unknown_one(tmp_path: Path) -> None:
    record = {"item_id": "textcraft/renamed/7", "conversations": make_turns("a", "b", "c", "d")}
    words = ("--as", "expert", "--environment", "textcraft")
    result = run_import(write(tmp_path, json.dumps(record)), tmp_path / "o", *words)
    assert "textcraft/renamed/7 is of split renamed, and records of split train are read" in result.stderr


def test_an_instance_that_is_not_there_is_named(tmp_path: Path) -> None:
    record = {"item_id": "textcraft_999999", "conversations": make_turns("a", "b", "c", "d")}
    result = run_import(
        write(tmp_path, json.dumps(record)), tmp_path / "o", "--as", "expert", "--environment", "textcraft"
    )
    assert "there is no instance textcraft/train/999999" in result.stderr
