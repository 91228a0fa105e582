"""Exports: what other trainers read puts the loss on the same turns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from toy import Line
from toy_paths import ToyTree, critique, good_sample, renderer

from agentr_core.errors import ConfigError, DataFault
from agentr_core.exchange.training_set import export_lines
from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.samples.dataset import token_row
from agentr_core.samples.identity import sample_id
from agentr_core.types import Message, Sample


def samples() -> list[Sample]:
    tree, env = ToyTree(0), Line()
    pair = tree.pair(["look", "right", "right"], ["look", "left", "stop"])
    revision = splice(pair, critique(1), env, SpliceConfig(), alpha=1.0, seed=0)
    assert isinstance(revision, Sample)
    return [revision, good_sample(pair.good, env)]


def tokens_of(sample: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
    row = token_row(sample, renderer())
    return row.input_ids, row.labels


def export_records(format: str, **options):  # type: ignore[no-untyped-def]
    lines = list(export_lines(samples(), format, **options))
    assert not any("\n" in line for line in lines)
    return [json.loads(line) for line in lines]


def test_trl_has_messages_with_flags_and_on_request_the_tokens() -> None:
    revision, _ = samples()
    record = export_records("trl")[0]
    assert record["id"] == sample_id(revision)
    assert record["kind"] == "revision"
    assert record["messages"] == [{"role": m.role, "content": m.text} for m in revision.messages]
    assert record["train"] == [m.train for m in revision.messages]
    assert "input_ids" not in record

    rows = {sample_id(sample): tokens_of(sample) for sample in samples()}
    record = export_records("trl", rows=rows)[0]
    ids, labels = rows[record["id"]]
    assert (tuple(record["input_ids"]), tuple(record["labels"])) == (ids, labels)
    assert sum(record["completion_mask"]) == sum(label != -100 for label in labels)
    with pytest.raises(DataFault, match="has no token row"):
        export_records("trl", rows={})


def test_trl_trains_on_the_labels_as_they_are(tiny_model_dir: Path, tmp_path: Path) -> None:
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    rows = {sample_id(sample): tokens_of(sample) for sample in samples()}
    lines = tmp_path / "samples.jsonl"
    lines.write_text("\n".join(export_lines(samples(), "trl", rows=rows)), encoding="utf-8")
    # None: True, its default, has a deprecated name, and warns.
    options = {"use_cpu": True, "bf16": False, "report_to": [], "max_length": 4096, "gradient_checkpointing": None}
    settings = SFTConfig(output_dir=str(tmp_path / "out"), **options)
    data = load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))

    trainer = SFTTrainer(str(tiny_model_dir), args=settings, train_dataset=data)

    (batch,) = trainer.get_train_dataloader()
    batch_labels = {tuple(label for label in labels if label != -100) for labels in batch["labels"].tolist()}
    assert batch_labels == {tuple(label for label in labels if label != -100) for _, labels in rows.values()}


def test_sharegpt_flags_each_turn() -> None:
    revision, good = samples()
    records = export_records("sharegpt")
    for sample, record in zip((revision, good), records, strict=True):
        assert [turn["train"] for turn in record["conversations"]] == [m.train for m in sample.messages]
    assert records[0]["conversations"][0] == {"from": "human", "value": "Walk right to the goal.", "train": False}
    assert records[0]["conversations"][1]["from"] == "gpt"


def test_llamafactory_has_a_line_for_each_trained_turn_and_it_is_the_last() -> None:
    revision, good = samples()
    records = export_records("llamafactory")
    for sample in (revision, good):
        conversations = [r["conversations"] for r in records if r["id"] == sample_id(sample)]
        positions = [i for i, m in enumerate(sample.messages) if m.train]
        assert [len(turns) for turns in conversations] == [i + 1 for i in positions]
        assert [turns[-1]["value"] for turns in conversations] == [sample.messages[i].text for i in positions]
        assert all([t["from"] for t in turns] == ["human", "gpt"] * (len(turns) // 2) for turns in conversations)


def test_llamafactory_keeps_the_system_text_apart_and_wants_alternating_turns() -> None:
    _, good = samples()
    system = replace(good, messages=(Message(role="system", text="Be brief."), *good.messages))
    (record, *_) = (json.loads(line) for line in export_lines([system], "llamafactory"))
    assert record["system"] == "Be brief."
    assert record["conversations"][0]["value"] == "Walk right to the goal."
    twice = replace(good, messages=(good.messages[0], *good.messages))
    with pytest.raises(DataFault, match="turn 1 is the user's"):
        list(export_lines([twice], "llamafactory"))


def test_an_unknown_format_is_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match="no export format 'xtuner'; choose one of trl, sharegpt, llamafactory"):
        export_lines(samples(), "xtuner")
