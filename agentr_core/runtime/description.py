"""What a method says about itself: the stages of each iteration, what each needs, and what is
trained.

These records import neither torch nor DuckDB: the code that does the work is imported when it is
called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from agentr_core.errors import ConfigError
from agentr_core.recipes import ModelRole, Recipe, TrainingConfig
from agentr_core.training.objectives import Objective
from agentr_core.types import NO_LIMITS, EpisodeLimits, Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from agentr_core.evaluation.headroom import Headroom, Judge, Prospect
    from agentr_core.evaluation.metrics import Estimate
    from agentr_core.protocols import Environment
    from agentr_core.reports.document import Section
    from agentr_core.reports.records import FunnelStage
    from agentr_core.runtime.place import Workplace
    from agentr_core.store.codec.trajectories import Episode
    from agentr_core.types import Instance, Sample

Need = Literal["gpu", "env"]
"""What a stage occupies, as a tag that Prefect limits: a model on a GPU, environments."""
Product = Literal["dataset", "checkpoint"]
Position = Literal["data", "samples", "run"]
"""Where sections stand: after the funnel of data construction, before the recipe, or on the page of
the whole run, which shows those of its last iteration."""
Check = Callable[["Recipe", "Environment", "Sequence[Instance]"], None]
"""Raises `UserError` for what would stop a stage; the instances are training instances."""


def imported(where: str) -> Callable[..., Any]:
    """Return a function that, when called, imports the function `module:name` and calls that."""

    def call(*args: Any, **options: Any) -> Any:
        return resolve_name(where)(*args, **options)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of an iteration.

    Two methods may have stages of the same name that do different work.
    """

    name: str
    about: str
    """What the stage does, as one sentence."""
    work: Callable[[Workplace, int], Awaitable[Any]]
    """Does the part of an iteration that is not yet done, and returns a short summary."""
    reads: tuple[str, ...] = ()
    """The sections and fields of a recipe that affect it, as `section` or `section.field`."""
    needs: tuple[Need, ...] = ()
    roles: tuple[ModelRole, ...] = ()
    """The roles whose models it asks."""
    spreads: bool = False
    """Whether it hands shards to the workers of a cluster."""
    gathers: bool = False
    """Whether it adds to the experience of an iteration, as a collection does."""
    chooses: bool = False
    """Whether it chooses, of all that was gathered right before it, what is trained on."""
    makes: Product | None = None
    """What an iteration has once it has ended. The stages before it then do nothing more."""
    check: Check = lambda recipe, env, instances: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training of an iteration: what it trains, and how."""

    objective: Objective
    config: TrainingConfig
    section: str = "training"
    """The section of the recipe that has its schedule."""
    num_train_epochs: float = 1.0
    anew: bool = False
    """Whether it trains the model that the run began with, not the latest policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """The section of a report that counts what came out of each stage of data construction."""

    title: str
    """A heading that says from what to what the funnel leads."""
    stages: Callable[[Workplace, int], tuple[FunnelStage, ...]]
    """Returns the counts of an iteration, read from the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one iteration: its stages and its training."""

    stages: tuple[Stage, ...]
    """The stages, in order."""
    training: Training | None = None
    """None where nothing is trained."""
    phase: str = ""
    """The kind of iteration, where a method has several."""
    takes: Callable[[Sample], bool] | None = None
    """Returns whether a sample becomes part of the dataset; None: all do."""
    funnel: Funnel | None = None
    """None where no training data is made."""

    @property
    def pairs(self) -> bool:
        """Whether the dataset is made of preference pairs."""
        return self.training is not None and self.training.objective.rows == "pairs"

    @property
    def gathering(self) -> tuple[Stage, ...]:
        """The stages up to the last one that gathers, and the choice right after it; none where
        training samples for itself.
        """
        last = max((place for place, stage in enumerate(self.stages, start=1) if stage.gathers), default=0)
        return self.stages[: last + any(stage.chooses for stage in self.stages[last : last + 1])]

    def settled(self, made: Collection[Product]) -> tuple[Stage, ...]:
        """Return the stages before the last one that made something which is there: what they would
        still add would be in none of it.
        """
        last = max((place for place, stage in enumerate(self.stages) if stage.makes in made), default=0)
        return self.stages[:last]

    def stage(self, name: str) -> Stage:
        """Return the stage of a given name. Raises `ConfigError` if the iteration has none of that
        name.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(f"this iteration has no stage {name}; it has {', '.join(one.name for one in self.stages)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart:
    """Sections that a method adds to the report of an iteration.

    The key of a section is the anchor of its heading: no two sections of a page share one.
    """

    sections: Callable[[Workplace, int], Sequence[Section]]
    """Returns the sections, read from the store; none where there is nothing to say."""
    position: Position = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acting:
    """The way in which a policy acts where a method collects experience."""

    sampling: Sampling
    max_steps: int
    repeats: int = 0
    """As `evaluation.repeats`; 0: an episode that repeats itself goes on."""
    limits: EpisodeLimits = NO_LIMITS


def _as_evaluated(recipe: Recipe) -> Acting:
    evaluation = recipe.evaluation
    sampling = evaluation.sampling(temperature=1.0, max_new_tokens=evaluation.max_new_tokens)
    return Acting(sampling=sampling, max_steps=evaluation.max_steps, limits=evaluation.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The most that an iteration asks of a model for one purpose: `replies`, at most `steps` in an
    episode or a row of questions, and at most `tokens` tokens in all of them.
    """

    replies: int
    tokens: int
    steps: int = 1
    role: ModelRole = "actor"

    @classmethod
    def episodes(cls, number: int, *, steps: int, most: int, limits: EpisodeLimits = NO_LIMITS) -> Asked:
        """Return what episodes ask, of `steps` replies of `most` tokens each, within limits."""
        tokens = min(steps * most, limits.tokens or steps * most)
        return cls(replies=number * steps, tokens=number * tokens, steps=steps)

    @classmethod
    def questions(cls, role: ModelRole, number: int, most: int) -> Asked:
        """Return what single questions to a helper ask, each answered with `most` tokens."""
        return cls(replies=number, tokens=number * most, role=role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way of learning, described once: flows, tasks, plans, checks, estimates and reports read
    it.
    """

    name: str
    """The name, as recipes give it in `method`."""
    title: str
    flow: Literal["flywheel", "compare"] = "flywheel"
    """Which flow runs its recipes."""
    sections: tuple[str, ...] = ()
    """The sections of a recipe that it reads, among those that not every method reads
    (`recipes.recipe.OPTIONAL`).
    """
    stages: tuple[Stage, ...]
    """Every stage that an iteration may have, in order."""
    plan: Callable[[Recipe, int], Plan]
    """Returns what an iteration, counted from 1, does."""
    before: tuple[Stage, ...] = ()
    """Stages for the model that a run begins with, before the first iteration."""
    faults: Callable[[Recipe], list[str]] = lambda recipe: []
    """Returns what is wrong with a recipe, one sentence each, beyond the faults that are checked
    for all methods.
    """
    settle: Callable[[Recipe], None] = lambda recipe: None
    """Raises `ConfigError` for faults that only the parsed recipe as a whole shows."""
    trained: Callable[[Recipe], Sequence[Recipe]] = lambda recipe: [recipe]
    """Returns the recipes whose trainings a run does: its own, or those of its arms."""
    identify: Callable[[Recipe, dict[str, Any]], None] = lambda recipe, plain: None
    """Removes from the plain data of a recipe what is not part of its run's id."""
    describe: Callable[[Recipe, int, int], list[str]] = lambda recipe, train, test: []
    """Returns lines for `agentr plan`, given a recipe and the numbers of training instances and of
    held-out episodes.
    """
    sampled: Callable[[Recipe, int, int], dict[str, Asked]] = lambda recipe, train, test: {}
    """Returns the most that an iteration asks of models, by purpose, given a recipe and the numbers
    of training instances and of held-out episodes; its evaluation is added to that."""
    taken_over: tuple[str, ...] = ("collect", "critique", "explore")
    """The stages, by name, whose inputs are stored with a run, so that runs with equal inputs take
    over each other's work. The default also names them for a method that has none of them, since
    runs have been stored that way.
    """
    acting: Callable[[Recipe], Acting] = _as_evaluated
    """Returns how the policy acts where experience is collected."""
    prospect: Callable[[Recipe, Headroom], Prospect] | None = None
    """Returns what an iteration of a recipe would make of a policy's experience, and whether a
    model can learn from that; None where this cannot be told.
    """
    trial: Callable[[Workplace, Sequence[Episode], Sequence[Path]], Awaitable[tuple[Judge, ...]]] | None = None
    """Returns what the verdicts of a recipe's judge on lost episodes are worth, and those of other
    models, given their directories; None where nothing is judged."""
    voiced: Callable[[str], bool] | None = None
    """Returns whether a reply contains a sentence with which samples of this method turn back from
    a mistake; None where they have no such sentences.
    """
    drawn_on: Callable[[Workplace], Collection[Stage]] = lambda place: ()
    """Returns the stages of a run that other runs have trained on: they add nothing more, so that
    whatever trains on it later has the same before it.
    """
    measures: Callable[[Workplace, int, str, Sequence[Episode]], dict[str, Estimate]] = lambda *_: {}
    """Returns the metrics of episodes, by name, beyond those of all methods, given the iteration
    and the name of their evaluation.
    """
    report: tuple[ReportPart, ...] = ()
    """What it adds to the report of an iteration, in order."""
    without_expert: str = "choose an environment that has one"
    """What to do about an environment that has no expert."""
