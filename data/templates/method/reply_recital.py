"""A method that works, for you to change: it learns one reply by heart.

It has a stage and a setting of its own; the stages after it are those that every method shares.
`Method` and `Stage` in agentr_core/runtime/context.py say what each field means.
"""

from __future__ import annotations

from typing import Any

from agentr_core.episodes.rollout import play_replies
from agentr_core.episodes.transcript import whole_episode
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.catalogue import DATASET, EVALUATE, EVALUATE_BASE, FUNNEL_OF_EXPERT, TRAIN, supervised
from agentr_core.recipes.recipe import Recipe
from agentr_core.reports.document import Paragraph, Section
from agentr_core.runtime.context import Method, Plan, ReportPart, RunContext, Stage
from agentr_core.runtime.instances import chosen_instances
from agentr_core.samples.identity import sample_id
from agentr_core.stages.report import expert_episodes
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.tables import merge
from agentr_core.types import Provenance, Sample, SampleKind, StopReason, Trajectory


async def recite(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Say the reply of the recipe to every training instance, and keep these episodes as
    samples.
    """
    iteration_id = ctx.iteration_id(iteration)
    units = []
    with ctx.worlds() as worlds:
        for instance in await chosen_instances(ctx, iteration):
            env = worlds.env_of(instance)
            first, (outcome,) = play_replies(env, instance, (ctx.recipe.options["reply"],))
            trajectory = Trajectory.ended(instance, first, (outcome.step,), outcome.stop or StopReason.STEP_LIMIT)
            key = fingerprint("reply-recital", iteration_id, instance.key)
            sample = Sample(
                kind=SampleKind.EXPERT,
                messages=whole_episode(env, trajectory),
                instance=instance,
                provenance=Provenance(extra={"trajectory": key}),
            )
            units.append(trajectory_rows(key, trajectory, source="expert", iteration_id=iteration_id))
            units.append(sample_rows(sample_id(sample), sample, iteration_id=iteration_id, trajectory_id=key))
    ctx.store.write(merge(units))
    return {"recited": len(units) // 2}


RECITE = Stage(name="recite", about="Say one reply to every instance.", work=recite, reads=("options",), needs=("env",))


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return what an iteration does."""
    return Plan(
        stages=(RECITE, DATASET, TRAIN, EVALUATE), training=supervised(recipe, iteration), funnel=FUNNEL_OF_EXPERT
    )


def faults(recipe: Recipe) -> list[str]:
    """Return what is wrong with the settings of a recipe."""
    return [] if set(recipe.options) == {"reply"} else ["options: give reply, and nothing else"]


def said(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return a section with the reply that was learned."""
    recited = expert_episodes(ctx, iteration).count
    return (
        Section("reply-recital", "What was recited", (Paragraph(f"{ctx.recipe.options['reply']}, {recited} times"),)),
    )


METHOD = Method(
    name="reply-recital",
    title="Reply recital",
    sections=("iterations", "options"),
    stages=(RECITE, DATASET, TRAIN, EVALUATE),
    plan=plan,
    before=(EVALUATE_BASE,),
    faults=faults,
    describe=lambda recipe, train, test: [f"each iteration: one reply to {train} instances"],
    report=(ReportPart(sections=said),),
)
