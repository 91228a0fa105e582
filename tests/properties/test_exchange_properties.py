"""What is exported comes back: JSON by our own import, Parquet by the libraries that read it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr_core.errors import ConfigError, DataFault
from agentr_core.exchange.formats import export
from agentr_core.exchange.imports import ImportResult, Target, import_chat, import_pairs, read_pairs
from agentr_core.exchange.training_set import PairRow, SampleRow, TrainingSet, opening_turns
from agentr_core.samples.chat_file import World, read_chat, reply_text
from agentr_core.samples.identity import sample_id
from agentr_core.types import (
    Instance,
    Message,
    Preference,
    PreferenceCase,
    Sample,
    SampleKind,
    Span,
    grown_turn,
)

pytestmark = pytest.mark.slow
"""Each example writes files."""
Turn = tuple[str, str, bool, tuple[tuple[str, bool], ...]]
WORLD = World("line")
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(str.strip)
instances = st.builds(
    Instance, environment=st.just("line"), split=st.sampled_from(["train", "other"]), index=st.integers(0, 99)
)
rewards = st.floats(0, 1, allow_nan=False)


def turn(role: str, text: str, *, train: bool = False) -> Message:
    return Message(role=role, text=text, train=train)  # type: ignore[arg-type]


@st.composite
def replies(draw: st.DrawFn, results: Sequence[str], *, first: bool | None = None) -> list[Message]:
    """Draw replies with flags, the last one trained, and results of these roles between them, of
    which a tool's may be several.
    """
    flags = [*draw(st.lists(st.booleans(), max_size=3)), True]
    if first is not None:
        flags[0] = first if len(flags) > 1 else True
    arguments = st.dictionaries(texts, texts | st.integers() | st.none())
    calls = st.lists(st.tuples(texts, arguments), min_size=1, max_size=2)
    turns = [turn("assistant", draw(texts), train=flag) for flag in flags]
    if "tool" in results:
        call_lists = [draw(st.just([]) | calls) for _ in turns]
        turns = [
            replace(reply, text=reply_text(reply.text, call_list))
            for reply, call_list in zip(turns, call_lists, strict=True)
        ]
    between = []
    for _ in flags[1:]:
        role = draw(st.sampled_from(results))
        between.append([turn(role, draw(texts)) for _ in range(draw(st.integers(1, 3)) if role == "tool" else 1)])
    return [
        message for reply, result_turns in zip(turns, between, strict=False) for message in (reply, *result_turns)
    ] + turns[-1:]


@st.composite
def prompts(draw: st.DrawFn) -> list[Message]:
    system = [turn("system", draw(texts))] if draw(st.booleans()) else []
    return [*system, turn("user", draw(texts)), turn("assistant", draw(texts)), turn("user", draw(texts))]


@st.composite
def alternating(draw: st.DrawFn) -> tuple[Message, ...]:
    return (*draw(prompts()), *draw(replies(("user",))))


@st.composite
def calling(draw: st.DrawFn) -> tuple[Message, ...]:
    definition = {"type": "function", "function": {"name": draw(texts), "parameters": {"type": "object", "n": 1.5}}}
    tools = turn("tools", json.dumps([definition] * draw(st.integers(1, 2)), ensure_ascii=False))
    return (tools, turn("system", draw(texts)), turn("user", draw(texts)), *draw(replies(("user", "tool"))))


@st.composite
def calling_with_results(draw: st.DrawFn) -> tuple[Message, ...]:
    """Draw turns in which each call of a reply has its result."""
    definition = {"type": "function", "function": {"name": draw(texts), "strict": True}}
    head = [turn("tools", json.dumps([definition], ensure_ascii=False))]
    head += [turn("system", draw(texts))] if draw(st.booleans()) else []
    calls = st.lists(st.tuples(texts, st.dictionaries(texts, texts | st.integers() | st.none())), max_size=2)
    turns = [turn("user", draw(texts))]
    for call_list in draw(st.lists(calls, max_size=3)):
        turns.append(turn("assistant", reply_text(draw(st.just("") | texts) or ("" if call_list else "x"), call_list)))
        turns += [turn("tool", draw(texts)) for _ in call_list] or [turn("user", draw(texts))]
    return (*head, *turns, turn("assistant", draw(texts), train=True))


@st.composite
def grown(draw: st.DrawFn) -> tuple[Message, ...]:
    flags = [True, *draw(st.lists(st.booleans(), max_size=2))]
    spans = [[Span(text=draw(texts), train=flag), Span(text=draw(texts))] for flag in flags]
    return (*draw(prompts())[:-2], grown_turn([span for pair in spans for span in pair][:-1]))


@st.composite
def sets(draw: st.DrawFn, *forms: Any) -> TrainingSet:
    rows = {}
    for messages in draw(st.lists(st.one_of(*[form() for form in forms]), min_size=1, max_size=3)):
        instance = draw(instances)
        sample = Sample(kind=SampleKind.GOOD, messages=messages, instance=instance)
        origin = {"run_id": "r", "instance_id": instance.key, "tree_id": draw(st.none() | st.just("t"))}
        key = sample_id(sample)
        rows[key] = SampleRow(id=key, sample=sample, origin=origin, tokens=((1, 2), (-100, 2)))
    # A folder of files is read in the order of their names.
    return TrainingSet(name="toy-1", facts={}, samples=[rows[key] for key in sorted(rows)])


@st.composite
def pair_sets(draw: st.DrawFn, *, single: bool = False, tools: bool = False) -> TrainingSet:
    rows = []
    for number in range(draw(st.integers(1, 3))):
        prompt = tuple(draw(prompts()))
        if tools and draw(st.booleans()):
            prompt = (draw(calling())[0], *prompt)
        sides: list[list[Message]] = []
        for text in ("good", "bad"):
            side = [turn("assistant", text, train=True)] if single else draw(replies(("user",), first=True))
            sides.append([replace(side[0], text=f"{text} {draw(texts)}"), *side[1:]])
        low, high = sorted(draw(st.tuples(rewards, rewards)))
        given_rewards = (high, low) if high > low and draw(st.booleans()) else (None, None)
        instance = draw(instances)
        chosen, rejected = (
            Sample(kind=kind, messages=(*prompt, *side), instance=instance)
            for kind, side in zip((SampleKind.CHOSEN, SampleKind.REJECTED), sides, strict=True)
        )
        preference = Preference(
            case=PreferenceCase.WIN,
            chosen=chosen,
            rejected=rejected,
            chosen_reward=given_rewards[0],
            rejected_reward=given_rewards[1],
        )
        rows.append(PairRow(id=f"p{number}", preference=preference, origin={"instance_id": instance.key}))
    return TrainingSet(name="toy-1", facts={}, pairs=rows)


@contextmanager
def export_set(made: TrainingSet, form: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out"
        export(made, target, form, without_mask=True)
        yield target


def plain(messages: Sequence[Message]) -> tuple[Turn, ...]:
    return tuple(
        (message.role, message.text, message.train, tuple((span.text, span.train) for span in message.spans))
        for message in messages
    )


def samples(made: TrainingSet) -> list[tuple[Turn, ...]]:
    return [plain(row.sample.messages) for row in made.samples]


def lines_of(made: TrainingSet) -> list[tuple[Turn, ...]]:
    """Return the conversation up to each trained turn, which alone is trained."""
    return [
        plain([*(replace(earlier, train=False) for earlier in row.sample.messages[:position]), message])
        for row in made.samples
        for position, message in enumerate(row.sample.messages)
        if message.train
    ]


def write_lines(found: ImportResult, folder: Path) -> Path:
    assert found.faults == ()
    file = folder / "imported.jsonl"
    file.write_text("".join(f"{line}\n" for line in found.lines), encoding="utf-8")
    return file


def import_samples(source: Path) -> list[tuple[Turn, ...]]:
    """Return the conversations that a recipe takes from what is imported of a file or folder."""
    kept_samples, rejections = read_chat(write_lines(import_chat(source), source.parent))
    assert rejections == ()
    return [plain(sample.messages) for sample in kept_samples]


@given(sets(alternating, calling, grown))
def test_samples_come_back_from_trl_and_sharegpt(made: TrainingSet) -> None:
    with export_set(made, "trl") as folder:
        assert import_samples(folder / "messages.jsonl") == samples(made)
    with export_set(made, "sharegpt") as folder:
        assert import_samples(folder / "sharegpt.jsonl") == samples(made)


@given(sets(alternating))
def test_samples_come_back_turn_by_turn_where_a_line_trains_its_last(made: TrainingSet) -> None:
    with export_set(made, "llama-factory") as folder:
        assert import_samples(folder) == lines_of(made)


@given(sets(alternating, calling))
def test_samples_come_back_turn_by_turn_from_prompts_and_completions(made: TrainingSet) -> None:
    with export_set(made, "trl") as folder:
        assert import_samples(folder / "prompt_completion.jsonl") == lines_of(made)


@given(sets(alternating, grown))
def test_samples_come_back_from_agenttraj(made: TrainingSet) -> None:
    with export_set(made, "agenttraj") as folder:
        assert import_samples(folder) == samples(made)


@given(sets(alternating, calling, grown))
def test_samples_come_back_from_atif(made: TrainingSet) -> None:
    with export_set(made, "atif") as folder:
        assert import_samples(folder) == samples(made)


@pytest.mark.parametrize("form", ["claude-code", "codex", "pi"])
@given(data=st.data())
def test_samples_come_back_from_sessions_with_all_replies_trained(form: str, data: st.DataObject) -> None:
    training_set = data.draw(sets(alternating, calling_with_results))
    expected = [
        plain([replace(message, train=message.role == "assistant") for message in row.sample.messages])
        for row in training_set.samples
    ]
    with export_set(training_set, form) as folder:
        assert sorted(import_samples(folder)) == sorted(expected)


@pytest.mark.parametrize(
    ("form", "forms"),
    [("pi", (grown,)), ("llama-factory", (calling,)), ("llama-factory", (grown,)), ("agenttraj", (calling,))],
)
@settings(max_examples=20)
@given(st.data())
def test_what_a_format_cannot_hold_is_refused(form: str, forms: tuple[Any, ...], data: st.DataObject) -> None:
    training_set = data.draw(sets(*forms))
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises((ConfigError, DataFault), match="trl or sharegpt"):
            export(training_set, Path(folder) / "out", form, without_mask=True)
        assert list(Path(folder).iterdir()) == []


def pairs(source: Path) -> list[tuple[Any, ...]]:
    file = write_lines(import_pairs(source, Target(world=WORLD, split="train")), source.parent)
    preferences, rejections = read_pairs(file, world=WORLD, split="train")
    assert rejections == ()
    return [of_pair(preference) for preference in preferences]


def of_pair(pair: Preference) -> tuple[Any, ...]:
    sides = plain(pair.chosen.messages), plain(pair.rejected.messages)
    return *sides, pair.chosen_reward, pair.rejected_reward, pair.chosen.instance


@given(pair_sets(tools=True))
def test_pairs_come_back(made: TrainingSet) -> None:
    for form in ("trl", "sharegpt"):
        with export_set(made, form) as folder:
            assert pairs(folder / "preference.jsonl") == [of_pair(row.preference) for row in made.pairs]


@given(pair_sets(single=True))
def test_pairs_come_back_from_llama_factory(made: TrainingSet) -> None:
    expected = [of_pair(row.preference) for row in made.pairs]
    if any(row.preference.chosen_reward is None for row in made.pairs):
        # Its notes say so.
        expected = [(*pair[:2], None, None, pair[4]) for pair in expected]
    with export_set(made, "llama-factory") as folder:
        assert ("left out are the rewards" in (folder / "README.md").read_text("utf-8")) == (expected[0][2] is None)
        assert pairs(folder) == expected


def rows_of(folder: Path) -> Any:
    from datasets import load_dataset

    return load_dataset(str(folder), split="train", cache_dir=str(folder.parent / "cache"))


@settings(max_examples=8)
@given(st.one_of(sets(alternating, calling, grown), pair_sets(tools=True)))
def test_datasets_reads_parquet_back(made: TrainingSet) -> None:
    def read_turns(turns: Sequence[Any]) -> tuple[Turn, ...]:
        return tuple(
            (
                entry["role"],
                entry["content"],
                entry["train"],
                tuple((s["text"], s["train"]) for s in entry["spans"] or ()),
            )
            for entry in turns
        )

    with export_set(made, "parquet") as folder:
        rows = rows_of(folder)
        if made.samples:
            assert [read_turns(row["messages"]) for row in rows] == samples(made)
            assert [(row["id"], row["tree_id"]) for row in rows] == [(r.id, r.origin["tree_id"]) for r in made.samples]
            return
        for row, pair in zip(rows, made.pairs, strict=True):
            prompt = row["prompt"]
            assert read_turns([*prompt, *row["chosen"]]) == plain(pair.preference.chosen.messages)
            assert read_turns([*prompt, *row["rejected"]]) == plain(pair.preference.rejected.messages)
            assert row["chosen_reward"] == pair.preference.chosen_reward


@settings(max_examples=8)
@given(sets(alternating, calling, grown))
def test_verl_reads_each_prompt_once(made: TrainingSet) -> None:
    """As `RLHFDataset` of verl 0.9.1 does: the rows of the file by `datasets`, of which `prompt` is
    what a template gets. It was run once on such a file.
    """
    from datasets import load_dataset

    sample_by_key: dict[str, Sample] = {}
    for row in made.samples:
        assert row.sample.instance is not None
        sample_by_key.setdefault(row.sample.instance.key, row.sample)
    with export_set(made, "verl") as folder:
        data = load_dataset(
            "parquet", data_files=str(folder / "train.parquet"), cache_dir=str(folder.parent / "cache")
        )["train"]
        assert [row["extra_info"]["interaction_kwargs"]["instance_id"] for row in data] == list(sample_by_key)
        for row, sample in zip(data, sample_by_key.values(), strict=True):
            prompt = [{"role": m.role, "content": m.text} for m in opening_turns(sample.messages) if m.role != "tools"]
            assert row["prompt"] == prompt
        offers = sum(sample.messages[0].role == "tools" for sample in sample_by_key.values())
        has_note = f"left out are the tools that {offers} prompts offer" in (folder / "README.md").read_text("utf-8")
        assert has_note == (offers > 0)
