"""Exports: each is opened by its own library or held to its published schema, says which turns
carry loss or is refused, and appears whole or not at all.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from atif_schema import faults
from toy import Line
from toy_paths import ToyTree, critique, good_sample, renderer

from agentr_core.episodes.transcript import call_text
from agentr_core.errors import ConfigError, DiskError
from agentr_core.exchange.formats import FORMATS, export
from agentr_core.exchange.imports import Target, import_chat, import_experts, import_pairs
from agentr_core.exchange.training_set import Launch, PairRow, SampleRow, TrainingSet
from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.samples.chat_file import World
from agentr_core.samples.dataset import token_row
from agentr_core.samples.identity import sample_id
from agentr_core.types import (
    Instance,
    Message,
    Preference,
    PreferenceCase,
    Provenance,
    Role,
    Sample,
    SampleKind,
    Span,
    grown_turn,
)
from flows.cli import exchange

WORLD = Target(world=World("line"), split="train")
ORIGIN = {
    "run_id": "r1",
    "recipe": "toy",
    "dataset_id": "d1",
    "dataset_hash": "feed",
    "iteration": 1,
    "instance_id": "line/train/0",
    "pair_id": None,
    "trajectory_id": "t1",
    "tree_id": None,
    "cut": 2,
    "good_reward": 1.0,
}


def samples() -> list[Sample]:
    tree, env = ToyTree(0), Line()
    pair = tree.pair(["look", "right", "right"], ["look", "left", "stop"])
    revision = splice(pair, critique(1), env, SpliceConfig(), alpha=1.0, seed=0)
    assert isinstance(revision, Sample)
    return [revision, good_sample(pair.good, env)]


def training_set(*some: Sample) -> TrainingSet:
    rows = []
    for position, sample in enumerate(some or samples()):
        row = token_row(sample, renderer())
        call = {"tool": "python", "key": "1 + 1", "status": "ok"}
        origin = {**ORIGIN, "position": position}
        tokens = (row.input_ids, row.labels)
        rows.append(SampleRow(id=sample_id(sample), sample=sample, origin=origin, tokens=tokens, tool_calls=[call]))
    return TrainingSet(name="toy-1", facts={"hash": "feed", "run_id": "r1"}, samples=rows)


def pairs(*texts: str) -> TrainingSet:
    """Return a set of one pair; its chosen side says the first text, then sees and says others."""
    revision = samples()[1]
    prompt = tuple(replace(message, train=False) for message in revision.messages[:3])

    def side(kind: str, said: tuple[str, ...]) -> Sample:
        roles = ("assistant", "user")
        turns = [Message(role=roles[n % 2], text=t, train=n % 2 == 0) for n, t in enumerate(said)]  # type: ignore[arg-type]
        return Sample(kind=kind, messages=(*prompt, *turns), instance=revision.instance)

    preference = Preference(
        case=PreferenceCase.WIN,
        chosen=side(SampleKind.CHOSEN, texts or ("right",)),
        rejected=side(SampleKind.REJECTED, ("left",)),
        chosen_reward=1.0,
        rejected_reward=0.0,
    )
    origin = {**ORIGIN, "chosen_sample_id": "a", "rejected_sample_id": "b", "position": 0}
    return TrainingSet(name="toy-1", facts={}, pairs=[PairRow(id="p1", preference=preference, origin=origin)])


def grown_sample() -> Sample:
    turn = grown_turn([Span(text="think", train=True), Span(text=" result"), Span(text="answer", train=True)])
    opening = (Message(role="system", text="Think."), Message(role="user", text="What?"))
    return Sample(
        kind=SampleKind.GOOD,
        messages=(*opening, turn),
        instance=Instance(environment="line", split="train", index=1),
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def load_rows(folder: Path, name: str | None, tmp_path: Path) -> Any:
    from datasets import load_dataset

    return load_dataset(str(folder), name, split="train", cache_dir=str(tmp_path / "cache"))


def test_the_command_line_offers_the_formats_that_there_are() -> None:
    assert (*FORMATS, "inspect") == exchange.FORMATS, "evaluations, not a training set"


@pytest.mark.slow
def test_parquet_is_opened_by_datasets_with_all_that_is_known_of_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert export(training_set(), folder, "parquet") == ("README.md", "data/train-00000-of-00001.parquet")
    rows = load_rows(folder, None, tmp_path)
    revision, _ = samples()
    record = rows[0]
    assert rows.num_rows == 2
    assert record["id"] == sample_id(revision)
    assert [turn["train"] for turn in record["messages"]] == [message.train for message in revision.messages]
    assert [turn["content"] for turn in record["messages"]] == [message.text for message in revision.messages]
    assert {name: record[name] for name in ORIGIN} == ORIGIN
    assert json.loads(record["tool_calls"])[0]["tool"] == "python"
    row = token_row(revision, renderer())
    assert (tuple(record["input_ids"]), tuple(record["labels"])) == (row.input_ids, row.labels)
    head = yaml.safe_load((folder / "README.md").read_text("utf-8").split("---\n")[1])
    assert head["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-00000-of-00001.parquet"}]
    assert "hash: `feed`" in (folder / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_parquet_keeps_the_flags_of_spans_and_of_sides(tmp_path: Path) -> None:
    export(training_set(grown_sample()), tmp_path / "grown", "parquet")
    (turn,) = [turn for turn in load_rows(tmp_path / "grown", None, tmp_path)[0]["messages"] if turn["spans"]]
    assert [(span["text"], span["train"]) for span in turn["spans"]] == [
        ("think", True),
        (" result", False),
        ("answer", True),
    ]
    export(pairs("right", "At 1.", "right"), tmp_path / "pairs", "parquet")
    pair = load_rows(tmp_path / "pairs", None, tmp_path)[0]
    assert [turn["train"] for turn in pair["chosen"]] == [True, False, True]
    assert (pair["chosen_reward"], pair["rejected_sample_id"], len(pair["prompt"])) == (1.0, "b", 3)


@pytest.mark.slow
def test_trl_trains_on_both_forms_where_the_flags_say(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    export(training_set(), tmp_path / "out", "trl")
    options = {"use_cpu": True, "bf16": False, "report_to": [], "max_length": 4096, "gradient_checkpointing": None}
    settings = SFTConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=64, **options)

    def trained_labels(name: str) -> set[tuple[int, ...]]:
        data = load_rows(tmp_path / "out", name, tmp_path)
        trainer = SFTTrainer(str(tiny_model_dir), args=settings, train_dataset=data)
        (batch,) = trainer.get_train_dataloader()
        return {tuple(label for label in row if label != -100) for row in batch["labels"].tolist()}

    rows = [token_row(sample, renderer()) for sample in samples()]
    assert trained_labels("messages") == {tuple(label for label in row.labels if label != -100) for row in rows}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    turns = [message.text for sample in samples() for message in sample.messages if message.train]
    texts = {tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in trained_labels("prompt_completion")}
    assert texts == {tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() for text in turns}
    assert len(turns) == len(lines(tmp_path / "out" / "prompt_completion.jsonl"))


@pytest.mark.slow
def test_trl_takes_preferences(tiny_model_dir: Path, tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    export(pairs(), tmp_path / "out", "trl")
    data = load_rows(tmp_path / "out", "preference", tmp_path)
    options = {"use_cpu": True, "bf16": False, "report_to": [], "max_length": 4096, "gradient_checkpointing": None}
    settings = DPOConfig(output_dir=str(tmp_path / "run"), **options)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    trainer = DPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer)
    (batch,) = trainer.get_train_dataloader()
    ids, mask = batch["input_ids"], batch["completion_mask"]
    texts = [
        tokenizer.decode(row[flags.bool()], skip_special_tokens=True).strip()
        for row, flags in zip(ids, mask, strict=True)
    ]
    assert texts == ["right", "left"]


def test_a_side_with_observations_needs_a_word_of_consent(tmp_path: Path) -> None:
    dataset = pairs("right", "At 1.", "right")
    for form in ("trl", "sharegpt"):
        with pytest.raises(ConfigError, match=f"{form} cannot say which turns of toy-1 carry loss: 1 turns within"):
            export(dataset, tmp_path / form, form)
        assert list(tmp_path.iterdir()) == []
    export(dataset, tmp_path / "trl", "trl", without_mask=True)
    assert "**Without the loss mask**: 1 turns within" in (tmp_path / "trl" / "README.md").read_text("utf-8")
    # What is written can be read again as ready pairs.
    result = import_pairs(tmp_path / "trl" / "preference.jsonl", WORLD)
    assert result.faults == ()
    assert [turn["content"] for turn in json.loads(result.lines[0])["chosen"]] == ["right", "At 1.", "right"]


def test_sharegpt_has_a_flag_for_each_turn_and_reads_back(tmp_path: Path) -> None:
    export(training_set(), tmp_path / "out", "sharegpt")
    records = lines(tmp_path / "out" / "sharegpt.jsonl")
    assert [[turn["train"] for turn in r["conversations"]] for r in records] == [
        [message.train for message in sample.messages] for sample in samples()
    ]
    assert {name: records[0][name] for name in ORIGIN} == ORIGIN
    result = import_chat(tmp_path / "out" / "sharegpt.jsonl")
    assert result.faults == ()
    flags = [turn.get("train", True) for turn in json.loads(result.lines[0])["messages"] if turn["role"] == "assistant"]
    assert flags == [message.train for message in samples()[0].messages if message.role == "assistant"]
    with pytest.raises(ConfigError, match="1 turns carry loss in a part of them"):
        export(training_set(grown_sample()), tmp_path / "grown", "sharegpt")


def test_llama_factory_finds_its_files(tmp_path: Path) -> None:
    """As `get_dataset` of LLaMA-Factory 0.9.5 reads it; it was run once, see deployments/LOG.md."""
    fields = {"file_name", "formatting", "ranking", "columns", "tags"}
    columns = {"messages", "system", "tools", "chosen", "rejected"}
    tags = {"role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag"}
    for name, dataset in (("sft", training_set()), ("dpo", pairs())):
        folder = tmp_path / name
        export(dataset, folder, "llama-factory")
        ((_, info),) = json.loads((folder / "dataset_info.json").read_text("utf-8")).items()
        assert (info.keys() <= fields, info["columns"].keys() <= columns, info["tags"].keys() <= tags) == (True,) * 3
        assert info["formatting"] == "sharegpt"
        tag = info["tags"]
        for record in lines(folder / info["file_name"]):
            turns = record[info["columns"]["messages"]]
            # User and assistant take turns from a user on; of a pair the last is the user's.
            roles = [tag["user_tag"], tag["assistant_tag"]] * len(turns)
            assert [turn[tag["role_tag"]] for turn in turns] == roles[: len(turns)]
            assert len(turns) % 2 == (name == "dpo")
            assert isinstance(record[info["columns"]["system"]], str)
            if name == "dpo":
                assert info["ranking"] is True
                assert record["chosen"] == {"from": "gpt", "value": "right"}
                assert record["rejected"] == {"from": "gpt", "value": "left"}
    with pytest.raises(ConfigError, match="its pairs have one reply on each side"):
        export(pairs("right", "At 1.", "right"), tmp_path / "whole", "llama-factory", without_mask=True)
    with pytest.raises(ConfigError, match="it trains whole turns"):
        export(training_set(grown_sample()), tmp_path / "grown", "llama-factory", without_mask=True)


def test_agenttraj_reads_back_as_an_experts_episodes(tmp_path: Path) -> None:
    """As the files of AgentTraj-L: an array of item_id and conversations with from, loss, value."""
    export(training_set(), tmp_path / "out", "agenttraj")
    file = tmp_path / "out" / "agenttraj.json"
    revision, good = json.loads(file.read_text("utf-8"))
    assert revision["item_id"] == "line_0"
    assert [turn["from"] for turn in revision["conversations"][:4]] == ["human", "gpt", "human", "gpt"]
    assert [turn["loss"] for turn in revision["conversations"][:4]] == [None, False, None, False]
    assert [turn["loss"] for turn in good["conversations"][3::2]] == [True, True, True]
    result = import_experts(file, WORLD, opening=2)
    # An expert has no steps that are not to be trained.
    assert ["some replies are not to be trained" in fault for fault in result.faults] == [True]
    assert [json.loads(line)["id"] for line in result.lines] == ["line/train/0"]
    with pytest.raises(ConfigError, match="it has no form for preference pairs"):
        export(pairs(), tmp_path / "pairs", "agenttraj", without_mask=True)


def test_alpaca_has_a_line_for_each_trained_turn(tmp_path: Path) -> None:
    dataset = training_set(samples()[1])
    export(dataset, tmp_path / "out", "alpaca")
    rows = lines(tmp_path / "out" / "alpaca.jsonl")
    texts = [message.text for message in samples()[1].messages]
    assert [(row["instruction"], row["output"]) for row in rows] == list(zip(texts[2::2], texts[3::2], strict=True))
    assert [row["history"] for row in rows] == [
        [[texts[place], texts[place + 1]] for place in range(0, 2 * number, 2)] for number in range(1, len(rows) + 1)
    ]
    assert (rows[0]["system"], rows[0]["input"], rows[0]["instance_id"]) == ("", "", "line/train/0")
    assert "1 samples have earlier turns in `history`" in (tmp_path / "out" / "README.md").read_text("utf-8")


def test_xtuner_has_a_flag_for_each_output(tmp_path: Path) -> None:
    """`encode_fn` of xtuner 0.2.0 gives an output labels unless its `output_with_loss` says no."""
    system = Message(role="system", text="Act.")
    sample = replace(samples()[1], messages=(system, *samples()[1].messages))
    export(training_set(sample), tmp_path / "out", "xtuner")
    (row,) = lines(tmp_path / "out" / "xtuner.jsonl")
    turns = row["conversation"]
    assert [turn["output_with_loss"] for turn in turns] == [message.train for message in sample.messages[2::2]]
    assert [turn["output_with_loss"] for turn in turns][:2] == [False, True]
    assert [turn["output"] for turn in turns] == [message.text for message in sample.messages[2::2]]
    assert [turn["system"] for turn in turns] == ["Act.", *[""] * (len(turns) - 1)]


@pytest.mark.parametrize("form", ["alpaca", "xtuner"])
def test_what_inputs_and_outputs_cannot_hold_is_refused(tmp_path: Path, form: str) -> None:
    row = SampleRow(id="s", sample=call_reply(call_text("look", "{}"), "a door"), origin=ORIGIN)
    whole = samples()[1]
    question = Message(role="user", text="And?")
    twice = replace(row, sample=replace(whole, messages=(*whole.messages, question, question)))
    for dataset, part in (
        (training_set(grown_sample()), "grown by continuation"),
        (pairs(), "no form for preference pairs"),
        (TrainingSet(name="toy-1", facts={}, samples=[row]), "no place for tools and their results"),
        (TrainingSet(name="toy-1", facts={}, samples=[twice]), "each input must have an output"),
    ):
        with pytest.raises(ConfigError, match=part):
            export(dataset, tmp_path / "out", form, without_mask=True)
        assert not (tmp_path / "out").exists()
    ends = replace(row, sample=replace(whole, messages=(*whole.messages, question)))
    export(TrainingSet(name="toy-1", facts={}, samples=[ends]), tmp_path / "out", form)
    assert "And?" not in (tmp_path / "out" / f"{form}.jsonl").read_text("utf-8")
    assert "the last turn of 1 samples, which has no reply" in (tmp_path / "out" / "README.md").read_text("utf-8")


def test_atif_keeps_to_its_schema_and_reads_back(tmp_path: Path) -> None:
    dataset = training_set(*samples(), grown_sample())
    files = export(dataset, tmp_path / "out", "atif")
    assert len(files) == 4
    records = {file.stem: json.loads(file.read_text("utf-8")) for file in (tmp_path / "out").glob("*/*.json")}
    assert {key: faults(record) for key, record in records.items()} == {key: [] for key in records}
    good = records[sample_id(samples()[1])]
    assert [step["source"] for step in good["steps"]] == ["user", "agent", "user", "agent", "agent", "agent"]
    assert good["steps"][3]["observation"] == {"results": [{"content": samples()[1].messages[4].text}]}
    assert [step["extra"]["train"] for step in good["steps"] if step["source"] == "agent"] == [False, True, True, True]
    assert [step.get("is_copied_context") for step in good["steps"]] == [None, True, None, None, None, None]
    assert good["extra"]["instance_id"] == "line/train/0"
    spans = records[sample_id(grown_sample())]["steps"]
    assert [(step["source"], step["message"]) for step in spans] == [
        ("system", "Think."),
        ("user", "What?"),
        ("agent", "think"),
        ("agent", "answer"),
    ]
    assert spans[2]["observation"] == {"results": [{"content": " result"}]}

    (tmp_path / "out" / "trajectories" / f"{sample_id(grown_sample())}.json").unlink()
    texts = [tuple(message.text for message in sample.messages) for sample in samples()]
    chats = import_chat(tmp_path / "out")
    assert chats.faults == ()
    assert {tuple(turn["content"] for turn in json.loads(line)["messages"]) for line in chats.lines} == set(texts)
    experts = import_experts(tmp_path / "out", WORLD, opening=2)
    assert ["some replies are not to be trained" in fault for fault in experts.faults] == [True]
    (good,) = map(json.loads, experts.lines)
    assert (good["id"], tuple(turn["content"] for turn in good["messages"])) == ("line/train/0", texts[1])


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def call_reply(reply: str, *results: str) -> Sample:
    turns = [
        Message(role="tools", text=json.dumps([LOOK])),
        Message(role="user", text="What?"),
        Message(role="assistant", text=reply, train=True, token_ids=(1, 2)),
        *(Message(role="tool", text=text) for text in results),
        Message(role="assistant", text="A door.", train=True, token_ids=(3,)),
    ]
    return Sample(kind=SampleKind.GOOD, messages=tuple(turns), instance=None)


def test_atif_has_calls_with_their_results_token_ids_and_log_probabilities(tmp_path: Path) -> None:
    reply = call_text("look", '{"at": "door"}', before=call_text("look", "{}", before="I look."))
    sample = call_reply(reply, "a door", "a room")
    row = SampleRow(id="s", sample=sample, origin=ORIGIN, logprobs=((-0.5, -0.25), (float("-inf"),)))
    dataset = TrainingSet(name="toy-1", facts={}, samples=[row])
    export(dataset, tmp_path / "out", "atif")
    record = json.loads((tmp_path / "out" / "trajectories" / "s.json").read_text("utf-8"))
    assert faults(record) == []
    _, step, last = record["steps"]
    assert step["message"] == "I look."
    assert step["tool_calls"] == [
        {"tool_call_id": "call_2_0", "function_name": "look", "arguments": {}},
        {"tool_call_id": "call_2_1", "function_name": "look", "arguments": {"at": "door"}},
    ]
    assert step["observation"]["results"] == [
        {"source_call_id": "call_2_0", "content": "a door"},
        {"source_call_id": "call_2_1", "content": "a room"},
    ]
    assert step["metrics"] == {"completion_tokens": 2, "completion_token_ids": [1, 2], "logprobs": [-0.5, -0.25]}
    assert (step["llm_call_count"], step["extra"]) == (1, {"train": True})
    assert "logprobs" not in last["metrics"], "the format allows no null, and JSON has no infinite number"
    assert "left out are the log-probabilities of 1 replies" in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert record["final_metrics"] == {"total_steps": 3, "total_completion_tokens": 3}


@pytest.mark.parametrize(
    "reply",
    [
        call_text("look", "{}"),
        call_text("look", '{"at":"door"}'),
        call_text("look", '{"at": "\\u00e9"}', before=" I look. "),
        f"{call_text('look', '{}')}\nThat is all.",
        call_text("look", '{"at": NaN}'),
        "<tool_call>\nlook\n</tool_call>",
    ],
)
def test_a_call_comes_back_from_atif_as_it_was_sampled(tmp_path: Path, reply: str) -> None:
    row = SampleRow(id="s", sample=call_reply(reply, "a door"), origin=ORIGIN)
    export(TrainingSet(name="toy-1", facts={}, samples=[row]), tmp_path / "out", "atif")
    (line,) = import_chat(tmp_path / "out").lines
    assert json.loads(line)["messages"][1]["content"] == reply
    assert [turn["role"] for turn in json.loads(line)["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_the_schema_of_atif_finds_what_breaks_it(tmp_path: Path) -> None:
    export(training_set(), tmp_path / "out", "atif", without_mask=True)
    good = json.loads(next((tmp_path / "out").glob("*/*.json")).read_text("utf-8"))
    step = good["steps"][0]
    for broken in (
        good | {"schema_version": "ATIF-v9"},
        good | {"reward": 1},
        good | {"steps": []},
        good | {"steps": [step | {"step_id": 2}]},
        good | {"steps": [step | {"metrics": {}}]},
        good | {"steps": [{name: step[name] for name in ("step_id", "source")}]},
    ):
        assert faults(broken)


def test_verl_has_the_prompt_of_each_instance_once(tmp_path: Path) -> None:
    """Columns and types as `RLHFDataset` of verl 0.9.1 reads them; see `exchange.verl.SCHEMA`."""
    export(training_set(*samples(), grown_sample()), tmp_path / "out", "verl")
    assert "\n2 prompts, exported by agentr." in (tmp_path / "out" / "README.md").read_text()
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row.keys() for row in rows] == [{"data_source", "prompt", "ability", "reward_model", "extra_info"}] * 2
    first, second = rows
    assert first["prompt"] == [{"role": m.role, "content": m.text} for m in samples()[0].messages[:3]]
    assert second["prompt"] == [{"role": "system", "content": "Think."}, {"role": "user", "content": "What?"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "line/train/0"}
    assert (first["data_source"], first["extra_info"]["index"], first["extra_info"]["split"]) == ("line", 0, "train")
    assert first["extra_info"]["interaction_kwargs"] == {"name": "line", "instance_id": "line/train/0"}
    assert first["extra_info"]["run_id"] == "r1"
    assert [path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".sh"] == [], "there is no model"


@pytest.mark.parametrize("roles", [("user",), ("system", "user"), ("tools", "user"), ("tools", "system", "user")])
def test_the_prompt_of_an_outside_agent_ends_before_its_first_reply(tmp_path: Path, roles: tuple[Role, ...]) -> None:
    opening = [Message(role=role, text="[]" if role == "tools" else role) for role in roles]
    sample = replace(
        call_reply("Go on."), instance=THIRD, messages=(*opening, *call_reply("I look.", "Go on.").messages[2:])
    )
    turns = [replace(message, role="user") if message.role == "tool" else message for message in sample.messages]
    rows = [SampleRow(id="s", sample=replace(sample, messages=tuple(turns)), origin=ORIGIN)]
    dataset = TrainingSet(name="toy-1", facts={}, samples=rows)
    export(dataset, tmp_path / "out", "verl")
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [turn["role"] for turn in row["prompt"]] == [role for role in roles if role != "tools"]
    export(dataset, tmp_path / "atif", "atif")
    *_, first, last = json.loads((tmp_path / "atif" / "trajectories" / "s.json").read_text("utf-8"))["steps"]
    assert (first["message"], first["observation"]["results"]) == ("I look.", [{"content": "Go on."}])
    assert last["message"] == "A door."


def test_the_prompt_for_verl_is_that_of_the_beginning_of_an_episode(tmp_path: Path) -> None:
    """After a summary, the first observation ends with the request for it."""
    good = replace(samples()[1], provenance=Provenance(extra={"conversation": 0}))
    goal = replace(good.messages[2], text=f"{good.messages[2].text}\n\nSum it up.")
    later = replace(
        good,
        messages=(*good.messages[:2], goal, *good.messages[3:]),
        provenance=Provenance(extra={"conversation": 4}),
    )
    dataset = training_set(replace(later, instance=THIRD), later, good)
    export(dataset, tmp_path / "out", "verl")
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [turn["content"] for turn in row["prompt"]] == [message.text for message in good.messages[:3]]
    assert FORMATS["verl"].notes_on(dataset) == [
        "left out are 1 instances, of whose episodes the set lacks the beginning"
    ]
    assert "\n1 prompts, exported by agentr." in (tmp_path / "out" / "README.md").read_text()


def test_verl_is_told_of_a_reward_where_no_question_has_answers(tmp_path: Path) -> None:
    """With golds, tests/flows/test_handover.py runs the script."""
    launch = Launch(model="/models/o'neill", workspace="my runs", run_id="r1")
    export(replace(training_set(), launch=launch), tmp_path / "out", "verl")
    script = tmp_path / "out" / "launch.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "REWARD:?name a Python file" in text
    assert "efficiency" not in text
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert (done.returncode, "REWARD: name a Python file" in done.stderr) == (1, True)


@pytest.mark.parametrize("form", list(FORMATS))
def test_an_export_is_whole_or_not_there(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    with pytest.raises(ConfigError, match="there already exists; name a new folder"):
        export(training_set(), folder, form, without_mask=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError, match="out cannot be written"):
        export(training_set(), tmp_path / "file" / "out", form, without_mask=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]
    # What a killed export left is no hindrance.
    (tmp_path / ".out.new").mkdir()
    files = export(training_set(), tmp_path / "out", form, without_mask=True)
    assert "README.md" in files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "there"]


SESSIONS = ["claude-code", "codex", "pi"]


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMATS if form not in SESSIONS])
def test_the_card_leads_datasets_to_the_files(tmp_path: Path, form: str) -> None:
    whole_turns = form in ("llama-factory", "alpaca", "xtuner")
    dataset = training_set() if whole_turns else training_set(*samples(), grown_sample())
    export(dataset, tmp_path / "out", form, without_mask=True)
    head = yaml.safe_load((tmp_path / "out" / "README.md").read_text("utf-8").split("---\n")[1])
    for config in head["configs"]:
        assert load_rows(tmp_path / "out", config["config_name"], tmp_path).num_rows > 1


@pytest.mark.slow
@pytest.mark.parametrize("form", ["trl", "sharegpt", "atif"])
def test_a_key_that_is_null_or_missing_at_first_has_a_type(tmp_path: Path, form: str) -> None:
    """`datasets` types a JSON file from its first 10 MB, here from its first kilobyte, and several
    files from the first.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    plain = [replace(samples()[1], provenance=Provenance(good_leaf=n)) for n in range(20)]
    dataset = training_set(*plain, grown_sample())
    rows = [replace(row, origin={**row.origin, "tree_id": None, "good_reward": None}) for row in dataset.samples[:-1]]
    last = replace(dataset.samples[-1], origin={**dataset.samples[-1].origin, "tree_id": "t9", "good_reward": 0.5})
    export(replace(dataset, samples=[*rows, last]), tmp_path / "out", form, without_mask=True)
    folder, cache = tmp_path / "out", str(tmp_path / "cache")
    name = {"trl": "messages", "sharegpt": "sharegpt", "atif": "default"}[form]
    chunk = {} if form == "atif" else {"chunksize": 1000}
    table = load_dataset(str(folder), name, split="train", cache_dir=cache, **chunk)
    ids = [row["extra"]["tree_id"] for row in table] if form == "atif" else table["tree_id"]
    assert (len(ids), sorted(filter(None, ids))) == (21, ["t9"])
    assert "The head of this file has the types of the columns" in (folder / "README.md").read_text("utf-8")
    if form != "atif":
        with pytest.raises(DatasetGenerationError):
            load_dataset("json", data_files=str(folder / f"{name}.jsonl"), cache_dir=cache, **chunk)


