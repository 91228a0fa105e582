"""The sections of a recipe that say how it is carried out: where, how much at once, and what may go
wrong.
"""

from __future__ import annotations

from typing import Literal

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Count, Natural, Unit, record


@record
class ErrorsConfig:
    """How many episode errors a stage may meet before it stops."""

    budget: Unit = 0.02
    """Part of the stage's episodes."""
    retries: Natural = 2
    """Further tries of an episode after a transient error."""
    count_as: Literal["out", "zero"] = later("out")
    """How an episode of an evaluation that failed for good counts in its means: not at all, or as a
    failure with reward 0 (as ETO does). Reports tell how many there were. It is never trained on,
    and no other episode goes on from it."""


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
    """Processes of a cluster that is started; 0 leaves it to the library."""
    shard_size: Count = 32
    """Trees or episodes that a worker is given, and that come back and are stored, together."""
    concurrency: Natural = 0
    """Trees or episodes in flight at once in a process, each with an environment. 0: 512, or as
    many as fill two batches if that is more. A server of environments may hold fewer."""
