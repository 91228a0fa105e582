"""Files of demonstrations and of ready pairs: both layouts, what is of no use, and lines that are
wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentr_core.errors import DataFileError
from agentr_core.exchange.imports import read_demonstrations, read_pairs
from agentr_core.exchange.training_set import pair_lines
from agentr_core.samples.chat_file import World
from agentr_core.types import Instance

Record = dict[str, Any]


def write(folder: Path, *records: Record | str) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), "utf-8")
    return path


def make_turns(*texts: str, first: str = "human") -> list[Record]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return [{"from": roles[at % 2], "value": text} for at, text in enumerate(texts)]


def openai(*texts: str) -> list[Record]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def demonstrations(path: Path, opening: int = 2) -> Any:
    return read_demonstrations(path, world=World("line"), split="train", opening=opening)


def pairs(path: Path) -> Any:
    return read_pairs(path, world=World("line"), split="train")


def pair(**changes: Any) -> Record:
    sides = {"chosen": make_turns("right", "At 1.", "right", first="gpt"), "rejected": make_turns("stop", first="gpt")}
    return {"id": 1, "prompt": make_turns("Go.", "Ok.", "The goal."), **sides} | changes


def test_demonstrations_are_the_replies_after_the_opening(tmp_path: Path) -> None:
    texts = ("Walk.", "Ok.", "The goal is 2 away.", "right", "You are at 1.", "right", "You are at 2.")
    file = write(
        tmp_path,
        {"id": 0, "conversations": make_turns(*texts)},
        {"id": "line/other/3", "messages": [{"role": "system", "content": "S"}, *openai(*texts)], "reward": 0.75},
    )
    demos = demonstrations(file)

    assert list(demos) == ["line/train/0", "line/other/3"]
    (first,), (second,) = demos.values()
    assert first.instance == Instance(environment="line", split="train", index=0)
    assert first.replies == second.replies == ("right", "right")
    assert (first.reward, second.reward) == (1.0, 0.75)
    assert second.where.endswith("data.jsonl:2")


@pytest.mark.parametrize("given", [3, "3", "gymnasium/train/3", "gymnasium-ns/Rooms-v0/train/3"])
def test_a_world_of_gymnasium_has_files_under_either_name(tmp_path: Path, given: Any) -> None:
    """Its instances are named by the id of the world, which may have a slash; the recipe says
    `gymnasium`.
    """
    world = World("gymnasium-ns/Rooms-v0", "gymnasium")
    path = write(tmp_path, {"id": given, "conversations": make_turns("a", "b", "c", "d")})
    ((demo,),) = read_demonstrations(path, world=world, split="train", opening=2).values()
    assert demo.instance == Instance(environment="gymnasium-ns/Rooms-v0", split="train", index=3)
    (preference,), _ = read_pairs(write(tmp_path, pair(id=given)), world=world, split="train")
    assert preference.chosen.instance == demo.instance


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_half_a_surrogate_pair_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataFileError, match=r"data\.jsonl:1, turn 3: value has half a surrogate pair"):
        demonstrations(write(tmp_path, {"id": 1, "conversations": make_turns("a", "b", "c", text)}))


def test_an_index_that_no_table_holds_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="give the index of an instance"):
        demonstrations(write(tmp_path, {"id": 10**30, "conversations": make_turns("a", "b", "c", "d")}))


def test_an_opening_of_no_turns(tmp_path: Path) -> None:
    file = write(tmp_path, {"id": "0", "conversations": make_turns("The goal.", "right")})
    assert demonstrations(file, opening=0)["line/train/0"][0].replies == ("right",)


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"conversations": make_turns("a", "b", "c", "d")}, "id is None; give the index of an instance of split train"),
        ({"id": "x", "conversations": make_turns("a", "b", "c", "d")}, "id is 'x'"),
        ({"id": True, "conversations": make_turns("a", "b", "c", "d")}, "id is True"),
        ({"id": "door/train/1", "conversations": make_turns("a", "b", "c", "d")}, "is of environment door"),
        ({"id": 1, "conversations": make_turns("a", "b")}, "set eto.expert.opening"),
        ({"id": 1, "conversations": make_turns("a", "b", "c")}, "set eto.expert.opening"),
        ({"id": 1, "conversations": make_turns("a", "b", "c", "d"), "reward": 7}, "reward is 7; it must be a number"),
        ({"id": 1, "text": "a"}, "has no list of turns"),
        (
            {"id": 0, "conversations": make_turns("a", "b", "c", "d")},
            "is the same demonstration of line/train/0 as .*:1; ",
        ),
    ],
)
def test_a_wrong_demonstration_is_named(tmp_path: Path, record: Record, fault: str) -> None:
    good = {"id": 0, "conversations": make_turns("a", "b", "c", "d")}
    with pytest.raises(DataFileError, match=rf"data\.jsonl:2.*{fault}"):
        demonstrations(write(tmp_path, good, record))


def test_ready_pairs_carry_loss_on_the_replies_of_the_sides_alone(tmp_path: Path) -> None:
    (preference,), rejected = pairs(write(tmp_path, pair(chosen_reward=1, rejected_reward=0.5)))

    assert rejected == ()
    assert [(m.role, m.train) for m in preference.chosen.messages] == [
        ("user", False),
        ("assistant", False),
        ("user", False),
        ("assistant", True),
        ("user", False),
        ("assistant", True),
    ]
    assert preference.chosen.messages[:3] == preference.rejected.messages[:3]
    assert preference.margin == 0.5
    assert preference.chosen.instance == Instance(environment="line", split="train", index=1)


def test_pairs_of_no_use_are_rejected_by_their_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        pair(),
        pair(rejected=make_turns("stop", "You stopped.", first="gpt")),
        pair(rejected=pair()["chosen"]),
        pair(chosen_reward=1.0),
        pair(chosen_reward=0.5, rejected_reward=0.5),
    )
    preferences, rejected = pairs(file)

    assert len(preferences) == 1
    assert preferences[0].margin is None
    assert [(r.subject, r.reason) for r in rejected] == [
        ("data.jsonl:2", "no-agent-turn-at-the-end"),
        ("data.jsonl:3", "same-sides"),
        ("data.jsonl:4", "missing-reward"),
        ("data.jsonl:5", "chosen-is-not-better"),
    ]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ("[1]", "is a list; write one JSON object"),
        ("{", "is not JSON"),
        ({"id": 1, "prompt": make_turns("Go.")}, "lacks chosen and rejected"),
        (pair(id=None), "id is None"),
        (pair(prompt=[]), "the prompt must end with a turn of the user"),
        (pair(prompt=make_turns("Go.", "Ok.")), "the prompt must end with a turn of the user"),
        (pair(chosen="right"), "chosen: there must be a list of turns, not str"),
        (pair(rejected=make_turns("Go.")), "rejected must begin with a turn of the assistant"),
        (pair(rejected=[{"from": "tool", "value": "x"}]), "rejected, turn 0: from is 'tool' and must be one of"),
        (pair(chosen=[{"from": "gpt"}]), "chosen, turn 0: a turn must be an object"),
        (pair(rejected_reward="high"), "rejected_reward is 'high'"),
    ],
)
def test_a_wrong_pair_is_named(tmp_path: Path, record: Record | str, fault: str) -> None:
    with pytest.raises(DataFileError, match=rf"data\.jsonl:2.*{fault}"):
        pairs(write(tmp_path, pair(), record))


@pytest.mark.parametrize("form", ["trl", "sharegpt"])
def test_exported_pairs_are_read_back(tmp_path: Path, form: str) -> None:
    (preference,), _ = pairs(write(tmp_path, pair(chosen_reward=1, rejected_reward=0.5)))
    (copy,), rejected = pairs(write(tmp_path, *pair_lines([preference], form)))

    assert rejected == ()
    assert copy.chosen.messages == preference.chosen.messages
    assert copy.rejected.messages == preference.rejected.messages
    assert (copy.margin, copy.chosen.instance) == (preference.margin, preference.chosen.instance)
