"""A trial of judges: what a model's verdicts on lost episodes are worth, before a run relies on
them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from agentr_core.episodes.units import run_all
from agentr_core.evaluation.metrics import Judge, success_rate
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.critique import Scan, judge_paths
from agentr_core.methods.table import plans_of
from agentr_core.protocols import Oracle
from agentr_core.recipes.models import ModelRole
from agentr_core.runtime.equipment import held_back, in_flight, speed
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.trajectories import Episode
from agentr_core.types import Judgement, Path, Verdict

TRIAL = "headroom"
Verdicts = dict[str, Sequence[Verdict]]
"""The verdicts on the steps of episodes, in their order, by the id of the trajectory."""


async def trial(place: Workplace, lost: Sequence[Episode], others: Sequence[pathlib.Path]) -> tuple[Judge, ...]:
    """Return what the judge of a recipe, and then each model in `others` in its place, says of all
    steps of lost episodes; nothing where the recipe has no judge.

    Section `critique` says how they are asked. With several votes, a record of its own has what the
    first vote alone says. Where the world has an oracle, verdicts are compared with the oracle's.

    Raises:
        ErrorBudgetSpent: more episodes could not be judged than the recipe allows.
    """
    stages = {stage.name for plan in plans_of(place.recipe) for stage in plan.stages}
    if "critique" not in stages or place.recipe.splice.mode == "direct" or not lost:
        return ()
    truth: Verdicts = {}
    with place.worlds() as worlds:
        for episode in lost:
            env = worlds.of(episode.instance)
            if isinstance(env, Oracle):
                actions = [step.action for step in episode.trajectory.steps]
                truth[episode.trajectory_id] = tuple(env.oracle(episode.instance, actions))
    own = place.recipe.models.judge
    asked: list[tuple[str, ModelRole, pathlib.Path]] = [
        (own.label if own else "the model itself", "judge", place.policy(1).path),
        *((str(path), "actor", path) for path in others),
    ]
    judges: list[Judge] = []
    for name, role, path in asked:
        judgements = await _judged(place, lost, role, path, name)
        votes = place.recipe.critique.votes
        if votes > 1:
            first = {
                key: [step.votes[0] if step.votes else Verdict.UNPARSABLE for step in steps]
                for key, steps in judgements.items()
            }
            judges.append(judge_of(name, first, truth, votes=1))
        verdicts = {key: [step.verdict for step in steps] for key, steps in judgements.items()}
        judges.append(judge_of(name, verdicts, truth, votes=votes))
    return tuple(judges)


async def _judged(
    place: Workplace, lost: Sequence[Episode], role: ModelRole, policy: pathlib.Path, name: str
) -> dict[str, list[Judgement]]:
    """Return the judgements of the steps of each episode, in their order, by the id of its
    trajectory.
    """
    config, done = place.recipe.critique, 0
    async with place.asking(role, policy, TRIAL, 0) as (sampler, writer, _):

        async def work(episode: Episode) -> list[Judgement]:
            nodes = tuple(range(1, len(episode.trajectory.steps) + 1))
            path = Path(tree_id=episode.trajectory_id, nodes=nodes, trajectory=episode.trajectory)
            judgements = await judge_paths(
                [Scan(path, 0)],
                held_back(sampler, writer),
                config,
                seed=derive_seed(place.recipe.seed, TRIAL, "judge", episode.repeat),
                count_tokens=sampler.model.count_tokens,
                context_length=sampler.model.context_length,
            )
            return [judgements[node] for node in nodes]

        def show(*_: object) -> None:
            nonlocal done
            done += 1
            place.progress(done, len(lost), f"lost episodes judged by {name}, {speed(sampler)}")

        return await run_all(
            lost,
            work,
            key=lambda episode: episode.trajectory_id,
            errors=place.recipe.errors,
            on_error=place.on_error(writer, TRIAL, 0),
            concurrency=in_flight(sampler, config.votes),
            on_result=show,
        )


def judge_of(
    name: str, said: Mapping[str, Sequence[Verdict]], truth: Mapping[str, Sequence[Verdict]], *, votes: int
) -> Judge:
    """Return the record of a judge: how much of what it said can be read, and how often it agrees
    with an oracle on the episodes that this knows.
    """
    read = [verdict is not Verdict.UNPARSABLE for some in said.values() for verdict in some]
    both = [pair for key in said if key in truth for pair in zip(said[key], truth[key], strict=True)]
    return Judge(
        name=name,
        votes=votes,
        episodes=len(said),
        steps=len(read),
        read=success_rate(read),
        right=success_rate([verdict is true for verdict, true in both]),
        bad_is_right=success_rate([true is Verdict.BAD for verdict, true in both if verdict is Verdict.BAD]),
        bad_is_seen=success_rate([verdict is Verdict.BAD for verdict, true in both if true is Verdict.BAD]),
        first_error=success_rate([_first_bad(said[key]) == _first_bad(truth[key]) for key in said if key in truth]),
    )


def _first_bad(verdicts: Sequence[Verdict]) -> int | None:
    return next((position for position, verdict in enumerate(verdicts) if verdict is Verdict.BAD), None)
