"""The judge, measured against an environment that knows the truth."""

from __future__ import annotations

from collections.abc import Iterable

from agentr_core.evaluation.metrics import success_rate
from agentr_core.methods.agent_r.report_records import OracleAgreement
from agentr_core.protocols.abilities import Oracle
from agentr_core.reports.records import Estimate
from agentr_core.runtime.place import Workplace
from agentr_core.search.tree import steps_to, way_to
from agentr_core.stages.report_scores import estimate
from agentr_core.store.codec.critiques import load_oracle, oracle_rows
from agentr_core.store.codec.trees import load_trees
from agentr_core.store.queries.judging import PairVerdict, pair_verdicts
from agentr_core.store.tables import merge
from agentr_core.types import Verdict

Truth = dict[tuple[str, int], Verdict]
"""The true verdict on each step, by tree and node."""


def agreement(place: Workplace, iteration: int) -> OracleAgreement | None:
    """Return how well the judge of an iteration agrees with the oracles of its worlds; None if no
    judged step has an oracle's verdict.

    Each judged node counts once; the first errors of paths are compared from the split on, pair by
    pair.
    """
    verdicts = pair_verdicts(place.store, place.source_id(iteration))
    truth = _truth(place, verdicts)
    known = [(one, truth[one.tree_id, one.node]) for one in verdicts if (one.tree_id, one.node) in truth]
    if not known:
        return None
    pairs = list({(one.tree_id, one.node): (one.verdict, true) for one, true in known}.values())
    firsts: dict[str, list[tuple[int, Verdict, Verdict]]] = {}
    for one, true in known:
        firsts.setdefault(one.pair_id, []).append((one.position, one.verdict, true))
    return OracleAgreement(
        accuracy=rate([said is true for said, true in pairs]),
        precision=_share([true is Verdict.BAD for said, true in pairs if said is Verdict.BAD]),
        recall=_share([said is Verdict.BAD for said, true in pairs if true is Verdict.BAD]),
        first_error=rate(
            [
                next((p for p, said, _ in found if said is Verdict.BAD), None)
                == next((p for p, _, true in found if true is Verdict.BAD), None)
                for found in firsts.values()
            ]
        ),
    )


def _truth(place: Workplace, verdicts: Iterable[PairVerdict]) -> Truth:
    """Return the verdicts of a run's oracles on the steps of judged paths; missing ones are asked
    for now and stored.
    """
    leaves = sorted({(one.tree_id, one.bad_leaf) for one in verdicts})
    truth = load_oracle(place.store, sorted({tree_id for tree_id, _ in leaves}))
    missing = [(tree_id, leaf) for tree_id, leaf in leaves if (tree_id, leaf) not in truth]
    if not missing:
        return truth
    asked: dict[str, dict[int, Verdict]] = {}
    with place.worlds() as worlds:
        if not any(isinstance(env, Oracle) for _, env in worlds):
            return truth
        trees = load_trees(place.store, sorted({tree_id for tree_id, _ in missing}))
        for tree_id, leaf in missing:
            tree = trees[tree_id]
            env = worlds.of(tree.instance)
            if isinstance(env, Oracle):
                said = env.oracle(tree.instance, [step.action for step in steps_to(tree.nodes, leaf)])
                asked.setdefault(tree_id, {}).update(zip(way_to(tree.nodes, leaf), said, strict=True))
    place.store.write(merge(oracle_rows(tree_id, said) for tree_id, said in asked.items()))
    return truth | {(tree_id, node): said for tree_id, found in asked.items() for node, said in found.items()}


def rate(hits: list[bool]) -> Estimate:
    """Return the share of hits with its interval."""
    return estimate(success_rate(hits))


def _share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None
