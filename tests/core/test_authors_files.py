"""Files that the programs of Agent-R and ETO wrote, in miniature: each is read as what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentr_core.exchange.imports import ImportResult, Target, import_chat, import_experts, import_pairs
from agentr_core.samples.chat_file import World

PLACE = Target(world=World("line"), split="train")
ROOT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Walk."},
    {"role": "assistant", "content": "Ok."},
    {"role": "user", "content": "The goal is 2 away."},
]


def node(reply: str, value: float, *children: dict[str, Any], visits: int = 1, ended: bool = True) -> dict[str, Any]:
    return {
        "visits": visits,
        "value": value,
        "prior": 1,
        "puct_value": value,
        "obs": f"After {reply}.",
        "llm_response": reply,
        "depth": 1,
        "is_terminal": ended,
        "recent_actions": [[reply, "seen"]],
        "action": reply,
        "env_score": 0,
        "disaster": False,
        "state": ROOT,
        "children": list(children),
    }


def tree(most: float = 1.0) -> dict[str, Any]:
    leaf = node("right", 2 * most, visits=2)
    branch = node("right", 2 * most, leaf, node("stop", 0.0), visits=3, ended=False)
    return node("ROOT", 2 * most, branch, node("look", 0.0, visits=0, ended=False), visits=3, ended=False)


def turns_of(*replies: tuple[str, bool]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [*ROOT]
    for reply, loss in replies:
        turns.append({"role": "assistant", "content": reply, "loss": loss})
        turns.append({"role": "user", "content": f"After {reply}."})
    return turns


REVISION: dict[str, Any] = {
    "task_num": "12",
    "revise_log": turns_of(("right", False), ("stop", False), ("I was wrong.\nAction: wait", True), ("right", True)),
    "high_log": turns_of(("right", True), ("right", True)),
    "low_log": turns_of(("right", True), ("stop", True)),
    "task_description": "The goal is 2 away.",
    "revise": True,
    "revise_feedback": [{"revision_feedback": "Judgement: Bad", "action": "stop", "obs": "", "judgement": "Bad"}],
}
LOG: dict[str, Any] = {
    "meta": {"steps": 2, "reward": 0.5, "success": False, "terminate_reason": "max_steps", "error": ""},
    "conversations": [
        {"from": ("human", "gpt")[at % 2], "value": text}
        for at, text in enumerate(("Walk.", "OK", "An example.", "left", "The goal is 2 away.", "right", "At 1."))
    ],
}


def write(folder: Path, record: dict[str, Any], name: str, **layout: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps(record, **layout), encoding="utf-8")
    return file


def only_record(found: ImportResult) -> dict[str, Any]:
    assert found.faults == ()
    (line,) = map(json.loads, found.lines)
    return dict(line)


def replies(turns: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [(turn["content"], turn.get("train", True)) for turn in turns if turn["role"] == "assistant"]


@pytest.mark.parametrize("most", [1.0, 100.0])
def test_a_tree_of_agent_r_is_its_best_path(tmp_path: Path, most: float) -> None:
    result = import_experts(write(tmp_path, tree(most), "search_results_12.json"), PLACE, opening=2)
    record = only_record(result)
    assert (record["id"], record["reward"]) == ("line/train/12", 1.0)
    assert replies(record["messages"]) == [("Ok.", False), ("right", True), ("right", True)]
    assert [turn["content"] for turn in record["messages"]][-3:] == ["After right.", "right", "After right."]
    assert {"nodes.prior", "nodes.recent_actions"} <= result.num_ignored_by_field.keys()
    assert not {"nodes.value", "nodes.task_num"} & result.num_ignored_by_field.keys()


def test_a_tree_of_agent_r_is_a_pair_of_its_best_and_its_worst_path(tmp_path: Path) -> None:
    record = only_record(import_pairs(write(tmp_path, tree(), "search_results_12.json", indent=1), PLACE))
    assert [turn["content"] for turn in record["prompt"]][-2:] == ["right", "After right."]
    assert [replies(record[side]) for side in ("chosen", "rejected")] == [[("right", True)], [("stop", True)]]
    assert (record["chosen_reward"], record["rejected_reward"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("record", "part"),
    [
        (node("ROOT", 0.0), "no path of the tree ended"),
        (node("ROOT", 1.0, node("right", 1.0), ended=False), "no two ended paths of the tree differ in value"),
        (node("ROOT", 1.0, node("a", 0.5), node("b", 0.5), ended=False), "no two ended paths of the tree differ"),
        (node("ROOT", 1.0, {"llm_response": "right"}, ended=False), "a node of the tree has no list of children"),
        (node("ROOT", 1.0, node("right", 1.0) | {"value": "1"}, ended=False), "has no numbers value and visits"),
    ],
)
def test_a_tree_without_what_is_asked_for_is_refused(tmp_path: Path, record: dict[str, Any], part: str) -> None:
    (sentence,) = import_pairs(write(tmp_path, record, "search_results_12.json"), PLACE).faults
    assert part in sentence


def test_a_revision_of_agent_r_trains_what_its_flags_say(tmp_path: Path) -> None:
    result = import_chat(write(tmp_path, REVISION, "textcraft_centric.jsonl"))
    assert replies(only_record(result)["messages"]) == [
        ("Ok.", False),
        ("right", False),
        ("stop", False),
        ("I was wrong.\nAction: wait", True),
        ("right", True),
    ]
    assert set(result.num_ignored_by_field) == {"high_log", "low_log", "task_description", "revise", "revise_feedback"}


def test_a_revision_of_agent_r_is_a_pair_of_its_two_paths(tmp_path: Path) -> None:
    record = only_record(import_pairs(write(tmp_path, REVISION, "textcraft_centric.jsonl"), PLACE))
    assert record["id"] == "line/train/12"
    assert [replies(record[side]) for side in ("chosen", "rejected")] == [[("right", True)], [("stop", True)]]


def test_a_good_path_of_agent_r_is_an_experts(tmp_path: Path) -> None:
    good = {"task_num": "12", "revise_log": REVISION["high_log"], "revise": False}
    record = only_record(import_experts(write(tmp_path, good, "textcraft_good.jsonl"), PLACE, opening=2))
    assert (record["id"], record["reward"]) == ("line/train/12", 1.0)


def test_a_log_of_eto_is_an_experts_by_the_name_of_its_file(tmp_path: Path) -> None:
    result = import_experts(write(tmp_path, LOG, "12.json", indent=4), PLACE, opening=4)
    record = only_record(result)
    assert (record["id"], record["reward"]) == ("line/train/12", 0.5)
    assert set(result.num_ignored_by_field) == {"meta.steps", "meta.terminate_reason"}


@pytest.mark.parametrize(
    ("record", "part"),
    [
        (
            {"7": {"taskName": "find a plant", "goldActionSequences": [{"variationIdx": 0, "path": []}]}},
            "has ScienceWorld's gold paths, which the world's own expert plays; leave eto.expert.file empty",
        ),
        (
            {"task_type": "pick_and_place_simple", "plan": {"high_pddl": [], "low_actions": []}},
            "has a plan for ALFRED's robot; the world's own expert plays the walkthrough of the game beside it",
        ),
        (
            {"states": ["Find a cup."], "actions": ["search[cup]"], "action_idxs": [-1], "available_actions": [[]]},
            "has a shopper of WebShop, whose goal has no number and whose products are named by their titles",
        ),
    ],
)
def test_the_demonstrations_of_worlds_are_refused_with_what_to_do(
    tmp_path: Path, record: dict[str, Any], part: str
) -> None:
    (sentence,) = import_experts(write(tmp_path, record, "data.json"), PLACE, opening=2).faults
    assert part in sentence
