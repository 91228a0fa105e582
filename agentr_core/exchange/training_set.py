"""A training set with everything that is known about its rows: the input of every format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentr_core.episodes.transcript import opening_length
from agentr_core.samples.export import Tokens
from agentr_core.types import Message, Preference, Sample

Origin = Mapping[str, Any]
"""The origin of a row: ids in the store by the names of its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of an instance and its right answers, as a reward function of another program
    asks for them: `data_source` is the name by which that function knows its rule.
    """

    text: str
    golds: tuple[str, ...]
    ability: str
    data_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a recipe says about a training in groups that another program is to do, with the values
    of ET-Agent's scripts where it says nothing. `model` is the directory that it starts from.
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

    `tokens` are the tokens it was trained as, None if they are not known; `tool_calls` are the tool
    calls in its episode, in order. `question` is that of its instance, None in a world without
    right answers.
    """

    id: str
    sample: Sample
    origin: Origin
    tokens: Tokens | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    question: Question | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """A preference in a training set, by its id."""

    id: str
    preference: Preference
    origin: Origin

    @property
    def start(self) -> int:
        """The number of turns that both sides begin with: those before the first that carries
        loss.
        """
        turns = self.preference.chosen.messages
        return next(position for position, message in enumerate(turns) if message.train)

    @property
    def sides(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The turns of the chosen and of the rejected side after those that both begin with."""
        pair = self.preference
        return pair.chosen.messages[self.start :], pair.rejected.messages[self.start :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSet:
    """The training set of an iteration, of samples or of pairs. `facts` describe its contents to a
    reader.
    """

    name: str
    """Short enough for the name of a data set: recipe, iteration."""
    facts: Mapping[str, Any]
    samples: Sequence[SampleRow] = ()
    pairs: Sequence[PairRow] = ()
    launch: Launch | None = None
    """None where it is not known what a training would start from."""

    def __len__(self) -> int:
        return len(self.pairs or self.samples)


TOOL_TURNS = ("tools", "tool")
"""The roles of the turns that define tools, and that have the results of calls."""


def samples_of(training_set: TrainingSet) -> Iterator[Sample]:
    """Yield the samples of a training set, and both sides of each of its pairs."""
    yield from (row.sample for row in training_set.samples)
    for pair in training_set.pairs:
        yield from (pair.preference.chosen, pair.preference.rejected)


def cut_replies(training_set: TrainingSet) -> str:
    """Return how many trained replies ended at their token limit, which texts do not say; empty if
    none.
    """
    spans = [span for sample in samples_of(training_set) for message in sample.messages for span in message.parts]
    count = sum(span.train and span.finish_reason == "length" for span in spans)
    why = "a trainer ends them as if the model had"
    return f"left out is that {count} trained replies were cut at their token limit; {why}" if count else ""


def rows_told(training_set: TrainingSet) -> str:
    """Return how many rows there are, and of what."""
    return f"{len(training_set)} {'preference pairs' if training_set.pairs else 'samples'}"


def cut_turns(training_set: TrainingSet) -> int:
    """Return how many turns of samples carry loss only in part."""
    return sum(
        message.train and not all(span.train for span in message.parts)
        for row in training_set.samples
        for message in row.sample.messages
    )


def spared_turns(training_set: TrainingSet) -> int:
    """Return how many turns within a side of a pair carry no loss."""
    return sum(
        not all(span.train for span in message.parts)
        for pair in training_set.pairs
        for side in pair.sides
        for message in side
    )


def opening(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the turns of an episode before its first reply: system and user if its assistant turn
    is grown; else instruction, acknowledgement and first observation.
    """
    grown = next((position for position, message in enumerate(messages) if message.spans), None)
    return messages[: opening_length(messages) if grown is None else grown]
