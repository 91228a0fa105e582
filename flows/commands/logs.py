"""Evaluations of a workspace, written as logs of Inspect."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from agentr_core.environment import Dividing, Environment
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import conversations, summary_positions, transcript_of
from agentr_core.errors import ConfigError
from agentr_core.evaluation.metrics import Estimate
from agentr_core.exchange.inspect_log import LoggedEpisode, LoggedEvaluation, notes, write_log
from agentr_core.exchange.training_set import opening_turns
from agentr_core.recipes.environments import REVISION
from agentr_core.runtime.context import RunContext
from agentr_core.stages.evaluate import load_measures, lost_episodes
from agentr_core.store.codec.trajectories import Episode, load_episodes
from agentr_core.store.database import Store
from agentr_core.store.queries.logs import (
    EpisodeCosts,
    EvaluationHead,
    episode_costs,
    failure_reasons,
    find_evaluations,
)
from agentr_core.store.queries.scorings import comparisons_by_scoring, load_regrades
from agentr_core.system import DISTRIBUTION, new_folder
from agentr_core.texts import count_text
from agentr_core.types import Message, StopReason, Trajectory
from tasks.wiring import RunRef, quiet_context
from tasks.workspaces import open_store

_SCORES = ("success", "reward")
_READ_WITH = (
    "`inspect view --log-dir FOLDER` shows them, `inspect_ai.log.read_eval_log(FILE)` reads one. A sample is an "
    "episode, an epoch its number among those of its instance; `success` and `reward` are its scores, and those named "
    "after a scoring are what `agentr regrade` said of it."
)


def export_logs(workspace: Path, prefix: str, folder: Path, *, iteration: int | None = None) -> str:
    """Write finished evaluations into a new folder, each as a log of Inspect; return a text that
    says what is there.

    Args:
        prefix: the beginning of the id of an evaluation, an iteration or a run.
        iteration: only the evaluations of this iteration of a run; None: of all iterations.

    Raises:
        ConfigError: there is no such finished evaluation, they are of several runs, or the folder
            is there already.
        DiskError: the folder cannot be written; nothing is left of it.
    """
    store = open_store(workspace, must_exist=True)
    heads, omissions = _choose(store, workspace, prefix, iteration)
    ctx = quiet_context(RunRef(workspace=str(workspace), run_id=heads[0].run_id))
    evaluations = [_evaluation(ctx, head) for head in heads]
    remarks = [*notes(evaluations), *omissions]
    with new_folder(folder) as draft:
        files = sorted(write_log(evaluation, draft) for evaluation in evaluations)
        lines = [f"# {heads[0].recipe}", _READ_WITH, *(f"**Note**: {note}." for note in remarks)]
        (draft / "README.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    episodes = sum(len(evaluation.episodes) for evaluation in evaluations)
    summary = (
        f"{count_text(episodes, 'episode')} of {count_text(len(files), 'evaluation')} of run {heads[0].run_id} "
        f"in {folder}"
    )
    return "\n".join([f"{summary}:", *(f"  {file}" for file in files), *remarks])


def _choose(
    store: Store, workspace: Path, prefix: str, iteration: int | None
) -> tuple[list[EvaluationHead], list[str]]:
    """Return the finished evaluations that `prefix` and `iteration` select, and a list with a
    sentence about unfinished ones that are left out, empty if there are none.
    """
    heads = find_evaluations(store, prefix)
    runs = {head.run_id for head in heads}
    if len(runs) != 1:
        raise ConfigError(
            f"{prefix!r} begins the id of {'more than one' if runs else 'no'} run in {workspace} that has an "
            f"evaluation, or of its iteration or evaluation; `agentr runs -w {workspace}` lists all runs"
        )
    candidates = [head for head in heads if iteration in (None, head.iteration)]
    finished_heads = [head for head in candidates if head.finished]
    if not finished_heads:
        iterations = ", ".join(map(str, sorted({head.iteration for head in heads if head.finished}))) or "none yet"
        which = "" if iteration is None else f" of iteration {iteration}"
        raise ConfigError(
            f"run {heads[0].run_id} has no finished evaluation{which}; finished are iterations: {iterations}"
        )
    left_out = ", ".join(f"{head.name} of iteration {head.iteration}" for head in candidates if not head.finished)
    return finished_heads, [f"left out, since it is not finished: {left_out}"] if left_out else []


def _evaluation(ctx: RunContext, head: EvaluationHead) -> LoggedEvaluation:
    config = ctx.recipe.evaluation
    set_config = config.sets.get(head.name, config)
    sampling = set_config.sampling(temperature=set_config.temperature, max_new_tokens=config.max_new_tokens)
    measures = load_measures(ctx.store, head.evaluation_id)
    episodes = _episodes(ctx, head)
    other_scores = sorted({name for episode in episodes for name in episode.scores} - set(_SCORES))
    means = {name: [episode.scores[name] for episode in episodes if name in episode.scores] for name in other_scores}
    max_steps = config.revision_test.max_steps if head.name == REVISION else config.max_steps
    limits = {
        StopReason.STEP_LIMIT: max_steps,
        StopReason.TOKEN_LIMIT: config.limits.tokens,
        StopReason.TIME_LIMIT: config.limits.seconds,
    }
    return LoggedEvaluation(
        evaluation_id=head.evaluation_id,
        run_id=head.run_id,
        task=f"{head.recipe}-{head.name}",
        split=head.split,
        model=head.model,
        started_at=head.started_at,
        ended_at=head.ended_at or head.started_at,
        episodes=episodes,
        measures={
            **{name: _estimate(measures[name]) for name in _SCORES if name in measures},
            **{name: (fmean(values), None, None, len(values)) for name, values in means.items()},
        },
        sampling={
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
        },
        limits={reason: float(limit) for reason, limit in limits.items() if limit},
        versions={**json.loads(head.versions), "agentr": version(DISTRIBUTION)},
        facts={
            name: getattr(head, name)
            for name in ("recipe", "method", "iteration", "name", "split", "checkpoint_id", "weights_sha256")
        },
    )


def _estimate(estimate: Estimate) -> tuple[float, float | None, float | None, int]:
    """Return mean, lower and upper bound, and n; a bound that is not finite becomes None, as JSON
    has no NaN.
    """
    low, high = (bound if math.isfinite(bound) else None for bound in (estimate.low, estimate.high))
    return estimate.mean, low, high, estimate.n


def _episodes(ctx: RunContext, head: EvaluationHead) -> list[LoggedEpisode]:
    facts = episode_costs(ctx.store, head.evaluation_id)
    reasons = failure_reasons(ctx.store, head.evaluation_id)
    counts = ctx.recipe.evaluation.disaster_counts
    episodes = load_episodes(ctx.store, head.evaluation_id)
    with ctx.worlds() as worlds:
        logged_episodes = [
            _episode(worlds.env_of(episode.instance), episode, facts[episode.trajectory_id], counts)
            for episode in episodes
        ]
    for scoring in comparisons_by_scoring(ctx.store, ctx.run_id):
        name = f"{scoring.grader}-{scoring.scoring_id[:8]}"
        regrades = load_regrades(ctx.store, scoring.scoring_id, [episode.trajectory_id for episode in episodes])
        for number, episode in enumerate(episodes):
            grade = regrades.get(episode.trajectory_id)
            if grade is not None and grade.reward is not None and grade.success is not None:
                new_scores = {f"{name}-success": float(grade.success), f"{name}-reward": grade.reward}
                logged_episodes[number] = replace(
                    logged_episodes[number], scores={**logged_episodes[number].scores, **new_scores}
                )
    zero = dict.fromkeys(_SCORES, 0.0) if ctx.recipe.errors.count_as == "zero" else {}
    errored_episodes = [
        LoggedEpisode(
            key=_key(episode),
            number=episode.repeat + 1,
            trajectory=episode.trajectory,
            scores=zero,
            error=reasons.get(episode.instance.episode(episode.repeat, episode.cut)) or "it failed for good",
            facts=_facts(episode),
        )
        for episode in lost_episodes(ctx, head.evaluation_id)
    ]
    return [*logged_episodes, *errored_episodes]


def _episode(env: Environment, episode: Episode, facts: EpisodeCosts, disaster_counts: float) -> LoggedEpisode:
    trajectory = episode.trajectory
    messages = _conversation(env, trajectory)
    seconds = (facts.sampling_seconds, facts.environment_seconds)
    return LoggedEpisode(
        key=_key(episode),
        number=episode.repeat + 1,
        trajectory=trajectory,
        messages=messages,
        num_opening_turns=len(opening_turns(messages)),
        target=env.problem(episode.instance).golds if isinstance(env, ReasoningWorld) else (),
        scores={
            "success": float(trajectory.success),
            "reward": disaster_counts if trajectory.stop == StopReason.DISASTER else trajectory.reward,
        },
        explanation=facts.grade or "",
        prompt_tokens=facts.prompt_tokens,
        completion_tokens=facts.completion_tokens,
        seconds=None if None in seconds else sum(filter(None, seconds)),
        facts={
            **_facts(episode),
            "trajectory_id": episode.trajectory_id,
            **{name: value for name, value in facts._asdict().items() if name != "grade"},
            "dropped": max((step.dropped for step in trajectory.steps), default=0),
        },
    )


def _conversation(env: Environment, trajectory: Trajectory) -> tuple[Message, ...]:
    """Return the conversation of an episode up to the last observation; several conversations are
    concatenated.
    """
    kind = transcript_of(env)
    if isinstance(kind, Dividing) or summary_positions(trajectory.steps):
        return tuple(message for part in conversations(env, trajectory) for message in part.messages)
    return kind.prompt(env, trajectory.first_observation, trajectory.steps)


def _key(episode: Episode) -> str:
    """Return the id of an episode's sample in Inspect: the instance's, followed in a revision test
    by the number of steps that were replayed, since each such start is a sample of its own.
    """
    return f"{episode.instance.key}@{episode.cut}" if episode.cut else episode.instance.key


def _facts(episode: Episode) -> Mapping[str, Any]:
    return {
        "instance_id": episode.instance.key,
        **asdict(episode.instance),
        "depth": episode.depth,
        "origin": episode.origin,
        "repeat": episode.repeat,
        "cut": episode.cut,
    }
