"""The contents of each page: rows from the store as the values of a template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from agentr_core.reports import addresses
from agentr_core.samples.rendering import ReadToken
from agentr_core.store import Store
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.queries.datasets import sample_head
from agentr_core.store.queries.funnels import rejection_counts
from agentr_core.store.queries.groups import group_head, group_rollouts, group_steps
from agentr_core.store.queries.lineage import ancestry, entities_beginning
from agentr_core.store.queries.overview import (
    EvaluationLine,
    evaluation_lines,
    event_lines,
    iteration_lines,
    run_line,
    run_lines,
)
from agentr_core.store.queries.paths import Derivation, family, tool_calls, trajectory_head, trajectory_steps
from agentr_core.store.queries.preferences import preference_head
from agentr_core.store.queries.runs import runs_beginning
from agentr_core.texts import visible
from agentr_core.viewer.lists import list_page
from agentr_core.viewer.page import Page
from agentr_core.viewer.trees import by_position, pair, tree


def runs(store: Store) -> Page:
    """Return the page that lists the runs of a workspace."""
    return Page("runs", {"runs": run_lines(store)})


def run(store: Store, run_id: str) -> Page | None:
    """Return the page of a run, or None if it is not stored, as for every page here."""
    head = run_line(store, run_id)
    if head is None:
        return None
    iterations = iteration_lines(store, run_id)
    values = {
        "run": head,
        "iterations": iterations,
        "evaluations": _with_bases(evaluation_lines(store, run_id)),
        "events": event_lines(store, run_id),
        "learning": {one.iteration: group_steps(store, one.iteration_id) for one in iterations if one.groups},
        "rejections": {
            one.iteration: rejection_counts(store, one.iteration_id) for one in iterations if one.rejections
        },
    }
    return Page("run", values)


def listing(store: Store, name: str, query: Mapping[str, str]) -> Page:
    """Return a page of a long list."""
    return Page("list", {"list": list_page(store, name, query)})


def trajectory(store: Store, trajectory_id: str) -> Page | None:
    """Return the page of a trajectory, step by step."""
    head = trajectory_head(store, trajectory_id)
    if head is None:
        return None
    values = {
        "head": head,
        "steps": trajectory_steps(store, trajectory_id),
        "calls": by_position(tool_calls(store, "step", trajectory_id)),
        "ancestry": ancestry(store, trajectory_id, "trajectory"),
    }
    return Page("trajectory", values)


def relatives(store: Store, trajectory_id: str) -> Page | None:
    """Return the page of a trajectory's family: what was made from what, by which operator."""
    members = family(store, trajectory_id)
    if not members:
        return None
    return Page("family", {"trajectory_id": trajectory_id, "lines": _generations(members)})


def sample(store: Store, sample_id: str) -> Page | None:
    """Return the page of a sample: its messages, with the trained ones marked."""
    head = sample_head(store, sample_id)
    if head is None:
        return None
    values = {
        "head": head,
        "messages": load_samples(store, [sample_id])[sample_id].messages,
        "ancestry": ancestry(store, sample_id, "sample"),
    }
    return Page("sample", values)


class TokenTurn(NamedTuple):
    """Tokens in a row that one writer wrote, and the end that follows them; each with its place."""

    name: str
    tokens: list[tuple[int, ReadToken]]
    trained: int


def token_turns(tokens: Sequence[ReadToken]) -> list[TokenTurn]:
    """Return the tokens of a conversation by who wrote them; an end of turn belongs to what it
    ends.
    """
    turns: list[tuple[str, list[tuple[int, ReadToken]]]] = []
    for at, one in enumerate(tokens):
        if not turns or one.writer not in (turns[-1][0], "end of turn"):
            turns.append((one.writer, []))
        turns[-1][1].append((at, one))
    return [TokenTurn(name, parts, sum(one.train for _, one in parts)) for name, parts in turns]


