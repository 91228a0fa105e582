"""Turns of a conversation, and the spans of a turn that was grown by continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentr_core.fingerprint import later

Role = Literal["system", "user", "assistant", "tool", "tools"]
"""The role of a turn's speaker. A `tool` turn is the result of a call; a `tools` turn, always the
first, defines the tools that may be called, as a JSON list: chat templates and servers take it
separately from the other turns.
"""
FinishReason = Literal["stop", "length"]
"""Why a reply ended: the model ended it (or a stop string did), or the token limit cut it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of an assistant turn: what the model wrote between two stops, or a text from outside
    that was appended to it, such as a tool's result. The fields are those of `Message`.
    """

    text: str
    train: bool = False
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    tokenizer: str | None = None

    @property
    def written(self) -> bool:
        """Whether the span was written, not sampled from a model."""
        return not self.token_ids and self.finish_reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation; `train` says whether its tokens carry loss.

    `token_ids` are the tokens the sampler produced for an assistant turn (end-of-turn token
    included), or None for a turn that was not sampled. Training uses them as they are.
    `finish_reason` says why a sampled turn ended, None if that is not known. A turn that was cut
    ends without a trained end of turn, since the model never produced one. `tokenizer` is the
    fingerprint of the tokenizer that made the ids; with any other tokenizer the text is tokenised
    again. None stands for that of the run's own model.

    An `example` is a turn of an episode that is shown before the problem; it is never trained.

    An assistant turn that was grown by continuation has `spans`, and these have tokens, flags and
    finish reasons of their own; make it with `grown_turn`. As the last turn of a prompt it is
    unfinished, and the reply continues it.
    """

    role: Role
    text: str
    train: bool = False
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    tokenizer: str | None = None
    spans: tuple[Span, ...] = later(())
    example: bool = later(False)

    def __post_init__(self) -> None:
        if self.spans and (self.role, self.text, self.train, self.token_ids) != _of_spans(self.spans):
            raise ValueError(
                "a turn with spans must have the role, text and flag of its spans; make it with `grown_turn`"
            )

    @property
    def parts(self) -> tuple[Span, ...]:
        """The spans of the turn; a turn without any is one span."""
        if self.spans:
            return self.spans
        whole = Span(
            text=self.text,
            train=self.train,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            tokenizer=self.tokenizer,
        )
        return (whole,)


def grown_turn(spans: Sequence[Span]) -> Message:
    """Return the assistant turn made of one or more spans; its `train` says whether any of them
    carries loss.
    """
    role, text, train, _ = _of_spans(spans)
    return Message(role=role, text=text, train=train, spans=tuple(spans))


def _of_spans(spans: Sequence[Span]) -> tuple[Role, str, bool, None]:
    return "assistant", "".join(span.text for span in spans), any(span.train for span in spans), None
