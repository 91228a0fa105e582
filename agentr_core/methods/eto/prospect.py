"""A forecast of what an exploration of a recipe's size would yield with a given policy.

A pair needs two episodes of one instance with different rewards, which are assumed to be 0 and 1.
"""

from __future__ import annotations

from agentr_core.evaluation.headroom import Forecast, Headroom, Prospect, prospect
from agentr_core.evaluation.pass_rates import Run, Tried, mixed
from agentr_core.recipes.eto import EtoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.sampling import sampling_of
from agentr_core.runtime.place import Acting


def acting(recipe: Recipe) -> Acting:
    """Return how the policy acts in an exploration."""
    explore = recipe.eto.explore
    sampling = sampling_of(explore)
    return Acting(sampling=sampling, max_steps=explore.max_steps, repeats=explore.repeats)


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Return what the first exploration would yield, and whether ETO can learn from it.

    The expert is assumed to win wherever the environment has one. Without one, pairs are the
    policy's own. Pairs by steps, from trees or from a file are not forecast: they are counted as
    whole episodes of the exploration.
    """
    eto, rates = recipe.eto, headroom.rates
    played = eto.explore.greedy + eto.explore.samples
    paired = min(played, eto.preferences.per_instance or played)

    def successes(one: Tried, run: Run) -> float:
        return _greedy(one, eto) + eto.explore.samples * run(1, 0)

    def failures(one: Tried, run: Run) -> float:
        lost = eto.explore.greedy - _greedy(one, eto) + eto.explore.samples * run(0, 1)
        return min(lost, paired)

    def contrast(one: Tried, run: Run) -> float:
        samples = eto.explore.samples
        if not eto.explore.greedy:
            return mixed(run, samples)
        return 1 - (run(samples, 0) if one.greedy else run(0, samples))

    forecasts = [
        Forecast(name="successes", expected=rates.total(headroom.instances, successes, most=played)),
        Forecast(name="own_pairs", expected=rates.total(headroom.instances, contrast, most=1)),
    ]
    if headroom.has_expert:
        pairs = rates.total(headroom.instances, failures, most=paired)
        forecasts.append(Forecast(name="expert_pairs", expected=pairs))
    by_expert = headroom.has_expert and eto.preferences.against == "expert"
    too_few = "the policy rarely loses to the expert" if by_expert else "an instance's episodes nearly all end alike"
    return prospect(
        "eto",
        forecasts,
        needs="expert_pairs" if by_expert else "own_pairs",
        short=too_few,
    )


def _greedy(one: Tried, eto: EtoConfig) -> int:
    return int(eto.explore.greedy and one.greedy)
