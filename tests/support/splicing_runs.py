"""A run of Agent-R up to its samples, stage by stage."""

from __future__ import annotations

from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.critique import critique
from agentr_core.methods.agent_r.splice import splice_pairs
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run


async def spliced(ctx: RunContext) -> dict[str, int]:
    """Collect, judge and splice in the first iteration of a run; return its counts of samples."""
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await collect(ctx, 1)
    await critique(ctx, 1)
    counts: dict[str, int] = await splice_pairs(ctx, 1)
    return counts
