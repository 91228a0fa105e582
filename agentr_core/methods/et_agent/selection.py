"""Choose the questions that a stage of reinforcement learning trains on, those whose rollouts
differ most in correctness and in the number of tool calls; and the trajectories to fine-tune on.

The rollouts of a question are a group of K. Its two objectives, both to be maximised, are the
dispersion of correctness and that of the number of calls over the group. Questions are taken by
Pareto front, best front first; the front that would exceed the number wanted is cut by crowding
distance. Sources: ET-Agent (arXiv 2601.06860), section on group-wise Pareto sampling; NSGA-II (Deb
et al. 2002) for fronts and crowding.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentr_core.environment import Environment
from agentr_core.environments.native import is_misread
from agentr_core.environments.reasoning.grammar import strict_fault, text_of
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.errors import ConfigError, DataFault
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.catalogue import group_rollout_config
from agentr_core.methods.et_agent.operators import TaggedForm, step_form_of
from agentr_core.recipes.et_agent import CurriculumConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.episode_shard import plan_rollouts, play_rollouts, rollout_id
from agentr_core.runtime.instances import SELECTED, chosen_instances
from agentr_core.samples.dataset import FilterResult
from agentr_core.stages.dataset import whole_episode_rows
from agentr_core.store.codec.ledger import rejection_rows, replace_stage_output
from agentr_core.store.codec.samples import (
    RolloutOutcome,
    SelectionOutcome,
    chosen_instance_rows,
    load_flywheel_trajectories,
    load_rollout_outcomes,
    load_selection,
    selection_rows,
)
from agentr_core.store.tables import merge
from agentr_core.system import run_in_thread
from agentr_core.types import Instance, Rejection, SampleKind, Trajectory

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

RIGHT_FROM = 0.75
"""The lowest correctness at which the filter of mixed groups takes an answer for right."""
_DIGITS = 12
"""Decimal places that dispersions are rounded to: those that are mathematically equal must be equal
as numbers, or one would dominate the other.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Selection:
    """The outcome for each question, in the order given.

    `correctness_spread` and `calls_spread` are the dispersions. `rank` counts fronts from 0; it is
    -1 for a question that the filter left out. `crowding` is the distance within the front,
    infinite at its ends and NaN for a question that was left out. `selected` marks the N questions.
    """

    correctness_spread: Floats
    calls_spread: Floats
    rank: Integers
    crowding: Floats
    selected: NDArray[np.bool_]


def select_by_front(
    ids: Sequence[str], correctness: Floats, calls: Floats, num_selected: int, *, mixed_only: bool = True
) -> Selection:
    """Select the `num_selected` questions to train on by Pareto front and crowding distance; all
    that pass the filter if there are fewer.

    The filter is applied before the choice, so it does not reduce the number chosen unless too few
    are left. Questions with equal crowding distance are taken in the order of their ids, so that
    the order in which they are given does not matter.

    Args:
        ids: one for each question, all different.
        correctness: of each rollout, in [0, 1]; shape (questions, rollouts).
        calls: how many tool calls each rollout made, or another cost; of the same shape.
        mixed_only: leave out questions whose rollouts are all right or all wrong.

    Raises `DataFault` if shapes or ids are wrong.
    """
    if correctness.ndim != 2 or correctness.shape != calls.shape or len(ids) != len(correctness):
        raise DataFault(
            f"{len(ids)} questions have correctness of shape {correctness.shape} and calls of {calls.shape}; "
            "give each question a row of one number for each rollout"
        )
    if len(set(ids)) != len(ids):
        raise DataFault("two questions have one id; select each question once")
    spreads = np.column_stack([dispersion(correctness), dispersion(calls)])
    rank = np.full(len(ids), -1, dtype=np.int64)
    distance = np.full(len(ids), np.nan)
    # From here on questions are in the order of their ids, which settles every tie.
    order = np.argsort(np.asarray(ids, dtype=np.str_), kind="stable")
    if mixed_only:
        order = order[is_mixed(correctness[order])]
    rank[order] = fronts(spreads[order])
    positions: list[int] = []
    by_front = order[np.argsort(rank[order], kind="stable")]
    for front in np.split(by_front, np.flatnonzero(np.diff(rank[by_front])) + 1) if len(order) else ():
        distance[front] = crowding(spreads[front])
        num_missing = num_selected - len(positions)
        if num_missing < len(front):
            front = front[np.argsort(-distance[front], kind="stable")][: max(0, num_missing)]
        positions.extend(front)
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[positions] = True
    return Selection(
        correctness_spread=spreads[:, 0], calls_spread=spreads[:, 1], rank=rank, crowding=distance, selected=mask
    )


