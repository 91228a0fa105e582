"""Revision samples as the report shows them: each turn with its part, its verdict, and its train
flag.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from agentr_core.episodes.transcript import OPENING, opening_length
from agentr_core.fingerprint import derive_seed
from agentr_core.reports.document import RevisionExample, Turn, TurnPart
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.critiques import load_critiques
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.queries.datasets import trained_revisions
from agentr_core.texts import counted
from agentr_core.types import Critique, Message, Role, Sample, Span, StepVerdict


def examples(place: Workplace, iteration: int, *, count: int) -> tuple[RevisionExample, ...]:
    """Return up to `count` revision samples of an iteration that were trained on, drawn by the
    recipe's seed.
    """
    rows = trained_revisions(place.store, place.iteration_id(iteration))
    rng = random.Random(derive_seed(place.recipe.seed, "examples", iteration))
    chosen = dict(rng.sample(rows, min(count, len(rows))))
    samples = load_samples(place.store, list(chosen))
    critiques = load_critiques(place.store, [pair for pair in chosen.values() if pair])
    most = place.recipe.agent_r.quote_chars
    return tuple(_example(key, sample, critiques.get(chosen[key] or ""), most) for key, sample in samples.items())


def _example(key: str, sample: Sample, critique: Critique | None, most: int) -> RevisionExample:
    origin = sample.provenance
    live = origin.extra.get("live_reward")
    return RevisionExample(
        sample_id=key,
        instance=sample.instance.key if sample.instance else "",
        tree_id=origin.tree_id,
        good_reward=origin.good_reward or 0.0,
        bad_reward=origin.bad_reward or 0.0,
        split=origin.split or 0,
        cut=origin.cut or 0,
        turns=_turns(sample, critique, most),
        live_reward=None if live is None else float(live),
    )


def _turns(sample: Sample, critique: Critique | None, most: int) -> tuple[Turn, ...]:
    split, cut = sample.provenance.split or 0, sample.provenance.cut or 0
    verdicts: dict[int, StepVerdict] = {v.position: v for v in critique.verdicts} if critique else {}
    first_error = critique.first_error if critique else None
    turns = []
    dropped = int(sample.provenance.extra.get("dropped", 0))
    for number, role, message in _numbered(sample):
        # Turns that a window left out lie between the first reply and the turn after it.
        position = (number - OPENING + 2 * dropped * (number > OPENING)) // 2
        reply = role == "assistant" and number >= OPENING
        verdict = verdicts.get(position) if reply and position < cut else None
        turns.append(
            Turn(
                role=role,
                text=_quoted(message.text, most),
                part=_part(number, position, split, cut),
                train=message.train,
                first_error=reply and position == first_error and position < cut,
                verdict=str(verdict.verdict) if verdict else "",
                judge_reply=_quoted(verdict.reply, most) if verdict else "",
            )
        )
    return tuple(turns)


def _quoted(text: str, most: int) -> str:
    left = len(text) - most
    return text if left <= 0 else f"{text[:most]}\n[... {counted(left, 'character')} more]"


def _numbered(sample: Sample) -> Iterator[tuple[int, Role, Message | Span]]:
    """Yield the turns of a sample with their numbers; the spans of a grown turn are numbered like
    turns after an opening.
    """
    # A system turn before the instruction, and examples, push the first turns to negative numbers.
    grown = any(message.spans for message in sample.messages)
    examples = sum(message.example for message in sample.messages)
    before = examples if grown else opening_length(sample.messages) - OPENING
    for number, message in enumerate(sample.messages, start=-before):
        if message.spans:
            for place, span in enumerate(message.spans):
                yield OPENING + place, "user" if place % 2 else "assistant", span
        else:
            yield number, message.role, message


def _part(number: int, position: int, split: int, cut: int) -> TurnPart:
    if number < OPENING:
        return "opening"
    if position >= cut:
        return "revision" if position == cut else "good"
    # A cut may lie in the shared steps: what follows it still belongs to the revision turn.
    return "shared" if position < split else "bad"
