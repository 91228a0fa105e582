"""Where the bad path of a pair is cut, and why a pair cannot be spliced."""

from __future__ import annotations

from itertools import takewhile

from agentr_core.errors import EnvironmentFault, IllTypedAnswer, ReplayDrifted
from agentr_core.methods.agent_r.pairing import pair_id
from agentr_core.methods.agent_r.replaying import at
from agentr_core.recipes.splicing import SpliceConfig
from agentr_core.types import Critique, PathPair, Rejection, Step, StopReason

STAGE = "splice"
UNPLAYABLE = (IllTypedAnswer, ReplayDrifted)
"""Errors of a replay that cost a path its sample, and nothing else."""


def cut_of(pair: PathPair, critique: Critique | None, config: SpliceConfig) -> int | Rejection:
    """Return how many steps of the bad path are kept, including the first error, or why the pair
    cannot be spliced.

    Good paths with nothing left after the steps that are kept are rejected. So are cuts that keep
    none of the bad path's own steps, unless `config.shared_cut` is `keep`, and kept parts that end
    the episode, unless `config.impossible` is.
    """
    steps = pair.bad.trajectory.steps
    if config.mode == "direct":
        cut = len(steps)
    elif critique is None:
        raise ValueError(f"pair {pair_id(pair)} has no critique, which splice mode {config.mode} needs; judge it first")
    elif critique.first_error is not None:
        cut = critique.first_error + 1
    elif config.no_error == "keep":
        cut = len(steps)
    else:
        return reject(pair, "no-error-found", f"none of {len(critique.verdicts)} judged steps is bad")
    if cut == 0:
        return reject(pair, "nothing-kept", "the bad path has no steps")
    shared = len(pair.good.trajectory.steps) - len(good_rest(pair, cut))
    if shared == len(pair.good.trajectory.steps):
        return reject(pair, "no-good-suffix", f"the good path ends with the {shared} shared steps")
    if cut <= pair.split and config.shared_cut == "reject":
        return reject(pair, "cut-in-shared-prefix", f"{cut} steps are kept and both paths share {pair.split}")
    return cut if config.impossible == "keep" else _impossible(pair, cut) or cut


def good_rest(pair: PathPair, cut: int) -> tuple[Step, ...]:
    """Return the steps of the good path from the first reply on that is not the one at its place
    among the first `cut` steps of the bad path: after a cut in the shared steps, from the cut on.
    """
    kept, steps = pair.bad.trajectory.steps[:cut], pair.good.trajectory.steps
    same = takewhile(lambda both: both[0].reply == both[1].reply, zip(kept, steps, strict=False))
    return steps[sum(1 for _ in same) :]


def _impossible(pair: PathPair, cut: int) -> Rejection | None:
    """Return why an agent cannot turn back after the first `cut` steps of the bad path, or None."""
    last = pair.bad.trajectory.steps[cut - 1]
    if last.disaster:
        return reject(pair, "kept-part-ends-in-disaster", at(cut - 1, last))
    if last.terminated:
        return reject(pair, "kept-part-ends-the-episode", at(cut - 1, last))
    if cut == len(pair.bad.trajectory.steps) and pair.bad.trajectory.stop is StopReason.CONTEXT_LIMIT:
        return reject(pair, "kept-part-fills-the-context", at(cut - 1, last))
    return None


def reject(pair: PathPair, reason: str, detail: str) -> Rejection:
    """Return the rejection of a pair."""
    return Rejection(stage=STAGE, subject=pair_id(pair), reason=reason, detail=detail)


def unplayable(subject: str, error: EnvironmentFault) -> Rejection:
    """Return the rejection of a path whose replay raised one of the errors in `UNPLAYABLE`."""
    reason = "ill-typed-answer" if isinstance(error, IllTypedAnswer) else "replay-drifted"
    return Rejection(stage=STAGE, subject=subject, reason=reason, detail=str(error))
