"""Agent-R: search trees, find the first error of each bad path, splice bad beginnings with good
ends into revision samples, and fine-tune on these.

Source: arXiv 2501.11425. With `data.use: expert` it is behaviour cloning without a search; with
`both+expert` the expert's episodes are added to its training set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import comb

from agentr_core.evaluation.metrics import Forecast, Headroom, OutcomeProbability, Prospect, prospect
from agentr_core.methods.catalogue import (
    AUDIT_OF_RUN,
    CLONE,
    COLLECT,
    CRITIQUE,
    DATASET,
    EVALUATE,
    EVALUATE_BASE,
    FUNNEL_OF_EXPERT,
    FUNNEL_OF_GROUPS,
    FUNNEL_OF_TREES,
    GOOD_PATHS,
    GROUPS_OF_RUN,
    HAS_REFLECTION,
    PROSPECT_OF_TREES,
    REINFORCE,
    REVISION_SAMPLES,
    REVISIONS,
    SPLICE,
    STEPS_OF_GROUPS,
    TRAIN,
    TREE_ROLLOUT_CONFIG,
    group_demands,
    group_relative,
    group_rl_faults,
    group_rollout_config,
    groups_phrase,
    reinforce_stage,
    splice_stage,
    summary_faults,
    supervised,
    unread_lines,
    values_by_iteration,
)
from agentr_core.recipes.agent_r import AgentRConfig, Learning
from agentr_core.recipes.data import DataConfig
from agentr_core.recipes.fields import in_iteration, sampling_of
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import Demand, Method, Plan, RolloutConfig, Stage, lazy_import

# A forecast of what a tree search of a recipe's size would yield with a given policy.
#
# A dive is treated as an episode whose outcome is independent of the other dives of its tree; at
# its last node `search.width` replies are sampled, so it ends in that many paths. Paths that begin
# after the expert's steps are left out of the forecast.


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSize:
    """The settings of a recipe that decide how much a tree yields.

    A tree is given up after `give_up_after` dives if none of them won. A dive ends in
    `leaves_per_dive` paths. `max_pairs` and `max_pairs_per_bad_leaf` limit the pairs,
    `max_good_paths` the good paths. For all but `num_dives` and `leaves_per_dive`, 0 means no
    limit.
    """

    num_dives: int
    give_up_after: int
    leaves_per_dive: int
    max_pairs: int
    max_pairs_per_bad_leaf: int
    max_good_paths: int

    def num_pairs(self, wins: int, losses: int) -> int:
        """Return the number of pairs of a tree with `wins` won and `losses` lost dives."""
        num_good = wins * self.leaves_per_dive
        return _capped(losses * self.leaves_per_dive * _capped(num_good, self.max_pairs_per_bad_leaf), self.max_pairs)

    def num_good_paths(self, wins: int) -> int:
        """Return how many good paths are kept from a tree with `wins` won dives."""
        return _capped(wins * self.leaves_per_dive, self.max_good_paths)

    def outcomes(self, probability: OutcomeProbability) -> Iterator[tuple[int, int, float]]:
        """Yield each possible outcome of a tree: (dives won, dives lost, probability)."""
        num_first = min(self.give_up_after or self.num_dives, self.num_dives)
        num_later = self.num_dives - num_first
        yield 0, num_first, probability(0, num_first)
        for wins in range(1, self.num_dives + 1):
            # Leave out the orders in which every win comes after the dive at which the tree would
            # have been given up.
            num_orders = comb(self.num_dives, wins) - comb(num_later, wins)
            yield wins, self.num_dives - wins, num_orders * probability(wins, self.num_dives - wins)

    def expected_value(self, probability: OutcomeProbability, value: Callable[[int, int], float]) -> float:
        """Return the expected value of `value(wins, losses)` over the outcomes of a tree."""
        return sum(chance * value(wins, losses) for wins, losses, chance in self.outcomes(probability))


def rollout_config(recipe: Recipe) -> RolloutConfig:
    """Return how the policy acts in a search: with at most `search.depth + 1` steps in a path."""
    return RolloutConfig(sampling=sampling_of(recipe.search), max_steps=recipe.search.depth + 1)


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Forecast what the trees of the first iteration would yield, and whether that is enough for
    Agent-R to learn from. What counts is the number of good paths with `data.use: good`, and the
    number of pairs otherwise.

    Rewards are assumed to be 0 or 1.
    """
    search, pairing, uses_good_paths = recipe.search, recipe.pairs, recipe.data.use == "good"
    is_rollouts = search.method == "rollouts"
    tree_size = TreeSize(
        num_dives=search.dives * search.width if is_rollouts else search.dives,
        give_up_after=search.give_up,
        leaves_per_dive=1 if is_rollouts else search.width,
        max_pairs=pairing.per_tree,
        max_pairs_per_bad_leaf=pairing.per_bad_leaf,
        max_good_paths=recipe.data.good_per_tree,
    )

    def forecast_of(name: str, value: Callable[[int, int], float]) -> Forecast:
        max_per_tree = max(value(wins, tree_size.num_dives - wins) for wins in range(tree_size.num_dives + 1))
        expectation = headroom.rates.total(
            headroom.instances, lambda _, run: tree_size.expected_value(run, value), max_per_instance=max_per_tree
        )
        return Forecast(name=name, expected=expectation)

    return prospect(
        "agent-r",
        [
            forecast_of("won_trees", lambda wins, losses: wins > 0),
            forecast_of("mixed_trees", lambda wins, losses: wins > 0 < losses),
            forecast_of("pairs", tree_size.num_pairs),
            forecast_of("good_paths", lambda wins, losses: tree_size.num_good_paths(wins)),
        ],
        needed_forecast="good_paths" if uses_good_paths else "pairs",
        shortage_reason="hardly a tree is won" if uses_good_paths else "nearly every tree is won or lost as a whole",
    )