@pytest.mark.slow
def test_tools_of_any_shape_are_read_back(tmp_path: Path) -> None:
    """Each tool names its own arguments, so that their definitions have no common type."""

    def with_tool(name: str, default: object) -> Sample:
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": {name: default}}}}
        return replace(samples()[1], messages=(Message(role="tools", text=json.dumps([tool])), *samples()[1].messages))

    cases = [with_tool("look", 1), with_tool("go", {"to": ["a"]})]
    rows = [SampleRow(id=sample_id(sample), sample=sample, origin=ORIGIN, tokens=((1,), (1,))) for sample in cases]
    export(TrainingSet(name="toy-1", facts={}, samples=[*training_set().samples, *rows]), tmp_path / "out", "trl")
    column = load_rows(tmp_path / "out", "messages", tmp_path)["tools"]
    assert column == [None, None, *(json.loads(sample.messages[0].text) for sample in cases)]
    # TRL gives them to the chat template, which has no turn of role `tools`.
    completions = load_rows(tmp_path / "out", "prompt_completion", tmp_path)
    num_replies = sum(message.train for message in cases[0].messages)
    assert completions["tools"][-2 * num_replies :] == [tools for tools in column[2:] for _ in range(num_replies)]
    assert {turn["role"] for prompt in completions["prompt"] for turn in prompt} == {"user", "assistant"}


