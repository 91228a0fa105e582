"""Training samples and datasets to rows and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from agentr_core.fingerprint import canonical
from agentr_core.store.codec.texts import instance_row, text_id, text_rows
from agentr_core.store.database import Store, put
from agentr_core.store.tables import Row, Rows
from agentr_core.types import Instance, Message, Provenance, Sample, Span


def sample_rows(
    sample_id: str,
    sample: Sample,
    *,
    iteration_id: str,
    pair_id: str | None = None,
    trajectory_id: str | None = None,
) -> Rows:
    """Return the rows of a sample and its messages; they are one unit. Its length is not known
    before it is in a dataset (`store_dataset`).

    Args:
        pair_id: the pair a revision was made from.
        trajectory_id: the stored trajectory behind it, such as an expert's episode or a continued
            splice.
    """
    return {
        "instance": [] if sample.instance is None else [instance_row(sample.instance)],
        "text": text_rows(
            text for message in sample.messages for text in (message.text, *(span.text for span in message.spans))
        ),
        "sample": [
            {
                **_sample_row(sample_id, sample, iteration_id),
                "pair_id": pair_id,
                "trajectory_id": trajectory_id,
            }
        ],
        "message": [
            {"sample_id": sample_id, "position": position, "role": message.role, **_part_row(message)}
            for position, message in enumerate(sample.messages)
        ],
        "message_span": [
            {"sample_id": sample_id, "message": number, "position": position, **_part_row(span)}
            for number, message in enumerate(sample.messages)
            for position, span in enumerate(message.spans)
        ],
    }


def dataset_rows(
    dataset_id: str, sample_ids: Sequence[str], *, iteration_id: str, content_hash: str, counts: Mapping[str, Any]
) -> Rows:
    """Return the rows of a dataset: its samples in their order; they are one unit."""
    return {
        "dataset": [
            {
                "dataset_id": dataset_id,
                "iteration_id": iteration_id,
                "hash": content_hash,
                "counts": canonical(dict(counts)),
            }
        ],
        "dataset_row": [
            {"dataset_id": dataset_id, "position": position, "sample_id": sample_id}
            for position, sample_id in enumerate(sample_ids)
        ],
    }


def store_dataset(store: Store, rows: Rows, lengths: Mapping[str, tuple[int, int]]) -> None:
    """Store the rows of a dataset and of its new samples, and the length of each of its samples, by
    id: its tokens, and those of them that carry loss. Raises as `Store.write` does.
    """
    tokens, trained = ([length[kind] for length in lengths.values()] for kind in (0, 1))
    with store.transaction() as con:
        put(con, rows)
        con.execute(_SET_LENGTHS, [list(lengths), tokens, trained])


def load_samples(
    store: Store, ids: Sequence[str] | None = None, *, iteration_id: str | None = None
) -> dict[str, Sample]:
    """Return stored samples by id: those of the given ids in their order, or those of an iteration
    sorted by id.
    """
    if not store.path.exists():
        return {}
    chosen = {"ids": None if ids is None else list(ids), "iteration_id": iteration_id}
    with store.reading() as con:
        heads = con.execute(_SAMPLES, chosen).fetchall()
        records = con.execute(_MESSAGES, chosen).fetchall()
        parts = con.execute(_SPANS, chosen).fetchall()
    spans = {
        key: tuple(Span(**_part(part)) for _, _, *part in group) for key, group in groupby(parts, key=itemgetter(0, 1))
    }
    messages = {
        key: tuple(_message(record, spans.get(record[:2], ())) for record in group)
        for key, group in groupby(records, key=itemgetter(0))
    }
    found = {record[0]: _sample(record, messages.get(record[0], ())) for record in heads}
    return found if ids is None else {key: found[key] for key in ids if key in found}


def load_dataset(store: Store, dataset_id: str) -> list[tuple[str, Sample]]:
    """Return the sample ids and samples of a dataset in their order; a sample may occur more than
    once.
    """
    rows = store.rows("select sample_id from dataset_row where dataset_id = ? order by position", dataset_id)
    ids = [sample_id for (sample_id,) in rows]
    samples = load_samples(store, ids)
    return [(sample_id, samples[sample_id]) for sample_id in ids]


def _sample_row(sample_id: str, sample: Sample, iteration_id: str) -> Row:
    origin = sample.provenance
    return {
        "sample_id": sample_id,
        "iteration_id": iteration_id,
        "kind": str(sample.kind),
        "instance_id": None if sample.instance is None else sample.instance.key,
        "tree_id": origin.tree_id or None,
        "good_leaf": origin.good_leaf,
        "bad_leaf": origin.bad_leaf,
        "shared_steps": origin.split,
        "cut": origin.cut,
        "good_reward": origin.good_reward,
        "bad_reward": origin.bad_reward,
        "extra": canonical(_extra(sample)),
    }


def _extra(sample: Sample) -> dict[str, Any]:
    """Return the further facts of a sample; they also say which of its turns are examples."""
    shown = [position for position, message in enumerate(sample.messages) if message.example]
    return {**sample.provenance.extra, **({_EXAMPLES: shown} if shown else {})}


def _part_row(part: Message | Span) -> Row:
    return {
        "text_id": text_id(part.text),
        "train": part.train,
        "token_ids": None if part.token_ids is None else list(part.token_ids),
        "finish_reason": part.finish_reason,
        "tokenizer": part.tokenizer,
    }


def _message(record: tuple[Any, ...], spans: tuple[Span, ...]) -> Message:
    _, _, role, *part = record
    return Message(role=role, spans=spans, **_part(part))


def _part(record: Sequence[Any]) -> dict[str, Any]:
    """Return the fields that a turn and a span have in common."""
    text, train, token_ids, finish_reason, tokenizer = record
    return {
        "text": text,
        "train": train,
        "token_ids": None if token_ids is None else tuple(token_ids),
        "finish_reason": finish_reason,
        "tokenizer": tokenizer,
    }


def _sample(record: tuple[Any, ...], messages: tuple[Message, ...]) -> Sample:
    _, kind, environment, split, index, tree_id, good_leaf, bad_leaf, shared, cut, good, bad, extra = record
    further = json.loads(extra)
    shown = set(further.pop(_EXAMPLES, ()))
    return Sample(
        kind=kind,
        messages=tuple(replace(one, example=True) if at in shown else one for at, one in enumerate(messages)),
        instance=None if environment is None else Instance(environment=environment, split=split, index=index),
        provenance=Provenance(
            tree_id=tree_id or "",
            good_leaf=good_leaf,
            bad_leaf=bad_leaf,
            split=shared,
            cut=cut,
            good_reward=good,
            bad_reward=bad,
            extra=further,
        ),
    )


_EXAMPLES = "example_turns"
"""The name, in a sample's further facts, of the positions of its turns that are examples."""

