"""ETO: clone the expert, let the policy explore, pair its failures with successes, and train on
these preferences; also the paper's baselines.

Source: arXiv 2403.02502.
"""

from __future__ import annotations

from math import comb

from agentr_core.evaluation.metrics import (
    Forecast,
    Headroom,
    InstanceResults,
    OutcomeProbability,
    Prospect,
    mixed_probability,
    prospect,
)
from agentr_core.methods.catalogue import (
    DATASET,
    DEMONSTRATE,
    EVALUATE,
    EVALUATE_BASE,
    EXPLORATION_ROLLOUT_CONFIG,
    EXPLORE,
    EXPLORE_AND_KEEP,
    FUNNEL_OF_EXPERT,
    PAIRS,
    PAIRS_OF_RUN,
    PREFER,
    PROSPECT_OF_EXPLORATION,
    THINK,
    TRAIN_ON_PAIRS,
    clone_stages,
    demonstrate_stages,
    preference,
    supervised,
    values_by_iteration,
)
from agentr_core.recipes.data import DataConfig, tree_faults
from agentr_core.recipes.eto import EtoConfig, Phase, eto_faults
from agentr_core.recipes.fields import in_iteration, sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime.context import Demand, Funnel, Method, Plan, RolloutConfig, Stage, lazy_import

# A forecast of what an exploration of a recipe's size would yield with a given policy.
#
# A pair needs two episodes of one instance with different rewards, which are assumed to be 0 or 1.


