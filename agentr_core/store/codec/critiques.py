"""Pairs of paths and what the judge said about them, to rows and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from agentr_core.store.codec.generations import Draw, draw_row, load_draws
from agentr_core.store.codec.texts import text_id, text_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import Rows
from agentr_core.types import Critique, Judgement, PathPair, StepVerdict, Verdict


def pair_rows(pair_id: str, pair: PathPair, *, iteration_id: str, position: int = 0) -> Rows:
    """Return the row of table `pair`. The paths themselves follow from the tree, which is stored
    with all its nodes.

    Args:
        position: its place among the pairs of its tree, from 0.
    """
    good, bad = pair.good.trajectory.reward, pair.bad.trajectory.reward
    return {
        "pair": [
            {
                "pair_id": pair_id,
                "iteration_id": iteration_id,
                "tree_id": pair.good.tree_id,
                "good_leaf": pair.good.leaf,
                "bad_leaf": pair.bad.leaf,
                "shared_steps": pair.split,
                "good_reward": float(good),
                "bad_reward": float(bad),
                "gap": float(good - bad),
                "position": position,
            }
        ]
    }


@dataclass(frozen=True, slots=True)
class StoredPair:
    """A good and a bad path of a tree, each by the index of its last node."""

    tree_id: str
    good_leaf: int
    bad_leaf: int
    shared_steps: int
    """Steps that both have in common from the root."""


def load_pairs(store: Store, iteration_id: str) -> dict[str, list[StoredPair]]:
    """Return the pairs of an iteration by tree, in the order in which they were made."""
    pairs: dict[str, list[StoredPair]] = {}
    for row in store.rows(
        "select tree_id, good_leaf, bad_leaf, shared_steps from pair where iteration_id = ? order by tree_id, position",
        iteration_id,
    ):
        made = StoredPair(*row)
        pairs.setdefault(made.tree_id, []).append(made)
    return pairs


def judgement_rows(tree_id: str, judgement: Judgement, *, iteration_id: str) -> Rows:
    """Return the rows of a judgement with the judge's replies; they are one unit."""
    draws = [
        Draw(seed=judgement.seed, number=number, generation=generation)
        for number, generation in enumerate(judgement.generations)
    ]
    return {
        "text": text_rows(generation.text for generation in judgement.generations),
        "judgement": [
            {
                "tree_id": tree_id,
                "node_index": judgement.node,
                "iteration_id": iteration_id,
                "verdict": str(judgement.verdict),
                "votes": [str(vote) for vote in judgement.votes],
                "dropped_steps": judgement.dropped_steps,
            }
        ],
        "generation": [draw_row("judgement", tree_id, judgement.node, draw) for draw in draws],
    }


def load_judgements(store: Store, tree_ids: Sequence[str]) -> dict[str, dict[int, Judgement]]:
    """Return the stored judgements by tree and node."""
    records = store.rows(
        "select tree_id, node_index, verdict, votes, dropped_steps from judgement "
        "where tree_id in (select unnest(?)) order by tree_id, node_index",
        list(tree_ids),
    )
    draws = load_draws(store, "judgement", tree_ids)
    judgements: dict[str, dict[int, Judgement]] = {}
    for tree_id, node, verdict, votes, dropped_steps in records:
        replies = draws.get(tree_id, {}).get(node, ())
        judgements.setdefault(tree_id, {})[node] = Judgement(
            node=node,
            seed=replies[0].seed if replies else 0,
            dropped_steps=dropped_steps,
            verdict=Verdict(verdict),
            votes=tuple(map(Verdict, votes)),
            generations=tuple(reply.generation for reply in replies),
        )
    return judgements


def oracle_rows(tree_id: str, truth: Mapping[int, Verdict]) -> Rows:
    """Return the rows of the true verdicts on nodes of a tree, by their indices."""
    return {
        "oracle_verdict": [
            {"tree_id": tree_id, "node_index": node, "verdict": str(verdict)} for node, verdict in truth.items()
        ]
    }


def load_oracle(store: Store, tree_ids: Sequence[str]) -> dict[tuple[str, int], Verdict]:
    """Return the stored true verdicts by tree and node."""
    rows = store.rows(
        "select tree_id, node_index, verdict from oracle_verdict where tree_id in (select unnest(?))", list(tree_ids)
    )
    return {(tree_id, node): Verdict(verdict) for tree_id, node, verdict in rows}


def critique_rows(
    pair_id: str,
    critique: Critique,
    *,
    iteration_id: str,
    nodes: Sequence[int] = (),
) -> Rows:
    """Return the rows of a finished critique; they are one unit.

    Args:
        nodes: indices of the bad path's nodes, so that `nodes[position]` is the judged node.
    """
    return {
        "text": text_rows(verdict.reply for verdict in critique.verdicts),
        "critique": [{"pair_id": pair_id, "iteration_id": iteration_id, "first_error": critique.first_error}],
        "verdict": [
            {
                "pair_id": pair_id,
                "position": verdict.position,
                "verdict": str(verdict.verdict),
                "reply_id": text_id(verdict.reply),
                "node_index": nodes[verdict.position] if verdict.position < len(nodes) else None,
            }
            for verdict in critique.verdicts
        ],
    }


def load_critiques(store: Store, pair_ids: Sequence[str]) -> dict[str, Critique]:
    """Return the stored critiques of pairs, by pair id in the order given."""
    if not store.path.exists():
        return {}
    with store.reading() as con:
        first_errors = dict(
            con.execute(
                "select pair_id, first_error from critique where pair_id in (select unnest(?))", [list(pair_ids)]
            ).fetchall()
        )
        records = con.execute(
            "select v.pair_id, v.position, v.verdict, t.text from verdict v join text t on t.text_id = v.reply_id "
            "where v.pair_id in (select unnest(?)) order by v.pair_id, v.position",
            [list(pair_ids)],
        ).fetchall()
    verdicts = {
        pair_id: tuple(
            StepVerdict(position=position, verdict=Verdict(verdict), reply=reply)
            for _, position, verdict, reply in group
        )
        for pair_id, group in groupby(records, key=itemgetter(0))
    }
    return {
        pair_id: Critique(verdicts=verdicts.get(pair_id, ()), first_error=first_errors[pair_id])
        for pair_id in pair_ids
        if pair_id in first_errors
    }