def select_at_random(
    ids: Sequence[str], correctness: Floats, calls: Floats, num_selected: int, *, mixed_only: bool = True, seed: int
) -> Selection:
    """Select `num_selected` questions at random, independent of the order in which they are given:
    the baseline for `select_by_front`.

    All questions that pass the filter are in front 0, and crowding is NaN. Arguments and errors are
    those of `select_by_front`.
    """
    # Selecting all questions gives the dispersions, and shows which ones pass the filter.
    selection = select_by_front(ids, correctness, calls, len(ids), mixed_only=mixed_only)
    fit_positions = sorted(np.flatnonzero(selection.selected).tolist(), key=lambda position: ids[position])
    drawn = np.random.default_rng(seed).permutation(len(fit_positions))[:num_selected]
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[[fit_positions[position] for position in drawn]] = True
    return replace(
        selection, rank=np.where(selection.selected, 0, -1), crowding=np.full(len(ids), np.nan), selected=mask
    )


def selection_reasons(selection: Selection, *, at_random: bool = False) -> list[str]:
    """Return why each question was chosen or not, as a word: `chosen`; `alike` if the filter left
    it out; `crowded` if it is in the last front that was used; `dominated` if it is in a later one;
    with `at_random`, for a selection by `select_at_random`, `not-drawn` in place of these two.
    """
    last_rank = int(selection.rank[selection.selected].max(initial=0))
    reasons = []
    for rank, selected in zip(selection.rank.tolist(), selection.selected.tolist(), strict=True):
        reason = "not-drawn" if at_random else "crowded" if rank == last_rank else "dominated"
        reasons.append("chosen" if selected else "alike" if rank < 0 else reason)
    return reasons


def dispersion(values: Floats) -> Floats:
    """Return the population standard deviation of each row, exactly the same for any order in it.

    The published code takes the variance, which gives the same fronts but other crowding distances.
    """
    if not values.size:
        return np.zeros(len(values))
    # Sorted, minus the least: whole numbers stay whole, and equal values give exactly 0.
    offsets = np.sort(values, axis=1)
    offsets = offsets - offsets[:, :1]
    row_length = values.shape[1]
    scaled_variances = row_length * (offsets**2).sum(axis=1) - offsets.sum(axis=1) ** 2
    deviations: Floats = np.round(np.sqrt(np.maximum(scaled_variances, 0.0)) / row_length, _DIGITS)
    return deviations


def is_mixed(correctness: Floats) -> NDArray[np.bool_]:
    """Return for each row whether it has both right answers (at least `RIGHT_FROM`) and wrong
    ones.
    """
    right = correctness >= RIGHT_FROM
    flags: NDArray[np.bool_] = np.logical_xor(right.any(axis=1), right.all(axis=1))
    return flags


def fronts(points: Floats) -> Integers:
    """Return the number of the front of each point, from 0, in O(n log n); both coordinates are to
    be maximised.

    A point dominates another if it is at least as good in both and better in one. Front 0 holds the
    points that no point dominates, front k those that only points of earlier fronts dominate.
    """
    if not len(points):
        return np.zeros(0, dtype=np.int64)
    # Equal points share a front, and `unique` sorts: by the first coordinate, then by the second.
    unique_points, unique_index = np.unique(points, axis=0, return_inverse=True)
    ranks = np.empty(len(unique_points), dtype=np.int64)
    # In a sweep from the best first coordinate down, a point is dominated by a front if and only if
    # a point of that front has at least the same second coordinate. The largest second coordinates
    # of the fronts so far decrease from front to front.
    front_bounds: list[float] = []
    for position in range(len(unique_points) - 1, -1, -1):
        bound = -float(unique_points[position, 1])
        rank = bisect_right(front_bounds, bound)
        if rank == len(front_bounds):
            front_bounds.append(bound)
        else:
            front_bounds[rank] = bound
        ranks[position] = rank
    return ranks[unique_index.reshape(-1)]