def test_what_a_format_leaves_out_is_named(tmp_path: Path) -> None:
    first, second = samples()
    cut = replace(second, messages=(*second.messages[:-1], replace(second.messages[-1], finish_reason="length")))
    system = replace(first, messages=(Message(role="system", text="Be brief."), *first.messages))
    dataset = training_set(cut, system)
    longest = max(len(row.tokens[0]) for row in dataset.samples if row.tokens)

    def notes(form: str, made: TrainingSet = dataset) -> list[str]:
        export(made, tmp_path / form, form, without_mask=True)
        texts = FORMATS[form].notes_on(made)
        page = (tmp_path / form / "README.md").read_text("utf-8")
        assert all(f"**Note**: {note}." in page for note in texts)
        return texts

    of_cut = "left out is that 1 trained replies were cut at their token limit; a trainer ends them as if the model had"
    assert notes("trl") == notes("sharegpt") == notes("atif") == [of_cut]
    assert notes("parquet") == notes("verl") == []
    assert notes("agenttraj") == [
        "1 samples have a system text in a field `system`, which AgentGym does not read",
        of_cut,
    ]
    cutoff = "LLaMA-Factory cuts each line to `cutoff_len` tokens, 2,048 unless that is set"
    suffix = f"; the longest sample has {longest:,} with the model of its run"
    assert notes("llama-factory") == [f"{cutoff}{suffix}", of_cut]
    (pair,) = pairs().pairs
    bare = replace(pair, preference=replace(pair.preference, chosen_reward=None, rejected_reward=None))
    pair_set = TrainingSet(name="toy-1", facts={}, pairs=[pair, bare])
    assert FORMATS["llama-factory"].notes_on(pair_set) == [
        cutoff,
        "left out are the rewards, which 1 of 2 pairs do not have",
    ]
    assert "which `agentr import` does not join again" in FORMATS["atif"].notes_on(pairs())[0]


