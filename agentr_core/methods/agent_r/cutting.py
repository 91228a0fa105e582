"""Where the bad path of a pair is cut, and why a pair cannot be spliced."""

from __future__ import annotations

from agentr_core.errors import EnvironmentFault, IllTypedAnswer, ReplayDrifted
from agentr_core.methods.agent_r.pairing import pair_id
from agentr_core.methods.agent_r.replaying import at
from agentr_core.recipes import SpliceConfig
from agentr_core.types import Critique, PathPair, Rejection, StopReason

STAGE = "splice"
UNPLAYABLE = (IllTypedAnswer, ReplayDrifted)
"""Errors of a replay that cost a path its sample, and nothing else."""


def cut_of(pair: PathPair, critique: Critique | None, config: SpliceConfig) -> int | Rejection:
    """Return how many steps of the bad path are kept, including the first error, or why the pair
    cannot be spliced.

    Good paths with nothing left after the shared steps are rejected. Unless `config.impossible` is
    `keep`, so are cuts that keep none of the bad path's own steps, and kept parts that end the
    episode.
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
    if pair.split >= len(pair.good.trajectory.steps):
        return reject(pair, "no-good-suffix", f"the good path ends with the {pair.split} shared steps")
    return cut if config.impossible == "keep" else _impossible(pair, cut) or cut


def _impossible(pair: PathPair, cut: int) -> Rejection | None:
    """Return why an agent cannot turn back after the first `cut` steps of the bad path, or None."""
    if cut <= pair.split:
        return reject(pair, "cut-in-shared-prefix", f"{cut} steps are kept and both paths share {pair.split}")
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
