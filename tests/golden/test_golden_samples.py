"""Samples of one iteration, beside those that version 269e248 made of the same recipe and model in
float32.

`samples/expected-LIMIT.json` were written by that version, and are never made anew by a later one:

    PYTHONPATH=CHECKOUT_OF_269e248:tests/support python tests/golden/test_golden_samples.py

What has changed since on purpose is said where it shows, with its number in issue 15.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from door import Door

from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.critique import critique
from agentr_core.methods.agent_r.splice import splice_pairs
from agentr_core.methods.faults import parse
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.start import begin, start
from agentr_core.stages.dataset import dataset, stored_tokens
from agentr_core.store.codec.samples import load_samples
from agentr_core.types import Message
from tasks.wiring import quiet_workplace, reference

FOLDER = Path(__file__).parent / "samples"
ROOMY, TIGHT = 128, 24
"""Limits of a reply: none reaches the first, and some reach the second."""

Record = dict[str, Any]


def recipe(workspace: Path, limit: int) -> dict[str, Any]:
    """Return a small recipe with pairs, verdicts and splices; `limit` is the most tokens of a
    reply.
    """
    return {
        "name": "golden",
        "workspace": str(workspace),
        "seed": 3,
        "environment": {"name": "door"},
        # Ids of trees, and with them the order of samples, follow from how the model is named.
        "model": {"path": "model", "dtype": "float32", "max_batch": 16, "device": "cpu"},
        "search": {"dives": 3, "width": 3, "depth": 4, "max_new_tokens": limit},
        "critique": {"max_new_tokens": 12, "unparsable": "bad"},
        "pairs": {"alpha": [0.5], "beta": 0.2},
        "splice": {"mode": "verified", "no_error": "reject"},
    }


def make(workspace: Path, limit: int) -> tuple[list[Record], Workplace]:
    """Make the dataset of a first iteration; return its samples in their order, and where they were
    made.
    """
    parsed = parse(recipe(workspace, limit))
    place = replace(quiet_workplace(reference(parsed), parsed), make_environment=lambda _: Door())
    return asyncio.run(_make(place)), place


async def _make(place: Workplace) -> list[Record]:
    await start(place)
    # A run that an earlier version began goes on with the seeds that it began with (number 14).
    with place.store.transaction() as con:
        con.execute("delete from stage_input")
    await begin(place, 1)
    for stage in (collect, critique, splice_pairs, dataset):
        await stage(place, 1)
    order = [key for (key,) in place.store.rows("select sample_id from dataset_row order by position")]
    samples = load_samples(place.store, order)
    return [
        {
            "kind": str(samples[key].kind),
            "instance": "" if (found := samples[key].instance) is None else found.key,
            "messages": [turn(message) for message in samples[key].messages],
            "input_ids": fingerprint(ids),
            "trained": spans(labels),
        }
        for key, (ids, labels) in zip(order, stored_tokens(place, 1), strict=True)
    ]


def turn(message: Message) -> list[Any]:
    """Return role and train flag of a turn, and hashes of its text and of the ids it was sampled
    as.
    """
    ids = message.token_ids
    return [message.role, message.train, fingerprint(message.text), None if ids is None else fingerprint(list(ids))]


def spans(labels: Sequence[int]) -> list[list[int]]:
    """Return where tokens carry loss: first and last position of each stretch."""
    trained = {position for position, label in enumerate(labels) if label >= 0}
    starts, ends = ([p for p in sorted(trained) if p + step not in trained] for step in (-1, 1))
    return [list(pair) for pair in zip(starts, ends, strict=True)]


def expected(limit: int) -> list[Record]:
    found: list[Record] = json.loads((FOLDER / f"expected-{limit}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("limit", [ROOMY, pytest.param(TIGHT, marks=pytest.mark.long)])
def test_samples_are_the_recorded_ones_in_their_order(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded when random streams and orders were named by what is asked, on 2026-11-28."""
    monkeypatch.chdir(FOLDER)
    known = expected(limit)
    assert {record["kind"] for record in known} == {"good", "revision"}
    found = make(tmp_path, limit)[0]
    # The last bits of a logit depend on the processor's instructions: with those of some, one draw
    # of these thousands falls differently.
    assert len(found) == len(known)
    assert len(set(map(json.dumps, found)) - set(map(json.dumps, known))) <= 1


def main() -> None:
    """Write what this version makes."""
    os.chdir(FOLDER)
    for limit in (ROOMY, TIGHT):
        with tempfile.TemporaryDirectory() as workspace:
            lines = map(json.dumps, make(Path(workspace), limit)[0])
            Path(f"expected-{limit}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