THIRD = Instance(environment="line", split="train", index=3)


def session(*messages: Message) -> TrainingSet:
    """Return the set of one sample of tools, a question and these turns."""
    sample = call_reply("")
    session_sample = replace(sample, messages=(*sample.messages[:2], *messages), instance=THIRD)
    return TrainingSet(name="toy-1", facts={}, samples=[SampleRow(id="s", sample=session_sample, origin=ORIGIN)])


LOOKED = Message(role="assistant", text=call_text("look", '{"at":1}', before="I look."), train=True)
DOOR = Message(role="tool", text="a door")


@pytest.mark.parametrize("form", SESSIONS)
def test_a_session_is_of_an_instance_and_names_what_it_leaves_out(tmp_path: Path, form: str) -> None:
    export(session(LOOKED, DOOR), tmp_path / "out", form)
    page = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "left out is how 1 replies spell their calls" in page
    assert ("in place of those of 1 samples" in page) == (form != "claude-code")
    assert "configs:" not in page
    result = import_experts(tmp_path / "out", WORLD, opening=0)
    assert result.faults == ()
    (record,) = map(json.loads, result.lines)
    assert (record["id"], record["messages"][-1]["content"]) == ("line/train/3", "a door")
    assert record["tools"] == json.loads(session().samples[0].sample.messages[0].text)
    assert {"agentr.run_id", "agentr.kind"} <= result.num_ignored_by_field.keys()


