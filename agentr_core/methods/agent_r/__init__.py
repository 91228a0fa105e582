"""Agent-R: search trees, find the first error of each bad path, splice bad beginnings with good
ends into revision samples, and fine-tune on these.

Source: arXiv 2501.11425. With `data.use: expert` it is behaviour cloning without a search; with
`both+expert` the expert's episodes are added to its training set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import comb

from agentr_core.evaluation.metrics import Forecast, Headroom, Prospect, Run, prospect
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
    IN_TREES,
    PROSPECT_OF_TREES,
    REINFORCE,
    REVISION_SAMPLES,
    REVISIONS,
    SPLICE,
    STEPS_OF_GROUPS,
    TRAIN,
    VOICED,
    acting_in_groups,
    by_iteration,
    of_groups,
    of_unread,
    reinforce_stage,
    reinforced,
    reinforcing_faults,
    sampled_groups,
    splice_stage,
    summary_faults,
    supervised,
)
from agentr_core.recipes.agent_r import AgentRConfig, Learning, SearchConfig
from agentr_core.recipes.data import DataConfig
from agentr_core.recipes.fields import in_iteration, sampling_of
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.place import Acting, Demand, Method, Plan, Stage, imported

# A forecast of what a tree search of a recipe's size would yield with a given policy.
#
# A dive is treated as an episode whose outcome is independent of the other dives of its tree; at
# its last node `search.width` replies are sampled, so it ends in that many paths. Paths that begin
# after the expert's steps are left out of the forecast.


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSize:
    """The settings of a recipe that decide how much a tree yields.

    A tree is given up after `give_up` dives if none of them won. A dive ends in `leaves` paths.
    `per_tree` and `per_bad_leaf` limit the pairs, `good_per_tree` the good paths. For all but
    `dives` and `leaves`, 0 means no limit.
    """

    dives: int
    give_up: int
    leaves: int
    per_tree: int
    per_bad_leaf: int
    good_per_tree: int

    def pairs(self, wins: int, losses: int) -> int:
        """Return the number of pairs of a tree with `wins` won and `losses` lost dives."""
        good = wins * self.leaves
        return _capped(losses * self.leaves * _capped(good, self.per_bad_leaf), self.per_tree)

    def good_paths(self, wins: int) -> int:
        """Return how many good paths are kept from a tree with `wins` won dives."""
        return _capped(wins * self.leaves, self.good_per_tree)

    def outcomes(self, run: Run) -> Iterator[tuple[int, int, float]]:
        """Yield each possible outcome of a tree: (dives won, dives lost, probability)."""
        first = min(self.give_up or self.dives, self.dives)
        rest = self.dives - first
        yield 0, first, run(0, first)
        for wins in range(1, self.dives + 1):
            # Leave out the orders in which every win comes after the dive at which the tree would
            # have been given up.
            ways = comb(self.dives, wins) - comb(rest, wins)
            yield wins, self.dives - wins, ways * run(wins, self.dives - wins)

    def expected(self, run: Run, value: Callable[[int, int], float]) -> float:
        """Return the expected value of `value(wins, losses)` over the outcomes of a tree."""
        return sum(chance * value(wins, losses) for wins, losses, chance in self.outcomes(run))


def acting(recipe: Recipe) -> Acting:
    """Return how the policy acts in a search: with at most `search.depth + 1` steps in a path."""
    return Acting(sampling=sampling_of(recipe.search), max_steps=recipe.search.depth + 1)


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Forecast what the trees of the first iteration would yield, and whether that is enough for
    Agent-R to learn from. What counts is the number of good paths with `data.use: good`, and the
    number of pairs otherwise.

    Rewards are assumed to be 0 or 1.
    """
    search, pairs, of_good = recipe.search, recipe.pairs, recipe.data.use == "good"
    alone = search.method == "rollouts"
    size = TreeSize(
        dives=search.dives * search.width if alone else search.dives,
        give_up=search.give_up,
        leaves=1 if alone else search.width,
        per_tree=pairs.per_tree,
        per_bad_leaf=pairs.per_bad_leaf,
        good_per_tree=recipe.data.good_per_tree,
    )

    def over_all(name: str, value: Callable[[int, int], float]) -> Forecast:
        most = max(value(wins, size.dives - wins) for wins in range(size.dives + 1))
        expectation = headroom.rates.total(
            headroom.instances, lambda _, run: size.expected(run, value), per_instance=most
        )
        return Forecast(name=name, expected=expectation)

    return prospect(
        "agent-r",
        [
            over_all("won_trees", lambda wins, losses: wins > 0),
            over_all("mixed_trees", lambda wins, losses: wins > 0 < losses),
            over_all("pairs", size.pairs),
            over_all("good_paths", lambda wins, losses: size.good_paths(wins)),
        ],
        needs="good_paths" if of_good else "pairs",
        short="hardly a tree is won" if of_good else "nearly every tree is won or lost as a whole",
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
        return Plan(stages=stages, training=reinforced(recipe), phase=RL, funnel=FUNNEL_OF_GROUPS)
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


def _describe(recipe: Recipe, train: int, test: int) -> list[str]:
    clones = recipe.data.use == "expert"
    phases = recipe.over_iterations(recipe.agent_r.phases)
    number = {phase: _instances(recipe, phase, train) for phase in phases}
    workloads = {_CLONE: f"the expert's episodes of {number.get(_CLONE)} instances"}
    if RL in phases:
        workloads[RL] = of_groups(recipe, number[RL])
    if "sft" in phases:
        workloads["sft"] = f"the expert's episodes of {number['sft']} instances" if clones else f"{number['sft']} trees"
        if recipe.data.use == "both+expert":
            workloads["sft"] += " and the expert's episodes"
    if len(number) == 1:
        lines = [f"each iteration: {workloads[phases[0]]}, then {test} held-out episodes"]
    else:
        lines = [
            f"iterations: {by_iteration(recipe, phases)}; each ends with {test} held-out episodes",
            *(f"an iteration {phase} has {workloads[phase]}" for phase in number),
            *(of_unread(recipe) if RL in phases else []),
        ]
    if clones or "sft" not in phases:
        return lines
    if recipe.search.expert_start:
        dives = "its first dive" if recipe.search.give_up == 1 else f"{recipe.search.give_up} dives"
        lines.append(f"a tree that earns nothing in {dives} goes on after the expert's first steps")
    alphas = [f"{alpha:g}" for alpha in recipe.over_iterations(recipe.pairs.alpha)]
    return [*lines, f"alpha by iteration: {by_iteration(recipe, alphas)}"]


def _sampled(recipe: Recipe, train: int, test: int) -> dict[str, Demand]:
    """Return upper bounds on what an iteration asks of models, by purpose (`search`, `critique`,
    ...).
    """
    phases = recipe.over_iterations(recipe.agent_r.phases)
    requests = {**sampled_groups(recipe, test)} if RL in phases else {}
    if "sft" not in phases or recipe.data.use == "expert":
        return requests
    number = _instances(recipe, "sft", train)
    search, critique, longest = recipe.search, recipe.critique, recipe.search.depth + 1
    paths = search.dives * search.width
    requests["search"] = Demand.episodes(number * paths, steps=longest, most=search.max_new_tokens)
    if recipe.data.use == "good" or recipe.splice.mode == "direct":
        return requests
    # Each node is judged once, however many bad paths go through it.
    replies = requests["search"].replies
    judgements = min(replies, number * recipe.pairs.per_tree * longest) if recipe.pairs.per_tree else replies
    requests["critique"] = Demand.questions("judge", judgements * critique.votes, critique.max_new_tokens)
    if recipe.splice.goes_on:
        # Any reply may end a path, and each bad path may be paired with each good one.
        ends = paths * longest
        caps = [ends * recipe.pairs.per_bad_leaf, recipe.pairs.per_tree]
        pairs = min([ends**2 // 4, *(cap for cap in caps if cap)])
        goes_on = recipe.splice.continuation
        tries = number * pairs * goes_on.samples
        demand = Demand.episodes(tries, steps=goes_on.max_steps, most=goes_on.max_new_tokens)
        requests["continue"] = replace(demand, role=goes_on.by)
    return requests


def _instances(recipe: Recipe, phase: Learning, train: int) -> int:
    """Return how many training instances the first iteration of a phase has; `train` is the number
    in iteration 1.
    """
    iteration = 1 + recipe.over_iterations(recipe.agent_r.phases).index(phase)
    limit = recipe.instances.of(iteration).train_limit
    return limit if limit and limit != recipe.instances.train_limit else train


def _faults(recipe: Recipe) -> list[str]:
    faults = summary_faults(recipe)
    if recipe.data.use in ("successes", "rft", "preferences"):
        faults.append(f"data.use: {recipe.data.use} is for the arms of method compare; choose another")
    if recipe.data.suffixes != DataConfig().suffixes:
        faults.append("data.suffixes: exchanged is the control of a comparison; give it to an arm of method compare")
    if recipe.search.method != "mcts":
        faults += [
            f"search.{name}: independent episodes do not use it; leave it out, or set search.method=mcts"
            for name in ("give_up", "expert_start", "exploration", "merge")
            if getattr(recipe.search, name) != getattr(SearchConfig(), name)
        ]
    if not recipe.agent_r.phases:
        faults.append("agent_r.phases: name at least one of clone, sft and rl")
    if set(recipe.agent_r.phases) == {_CLONE} and recipe.data.use != "expert":
        faults.append("agent_r.phases: clone alone is data.use=expert; set that, and leave phases out")
    if RL in recipe.agent_r.phases:
        return faults + reinforcing_faults(recipe, alone=set(recipe.agent_r.phases) == {RL})
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
    sampled=_sampled,
    acting=lambda recipe: (IN_TREES if "sft" in recipe.agent_r.phases else acting_in_groups)(recipe),
    prospect=PROSPECT_OF_TREES,
    trial=imported("agentr_core.methods.agent_r.critique:trial"),
    voiced=VOICED,
    report=(REVISIONS, REVISION_SAMPLES, STEPS_OF_GROUPS, GROUPS_OF_RUN, AUDIT_OF_RUN),
    without_expert="data.use must be revision, good or both, and agent_r.phases without clone",
)
