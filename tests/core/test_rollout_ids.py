"""A rollout's id tells what it goes on from: what is stored under an id had the same beginning."""

from __future__ import annotations

from dataclasses import replace

from toy import instance

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.runtime.episode_shard import rollout_id
from agentr_core.types import Step

BEGUN = Step(reply="look", action="look", observation="You are at 0.", reward=0.0)


def test_rollouts_that_go_on_from_other_steps_have_other_ids() -> None:
    fresh = EpisodePlan(instance=instance(1), seed=3, number=4)
    variants = [
        replace(fresh, prefix=(BEGUN,)),
        replace(fresh, prefix=(replace(BEGUN, reply="left"),)),
        replace(fresh, prefix=(replace(BEGUN, observation="You are at 1."),)),
        replace(fresh, prefix=(BEGUN, BEGUN)),
    ]
    assert len({rollout_id("iteration", "model", plan) for plan in (fresh, *variants)}) == 5
    assert rollout_id("iteration", "model", replace(variants[0])) == rollout_id("iteration", "model", variants[0])
