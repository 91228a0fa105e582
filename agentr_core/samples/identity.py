"""The ids of samples, an order that does not depend on the run, and the parts that carry loss."""

from __future__ import annotations

from typing import Any

from agentr_core.fingerprint import fingerprint
from agentr_core.types import Message, Sample, Span


def sample_id(sample: Sample) -> str:
    """Return the id of a sample: a fingerprint of its content and provenance."""
    messages = [_message_fields(message) for message in sample.messages]
    return fingerprint("sample", sample.kind, messages, sample.instance, sample.provenance)


def conversation_key(sample: Sample) -> str:
    """Return a fingerprint of the conversation alone: roles, texts and train flags of its turns and
    spans, without instance and provenance.
    """
    return fingerprint(
        [(m.role, m.text, m.train, *((span.text, span.train) for span in m.spans)) for m in sample.messages]
    )


def content_sort_key(sample: Sample) -> tuple[str, int, int]:
    """Return a sort key that does not depend on the run: kind, turns and instance, then the indices
    of the good and the bad leaf in the search tree (-1 for none).
    """
    content = fingerprint(sample.kind, [_message_fields(message) for message in sample.messages], sample.instance)
    leaves = (sample.provenance.good_leaf, sample.provenance.bad_leaf)
    good, bad = (-1 if leaf is None else leaf for leaf in leaves)
    return content, good, bad


def trained_spans(sample: Sample) -> tuple[Span, ...]:
    """Return the parts of a sample that carry loss, in order. A turn without spans is one span."""
    return tuple(span for message in sample.messages for span in message.parts if span.train)


def _message_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a turn that go into the id of its sample.

    The finish reason is included only if it is "length", where it changes what is trained: samples
    of earlier versions, which have none, keep their ids.
    """
    fields = {"role": message.role, **_span_fields(message), **({"example": True} if message.example else {})}
    return fields if not message.spans else {**fields, "spans": [_span_fields(span) for span in message.spans]}


def _span_fields(part: Message | Span) -> dict[str, Any]:
    fields = {"text": part.text, "train": part.train, "token_ids": part.token_ids}
    return fields if part.finish_reason != "length" else {**fields, "finish_reason": "length"}


# The label that marks a token without loss.

IGNORE_INDEX = -100
"""The default `ignore_index` of torch's cross entropy."""
