"""A training set with all that is known of its rows, as every format is given it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentr_core.episodes.transcript import opening_length
from agentr_core.samples.export import Tokens
from agentr_core.types import Message, Preference, Sample

Origin = Mapping[str, Any]
"""Where a row comes from: ids in the store by the names of its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """A sample in a training set.

    `tokens` are those that it was trained as, None where they are not known; `tool_calls` the calls
    of tools in its episode, in their order.
    """

    id: str
    sample: Sample
    origin: Origin
    tokens: Tokens | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """A preference in a training set, by its id."""

    id: str
    preference: Preference
    origin: Origin

    @property
    def start(self) -> int:
        """How many turns both sides begin with: those before the first that carries loss."""
        turns = self.preference.chosen.messages
        return next(position for position, message in enumerate(turns) if message.train)

    @property
    def sides(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """What the chosen and the rejected side say after the turns that both begin with."""
        pair = self.preference
        return pair.chosen.messages[self.start :], pair.rejected.messages[self.start :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSet:
    """The training set of an iteration, of samples or of pairs. `facts` say what it is made of, for
    a reader.
    """

    name: str
    """Short enough for the name of a data set: recipe, iteration."""
    facts: Mapping[str, Any]
    samples: Sequence[SampleRow] = ()
    pairs: Sequence[PairRow] = ()

    def __len__(self) -> int:
        return len(self.pairs or self.samples)


def cut_turns(training_set: TrainingSet) -> int:
    """Return how many turns of samples carry loss in a part of them only."""
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
    """Return the turns of an episode before its first reply: system and user where its turn is
    grown; else instruction, acknowledgement and first observation.
    """
    grown = next((position for position, message in enumerate(messages) if message.spans), None)
    return messages[: opening_length(messages) if grown is None else grown]
