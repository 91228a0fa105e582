"""The section of a recipe that says how a bad prefix and a good suffix become one conversation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Count, Natural, Temperature, record
from agentr_core.recipes.sampling import SamplingFields


@record
class ContinuationConfig(SamplingFields):
    """How the acting model goes on from a turn of revision in splice mode `continued`."""

    samples: Count = 4
    """Tries for each pair."""
    temperature: Temperature = 1.0
    max_steps: Count = 20
    max_new_tokens: Count = 512
    per_pair: Natural = 1
    """The most successful tries of a pair that are kept, shortest first; 0 means all."""


@record
class SpliceConfig:
    """How a bad prefix and a good suffix become one conversation."""

    mode: Literal["verified", "blind", "direct", "continued"] = "blind"
    """`blind`: as published. `direct`: the whole bad path is kept, no judge. `verified`: the splice
    is played in the environment and kept only if its live reward still clears alpha; observations
    are the live ones. `continued`: after the turn of revision the acting model itself goes on, and
    continuations that clear alpha are kept."""
    action: Annotated[str, Field(min_length=1, pattern=r"^[^\n]*$")] = "wait"
    """The action of the turn of revision: a dummy (as published), or one that shows where the agent
    stands, such as `inventory` in TextCraft. It is played in the modes `verified` and `continued`.
    """
    reflections: Annotated[int, Field(ge=1, le=20)] = 20
    """How many of the 20 sentences the one in the turn of revision is drawn from. A model that
    decodes greedily turns back only where a single sentence is likelier than going on, so with many
    sentences it turns back less."""
    no_error: Literal["keep", "reject"] = "keep"
    """What to do when the judge finds no bad step: keep the whole bad path (as published) or reject
    the pair.
    """
    impossible: Literal["reject", "keep"] = later("reject")
    """What becomes of a splice that cannot have happened: the steps it keeps end the episode,
    perhaps in a disaster. `keep` (as published) works with the modes that play nothing, `blind` and
    `direct`."""
    shared_cut: Literal["reject", "keep"] = later("reject")
    """What becomes of a pair whose first bad step is one that both paths share, which happens only
    with `critique.scan_from: root`. The steps it keeps are those of the good path, so nothing was
    wrong there. `keep` (as published): the good path goes on after that step, with the turn of
    revision in its midst."""
    prune: bool = False
    """Leave out the steps of good paths and good suffixes that the live reward does not need; needs
    mode `verified`.
    """
    continuation: ContinuationConfig = ContinuationConfig()


def splice_faults(splice: SpliceConfig) -> list[str]:
    """Return what is wrong with the section `splice` of a recipe, one sentence each."""
    faults = []
    if splice.prune and splice.mode != "verified":
        faults.append(f"splice.prune: works only in splice.mode verified, not {splice.mode}")
    if splice.impossible == "keep" and splice.mode not in ("blind", "direct"):
        faults.append(
            f"splice.impossible: mode {splice.mode} plays its splices, which only possible ones allow; leave it out, "
            "or set splice.mode to blind or direct"
        )
    if splice.mode != "continued" and splice.continuation != ContinuationConfig():
        faults.append(f"splice.continuation: belongs to splice.mode continued, not {splice.mode}; leave it out")
    if splice.continuation.samples > 1 and splice.continuation.temperature == 0:
        faults.append("splice.continuation: more than one sample at temperature 0 would repeat the same one")
    return faults