def token_text(text: str) -> str:
    """Return what is shown of a token: signs for the white space in it, and marks for what cannot
    be seen.
    """
    return visible(text.replace("\n", "\u23ce").replace("\t", "\u21e5")).replace(" ", "\u00b7")


def preference(store: Store, preference_id: str) -> Page | None:
    """Return the page of a preference: its two samples side by side."""
    head = preference_head(store, preference_id)
    if head is None:
        return None
    samples = load_samples(store, [head.chosen_sample_id, head.rejected_sample_id])
    chosen, rejected = (samples[key].messages for key in (head.chosen_sample_id, head.rejected_sample_id))
    shared = next(
        (i for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    values = {
        "head": head,
        "shared": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
        "ancestry": ancestry(store, preference_id, "preference"),
    }
    return Page("preference", values)


def group(store: Store, iteration_id: str, step: int, number: int) -> Page | None:
    """Return the page of a group of reinforcement learning: its episodes with their advantages."""
    head = group_head(store, iteration_id, step, number)
    if head is None:
        return None
    rollouts = group_rollouts(store, iteration_id, step, number)
    most = max((abs(rollout.advantage) for rollout in rollouts), default=0.0) or 1.0
    return Page("group", {"head": head, "rollouts": rollouts, "most": most})


def find(store: Store, words: str) -> Page:
    """Return the page of the only thing whose id begins with `words`, or else that of the search
    for them.
    """
    words = words.strip()
    instead = addresses.with_query("/search", {"q": words})
    if re.fullmatch(r"[0-9a-f]{4,64}(#\d+)?", words):
        known = [("run", key) for key in runs_beginning(store, words)]
        known += [(one.kind, one.key) for one in entities_beginning(store, words, limit=3)]
        if len(known) == 1:
            instead = addresses.page_of(*known[0])
    return Page("", {}, elsewhere=instead)


def _with_bases(evaluations: Sequence[EvaluationLine]) -> list[tuple[EvaluationLine, str | None]]:
    """Return evaluations, each with the id of the earliest one of the same name, or None if it is
    that one.
    """
    firsts: dict[tuple[str, str], str] = {}
    for one in evaluations:
        firsts.setdefault((one.name, one.split), one.evaluation_id)
    bases = [firsts[one.name, one.split] for one in evaluations]
    return [(one, base if base != one.evaluation_id else None) for one, base in zip(evaluations, bases, strict=True)]


def _generations(members: Sequence[Derivation]) -> list[tuple[int, Derivation]]:
    """Return the members of a family with their depth, each after the one that it was made from;
    one with several parents stands below each of them.
    """
    known = {one.child_id for one in members}
    children: dict[str | None, list[Derivation]] = {}
    for one in members:
        children.setdefault(one.parent_id if one.parent_id in known else None, []).append(one)
    lines: list[tuple[int, Derivation]] = []
    waiting = [(0, one) for one in reversed(children.get(None, []))]
    while waiting:
        depth, one = waiting.pop()
        lines.append((depth, one))
        waiting.extend((depth + 1, child) for child in reversed(children.get(one.child_id, [])))
    return lines


def origin(kind: str) -> Detail:
    """Return the function that makes the page of a checkpoint, a dataset or an evaluation, which
    shows only what it was made from.
    """

    def shown(store: Store, key: str) -> Page | None:
        lines = ancestry(store, key, kind)
        return Page("origin", {"kind": kind, "key": key, "ancestry": lines}) if lines else None

    return shown


Detail = Callable[[Store, str], Page | None]
DETAILS: Mapping[str, Detail] = {
    "run": run,
    "trajectory": trajectory,
    "family": relatives,
    "tree": tree,
    "pair": pair,
    "sample": sample,
    "preference": preference,
    "checkpoint": origin("checkpoint"),
    "dataset": origin("dataset"),
    "evaluation": origin("evaluation"),
}
"""For each kind of thing, the function that returns its page by id."""