_SET_LENGTHS = """
update sample set num_tokens = tokens, num_trained_tokens = trained
from (select unnest(?::varchar[]) as id, unnest(?::integer[]) as tokens, unnest(?::integer[]) as trained)
where sample_id = id
"""

_CHOSEN = """
($ids::varchar[] is null or s.sample_id in (select unnest($ids::varchar[])))
    and ($iteration_id::varchar is null or s.iteration_id = $iteration_id)
"""
_SAMPLES = f"""
select s.sample_id, s.kind, i.environment, i.split, i.instance_index, s.tree_id, s.good_leaf, s.bad_leaf,
    s.shared_steps, s.cut, s.good_reward, s.bad_reward, s.extra
from sample s left join instance i using (instance_id)
where {_CHOSEN}
order by s.sample_id
"""
_MESSAGES = f"""
select m.sample_id, m.position, m.role, t.text, m.train, m.token_ids, m.finish_reason, m.tokenizer
from message m
join sample s using (sample_id)
join text t using (text_id)
where {_CHOSEN}
order by m.sample_id, m.position
"""
_SPANS = f"""
select p.sample_id, p.message, t.text, p.train, p.token_ids, p.finish_reason, p.tokenizer
from message_span p
join sample s using (sample_id)
join text t using (text_id)
where {_CHOSEN}
order by p.sample_id, p.message, p.position
"""