@pytest.mark.parametrize("form", SESSIONS)
def test_what_a_session_cannot_hold_is_refused(tmp_path: Path, form: str) -> None:
    question = Message(role="user", text="And?")
    for dataset, part in (
        (pairs(), "no form for preference pairs"),
        (training_set(grown_sample()), "grown by continuation"),
        (session(LOOKED, LOOKED), "the user and the model must take turns"),
        (session(LOOKED, DOOR, replace(question, role="system")), "the user and the model must take turns"),
        (session(LOOKED, DOOR, DOOR), "some results of tools answer no call"),
        (session(LOOKED, question, DOOR), "some results of tools answer no call"),
        (session(replace(LOOKED, train=False), DOOR), "1 replies carry none, and a session has no flags"),
    ):
        with pytest.raises(ConfigError, match=part):
            export(dataset, tmp_path / "out", form)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", SESSIONS)
def test_a_call_with_a_number_that_json_lacks_stays_text(tmp_path: Path, form: str) -> None:
    reply = replace(LOOKED, text=call_text("look", '{"at": NaN}'))
    export(session(reply), tmp_path / "out", form)
    (record,) = map(json.loads, import_chat(tmp_path / "out").lines)
    assert record["messages"][-1]["content"] == reply.text


@pytest.mark.parametrize("form", ["atif", *SESSIONS])
def test_a_sample_that_a_dataset_repeats_has_a_file_each_time(tmp_path: Path, form: str) -> None:
    (row,) = session(LOOKED, DOOR).samples
    rows = [replace(row, origin={**ORIGIN, "position": position}) for position in range(3)]
    dataset = TrainingSet(name="toy-1", facts={}, samples=[*rows, replace(row, id="t")])
    export(dataset, tmp_path / "out", form)
    files = [file for file in (tmp_path / "out").rglob("*.json*")]
    assert len(files) == len({file.read_text("utf-8") for file in files}) == 4
    result = import_chat(tmp_path / "out")
    assert (len(result.lines), len(set(result.lines)), result.faults) == (4, 1, ())


