"""Every field of a record is read, refused in one sentence, or named as left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.episodes.transcript import call_text
from agentr_core.errors import DataFileError
from agentr_core.exchange.imports import (
    Target,
    import_chat,
    import_experts,
    import_pairs,
    read_demonstrations,
    read_pairs,
)
from agentr_core.samples.chat_file import World, read_chat
from agentr_core.types import Message
from flows.cli import cli

Record = dict[str, Any]
PLACE = Target(world=World("line"), split="train")
NO = [False, 0, 0.0, "false", [0], [False, 0.0, None], ["false"]]
YES = [True, 1, 1.0, None, [1, 1.0], [], [None]]
NEITHER = ["no", "true", "0", 2, -1, {}, {"value": 0}, [0, 1], [2], float("nan"), 10**400]
WEIGHTS = [0.5, 0.01, 0.99]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def write(folder: Path, *records: Any) -> Path:
    file = folder / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return file


def chat(*texts: str, **changes: Any) -> Record:
    """Return turns of user and assistant; `changes` are fields of the first reply."""
    turns: list[Record] = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts or ("a", "b", "c", "d"))
    ]
    turns[1] |= changes
    return {"messages": turns}


def make_turn(text: str, role: str = "user") -> Record:
    return {"role": role, "content": text}


def call(key: str, name: str, arguments: Any) -> Record:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def make_call(key: str) -> Record:
    return {"role": "assistant", "content": "", "tool_calls": [call(key, "look", "{}")]}


def result(key: str, text: str) -> Record:
    return {"role": "tool", "tool_call_id": key, "content": text}


def pair(**changes: Any) -> Record:
    def make_turns(*texts: str) -> list[Record]:
        return [{"role": ("assistant", "user")[n % 2], "content": text} for n, text in enumerate(texts)]

    sides = {"chosen": make_turns("x", "seen", "y"), "rejected": make_turns("z", "seen", "w")}
    return {"id": 1, "prompt": [{"role": "user", "content": "Go."}], **sides} | changes


def read_messages(folder: Path, record: Record) -> tuple[Message, ...]:
    """Return the conversation of a record, as a recipe reads it, and as it does after an import."""
    (sample,), _ = read_chat(write(folder, record))
    report = import_chat(write(folder, record))
    assert report.faults == ()
    (copy,), _ = read_chat(write(folder, *map(json.loads, report.lines)))
    assert copy.messages == sample.messages
    return sample.messages


def fault(folder: Path, record: Record) -> str:
    """Return why a record is refused, by an import and by a recipe alike."""
    (sentence,) = import_chat(write(folder, record)).faults
    with pytest.raises(DataFileError) as caught:
        read_chat(write(folder, record))
    assert str(caught.value) == sentence
    assert "\n" not in sentence
    assert len(sentence) < 400
    return sentence


def flags(messages: tuple[Message, ...]) -> list[bool]:
    return [message.train for message in messages if message.role == "assistant"]


@pytest.mark.parametrize("name", ["train", "loss", "weight", "training"])
@pytest.mark.parametrize("value", NO, ids=repr)
def test_no_in_any_spelling_is_not_trained(tmp_path: Path, name: str, value: Any) -> None:
    assert flags(read_messages(tmp_path, chat(**{name: value}))) == [False, True]
    turns: list[Any] = [None, value, None, None]
    assert flags(read_messages(tmp_path, chat() | {name: turns})) == [False, True]
    demonstration = chat("Walk.", "Ok.", "Goal", "right", "At 1.", "left")
    demonstration["messages"][3][name] = value
    with pytest.raises(DataFileError, match="some replies are not to be trained"):
        read_demonstrations(write(tmp_path, demonstration | {"id": 1}), world=World("line"), split="train", opening=2)


@pytest.mark.parametrize("name", ["train", "loss", "weight", "training"])
@pytest.mark.parametrize("value", YES, ids=repr)
def test_yes_and_null_are_trained(tmp_path: Path, name: str, value: Any) -> None:
    assert flags(read_messages(tmp_path, chat(**{name: value}))) == [True, True]
    assert flags(read_messages(tmp_path, chat() | {name: [0, value, None, 0]})) == [True, False]


@pytest.mark.parametrize("value", [*NEITHER, *WEIGHTS], ids=lambda value: str(value)[:20])
def test_what_is_no_flag_is_refused(tmp_path: Path, value: Any) -> None:
    for record in (chat(weight=value), chat() | {"weight": [None, value, None, None]}):
        sentence = fault(tmp_path, record)
        assert "data.jsonl:1, turn 1: weight" in sentence
        assert ("without a weight, so give 0 or 1" in sentence) == (value in WEIGHTS)
    pair_record = pair()
    pair_record["chosen"][0]["loss"] = value
    (sentence,) = import_pairs(write(tmp_path, pair_record), PLACE).faults
    assert "data.jsonl:1, chosen, turn 0: loss" in sentence


def test_flags_of_a_whole_record(tmp_path: Path) -> None:
    assert flags(read_messages(tmp_path, chat() | {"train": True})) == [True, True]
    (sentence,) = import_chat(write(tmp_path, chat() | {"weight": 0})).faults
    assert "no assistant turn" in sentence
    assert "weight has 3 flags for 4 turns" in fault(tmp_path, chat() | {"weight": [0, 1, 0]})
    assert "data.jsonl:1: loss is 2.3" in fault(tmp_path, chat() | {"loss": 2.3})


def test_flags_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    assert "train and weight contradict each other" in fault(tmp_path, chat(train=True, weight=0))
    assert "its flag and train of the record contradict" in fault(tmp_path, chat(weight=1) | {"train": [0, 0, 0, 1]})
    assert "contradict" in fault(tmp_path, chat() | {"train": [0, 0, 0, 1], "loss": [0, 1, 0, 1]})
    assert flags(read_messages(tmp_path, chat(train=False, weight=0) | {"loss": [None, 0.0, None, 1.0]})) == [
        False,
        True,
    ]


def test_pairs_keep_what_is_not_trained(tmp_path: Path) -> None:
    record = pair()
    record["rejected"][0]["train"] = False
    record["rejected"] = [*record["chosen"][:1], *record["rejected"][1:]]
    record["chosen"][0] = record["rejected"][0] = {**record["chosen"][0], "weight": 0}
    report = import_pairs(write(tmp_path, record), PLACE)
    assert report.faults == ()
    for file in (write(tmp_path, record), write(tmp_path, *map(json.loads, report.lines))):
        (sample,), rejections = read_pairs(file, world=PLACE.world, split="train")
        assert rejections == ()
        assert flags(sample.chosen.messages) == flags(sample.rejected.messages) == [False, True]


@pytest.mark.parametrize(
    ("side", "place", "reason"),
    [("chosen", 2, "last reply not trained"), ("rejected", 0, "different prompts")],
)
def test_pairs_without_a_place_for_the_loss_are_of_no_use(tmp_path: Path, side: str, place: int, reason: str) -> None:
    record = pair()
    record[side][place]["train"] = False
    (sentence,) = import_pairs(write(tmp_path, record), PLACE).faults
    assert f"is of no use: {reason}" in sentence
    _, (rejection,) = read_pairs(write(tmp_path, record), world=PLACE.world, split="train")
    assert rejection.reason == reason.replace(" ", "-")
    (sentence,) = import_pairs(write(tmp_path, pair(train=0)), PLACE).faults
    assert "last reply not trained" in sentence


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_text_beside_the_turns_is_a_turn(tmp_path: Path, name: str) -> None:
    messages = read_messages(tmp_path, chat() | {name: "Be brief."})
    assert (messages[0].role, messages[0].text, len(messages)) == ("system", "Be brief.", 5)
    turn = {"role": "system", "content": "Be brief."}
    record = {"messages": [turn, *chat()["messages"]], name: "Be brief."}
    assert read_messages(tmp_path, record) == messages
    assert "several system texts that differ" in fault(tmp_path, record | {name: "Be long."})
    assert "several system texts that differ" in fault(tmp_path, chat() | {"system": "A", "system_prompt": "B"})
    assert read_messages(tmp_path, chat() | {name: ""})[0].role == "user"
    assert "content that is not text" in fault(tmp_path, chat() | {name: 7})
    report = import_pairs(write(tmp_path, pair(**{name: "Be brief."})), PLACE)
    assert json.loads(report.lines[0])["prompt"][0] == turn
    report = import_experts(write(tmp_path, chat() | {"id": 1, name: "Be brief."}), PLACE, opening=0)
    assert json.loads(report.lines[0])["messages"][0] == turn


@pytest.mark.parametrize(
    ("record", "part"),
    [
        (chat(tool_calls=[{"id": "c"}]), "turn 1: call 1 must have a name, and arguments that are an object"),
        (chat(tool_calls=[call("c", "look", '{"at": ')]), "turn 1: call 1 must have a name, and arguments"),
        (chat(tool_calls="look"), "turn 1: tool_calls must be a list in a turn of the assistant"),
        (chat(content=call_text("look", "{}"), tool_calls=[call("c", "go", "{}")]), "its text makes other calls"),
        (chat(function_call={"name": "f"}), "turn 1 has function_call"),
        (
            {
                "messages": [make_turn("go"), make_call("c"), result("d", "seen"), make_turn("b", "assistant")],
                "tools": [TOOL],
            },
            "'d'",
        ),
        (chat(content=[{"type": "image_url", "image_url": {}}]), "content that is not text"),
        (chat(content=[{"type": "thinking", "text": "a"}]), "content that is not text"),
        (chat(audio={"id": "a"}), "turn 1 has audio, and only texts are read"),
        (chat(train_detail=[{"begin_offset": 0}]), "turn 1 has train_detail"),
        (chat(loss_scale=0.3), "turn 1 has loss_scale"),
        (chat() | {"images": ["a.png"]}, "has images, and only texts are read"),
        (chat() | {"history": [["a", "b"]]}, "has turns in history, too"),
        (chat() | {"functions": [{"name": "f"}]}, "defines functions in an old form"),
        (chat() | {"chosen": [1], "rejected": [2]}, "is a preference pair; import it with --as pairs"),
        (chat() | {"label": False}, "label is false, so its answer is a bad one"),
        (chat() | {"kto_tag": False}, "kto_tag is false"),
        (chat() | {"labels": [-100, 5]}, "labels says which tokens are trained"),
        (chat() | {"conversations": chat("x", "y")["messages"]}, "has both messages and conversations"),
        (chat() | {"tools": [{"name": "look"}]}, "tools must be a list of functions as OpenAI defines them"),
        (chat() | {"tools": "look"}, "tools is a text that is not JSON"),
        (chat(spans=[{"text": "b", "train": None}]), 'a span must have a "text" and a flag "train"'),
        (chat(spans=[{"text": "x", "train": True}]), "spans must be the parts of an assistant's text"),
        (chat(spans=[{"text": "b", "train": True}], weight=0), "those of its spans contradict each other"),
        ({"prompt": "a", "completion": "b"}, "has no list of turns"),
        (
            {"id": "i", "kind": "good", "system": "", "conversations": [{"from": "human", "value": "a"}] * 2},
            "was exported for LLaMA-Factory by an earlier version",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_read_and_would_matter_is_refused(tmp_path: Path, record: Record, part: str) -> None:
    assert part in fault(tmp_path, record)


def test_empty_fields_are_as_if_missing(tmp_path: Path) -> None:
    record = chat(tool_calls=[], function_call=None, audio=None, spans=None) | {"images": [], "tools": "[]"}
    assert read_messages(tmp_path, record) == read_messages(tmp_path, chat())
    assert import_chat(write(tmp_path, record)).num_ignored_by_field == {}


def test_texts_in_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert read_messages(tmp_path, chat(content=parts))[1].text == "bc"


def test_prompts_and_completions_of_trl(tmp_path: Path) -> None:
    turns = chat("a", "b", "c", "d")["messages"]
    record = {"prompt": turns[:3], "completion": turns[3:], "system": "S"}
    assert flags(read_messages(tmp_path, record)) == [False, True]


def test_tools_are_read_with_their_results(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "Where?"},
        {"from": "gpt", "value": "<tool_call>look</tool_call>"},
        {"from": "observation", "value": "a desk"},
        {"from": "observation", "value": "a door"},
        {"from": "gpt", "value": "Here."},
    ]
    messages = read_messages(tmp_path, {"conversations": turns, "tools": json.dumps([TOOL])})
    assert messages == read_messages(tmp_path, {"conversations": turns, "tools": [TOOL]})
    assert [message.role for message in messages] == ["tools", "user", "assistant", "tool", "tool", "assistant"]
    assert json.loads(messages[0].text) == [TOOL]
    assert "from is 'observation' and must be one of" in fault(tmp_path, {"conversations": turns})
    (sentence,) = import_chat(write(tmp_path, {"conversations": [*turns, turns[-1]], "tools": [TOOL]})).faults
    assert "turns do not alternate" in sentence


def test_calls_in_the_texts_of_sharegpt_have_results_as_those_of_openai_do(tmp_path: Path) -> None:
    texts = [("human", "Where?"), ("gpt", call_text("look", "{}")), ("observation", "a door"), ("gpt", "Here.")]
    record = {"conversations": [{"from": role, "value": text} for role, text in texts]}
    assert "is of no use: calls tools that it does not define" in "".join(import_chat(write(tmp_path, record)).faults)
    (line,) = import_chat(write(tmp_path, record), [TOOL]).lines
    assert [turn["role"] for turn in json.loads(line)["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(line)["tools"] == [TOOL]
    (line,) = import_experts(write(tmp_path, record | {"id": 1}), PLACE, opening=0).lines
    assert json.loads(line)["messages"][2] == {"role": "tool", "content": "a door"}


def test_what_is_left_out_is_named_with_its_records(tmp_path: Path) -> None:
    record = chat(name="bot", reasoning_content="17*20=340") | {"id": 3, "score": 0.5, "prompt": "a"}
    record["messages"][0]["train"] = True
    report = import_chat(write(tmp_path, record, chat() | {"score": 0, "origin": None}))
    assert report.num_ignored_by_field == {
        "id": 1,
        "score": 2,
        "prompt": 1,
        "messages.name": 1,
        "messages.reasoning_content": 1,
        "messages.train of user": 1,
    }
    outcome = CliRunner().invoke(
        cli, ["import", str(write(tmp_path, record)), str(tmp_path / "out.jsonl"), "--as", "general"]
    )
    assert outcome.exit_code == 0
    assert "fields left out, and of how many records: id (1), messages.name (1), messages.reason" in outcome.stderr
    assert import_experts(write(tmp_path, chat() | {"id": 1, "a": 1}), PLACE, opening=0).num_ignored_by_field == {
        "a": 1
    }
    assert import_pairs(write(tmp_path, pair(a=1, extra={"x": 1})), PLACE).num_ignored_by_field == {
        "a": 1,
        "extra.x": 1,
    }


def of_step(key: str, name: str, arguments: Any) -> Record:
    return {"tool_call_id": key, "function_name": name, "arguments": arguments}


def make_observation(key: str) -> Record:
    return {"observation": {"results": [{"source_call_id": key, "content": "seen"}]}}


def atif(*steps: Record, **fields: Any) -> Record:
    task = {"source": "user", "message": "Find the key."}
    all_steps = [{"step_id": number, **step} for number, step in enumerate((task, *steps), start=1)]
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "w", "version": "1"}, "steps": all_steps, **fields}


def agent(message: str, **fields: Any) -> Record:
    return {"source": "agent", "message": message, "observation": {"results": [{"content": "seen"}]}, **fields}


def test_steps_that_the_model_did_not_write_here_are_not_trained(tmp_path: Path) -> None:
    steps = (
        agent("copied", is_copied_context=True),
        agent("own", is_copied_context=False, llm_call_count=None),
        agent("harness", llm_call_count=0),
        agent("spared", extra={"train": 0}),
        agent("several", llm_call_count=3, extra={"train": 1.0}),
    )
    assert flags(read_messages(tmp_path, atif(*steps))) == [False, True, False, False, True]
    with pytest.raises(DataFileError, match="some replies are not to be trained"):
        read_demonstrations(
            write(tmp_path, atif(*steps[1:3], extra={"instance_id": "line/train/1"})),
            world=World("line"),
            split="train",
            opening=0,
        )


@pytest.mark.parametrize(
    ("step", "part"),
    [
        (agent("a", llm_call_count=-1), "step 2: llm_call_count must be a number from 0 on"),
        (agent("a", llm_call_count="0"), "step 2: llm_call_count must be"),
        (agent("a", is_copied_context="yes"), "step 2: is_copied_context is 'yes'"),
        (agent("a", extra={"train": 0.5}), "step 2: extra.train is 0.5; a reply is trained or not"),
        (agent("a", tool_calls=[{"tool_call_id": "c"}]), "step 2: each of tool_calls must have a tool_call_id, a"),
        (agent("a", tool_calls=[of_step("c", "look", "{}")]), "step 2: each of tool_calls must have"),
        (
            agent("a", tool_calls=[of_step("c", "look", {})]) | make_observation("d"),
            "step 2: source_call_id is 'd', and no call of",
        ),
        (agent("a", tool_calls=[of_step("c", "look", {})], extra={"reply": "b"}), "extra.reply says something else"),
        (
            agent("a", tool_calls=[of_step("c", "look", {})], extra={"observation_role": "assistant"}),
            "its results are a part of its turn (extra.observation_role), so it has no calls",
        ),
        (agent("a", step_id=3), "step 2: step_id is 3; steps are numbered from 1 in their order"),
        (agent("a", extra={"observation_role": "me"}), "extra.observation_role must be one of"),
    ],
)
def test_steps_with_other_values_are_refused(tmp_path: Path, step: Record, part: str) -> None:
    assert part in fault(tmp_path, atif(step))


@pytest.mark.parametrize("version", [*(f"ATIF-v1.{minor}" for minor in range(9)), None])
def test_each_version_of_atif_is_read_and_no_version_is_the_last(tmp_path: Path, version: str | None) -> None:
    record = atif(agent("a"), agent("b"))
    del record["schema_version"]
    record |= {} if version is None else {"schema_version": version}
    assert flags(read_messages(tmp_path, record)) == [True, True]


@pytest.mark.parametrize("version", ["ATIF-v1.9", "ATIF-v2.0", "ATIF-v1"])
def test_an_unknown_version_of_atif_is_refused(tmp_path: Path, version: str) -> None:
    assert "ATIF-v1.0 to ATIF-v1.8 are read" in fault(tmp_path, atif(agent("a")) | {"schema_version": version})


def test_calls_of_steps_are_written_as_the_model_writes_them(tmp_path: Path) -> None:
    calls = [of_step("x", "look", {"at": "door"}), of_step("y", "go", {}) | {"extra": {"retries": 1}}]
    results = [
        {"source_call_id": "y", "content": "gone"},
        {"content": "It is late."},
        {"source_call_id": "x", "content": "a door", "extra": {"score": 1}},
    ]
    record = atif(agent("Two.", tool_calls=calls, observation={"results": results}), agent("b"))
    record["agent"]["tool_definitions"] = [TOOL]
    messages = read_messages(tmp_path, record)
    two = call_text("go", "{}", before=call_text("look", '{"at": "door"}', before="Two."))
    assert [(message.role, message.text) for message in messages[2:6]] == [
        ("assistant", two),
        ("tool", "a door"),
        ("tool", "gone"),
        ("user", "It is late."),
    ]
    assert messages[2].train
    num_by_field = import_chat(write(tmp_path, record)).num_ignored_by_field
    assert {"steps.tool_calls.extra", "steps.observation.extra"} <= num_by_field.keys()
    del record["agent"]["tool_definitions"]
    (sentence,) = import_chat(write(tmp_path, record)).faults
    assert "is of no use: calls tools that it does not define" in sentence
    # An expert's replies are played again, and the world has its own tools.
    (line,) = import_experts(write(tmp_path, record | {"id": 1}), PLACE, opening=0).lines
    file = tmp_path / "expert.jsonl"
    file.write_text(line)
    ((demonstration,),) = read_demonstrations(file, world=World("line"), split="train", opening=0).values()
    assert demonstration.replies == (two, "b")


@pytest.mark.parametrize(("x", "y"), [("x", "y"), (1, 2)])
def test_calls_in_turns_of_openai_are_read_with_their_results_in_order(tmp_path: Path, x: Any, y: Any) -> None:
    calls = [call(x, "look", '{"at":"door"}'), call(y, "go", {"to": 1})]
    turns = [
        make_turn("Find it."),
        {"role": "assistant", "content": None, "tool_calls": calls},
        result(y, "gone"),
        result(x, "a door"),
        make_turn("Found.", "assistant"),
    ]
    messages = read_messages(tmp_path, {"messages": turns, "tools": [TOOL]})
    text = call_text("go", '{"to": 1}', before=call_text("look", '{"at":"door"}'))
    assert [message.text for message in messages[2:]] == [text, "a door", "gone", "Found."]
    # A text that has the calls already is taken as it is.
    turns[1] = {"role": "assistant", "content": text, "tool_calls": calls}
    assert read_messages(tmp_path, {"messages": turns, "tools": [TOOL]}) == messages


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(tmp_path: Path, arguments: Any) -> None:
    reply = {"role": "assistant", "content": None, "tool_calls": [call("x", "look", arguments)]}
    turns = [make_turn("Find it."), reply, result("x", "a door"), make_turn("Found.", "assistant")]
    messages = read_messages(tmp_path, {"messages": turns, "tools": [TOOL]})
    assert messages[2].text == call_text("look", "{}")


def test_a_parquet_file_is_read_as_the_lines_of_its_rows(tmp_path: Path) -> None:
    calls = [call("x", "look", {"at": "door"}), call("y", "go", {"to": 1})]
    turns = [make_turn("Find it."), {"role": "assistant", "content": None, "tool_calls": calls}]
    turns += [result("x", "a door"), result("y", "gone"), make_turn("Found.", "assistant")]
    tool = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
    rows = [{"messages": turns, "tools": [{"type": "function", "function": tool}]}, chat(train=False)]
    file = tmp_path / "rows.parquet"
    # Each argument of a call is a column, which is null where the call has another.
    pq.write_table(pa.Table.from_pylist(rows), file)
    lines = import_chat(write(tmp_path, *rows)).lines
    assert import_chat(file).lines == lines
    folder = tmp_path / "folder"
    folder.mkdir()
    file.rename(folder / "rows.parquet")
    write(folder, *rows)
    assert import_chat(folder).lines == (*lines, *lines)
    file.write_text("no Parquet")
    with pytest.raises(DataFileError, match=r"cannot be read: .*; set SOURCE to a Parquet file"):
        import_chat(file)


def test_labels_of_tokens_are_left_out_where_each_reply_has_its_flag(tmp_path: Path) -> None:
    record = chat(train=False) | {"labels": [-100, 7], "input_ids": [3, 7]}
    assert "labels says which tokens are trained" in fault(tmp_path, record)
    record["messages"][3]["train"] = None
    assert "labels says which tokens are trained" in fault(tmp_path, record)
    record["messages"][3]["train"] = True
    assert flags(read_messages(tmp_path, record)) == [False, True]


def test_a_trajectory_that_goes_on_in_another_file(tmp_path: Path) -> None:
    record = atif(
        agent("a", reasoning_content="hm", timestamp="2026-11-28T00:00:00Z"),
        continued_trajectory_ref="next.json",
        extra={"instance_id": "line/train/1"},
    )
    report = import_chat(write(tmp_path, record))
    assert report.faults == ()
    assert report.num_ignored_by_field.keys() == {
        *("agent.name", "agent.version", "continued_trajectory_ref", "extra"),
        *("steps.reasoning_content", "steps.timestamp"),
    }
    (sentence,) = import_experts(write(tmp_path, record), PLACE, opening=0).faults
    assert "goes on in another file (continued_trajectory_ref), and an expert's episode must be whole" in sentence


def test_the_tools_of_an_agent_are_read(tmp_path: Path) -> None:
    record = atif(agent("a"), agent("b"))
    record["agent"]["tool_definitions"] = [TOOL]
    assert json.loads(read_messages(tmp_path, record)[0].text) == [TOOL]


def test_a_folder_of_an_export_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "dataset_info.json").write_text(json.dumps({"agentr": {"file_name": "agentr.jsonl"}}))
    (folder / "messages.jsonl").write_text(json.dumps(chat()))
    assert len(import_chat(folder).lines) == 1
    (folder / "prompt_completion.jsonl").write_text(json.dumps(chat()))
    with pytest.raises(DataFileError, match="holds the same samples as messages and as prompt_completion; name a file"):
        import_chat(folder)


def test_a_demonstration_that_was_grown_has_a_reply_for_each_span(tmp_path: Path) -> None:
    spans = [{"text": "b", "train": True}, {"text": " seen ", "train": False}, {"text": "c", "train": True}]
    record = chat("a", "b seen c", spans=spans) | {"id": "textcraft/train/1"}
    world = World(TextCraft().name)
    ((demonstration,),) = read_demonstrations(write(tmp_path, record), world=world, split="train", opening=0).values()
    assert demonstration.replies == ("b", "c")