def _capped(number: int, cap: int) -> int:
    return min(number, cap) if cap else number


_CLONE: Learning = "clone"
RL: Learning = "rl"


def phase_of(agent_r: AgentRConfig, iteration: int) -> Learning:
    """Return the phase of an iteration, counted from 1."""
    return in_iteration(agent_r.phases, iteration)


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration, counted from 1. Its phase decides what it trains on and, in
    phase `sft`, `data.use` decides how its samples are made.
    """
    phase = phase_of(recipe.agent_r, iteration)
    if phase == RL:
        stages = (reinforce_stage(recipe.grpo), EVALUATE)
        return Plan(stages=stages, training=group_relative(recipe), phase=RL, funnel=FUNNEL_OF_GROUPS)
    use = "expert" if phase == _CLONE else recipe.data.use
    revision_stages = (COLLECT, CRITIQUE, splice_stage(recipe.splice))
    sample_stages: dict[str, tuple[Stage, ...]] = {
        "expert": (CLONE,),
        "both+expert": (*revision_stages, CLONE),
        "good": (COLLECT, GOOD_PATHS),
    }
    return Plan(
        stages=(*sample_stages.get(use, revision_stages), DATASET, TRAIN, EVALUATE),
        training=supervised(recipe, iteration),
        phase=_CLONE if phase == _CLONE else "",
        funnel=FUNNEL_OF_EXPERT if use == "expert" else FUNNEL_OF_TREES,
    )


def _describe(recipe: Recipe, num_train: int, num_test: int) -> list[str]:
    is_cloning = recipe.data.use == "expert"
    phases = recipe.over_iterations(recipe.agent_r.phases)
    num_instances_by_phase = {phase: _num_instances(recipe, phase, num_train) for phase in phases}
    workloads = {_CLONE: f"the expert's episodes of {num_instances_by_phase.get(_CLONE)} instances"}
    if RL in phases:
        workloads[RL] = groups_phrase(recipe, num_instances_by_phase[RL])
    if "sft" in phases:
        workloads["sft"] = (
            f"the expert's episodes of {num_instances_by_phase['sft']} instances"
            if is_cloning
            else f"{num_instances_by_phase['sft']} trees"
        )
        if recipe.data.use == "both+expert":
            workloads["sft"] += " and the expert's episodes"
    if len(num_instances_by_phase) == 1:
        lines = [f"each iteration: {workloads[phases[0]]}, then {num_test} held-out episodes"]
    else:
        lines = [
            f"iterations: {values_by_iteration(recipe, phases)}; each ends with {num_test} held-out episodes",
            *(f"an iteration {phase} has {workloads[phase]}" for phase in num_instances_by_phase),
            *(unread_lines(recipe) if RL in phases else []),
        ]
    if is_cloning or "sft" not in phases:
        return lines
    if recipe.search.expert_start:
        dives_phrase = "its first dive" if recipe.search.give_up == 1 else f"{recipe.search.give_up} dives"
        lines.append(f"a tree that earns nothing in {dives_phrase} goes on after the expert's first steps")
    alphas = [f"{alpha:g}" for alpha in recipe.over_iterations(recipe.pairs.alpha)]
    return [*lines, f"alpha by iteration: {values_by_iteration(recipe, alphas)}"]


def _demands(recipe: Recipe, num_train: int, num_test: int) -> dict[str, Demand]:
    """Return upper bounds on what an iteration asks of models, by purpose (`search`, `critique`,
    ...).
    """
    phases = recipe.over_iterations(recipe.agent_r.phases)
    demands = {**group_demands(recipe, num_test)} if RL in phases else {}
    if "sft" not in phases or recipe.data.use == "expert":
        return demands
    num_instances = _num_instances(recipe, "sft", num_train)
    search, critique, max_steps = recipe.search, recipe.critique, recipe.search.depth + 1
    num_paths = search.dives * search.width
    demands["search"] = Demand.episodes(
        num_instances * num_paths, steps=max_steps, max_new_tokens=search.max_new_tokens
    )
    if recipe.data.use == "good" or recipe.splice.mode == "direct":
        return demands
    # Each node is judged once, however many bad paths go through it.
    num_replies = demands["search"].replies
    num_judgements = (
        min(num_replies, num_instances * recipe.pairs.per_tree * max_steps) if recipe.pairs.per_tree else num_replies
    )
    demands["critique"] = Demand.questions("judge", num_judgements * critique.votes, critique.max_new_tokens)
    if recipe.splice.goes_on:
        # Any reply may end a path, and each bad path may be paired with each good one.
        num_leaves = num_paths * max_steps
        caps = [num_leaves * recipe.pairs.per_bad_leaf, recipe.pairs.per_tree]
        num_pairs = min([num_leaves**2 // 4, *(cap for cap in caps if cap)])
        continuation = recipe.splice.continuation
        num_tries = num_instances * num_pairs * continuation.samples
        demand = Demand.episodes(num_tries, steps=continuation.max_steps, max_new_tokens=continuation.max_new_tokens)
        demands["continue"] = replace(demand, role=continuation.by)
    return demands


def _num_instances(recipe: Recipe, phase: Learning, num_train: int) -> int:
    """Return how many training instances the first iteration of a phase has; `num_train` is the
    number in iteration 1.
    """
    iteration = 1 + recipe.over_iterations(recipe.agent_r.phases).index(phase)
    limit = recipe.instances.at_iteration(iteration).train_limit
    return limit if limit and limit != recipe.instances.train_limit else num_train


def _faults(recipe: Recipe) -> list[str]:
    faults = summary_faults(recipe)
    if recipe.data.use in ("successes", "rft", "preferences"):
        faults.append(f"data.use: {recipe.data.use} is for the arms of method compare; choose another")
    if recipe.data.suffixes != DataConfig().suffixes:
        faults.append("data.suffixes: exchanged is the control of a comparison; give it to an arm of method compare")
    if not recipe.agent_r.phases:
        faults.append("agent_r.phases: name at least one of clone, sft and rl")
    if set(recipe.agent_r.phases) == {_CLONE} and recipe.data.use != "expert":
        faults.append("agent_r.phases: clone alone is data.use=expert; set that, and leave phases out")
    if RL in recipe.agent_r.phases:
        return faults + group_rl_faults(recipe, is_only_phase=set(recipe.agent_r.phases) == {RL})
    if recipe.grpo != GrpoConfig():
        faults.append("grpo: has no use without an iteration rl; name one in agent_r.phases, or leave it out")
    return faults


METHOD = Method(
    name="agent-r",
    title="Agent-R",
    sections=("agent_r", "search", "critique", "pairs", "splice", "grpo", "iterations"),
    stages=(COLLECT, CRITIQUE, SPLICE, DATASET, TRAIN, REINFORCE, EVALUATE),
    plan=plan,
    before=(EVALUATE_BASE,),
    faults=_faults,
    describe=_describe,
    demands=_demands,
    rollout_config=lambda recipe: (TREE_ROLLOUT_CONFIG if "sft" in recipe.agent_r.phases else group_rollout_config)(
        recipe
    ),
    prospect=PROSPECT_OF_TREES,
    measure_judges=lazy_import("agentr_core.methods.agent_r.critique:measure_judges"),
    has_reflection=HAS_REFLECTION,
    report=(REVISIONS, REVISION_SAMPLES, STEPS_OF_GROUPS, GROUPS_OF_RUN, AUDIT_OF_RUN),
    without_expert="data.use must be revision, good or both, and agent_r.phases without clone",
)