def test_a_rejected_side_is_not_imported_as_a_conversation(tmp_path: Path) -> None:
    export(pairs(), tmp_path / "out", "atif", without_mask=True)
    result = import_chat(tmp_path / "out")
    assert len(result.lines) == 1
    assert ["is the rejected side of a preference pair" in fault for fault in result.faults] == [True]


def test_prompts_that_llama_factory_skips_are_refused(tmp_path: Path) -> None:
    (pair,) = pairs().pairs
    twice = Message(role="user", text="Go on.")

    def longer(side: Sample) -> Sample:
        return replace(side, messages=(*side.messages[:3], twice, *side.messages[3:]))

    preference = replace(
        pair.preference, chosen=longer(pair.preference.chosen), rejected=longer(pair.preference.rejected)
    )
    dataset = TrainingSet(name="toy-1", facts={}, pairs=[replace(pair, preference=preference)])
    with pytest.raises(ConfigError, match="user and assistant must take turns in a prompt, and the user must end it"):
        export(dataset, tmp_path / "out", "llama-factory")


def test_results_of_tools_that_atif_has_no_step_for_are_refused(tmp_path: Path) -> None:
    sample = replace(
        samples()[1],
        messages=(
            Message(role="tools", text="[]"),
            Message(role="user", text="a"),
            Message(role="tool", text="b"),
            *samples()[1].messages,
        ),
    )
    dataset = TrainingSet(name="toy-1", facts={}, samples=[SampleRow(id="s", sample=sample, origin=ORIGIN)])
    with pytest.raises(ConfigError, match="some results of tools follow no reply that could have called them"):
        export(dataset, tmp_path / "out", "atif", without_mask=True)


def test_a_text_that_no_file_holds_leaves_nothing(tmp_path: Path) -> None:
    broken = replace(grown_sample(), messages=(Message(role="user", text="a\ud800b"), *grown_sample().messages[2:]))
    dataset = TrainingSet(name="toy-1", facts={}, samples=[SampleRow(id="s", sample=broken, origin={})])
    with pytest.raises(DiskError, match="out cannot be written"):
        export(dataset, tmp_path / "out", "sharegpt", without_mask=True)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no export format 'pickle'; choose one of parquet, trl, "):
        export(training_set(), tmp_path / "out", "pickle")
