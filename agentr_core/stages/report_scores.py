"""The scores of a report: every model evaluated to the end so far, on the same held-out
instances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from agentr_core.evaluation import metrics
from agentr_core.recipes.evaluation import REVISION, TEST
from agentr_core.reports.records import DepthScore, Estimate, IterationScore, PassAt, SetScore, Unfinished
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id, measure_evaluation
from agentr_core.stages.lost_episodes import lost_episodes
from agentr_core.stages.measures import Measures, ks_of_pass, load_measures, of_depths, of_world
from agentr_core.store.queries.evaluations import is_finished, unfinished_evaluations


class Scoreboard:
    """The scores of a run's models: each is read once, however many reports show it."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._measures: dict[tuple[int, str], Measures] = {}
        self._scores: dict[int, IterationScore | None] = {}

    def up_to(self, iteration: int) -> tuple[IterationScore, ...]:
        """Return the score of the base model and of each iteration up to the given one, where it
        was evaluated.
        """
        found = (self.score(number) for number in range(iteration + 1))
        return tuple(score for score in found if score is not None)

    def score(self, iteration: int) -> IterationScore | None:
        """Return the score of the model that an iteration made (0: the base model); None where it
        was not evaluated.
        """
        if iteration not in self._scores:
            self._scores[iteration] = self._read(iteration)
        return self._scores[iteration]

    def difference(self, iteration: int, other: int) -> Estimate | None:
        """Return the success of an iteration minus that of the base model (0) or of the iteration
        before, paired by episode, with its 95% interval.

        None when one of the two was not evaluated.
        """
        found = self.measured(iteration, TEST)
        return finite(found.get("gain_over_base" if other == 0 else "gain_over_previous"))

    def measured(self, iteration: int, name: str) -> Measures:
        """Return what was measured of an iteration's model on a set; empty until its evaluation is
        finished.

        One of an earlier version is measured now.
        """
        key = iteration, name
        if key not in self._measures:
            store, evaluation = self._place.store, evaluation_id(self._place, iteration, name)
            found = load_measures(store, evaluation)
            if not found and is_finished(store, evaluation):
                found = measure_evaluation(self._place, iteration, name)
            self._measures[key] = found
        return self._measures[key]

    def unfinished(self, iteration: int) -> tuple[Unfinished, ...]:
        """Return how far the evaluations of the models up to an iteration are that have begun and
        are not finished.
        """
        asked = {
            evaluation_id(self._place, number, name): (number, name)
            for number in range(iteration + 1)
            for name in self._names
        }
        ended = unfinished_evaluations(self._place.store, list(asked))
        return tuple(
            Unfinished(iteration=number, name=name, episodes=ended[key], planned=self._planned(name))
            for key, (number, name) in asked.items()
            if key in ended
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return (TEST, *self._place.recipe.evaluation.sets, REVISION)

    def _planned(self, name: str) -> int | None:
        """Return how many episodes a set has, as the first model played them."""
        found = self.measured(0, name)
        if not found:
            return None
        lost = lost_episodes(self._place, evaluation_id(self._place, 0, name))
        return found["success"].n + (len(lost) if self._place.recipe.errors.count_as == "out" else 0)

    def _read(self, iteration: int) -> IterationScore | None:
        measures = self.measured(iteration, TEST)
        if not measures:
            return None
        recipe = self._place.recipe
        evaluations = [evaluation_id(self._place, iteration, name) for name in self._names]
        return replace(
            _score(iteration, measures, self.measured(iteration, REVISION)),
            sets=tuple(self._sets(iteration)) if recipe.evaluation.sets else (),
            worlds=tuple(self._worlds(iteration)),
            lost=sum(len(lost_episodes(self._place, one)) for one in evaluations),
            lost_as=recipe.errors.count_as,
        )

    def _sets(self, iteration: int) -> Iterator[SetScore]:
        recipe = self._place.recipe
        # The test sets of several worlds are reported world by world.
        first = {} if recipe.environments else {TEST: recipe.instances.test}
        further = {name: chosen.split for name, chosen in recipe.evaluation.sets.items()}
        for name, split in (first | further).items():
            if found := self.measured(iteration, name):
                yield _set_score(name, split, found)

    def _worlds(self, iteration: int) -> Iterator[SetScore]:
        """Yield the score of an iteration's model on the test set of each of several worlds."""
        for name, world in self._place.recipe.environments.items():
            if found := of_world(self.measured(iteration, TEST), name):
                revised = of_world(self.measured(iteration, REVISION), name)
                yield replace(
                    _set_score(name, world.instances.test, found),
                    reward=estimate(found["reward"]),
                    revision=estimate(revised["success"]) if revised else None,
                    revision_reward=estimate(revised["reward"]) if revised else None,
                )


def _set_score(name: str, split: str, found: Measures) -> SetScore:
    return SetScore(
        name=name,
        split=split,
        instances=int(found["instances"].mean),
        success=estimate(found["success_clustered"]),
        versus_base=finite(found.get("gain_over_base")),
        by_depth=tuple(
            DepthScore(
                depth=depth,
                success=estimate(part["success_clustered"]),
                versus_base=finite(part.get("gain_over_base")),
            )
            for depth, part in of_depths(found)
        ),
        pass_at=tuple(_pass_at(found)),
    )


def _pass_at(found: Measures) -> Iterator[PassAt]:
    for k in ks_of_pass(found):
        whole = finite(found[f"pass@{k}"])
        if whole is not None:
            parts = ((depth, finite(part.get(f"pass@{k}"))) for depth, part in of_depths(found))
            by_depth = tuple(DepthScore(depth=depth, success=part) for depth, part in parts if part is not None)
            yield PassAt(k=k, success=whole, by_depth=by_depth)


def _score(number: int, found: Measures, revision: Measures) -> IterationScore:
    loops = [found[f"loops@{length}"].mean for length in metrics.LOOP_LENGTHS if f"loops@{length}" in found]
    return IterationScore(
        iteration=number,
        success=estimate(found["success"]),
        reward=estimate(found["reward"]),
        versus_base=finite(found.get("gain_over_base")),
        steps_to_success=found["steps_to_success"].mean if "steps_to_success" in found else None,
        by_depth=tuple(DepthScore(depth=depth, success=estimate(part["success"])) for depth, part in of_depths(found)),
        revision=estimate(revision["success"]) if revision else None,
        revision_reward=estimate(revision["reward"]) if revision else None,
        loops=tuple(loops),
        looping=found["looping"].mean if "looping" in found else None,
    )


def estimate(found: metrics.Estimate) -> Estimate:
    """Return a measured number as a report shows it."""
    return Estimate(value=found.mean, low=found.low, high=found.high, n=found.n)


def finite(found: metrics.Estimate | None) -> Estimate | None:
    """Return an estimate for a report; None if there is none, or if it has no finite interval."""
    return estimate(found) if found is not None and math.isfinite(found.low) else None