def crowding(points: Floats) -> Floats:
    """Return the crowding distance of each point of a front (Deb et al. 2002): the sum over
    coordinates of the distance between its two neighbours, in units of the coordinate's range.

    The distance at the ends of a coordinate is infinite. A coordinate in which all points are equal
    adds nothing. Of equal values the earlier point comes first.
    """
    distance = np.zeros(len(points))
    for values in points.T:
        order = np.argsort(values, kind="stable")
        low, high = values[order[[0, -1]]] if len(order) else (0.0, 0.0)
        if high > low:
            distance[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / (high - low)
            distance[order[[0, -1]]] = np.inf
    return distance


# The episodes that a policy is fine-tuned on before reinforcement learning: right answers in the
# strict format, without a failed call.
#
# Source: ET-Agent (arXiv 2601.06860), action-space exploration. Dropping repeated texts and capping
# the episodes of a question are our additions.

RFT = "rft"
Episode = tuple[str, Trajectory]
"""A trajectory with its id."""


def filter_for_tuning(
    episodes: Iterable[Episode], *, per_question: int, seed: int, tagged_ids: Collection[str] | None = None
) -> FilterResult[Episode]:
    """Return the episodes to train on, in the order given, and a rejection with its reason for each
    of the others. Of episodes with the same text, the first is kept.

    Reasons are `wrong-answer`, `format`, `failed-call`, `refused-call` (of a tool that does not
    exist or is used up), `duplicate` and `question-cap`.

    Args:
        per_question: the most episodes of an instance, drawn by `seed`; 0 keeps all. They are drawn
            whatever their length, since fine-tuning should widen behaviour.
        tagged_ids: the ids of episodes that must keep the tag format and have no refused call;
            None: all. The others are from worlds whose episodes alternate replies and observations,
            where a refused action is a step like any other.
    """
    fit_episodes: list[Episode] = []
    rejected: list[Rejection] = []
    first_id_by_text: dict[str, str] = {}
    for trajectory_id, trajectory in episodes:
        reason, detail = _fault(trajectory, tagged_ids is None or trajectory_id in tagged_ids)
        text = f"{trajectory.instance.key}\n{text_of(trajectory)}"
        if not reason and first_id_by_text.setdefault(text, trajectory_id) != trajectory_id:
            reason, detail = "duplicate", f"same text as trajectory {first_id_by_text[text]}"
        if reason:
            rejected.append(_rejection(trajectory_id, reason, detail))
        else:
            fit_episodes.append((trajectory_id, trajectory))
    # The draw is independent of the order of the episodes and of their ids.
    texts_by_question: dict[str, list[tuple[str, str]]] = {}
    for trajectory_id, trajectory in fit_episodes:
        texts_by_question.setdefault(trajectory.instance.key, []).append((text_of(trajectory), trajectory_id))
    drawn_ids = {
        trajectory_id
        for key, texts in texts_by_question.items()
        for _, trajectory_id in random.Random(derive_seed(seed, "rft", key)).sample(
            sorted(texts), min(len(texts), per_question or len(texts))
        )
    }
    over_cap = [episode for episode in fit_episodes if episode[0] not in drawn_ids]
    rejected += [
        _rejection(trajectory_id, "question-cap", f"{trajectory.instance.key} keeps {per_question}")
        for trajectory_id, trajectory in over_cap
    ]
    return FilterResult(tuple(episode for episode in fit_episodes if episode[0] in drawn_ids), tuple(rejected))


def _fault(trajectory: Trajectory, is_tagged: bool) -> tuple[str, str]:
    """Return the reason why an episode is not trained on, and details; two empty strings if it
    is.
    """
    if not trajectory.success:
        return "wrong-answer", f"reward {trajectory.reward:g}, stopped by {trajectory.stop}"
    if is_tagged and (fault := strict_fault(text_of(trajectory))):
        return "format", fault
    if misread_action := next((step.action for step in trajectory.steps if is_misread(step.action)), ""):
        return "format", misread_action
    failed_call = next((call for step in trajectory.steps for call in step.tool_calls if call.status != "ok"), None)
    if failed_call is not None:
        return "failed-call", f"{failed_call.tool}: {failed_call.status}"
    refused_actions = [step.action for step in trajectory.steps if is_tagged and step.valid is False]
    return ("refused-call", refused_actions[0]) if refused_actions else ("", "")


def _rejection(subject: str, reason: str, detail: str) -> Rejection:
    return Rejection(stage=RFT, subject=subject, reason=reason, detail=detail)


# Selection for fine-tuning: suitable trajectories of an iteration's flywheel become samples; all
# others are stored as rejections.


async def select_rft(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Make and store the samples of an iteration from its flywheel; return the numbers of `samples`
    and of `rejected` trajectories.

    Families that an error stopped contribute the members that they have.
    """
    iteration_id = ctx.iteration_id(iteration)

    def make_samples() -> dict[str, Any]:
        members = load_flywheel_trajectories(ctx.store, iteration_id)
        with ctx.worlds() as worlds:
            tagged_ids = {
                key
                for key, member in members.items()
                if isinstance(step_form_of(worlds.env_of(member.instance), member.instance), TaggedForm)
            }
        result = filter_for_tuning(
            # Of equal texts the first is kept and its tokens are trained on. Ordered by ids, which
            # contain the run, this would depend on the run.
            sorted(members.items(), key=lambda member: [step.token_ids for step in member[1].steps]),
            per_question=ctx.recipe.et_agent.rft.per_question,
            seed=derive_seed(ctx.recipe.seed, RFT, iteration),
            tagged_ids=tagged_ids,
        )
        sample_rows = whole_episode_rows(ctx, iteration, dict(result.kept_items), stage=RFT)
        rows = merge([rejection_rows(result.rejections, iteration_id=iteration_id), sample_rows])
        replace_stage_output(ctx.store, rows, iteration_id=iteration_id, stage=RFT, sample_kinds=[SampleKind.GOOD])
        return {"samples": len(sample_rows.get("sample", ())), "rejected": len(result.rejections)}

    with ctx.timed("select_rft", iteration):
        return await run_in_thread(make_samples)


# Rollouts of a stage of the curriculum: the policy answers each training question several times.
#
# The rollouts are not trained on; their dispersions decide which questions are.

ROLLOUT = "rollout"


async def rollout(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Play the missing rollouts of an iteration; copy those that another run with the same inputs
    has. Return the number of `rollouts`, and of those attempted now (`new`).

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: training and test instances overlap, or the policy is missing.
        WorkerLost: one worker after another was lost; what they returned is kept.
    """
    instances = await chosen_instances(ctx, iteration)
    recipe, iteration_id, policy = ctx.recipe, ctx.iteration_id(iteration), ctx.policy(iteration)
    plans = [
        EpisodePlan(
            instance=instance,
            number=number,
            seed=derive_seed(recipe.seed, ROLLOUT, iteration, instance.key, number),
            repeats=recipe.grpo.repeats,
        )
        for instance in instances
        for number in range(recipe.et_agent.curriculum.rollouts)
    ]
    plans_by_id = {rollout_id(iteration_id, policy.id, plan): plan for plan in plans}
    plan_rollouts(ctx, iteration, plans_by_id, stage=ROLLOUT)
    rollout_settings = group_rollout_config(ctx.recipe)
    num_new = await play_rollouts(
        ctx,
        iteration,
        plans_by_id,
        stage=ROLLOUT,
        name="rollouts",
        sampling=rollout_settings.sampling,
        max_steps=rollout_settings.max_steps,
        limits=rollout_settings.limits,
    )
    return {"rollouts": len(plans_by_id), "new": num_new}


def check_counts(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if the curriculum does not suit the world: it has a cost for a tool that
    the world lacks, wants boxed answers where there are no questions, or counts calls in a world
    whose episodes are not one growing turn.
    """
    tools, costs = env.tools if isinstance(env, ReasoningWorld) else None, recipe.et_agent.curriculum.call_costs
    if tools is not None and (unknown_tools := sorted(costs.keys() - set(tools))):
        available = " and ".join(tools) or "none"
        raise ConfigError(
            f"et_agent.curriculum.call_costs: {env.name} has no tool {unknown_tools[0]}; it has {available}"
        )
    if recipe.et_agent.curriculum.boxed_only and tools is None:
        raise ConfigError(
            f"et_agent.curriculum.boxed_only: {env.name} has no questions that are answered in a box; leave it out"
        )
    if recipe.et_agent.curriculum.counts == "calls" and not isinstance(transcript_of(env), Continuation):
        raise ConfigError(
            f"et_agent.curriculum.counts: calls are counted in one growing turn with tags; episodes of {env.name} are "
            "turns, so set it to steps"
        )


# The selection in a curriculum stage: the questions to train on are chosen by their rollouts.

SELECT = "select"
_LEFT_OUT: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(("s_corr", "s_tool", "front", "crowding")) | {"selected": False, "reason": "incomplete"}
)


async def select_questions(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Choose the questions of an iteration by its rollouts, and store the outcome for each, unless
    a selection is stored already. Return the numbers of `questions` and of those `selected`.

    Raises `DataFault` when no question can be trained on.
    """
    iteration_id, config = ctx.iteration_id(iteration), ctx.recipe.et_agent.curriculum
    questions = load_selection(ctx.store, iteration_id)
    if not questions:
        instances = {instance.key: instance for instance in await chosen_instances(ctx, iteration)}
        with ctx.timed(SELECT, iteration):
            outcomes = load_rollout_outcomes(ctx.store, iteration_id)
            seed = derive_seed(ctx.recipe.seed, SELECT, iteration)
            questions = selection_outcomes(outcomes, config, seed=seed)
            selected_instances = [instances[question.instance_id] for question in questions if question.selected]
            rows = selection_rows(iteration_id, questions)
            ctx.store.write(merge([rows, chosen_instance_rows(iteration_id, {SELECTED: selected_instances})]))
    num_selected = sum(question.selected for question in questions)
    if not num_selected:
        raise DataFault(
            f"no question of iteration {iteration} has right and wrong answers among its {config.rollouts} rollouts; "
            "sample more of each (et_agent.curriculum.rollouts), or other questions"
        )
    return {"questions": len(questions), "selected": num_selected}


def selection_outcomes(
    outcomes: Sequence[RolloutOutcome], config: CurriculumConfig, *, seed: int
) -> list[SelectionOutcome]:
    """Return the outcome of the selection for each question, in the order of their first rollouts.

    A question with a rollout that failed for good is not chosen (reason `incomplete`), because
    dispersions over different numbers of rollouts cannot be compared.
    """
    outcomes_by_question: defaultdict[str, list[RolloutOutcome]] = defaultdict(list)
    for outcome in outcomes:
        outcomes_by_question[outcome.instance_id].append(outcome)
    played_by_question = {
        key: [outcome for outcome in group if outcome.reward is not None] for key, group in outcomes_by_question.items()
    }
    complete_ids = [key for key in outcomes_by_question if len(played_by_question[key]) == config.rollouts]
    shape = len(complete_ids), config.rollouts
    rollouts = [outcome for key in complete_ids for outcome in played_by_question[key]]
    correctness = np.array([outcome.reward for outcome in rollouts], dtype=np.float64).reshape(shape)
    costs = np.array([_cost(outcome, config) for outcome in rollouts], dtype=np.float64).reshape(shape)
    if config.select == "random":
        selection = select_at_random(
            complete_ids, correctness, costs, config.questions, mixed_only=config.mixed_only, seed=seed
        )
    else:
        selection = select_by_front(complete_ids, correctness, costs, config.questions, mixed_only=config.mixed_only)
    reasons = selection_reasons(selection, at_random=config.select == "random")
    fields_by_question: dict[str, dict[str, Any]] = {}
    for position, (key, reason) in enumerate(zip(complete_ids, reasons, strict=True)):
        distance = float(selection.crowding[position])
        fields_by_question[key] = {
            "s_corr": float(selection.correctness_spread[position]),
            "s_tool": float(selection.calls_spread[position]),
            "front": int(selection.rank[position]) if selection.rank[position] >= 0 else None,
            "crowding": None if math.isnan(distance) else distance,
            "selected": bool(selection.selected[position]),
            "reason": reason,
        }
    return [
        SelectionOutcome(
            instance_id=key,
            episodes=len(group),
            correctness=fmean(outcome.reward or 0.0 for outcome in group) if group else 0.0,
            cost=fmean(_cost(outcome, config) for outcome in group) if group else 0.0,
            **fields_by_question.get(key, _LEFT_OUT),
        )
        for key, group in played_by_question.items()
    ]


def _cost(outcome: RolloutOutcome, config: CurriculumConfig) -> int:
    return (outcome.calls if config.counts == "calls" else outcome.steps) or 0