def rollout_config(recipe: Recipe) -> RolloutConfig:
    """Return how the policy acts in an exploration: sampling, step limit and `repeats`."""
    explore = recipe.eto.explore
    sampling = sampling_of(explore)
    return RolloutConfig(sampling=sampling, max_steps=explore.max_steps, repeats=explore.repeats)


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Forecast what the first exploration would yield, and whether ETO can learn from it.

    If the environment has an expert, it is assumed to win every instance; without one, or with
    `eto.preferences.against: own`, what counts is the policy's own pairs. Whatever level and source
    the recipe names, pairs are counted as pairs of whole episodes of the exploration.
    """
    eto, pass_rates = recipe.eto, headroom.rates
    episodes = eto.explore.greedy + eto.explore.samples
    pair_limit = min(episodes, eto.preferences.per_instance or episodes)
    cap = recipe.data.good_per_tree or episodes

    def expected_successes(outcome: InstanceResults, probability: OutcomeProbability) -> float:
        num_greedy_wins, samples = int(eto.explore.greedy and outcome.greedy), eto.explore.samples
        return sum(
            comb(samples, wins) * probability(wins, samples - wins) * min(num_greedy_wins + wins, cap)
            for wins in range(samples + 1)
        )

    def expected_failures(outcome: InstanceResults, probability: OutcomeProbability) -> float:
        num_greedy_losses, samples = int(eto.explore.greedy and not outcome.greedy), eto.explore.samples
        return sum(
            comb(samples, losses) * probability(samples - losses, losses) * min(num_greedy_losses + losses, pair_limit)
            for losses in range(samples + 1)
        )

    def own_pair_probability(outcome: InstanceResults, probability: OutcomeProbability) -> float:
        samples = eto.explore.samples
        if not eto.explore.greedy:
            return mixed_probability(probability, samples)
        return 1 - (probability(samples, 0) if outcome.greedy else probability(0, samples))

    forecasts = [
        Forecast(
            name="successes", expected=pass_rates.total(headroom.instances, expected_successes, max_per_instance=cap)
        ),
        Forecast(
            name="own_pairs", expected=pass_rates.total(headroom.instances, own_pair_probability, max_per_instance=1)
        ),
    ]
    if headroom.has_expert:
        pairs = pass_rates.total(headroom.instances, expected_failures, max_per_instance=pair_limit)
        forecasts.append(Forecast(name="expert_pairs", expected=pairs))
    by_expert = headroom.has_expert and eto.preferences.against == "expert"
    too_few = "the policy rarely loses to the expert" if by_expert else "an instance's episodes nearly all end alike"
    return prospect(
        "eto",
        forecasts,
        needed_forecast="expert_pairs" if by_expert else "own_pairs",
        shortage_reason=too_few,
    )


_EPISODE_FUNNEL = lazy_import("agentr_core.methods.eto.report:funnel")
_FUNNELS: dict[Phase, Funnel] = {
    "sft": FUNNEL_OF_EXPERT,
    "rft": Funnel(title="From episodes to training rows", stages=_EPISODE_FUNNEL),
    "dpo": Funnel(title="From episodes to preference pairs", stages=_EPISODE_FUNNEL),
}


# The baselines (SFT, RFT) and the variant without an expert are other sequences of the same phases,
# so that resuming, evaluation and reports need no special cases.
def phase_of(eto: EtoConfig, iteration: int) -> Phase:
    """Return the phase of an iteration, counted from 1, which says what it trains on."""
    return in_iteration(eto.phases, iteration)


def trains_on_expert(eto: EtoConfig, iteration: int) -> bool:
    """Return whether an iteration, counted from 1, trains on the expert's episodes."""
    phase = phase_of(eto, iteration)
    return phase == "sft" or (phase == "rft" and eto.rft == "with_expert")


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration, which depends on its phase."""
    phase = phase_of(recipe.eto, iteration)
    if phase == "dpo":
        num_earlier = sum(phase_of(recipe.eto, earlier_iteration) == "dpo" for earlier_iteration in range(1, iteration))
        training = preference(recipe, num_earlier)
    else:
        training = supervised(recipe, iteration, anew=phase == "rft" and trains_on_expert(recipe.eto, iteration))
    return Plan(
        stages=(*_sample_stages(recipe.eto, iteration), DATASET, TRAIN_ON_PAIRS, EVALUATE),
        training=training,
        phase=phase,
        funnel=_FUNNELS[phase],
    )


def _sample_stages(eto: EtoConfig, iteration: int) -> tuple[Stage, ...]:
    phase = phase_of(eto, iteration)
    if phase == "sft":
        return clone_stages(eto)
    if phase == "rft":
        return (*clone_stages(eto), EXPLORE_AND_KEEP) if trains_on_expert(eto, iteration) else (EXPLORE_AND_KEEP,)
    if eto.preferences.source != "exploration":
        return (PREFER,)
    return (*demonstrate_stages(eto), EXPLORE, PREFER) if eto.preferences.against == "expert" else (EXPLORE, PREFER)


def _describe(recipe: Recipe, num_train: int, num_test: int) -> list[str]:
    explore, phases = recipe.eto.explore, recipe.over_iterations(recipe.eto.phases)
    lines = [f"iterations: {values_by_iteration(recipe, phases)}; each ends with {num_test} held-out episodes"]
    if _explores(recipe):
        lines.append(
            f"an iteration that explores plays {num_train} instances, {explore.samples + explore.greedy} times each"
            + (" from every step of the expert" if recipe.eto.preferences.level != "trajectory" else "")
        )
    data, training = recipe.data, recipe.training
    # Settings that supervised iterations read and iterations of phase `dpo` do not.
    is_set_by_name = {
        "data.general": data.general.share > 0,
        "data.replay": data.replay,
        "data.duplicates": data.duplicates != DataConfig().duplicates,
        "data.good_per_tree": data.good_per_tree > 0,
        "training.start_from": training.start_from != TrainingConfig().start_from,
        "training.step_tokens": training.step_tokens > 0,
        "training.lora_dropout": training.lora_dropout > 0,
    }
    names = [name for name, is_set in is_set_by_name.items() if is_set]
    if names and "dpo" in phases:
        lines.append(f"an iteration dpo does not read {', '.join(names)}")
    return lines


def _demands(recipe: Recipe, num_train: int, num_test: int) -> dict[str, Demand]:
    """Return upper bounds on what an iteration asks of models, by purpose (`think`, `explore`). An
    expert's episode is assumed to have at most `eto.explore.max_steps` steps.
    """
    eto, explore = recipe.eto, recipe.eto.explore
    demands = {}
    if eto.expert.thoughts.enabled:
        num_questions = num_train * explore.max_steps * eto.expert.thoughts.tries
        demands["think"] = Demand.questions("editor", num_questions, eto.expert.thoughts.max_new_tokens)
    if not _explores(recipe):
        return demands
    compares_steps = eto.preferences.source == "exploration" and eto.preferences.level != "trajectory"
    num_forks = (eto.preferences.forced_steps or explore.max_steps) if compares_steps else 1
    num_episodes = num_train * (explore.samples + explore.greedy) * num_forks
    max_tokens = recipe.longest_reply(explore.max_new_tokens)
    return demands | {"explore": Demand.episodes(num_episodes, steps=explore.max_steps, max_new_tokens=max_tokens)}


def _explores(recipe: Recipe) -> bool:
    stages = {stage for i in recipe.distinct_iterations() for stage in _sample_stages(recipe.eto, i)}
    return not stages.isdisjoint((EXPLORE, EXPLORE_AND_KEEP))


METHOD = Method(
    name="eto",
    title="ETO",
    sections=("eto", "iterations"),
    stages=(DEMONSTRATE, THINK, EXPLORE, PREFER, DATASET, TRAIN_ON_PAIRS, EVALUATE),
    plan=plan,
    before=(EVALUATE_BASE,),
    faults=lambda recipe: [*tree_faults(recipe.data, successes="rft" in recipe.eto.phases), *eto_faults(recipe.eto)],
    describe=_describe,
    demands=_demands,
    rollout_config=EXPLORATION_ROLLOUT_CONFIG,
    prospect=PROSPECT_OF_EXPLORATION,
    report=(PAIRS, PAIRS_OF_RUN),
    without_expert=(
        "name a file of demonstrations in eto.expert.file, or do without it: eto.phases [rft, dpo] and "
        "eto.preferences.against own"
    ),
)
