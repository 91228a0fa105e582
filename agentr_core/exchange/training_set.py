"""The input of all export formats: a training set with the origin of its rows, and its samples and
pairs as lines of JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from agentr_core.episodes.transcript import opening_length
from agentr_core.errors import ConfigError, DataFault
from agentr_core.samples.identity import sample_id
from agentr_core.types import Message, Preference, Role, Sample

# Samples as lines of JSON for other trainers. Each format has its own way to say which turns carry
# no loss.

ConversationFormat = Literal["trl", "sharegpt", "llamafactory"]
IdsAndLabels = tuple[Sequence[int], Sequence[int]]
"""The token ids of a sample and their labels, -100 where there is no loss."""

_SHAREGPT_ROLES: dict[Role, str] = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def export_lines(
    samples: Iterable[Sample], format: str, *, rows: Mapping[str, IdsAndLabels] | None = None
) -> Iterator[str]:
    """Yield the samples as lines of JSON, each with the sample's id and kind.

    trl            `messages` with a list `train` of one flag for each. With `rows` (by sample id)
                   also `input_ids`, `labels` and `completion_mask`. TRL's SFT trainer takes these
                   as they are, cut at its `max_length`; it ignores `train`, so without them
                   it would train on the bad steps too.
    sharegpt       `conversations` with a flag `train` in each turn, which Axolotl reads if it is
                   told `message_field_training: train`. A reader that ignores the flag would train
                   on the bad steps.
    llamafactory   ShareGPT turns with the system text apart. A conversation has one line for each
                   trained turn, which is its last: LLaMA-Factory reads no flags, so train on these
                   with `mask_history: true`. Other readers find the flags in `train` of each turn.

    A turn that was grown by continuation has `spans` in the first two formats: the text of each
    with its flag. Readers that ignore spans would train on results too, unless they take `labels`.
    The definitions of tools are in `tools`, beside the turns; a call is part of its reply's text.

    Raises:
        ConfigError: there is no such format.
        DataFault: `rows` lacks a sample, or a conversation cannot be written in the format.
    """
    writers: dict[str, Callable[[Sample], Iterable[dict[str, Any]]]] = {
        "trl": lambda sample: [_trl(sample, rows)],
        "sharegpt": lambda sample: [_sharegpt(sample)],
        "llamafactory": _llamafactory,
    }
    if format not in writers:
        raise ConfigError(
            f"there is no export format {format!r}; choose one of {', '.join(get_args(ConversationFormat))}"
        )
    return (
        json.dumps({"id": sample_id(sample), "kind": sample.kind, **record}, ensure_ascii=False)
        for sample in samples
        for record in writers[format](sample)
    )


def pair_lines(preferences: Iterable[Preference], format: str) -> Iterator[str]:
    """Yield preferences as lines of JSON that `imports.read_pairs` and TRL read: `prompt`, `chosen`
    and `rejected`, the id of the instance, and the rewards.

    Turns have `role` and `content` in format `trl`, `from` and `value` in `sharegpt`. A reply
    within a side that carries no loss has the flag `train` False. TRL's own collator masks only the
    prompt: with it, the observations within a side carry loss too.

    Raises `ConfigError` for another format: LLaMA-Factory's pairs have one reply on each side.
    """
    write_turn = {"trl": _openai_turn, "sharegpt": _sharegpt_turn}.get(format)
    if write_turn is None:
        raise ConfigError(f"preference pairs cannot be written as {format!r}; choose trl or sharegpt")
    for preference in preferences:
        instance, turns = preference.chosen.instance, without_tools(preference.chosen)
        start = next(position for position, message in enumerate(turns) if message.train)
        record = {
            "id": None if instance is None else instance.key,
            "prompt": [write_turn(message) for message in turns[:start]],
            "chosen": [{**write_turn(message), **_loss_flag(message)} for message in turns[start:]],
            "rejected": [
                {**write_turn(message), **_loss_flag(message)} for message in without_tools(preference.rejected)[start:]
            ],
            "chosen_reward": preference.chosen_reward,
            "rejected_reward": preference.rejected_reward,
            **tools_of(preference.chosen),
        }
        yield json.dumps(record, ensure_ascii=False)


def _trl(sample: Sample, rows: Mapping[str, IdsAndLabels] | None) -> dict[str, Any]:
    messages = without_tools(sample)
    record: dict[str, Any] = {
        "messages": [_openai_turn(message) for message in messages],
        "train": [message.train for message in messages],
        **tools_of(sample),
    }
    if rows is None:
        return record
    row = rows.get(sample_id(sample))
    if row is None:
        raise DataFault(
            f"sample {sample_id(sample)} has no token row; export with the rows of its dataset, or without any"
        )
    ids, labels = row
    mask = [int(label == token) for token, label in zip(ids, labels, strict=True)]
    return record | {"input_ids": ids, "labels": labels, "completion_mask": mask}


def _sharegpt(sample: Sample) -> dict[str, Any]:
    turns = [{**_sharegpt_turn(message), "train": message.train} for message in without_tools(sample)]
    return {"conversations": turns, **tools_of(sample)}


def without_tools(sample: Sample) -> tuple[Message, ...]:
    """Return the turns of a sample without the one that defines tools, which are written to a
    separate field.
    """
    return sample.messages[1:] if sample.messages[0].role == "tools" else sample.messages


def tools_of(sample: Sample) -> dict[str, Any]:
    """Return the tool definitions of a sample as `{"tools": [...]}`; `{}` if it has none."""
    first = sample.messages[0]
    return {"tools": json.loads(first.text)} if first.role == "tools" else {}


def _llamafactory(sample: Sample) -> Iterator[dict[str, Any]]:
    has_system = sample.messages[0].role == "system"
    system = sample.messages[0].text if has_system else ""
    messages = sample.messages[1:] if has_system else sample.messages
    for position, message in enumerate(messages):
        expected_role = ("user", "assistant")[position % 2]
        if message.role != expected_role:
            raise DataFault(
                f"sample {sample_id(sample)}: turn {position} is the {message.role}'s where LLaMA-Factory wants the "
                f"{expected_role}'s; export it as trl or sharegpt"
            )
    for position, message in enumerate(messages):
        if message.spans:
            raise DataFault(
                f"sample {sample_id(sample)}: turn {position} has spans without loss, and LLaMA-Factory trains whole "
                "turns; export it as trl or sharegpt"
            )
        if message.train:
            turns = [{**_sharegpt_turn(before), "train": False} for before in messages[:position]]
            yield {"conversations": [*turns, {**_sharegpt_turn(message), "train": True}], "system": system}


def _openai_turn(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.text, **spans_of(message)}


def _sharegpt_turn(message: Message) -> dict[str, Any]:
    return {"from": _SHAREGPT_ROLES[message.role], "value": message.text, **spans_of(message)}


def _loss_flag(message: Message) -> dict[str, bool]:
    return {"train": False} if message.role == "assistant" and not message.train else {}


def spans_of(message: Message) -> dict[str, Any]:
    """Return the spans of a turn as `{"spans": [{"text", "train"}, ...]}`; `{}` for a turn without
    spans.
    """
    spans = [{"text": span.text, "train": span.train} for span in message.spans]
    return {"spans": spans} if spans else {}


Origin = Mapping[str, Any]
"""The origin of a row: ids of records in the store, by column name (see `formats.ORIGIN`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of an instance and its right answers, for the reward function of another
    program, which chooses its scoring rule by `data_source`.
    """

    text: str
    golds: tuple[str, ...]
    ability: str
    data_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings of a group-based RL training (GRPO) that another program is to run: the recipe's
    or, by default, those of ET-Agent's scripts. `model` is the directory of the initial policy.
    """

    model: str
    workspace: str
    run_id: str
    groups: int = 64
    generations: int = 16
    minibatch: int = 4
    learning_rate: float = 1e-6
    sigma_calls: float = 0.0
    sigma_length: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """A sample in a training set.

    `tokens` are the token ids and labels that were trained, None if they are not known. `question`
    is that of its instance, None in an environment without right answers. `tool_calls` are the
    tool calls in its episode, in order. `logprobs` has for each reply the natural-log probabilities
    of its tokens at sampling time, None where they are not known.
    """

    id: str
    sample: Sample
    origin: Origin
    tokens: IdsAndLabels | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    question: Question | None = None
    logprobs: Sequence[Sequence[float] | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """A preference pair in a training set."""

    id: str
    preference: Preference
    origin: Origin

    @property
    def prompt_length(self) -> int:
        """The length of the prompt: the number of turns before the first one that carries loss,
        which are the same on both sides.
        """
        turns = self.preference.chosen.messages
        return next(position for position, message in enumerate(turns) if message.train)

    @property
    def sides(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The turns of the chosen and of the rejected side after the prompt."""
        pair = self.preference
        return pair.chosen.messages[self.prompt_length :], pair.rejected.messages[self.prompt_length :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSet:
    """The training set of an iteration, of samples or of pairs. `facts` are listed in its card,
    value by name.
    """

    name: str
    """A short name for the data set: recipe and iteration."""
    facts: Mapping[str, Any]
    samples: Sequence[SampleRow] = ()
    pairs: Sequence[PairRow] = ()
    launch: Launch | None = None
    """The settings of a training on it; None where the initial policy is not known."""
    card_sections: Mapping[str, str] = field(default_factory=dict)
    """The sections of its card: their text, in Markdown, by their heading."""
    licence: str = ""
    """The identifier of a licence; empty if its card names none."""

    def __len__(self) -> int:
        return len(self.pairs or self.samples)


TOOL_ROLES = ("tools", "tool")
"""The roles of the turn that defines tools and of the turns with the results of calls."""


def file_keys(training_set: TrainingSet) -> list[str]:
    """Return a different key for each sample of a training set, to name its file by: its id, and
    `ID-2`, `ID-3` ... where it occurs again, as conversations of general data may.
    """
    counts: Counter[str] = Counter()
    keys = []
    for row in training_set.samples:
        counts[row.id] += 1
        keys.append(row.id if counts[row.id] == 1 else f"{row.id}-{counts[row.id]}")
    return keys


def samples_of(training_set: TrainingSet) -> Iterator[Sample]:
    """Yield the samples of a training set, and both sides of each of its pairs."""
    yield from (row.sample for row in training_set.samples)
    for pair in training_set.pairs:
        yield from (pair.preference.chosen, pair.preference.rejected)


def cut_replies_note(training_set: TrainingSet) -> str:
    """Return a note on how many trained replies were cut at their token limit, which the exported
    texts do not show; empty if none.
    """
    spans = [span for sample in samples_of(training_set) for message in sample.messages for span in message.parts]
    num_cut = sum(span.train and span.finish_reason == "length" for span in spans)
    reason = "a trainer ends them as if the model had"
    return f"left out is that {num_cut} trained replies were cut at their token limit; {reason}" if num_cut else ""


def rows_text(training_set: TrainingSet) -> str:
    """Return the number and the kind of the rows, as in "12 samples"."""
    return f"{len(training_set)} {'preference pairs' if training_set.pairs else 'samples'}"


def count_partly_trained_turns(training_set: TrainingSet) -> int:
    """Return how many turns of the samples carry loss in some of their spans, but not in all."""
    return sum(
        message.train and not all(span.train for span in message.parts)
        for row in training_set.samples
        for message in row.sample.messages
    )


def count_untrained_side_turns(training_set: TrainingSet) -> int:
    """Return how many turns within the sides of pairs carry no loss in at least one span. Such
    turns include observations.
    """
    return sum(
        not all(span.train for span in message.parts)
        for pair in training_set.pairs
        for side in pair.sides
        for message in side
    )


def opening_turns(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the turns of an episode before its first reply: those before the turn that was grown
    by continuation, if there is one, else as many as `opening_length` says. An outside agent may
    send fewer, so the first turn that is trained or has sampled tokens comes after them, too.
    """
    first_span = next((position for position, message in enumerate(messages) if message.spans), None)
    if first_span is not None:
        return messages[:first_span]
    replies = (position for position, message in enumerate(messages) if message.train or message.token_ids is not None)
    return messages[: min(opening_length(messages), next(replies, len(messages)))]
