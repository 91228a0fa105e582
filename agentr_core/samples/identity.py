"""What identifies a sample, and which of its turns may carry loss."""

from __future__ import annotations

from typing import Any

from agentr_core.errors import DataFault
from agentr_core.fingerprint import fingerprint
from agentr_core.types import Message, Sample, SampleKind, Span

TurnClass = str
"""The purpose of a trained turn, by which trained tokens are counted: revision_turn and good_suffix
in a revision, good_path in a good path, else the kind of the sample.
"""


def sample_id(sample: Sample) -> str:
    """Return the id of a sample: a fingerprint of its content and provenance."""
    messages = [_identified_message(message) for message in sample.messages]
    return fingerprint("sample", sample.kind, messages, sample.instance, sample.provenance)


def conversation_key(sample: Sample) -> str:
    """Return a fingerprint of what training reads: texts, roles and train flags, but not where they
    come from.
    """
    return fingerprint(
        [(m.role, m.text, m.train, *((span.text, span.train) for span in m.spans)) for m in sample.messages]
    )


def content_order(sample: Sample) -> tuple[str, int, int]:
    """Return a key that orders samples by what is in them, whatever run made them; samples of equal
    content are ordered by the leaves that they end at.
    """
    content = fingerprint(sample.kind, [_identified_message(message) for message in sample.messages], sample.instance)
    leaves = (sample.provenance.good_leaf, sample.provenance.bad_leaf)
    good, bad = (-1 if leaf is None else leaf for leaf in leaves)
    return content, good, bad


def trained_spans(sample: Sample) -> tuple[Span, ...]:
    """Return the parts of a sample that carry loss, in order: turns, or spans of turns that were
    grown.
    """
    return tuple(span for message in sample.messages for span in message.parts if span.train)


def turn_classes(sample: Sample) -> tuple[TurnClass, ...]:
    """Return the class of each trained span of a sample; in a revision sample the first one is the
    revision turn.

    If the sample was read through a window, that holds for its first stretch alone.
    """
    count = len(trained_spans(sample))
    if sample.kind != SampleKind.REVISION:
        return ("good_path" if sample.kind == SampleKind.GOOD else str(sample.kind),) * count
    suffix = "good_suffix"
    if sample.provenance.extra.get("stretch", 0):
        return (suffix,) * count
    return ("revision_turn", *(suffix,) * (count - 1))[:count]


def check_flags(sample: Sample) -> None:
    """Raise `DataFault` if a turn is trained that must not be: only replies may, and in a revision
    sample none before the revision turn.

    The acknowledgement of the instruction and the `cut` kept replies come before the revision turn.
    """
    fault = _flag_fault(sample)
    if fault:
        raise DataFault(f"{sample.kind} sample {sample_id(sample)} {fault}")


def _identified_message(message: Message) -> dict[str, Any]:
    """Return the part of a turn that goes into the id of its sample.

    Whether a turn was cut changes what is trained of it. Only a cut is recorded; its absence is the
    default, so that samples of earlier versions keep their ids.
    """
    fields = {"role": message.role, **_identified_span(message), **({"example": True} if message.example else {})}
    return fields if not message.spans else {**fields, "spans": [_identified_span(span) for span in message.spans]}


def _identified_span(part: Message | Span) -> dict[str, Any]:
    fields = {"text": part.text, "train": part.train, "token_ids": part.token_ids}
    return fields if part.finish_reason != "length" else {**fields, "finish_reason": "length"}


def _flag_fault(sample: Sample) -> str:
    if not trained_spans(sample):
        return "has no trained turn; reject it before it reaches a dataset"
    wrong = [position for position, m in enumerate(sample.messages) if m.train and m.role != "assistant"]
    if any(m.train and m.example for m in sample.messages):
        return "trains a turn of an example; only replies of its own episode carry loss"
    if wrong:
        return f"trains turn {wrong[0]}, which is not the assistant's; only replies carry loss"
    cut = sample.provenance.cut
    if sample.kind == SampleKind.REVISION:
        if cut is None:
            return "does not say how many bad steps it keeps; set provenance.cut"
        flags = _reply_flags(sample)
        later = bool(sample.provenance.extra.get("stretch", 0))
        # The acknowledgement comes first; a later stretch begins after the revision turn, which it
        # may still show.
        # Of these replies a window shows the first one, and those that it has not dropped.
        replies = cut + later
        num_untrained = 1 + min(replies, 1) + max(0, replies - 1 - sample.provenance.extra.get("dropped", 0))
        if flags[:num_untrained] != [False] * num_untrained or not (later or flags[num_untrained]):
            return f"keeps {cut} bad steps and trains one of them, or not the revision turn after them; build it again"
    return ""


def _reply_flags(sample: Sample) -> list[bool]:
    """Return whether each reply carries loss, after one flag that is always False: that of the
    acknowledgement or, in its place, of the turn that the replies are spans of, or that defines
    tools.
    """
    turns = [message for message in sample.messages if message.role == "assistant" and not message.example]
    spans = [span for turn in turns for span in turn.spans]
    # An observation follows each reply.
    if spans:
        return [False, *(span.train for span in spans[::2])]
    acknowledged = sample.messages[0].role != "tools"
    return [*([] if acknowledged else [False]), *(turn.train for turn in turns)]


# The label that marks a token without loss.

IGNORED = -100
"""What torch's cross entropy skips by default."""
