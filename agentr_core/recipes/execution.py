"""The sections of a recipe that say how it is carried out: where, how much at once, and how many
errors it may have.
"""

from __future__ import annotations

from typing import Literal

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Count, Natural, Unit, record


@record
class ErrorsConfig:
    """The episode errors that a stage may have before it stops."""

    budget: Unit = 0.02
    """Share of the stage's episodes that may fail."""
    retries: Natural = 2
    """Further tries of an episode after a transient error."""
    count_as: Literal["out", "zero"] = later("out")
    """How an evaluation's episode that failed for good counts in its means: not at all, or as a
    failure with reward 0 (as in ETO). Reports state how many there were. Such an episode is never
    trained on, and no other episode continues from it."""


@record
class ScaleConfig:
    """Where trees are grown and episodes played, here or by the workers of a cluster, and how many
    at once.
    """

    runner: Literal["local", "dask", "ray"] = "local"
    address: str = ""
    """The cluster (`tcp://host:8786` for Dask, `ray://host:10001` for Ray); if empty, one is
    started on this machine for each stage."""
    workers: Natural = 0
    """Processes of a cluster that the run starts; 0 leaves their number to the library."""
    shard_size: Count = 32
    """Trees or episodes that are given to a worker, returned and stored together."""
    concurrency: Natural = 0
    """Trees or episodes in flight at once in a process, each with an environment. 0: 512, or as
    many as fill two batches if that is more. A server of environments may hold fewer."""
