"""Sample the episodes of a training step: choose instances, play what is not stored yet, and group
the episodes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import Helper, require_state
from agentr_core.errors import DataFault
from agentr_core.evaluation.episodes import EpisodePlan, episode_plans
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.grpo.cuts import STAGE, cuts_of
from agentr_core.methods.grpo.readings import expert_of
from agentr_core.models.checkpoint_dir import check_same_tokens
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.grpo import BranchingConfig, GrpoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.episode_shard import EpisodeShard, rollout_id, with_ungraded
from agentr_core.runtime.equipment import Checkpoint, Effort, Worlds
from agentr_core.runtime.instances import held_out
from agentr_core.runtime.place import Workplace
from agentr_core.stages.demonstrate import expert_id, expert_rows, need_expert
from agentr_core.stages.evaluate import limited
from agentr_core.store.codec.ledger import VALIDATION, Group, load_failures, rejection_rows, validation_rows
from agentr_core.store.codec.samples import derivation_rows
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Writer
from agentr_core.system import in_thread
from agentr_core.training.group.advantages import has_contrast
from agentr_core.training.job import GroupReward
from agentr_core.types import Derivation, Instance, Rejection, Step, Trajectory

# Groups that begin in the middle: which instances of a training step go on from a failed episode or
# from the expert's, and after which of its steps.
#
# Agent-R splices a revision onto the beginning of a bad path and trains on it (arXiv 2501.11425,
# section 3.2). Here the policy itself goes on from such a beginning, as in the revision test, and
# is rewarded for the outcome. Where it never wins, it goes on from a beginning of the expert's
# episode: the later that ends, the less is left to find (arXiv 2402.05808).

Operator = Literal["revision", "continuation"]
"""How a group goes on: `revision` of a failed trajectory, or `continuation` of the expert's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The steps that the episodes of a group go on from: the first ones of the trajectory with id
    `parent`. Without any, the episodes begin at the start. `operator` says whose trajectory it is.
    """

    steps: tuple[Step, ...] = ()
    parent: str = ""
    operator: Operator = "revision"


def revisited(
    instances: Sequence[Instance], failures: Mapping[str, Sequence[str]], *, share: float, seed: int
) -> dict[str, str]:
    """Return the ids of the failed episodes to go on from, by instance key: one for each of at most
    a `share` of all `instances`, drawn by the seed.

    At least one instance is always left out, so that each step has episodes from the start.

    Args:
        failures: the ids of failed episodes with at least two steps, by the key of their instance,
            in the order in which they were planned.
    """
    able = sorted({instance.key for instance in instances if failures.get(instance.key)})
    rng = random.Random(seed)
    most = min(round(share * len(instances)), len(instances) - 1)
    keys = rng.sample(able, min(len(able), most))
    return {key: rng.choice(failures[key]) for key in sorted(keys)}


def beginning(
    key: str, trajectory: Trajectory, *, seed: int, operator: Operator = "revision", cut: int | None = None
) -> Beginning:
    """Return a beginning of the trajectory with id `key`, which has at least two steps: its first
    `cut` steps, fewer than all. Without `cut` the number is drawn by the seed and the instance so
    that at least one step is kept and at least one is cut off: no beginning ends the episode.
    """
    if cut is None:
        cut = random.Random(derive_seed(seed, "cut", trajectory.instance.key)).randrange(1, len(trajectory.steps))
    return Beginning(steps=trajectory.steps[:cut], parent=key, operator=operator)


# Episodes that branch where the policy becomes less sure than it was at the start.
#
# A group begins with a few episodes. After each observation an episode may branch: another one is
# played from the same steps on. The chance grows with the entropy of the preceding reply minus that
# of the first reply. Episodes that the group still lacks in the end are played from the start.
# Source: ARPO (arXiv 2507.19849).
#
# Entropies are estimated from the log-probabilities of the sampled tokens: minus their sum is, on
# average, the entropy of the policy's whole distribution. The published code sums p * log p over
# the ten likeliest tokens instead.

OPERATOR = "branch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A played episode of a group. `key` is the id of its trajectory.

    A branch has the first steps of its parent, and therefore also the first entropy, with which
    those of later steps are compared.
    """

    key: str
    plan: EpisodePlan
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The place where a member branches: after the first `position` of its steps."""

    parent: Member
    position: int

    @property
    def prefix(self) -> tuple[Step, ...]:
        """The steps that the branch goes on from."""
        return self.parent.trajectory.steps[: self.position]


def entropy(step: Step, branching: BranchingConfig, vocabulary: int) -> float:
    """Return an estimate of the entropy of a reply's first tokens, summed over them, in units of
    `ln(vocabulary)`.

    Raises `DataFault` if the reply has no log-probabilities.
    """
    if step.logprobs is None:
        raise DataFault(f"the reply {step.reply[:60]!r} has no log-probabilities, so its entropy is not known")
    return -sum(step.logprobs[: branching.entropy_tokens]) / math.log(vocabulary)


def chance(rise: float, branching: BranchingConfig) -> float:
    """Return the probability of a branch after a reply whose entropy is `rise` above that of the
    first one.
    """
    return min(1.0, max(0.0, branching.branch_probability + branching.entropy_weight * rise))


def forks(
    members: Sequence[Member], branching: BranchingConfig, vocabulary: int, *, room: int, given: int = 0
) -> list[Fork]:
    """Return where members branch: at most `room` places, the earliest in the episodes first.

    Each observation of a member's own, as opposed to its parent's, gives one chance to branch,
    which is drawn with a seed of its own. The first `given` steps of each member were not sampled
    for the group.
    """
    candidates: list[Fork] = []
    for member in members:
        steps = member.trajectory.steps
        for position in range(len(member.plan.prefix) + 1, len(steps)):
            if not steps[position - 1].observation:
                continue
            rise = entropy(steps[position - 1], branching, vocabulary) - entropy(steps[given], branching, vocabulary)
            draw = random.Random(derive_seed(member.plan.seed, OPERATOR, position)).random()
            if draw < chance(rise, branching):
                candidates.append(Fork(parent=member, position=position))
    return sorted(candidates, key=lambda fork: (fork.position, fork.parent.plan.number))[:room]


# A group while it is sampled: which episodes of an instance to play, wave by wave.


@dataclass(slots=True, kw_only=True)
class Family:
    """The episodes of one instance in a draw, a group in the making. `first` is the number of its
    first episode, `planned` how many episodes were planned so far.
    """

    instance: Instance
    first: int
    seed: Callable[[int], int]
    """Returns the seed of an episode, given its number."""
    beginning: Beginning = field(default_factory=Beginning)
    """The steps that all of its episodes go on from."""
    episodes: dict[str, Trajectory] = field(default_factory=dict)
    """The episodes played so far, by the id of the trajectory."""
    given: dict[str, int] = field(default_factory=dict)
    """How many steps an episode began with, by the id of the trajectory, for those that do not
    begin at the start.
    """
    planned: int = 0
    _newest: list[Member] = field(default_factory=list)
    _forks: dict[str, Fork] = field(default_factory=dict)

    def next_wave(self, config: GrpoConfig, vocabulary: int) -> list[EpisodePlan]:
        """Return the episodes to play next, and count them as planned; none once the group is full.

        Without branching there is one wave. With it, a wave of fresh episodes is followed by waves
        of branches from the last one; if none branches, fresh ones fill the group.
        """
        room, settings = config.num_generations - self.planned, config.branching
        if not room or settings is None:
            return self._fresh(room)
        if not self.planned:
            return self._fresh(settings.initial_rollouts)
        branches: list[EpisodePlan] = []
        num_given = len(self.beginning.steps)
        for fork in forks(self._newest, settings, vocabulary, room=room, given=num_given):
            (number,) = self._numbers(1)
            plan = EpisodePlan(
                instance=self.instance,
                number=number,
                seed=self.seed(number),
                prefix=fork.prefix,
                max_steps=config.max_steps - (fork.position - num_given),
            )
            self._forks[plan.key] = fork
            branches.append(plan)
        return branches or self._fresh(room)

    def take(self, episodes: Mapping[str, tuple[EpisodePlan, Trajectory]]) -> list[Derivation]:
        """Add the played episodes of a wave, given by trajectory id; return the derivations of
        those that do not begin at the start.
        """
        self._newest = [
            Member(key=key, plan=plan, trajectory=trajectory) for key, (plan, trajectory) in episodes.items()
        ]
        self.episodes |= {member.key: member.trajectory for member in self._newest}
        derivations: list[Derivation] = []
        for member in self._newest:
            if not member.plan.prefix:
                continue
            self.given[member.key] = len(member.plan.prefix)
            fork = self._forks.get(member.plan.key)
            derivations.append(
                Derivation(
                    child=member.key,
                    parent=fork.parent.key if fork else self.beginning.parent,
                    operator=OPERATOR if fork else self.beginning.operator,
                    position=len(member.plan.prefix),
                    seed=member.plan.seed,
                )
            )
        return derivations

    def _fresh(self, count: int) -> list[EpisodePlan]:
        return [
            EpisodePlan(instance=self.instance, number=n, seed=self.seed(n), prefix=self.beginning.steps)
            for n in self._numbers(count)
        ]

    def _numbers(self, count: int) -> range:
        start = self.first + self.planned
        self.planned += count
        return range(start, start + count)


# Which instances a step draws: those whose groups are likely to have contrast, judging by their
# latest episodes.

_WON, _MISSED = 0.5, 0.1
"""The prior wins and losses of every instance. Most instances are hopeless or mastered, and the
policy improves: of groups of eight, a third were mixed where the instance had always been lost
before, and 4% where it had always been won (`deployments/LOG.md`, "which instances have contrast").
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRewards:
    """Rewards of an instance, won and missed, summed over its episodes; earlier ones count less."""

    won: float = 0.0
    missed: float = 0.0

    def after(self, *, episodes: int, reward: float, memory: float) -> PastRewards:
        """Return the past rewards after a group with a mean reward in [0, 1]; earlier groups count
        `memory` times as much.
        """
        return PastRewards(
            won=memory * self.won + episodes * reward, missed=memory * self.missed + episodes * (1.0 - reward)
        )


def contrast(rate: float, size: int) -> float:
    """Return the chance, in [0, 1), that some of `size` episodes succeed and some fail at this rate
    of success.
    """
    return 1.0 - rate**size - (1.0 - rate) ** size


def choose(
    instances: Sequence[Instance],
    tallies: Mapping[str, PastRewards] | None,
    *,
    count: int,
    size: int,
    seed: int,
    avoid: Collection[str] = (),
) -> list[Instance]:
    """Return `count` instances, starting with those whose groups of `size` episodes are likely to
    have contrast.

    A rate of success is drawn for each from the Beta distribution given by its tally and a prior,
    and the instances with the highest chances of contrast are taken (Thompson sampling). So an
    instance of which little is known is chosen now and then, as is one that was always lost, since
    the policy improves. If `tallies` is None, all have the same chance.

    Instances to `avoid`, by key, are chosen only after all others; if there are fewer than `count`
    instances, they repeat.
    """
    random = np.random.default_rng(seed)
    if tallies is None:
        scores = random.random(len(instances))
    else:
        past = [tallies.get(instance.key, PastRewards()) for instance in instances]
        rates = random.beta([_WON + tally.won for tally in past], [_MISSED + tally.missed for tally in past])
        scores = np.array([contrast(rate, size) for rate in rates])
    score_of = {instance.key: score for instance, score in zip(instances, scores, strict=True)}
    order = sorted(instances, key=lambda instance: (instance.key in avoid, -score_of[instance.key], instance.key))
    return [order[position % len(order)] for position in range(count)]


def lost(instances: Iterable[Instance], tallies: Mapping[str, PastRewards]) -> list[Instance]:
    """Return the instances that were played and never earned any reward."""
    return [instance for instance in instances if instance.key in tallies and not tallies[instance.key].won]


def past_rewards(outcomes: Iterable[tuple[str, int, float]], *, memory: float) -> dict[str, PastRewards]:
    """Return the tally of each instance, by key, after a sequence of groups, each given as instance
    key, number of episodes and mean reward.
    """
    tallies: dict[str, PastRewards] = {}
    for key, episodes, reward in outcomes:
        tallies[key] = tallies.get(key, PastRewards()).after(episodes=episodes, reward=reward, memory=memory)
    return tallies


_LEAST = 2
"""The fewest episodes that can be compared."""


def check_world(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if `grpo` needs an expert or the state of the world and the world lacks
    it, or if the scorer and the policy are directories with different tokenizers.
    """
    if recipe.grpo.repeats:
        require_state(env, "grpo.repeats")
    if recipe.grpo.credit in ("states", "graph") and recipe.grpo.states.key == "world":
        require_state(env, "grpo.credit", instead="set grpo.states.key to observation")
    if recipe.grpo.expert_share:
        need_expert(env, instances, "grpo.expert_share")
    if recipe.grpo.distil is None:
        return
    if recipe.grpo.distil.context == "expert":
        need_expert(env, instances, "grpo.distil.context")
    if recipe.grpo.distil.context == "records" and recipe.grpo.distil.key == "world":
        require_state(env, "grpo.distil.context", instead="set grpo.distil.key to observation")
    paths = [Path(model.path) for model in (recipe.models.scorer, recipe.model) if model is not None]
    if len(paths) == 2 and all(path.is_dir() for path in paths):
        check_same_tokens(*paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The player of the episodes of an iteration's training steps. `reward` replaces the episodes'
    own rewards within a group if it is given; `vocabulary` is the number of different tokens.
    """

    place: Workplace
    iteration: int
    reward: GroupReward | None = None
    vocabulary: int
    instances: Sequence[Instance]
    sampler: Sampler
    helper: Helper
    writer: Writer

    async def play(
        self, step: int, policy: Checkpoint, tallies: dict[str, PastRewards], worlds: Worlds
    ) -> tuple[list[Group], Effort]:
        """Play the episodes of a training step; return its groups and the effort that they took.
        Every episode is stored, and stored ones are not played again.

        In place of groups without contrast others are drawn as well, at most `grpo.resample` times.

        Raises `ErrorBudgetSpent` when more episodes fail for good than the recipe allows.
        """
        seed, config = self.place.recipe.seed, self.place.recipe.grpo
        groups: list[Group] = []
        effort = Effort()
        for draw in range(1 + config.resample):
            missing = config.groups - sum(has_contrast(group.compared) for group in groups)
            if not missing:
                break
            drawn_keys = {group.instance.key for group in groups}
            # The instances whose groups go on from the expert's first steps.
            hopeless = [instance for instance in lost(self.instances, tallies) if instance.key not in drawn_keys]
            most = min(round(config.expert_share * missing), missing - 1, len(hopeless))
            led_instances = random.Random(derive_seed(seed, "led", self.iteration, step, draw)).sample(hopeless, most)
            instances = choose(
                self.instances,
                None if config.curriculum == "uniform" else tallies,
                count=missing - len(led_instances),
                size=config.num_generations,
                seed=derive_seed(seed, "groups", self.iteration, step, draw),
                avoid=drawn_keys | {instance.key for instance in led_instances},
            )
            # Each instance with the number of times it was chosen before in this draw.
            choices = [(position // len(self.instances), instance) for position, instance in enumerate(instances)]
            families = await self._families(step, draw, choices, led_instances, worlds)
            more, round_effort = await self._round(step, draw, policy, families, worlds, first=len(groups))
            groups += more
            effort += round_effort
        return groups, effort

    # This is not stored as an evaluation: an evaluation belongs to a checkpoint, and a policy
    # between two steps is none. It has seeds of its own, so that training gives the same weights
    # without it.
    async def validate(self, step: int, policy: Checkpoint) -> None:
        """Have a policy play the development set after a training step, and store its episodes as a
        validation. Episodes that are stored already are not played again.

        Raises `ErrorBudgetSpent` when more episodes fail for good than the recipe allows.
        """
        recipe, store, iteration_id = self.place.recipe, self.place.store, self.place.iteration_id(self.iteration)
        name, config = recipe.evaluation.development, recipe.evaluation
        seed = derive_seed(recipe.seed, "validate", self.iteration)
        plans = limited(recipe, name, episode_plans(held_out(self.place)[name], episodes=1, seed=seed))
        ids = {plan.key: rollout_id(iteration_id, policy.id, plan) for plan in plans}
        missing = set(store.missing("trajectory", list(ids.values())))
        await self._played(
            EpisodeShard(
                stage=STAGE,
                evaluation_id="",
                name=f"{name} after step {step}",
                iteration=self.iteration,
                checkpoint=policy,
                plans=tuple(plan for plan in plans if ids[plan.key] in missing),
                sampling=config.sets[name].sampling(temperature=0.0, max_new_tokens=config.max_new_tokens),
                max_steps=config.max_steps,
                repeats=config.repeats,
                limits=config.limits,
                source=VALIDATION,
                done=len(plans) - len(missing),
                total=len(plans),
            ),
            step,
        )
        lost_ids = set(store.missing("trajectory", list(ids.values())))
        store.write(validation_rows(iteration_id, step, [key for key in ids.values() if key not in lost_ids]))

    async def _families(
        self,
        step: int,
        draw: int,
        choices: Sequence[tuple[int, Instance]],
        led_instances: Sequence[Instance],
        worlds: Worlds,
    ) -> list[Family]:
        """Return the families of a draw before any of their episodes is played: those of `choices`,
        then those of `led_instances`, which go on from the expert's first steps.
        """
        # By instance key; groups that begin at the start are left out.
        beginnings: dict[str, Beginning] = {}
        if share := self.place.recipe.grpo.revision_share:
            store, seed = self.place.store, derive_seed(self.place.recipe.seed, "revisions", self.iteration, step, draw)
            failures = load_failures(store, self.place.iteration_id(self.iteration), until=step - 1)
            parent_ids = revisited([instance for _, instance in choices], failures, share=share, seed=seed)
            trajectories = load_trajectories(store, list(parent_ids.values()))
            cuts = await cuts_of(self.place, self.iteration, trajectories, self.helper, self.writer, seed=seed)
            beginnings = {
                key: beginning(own, trajectories[own], seed=seed, cut=cuts.get(own)) for key, own in parent_ids.items()
            }
        expert_beginnings = (
            await in_thread(self._expert_beginnings, step, draw, led_instances, worlds) if led_instances else {}
        )
        led_keys = {instance.key for instance in led_instances}
        # With few instances one may be chosen again; other episode numbers then give it other
        # seeds.
        return [
            *(
                self._family(
                    step, draw, instance, {} if again else beginnings, again=again + (instance.key in led_keys)
                )
                for again, instance in choices
            ),
            *(self._family(step, draw, instance, expert_beginnings, again=0) for instance in led_instances),
        ]

    def _family(
        self, step: int, draw: int, instance: Instance, beginnings: Mapping[str, Beginning], *, again: int
    ) -> Family:
        config = self.place.recipe.grpo
        return Family(
            instance=instance,
            first=(draw * config.groups + again) * config.num_generations,
            seed=partial(derive_seed, self.place.recipe.seed, "rollout", self.iteration, step, instance.key),
            beginning=beginnings.get(instance.key, Beginning()),
        )

    async def _round(
        self, step: int, draw: int, policy: Checkpoint, families: Sequence[Family], worlds: Worlds, *, first: int
    ) -> tuple[list[Group], Effort]:
        config = self.place.recipe.grpo
        effort = Effort()
        while any(waves := [family.next_wave(config, self.vocabulary) for family in families]):
            effort += await self._wave(step, policy, list(zip(families, waves, strict=True)))
        groups: list[Group] = []
        for family in families:
            if len(family.episodes) >= _LEAST:
                shaped_rewards: tuple[float, ...] | None = None
                if self.reward is not None:
                    env, episodes = worlds.of(family.instance), list(family.episodes.values())
                    shaped_rewards = tuple(self.reward.rewards(episodes, step=step, steps=config.steps, env=env))
                groups.append(
                    Group(
                        number=first + len(groups),
                        draw=draw,
                        policy=policy.id,
                        instance=family.instance,
                        prefix=len(family.beginning.steps),
                        led=family.beginning.operator == "continuation",
                        episodes=family.episodes,
                        given=family.given,
                        shaped=shaped_rewards,
                    )
                )
        return groups, effort

    def _expert_beginnings(
        self, step: int, draw: int, led_instances: Sequence[Instance], worlds: Worlds
    ) -> dict[str, Beginning]:
        """Return beginnings of the expert's episodes, by instance key, and store these episodes.
        Instances that the expert does not solve, or solves in one step, are left out; a replay of
        the expert that fails is stored as a rejection.
        """
        seed = derive_seed(self.place.recipe.seed, "led", self.iteration, step, draw)
        iteration_id = self.place.iteration_id(self.iteration)
        beginnings: dict[str, Beginning] = {}
        for instance in led_instances:
            env = worlds.of(instance)
            replay = expert_of(env, instance)
            if isinstance(replay, Rejection):
                self.place.store.write(rejection_rows([replay], iteration_id=iteration_id))
                continue
            if replay is not None and len(replay.steps) > 1:
                self.place.store.write(expert_rows(iteration_id, replay, 0, env=env, samples=False))
                key = expert_id(iteration_id, instance)
                beginnings[instance.key] = beginning(key, replay, seed=seed, operator="continuation")
        return beginnings

    async def _wave(
        self, step: int, policy: Checkpoint, wave: Sequence[tuple[Family, Sequence[EpisodePlan]]]
    ) -> Effort:
        """Play the episodes of a wave that are not stored yet, and add to each family its episodes;
        return the effort that they took.
        """
        store, iteration_id = self.place.store, self.place.iteration_id(self.iteration)
        ids = {plan.key: rollout_id(iteration_id, policy.id, plan) for _, plans in wave for plan in plans}
        missing = set(store.missing("trajectory", list(ids.values())))
        missing_plans = tuple(plan for _, plans in wave for plan in plans if ids[plan.key] in missing)
        config = self.place.recipe.grpo
        shard = EpisodeShard(
            stage=STAGE,
            evaluation_id="",
            name=f"step {step}",
            iteration=self.iteration,
            checkpoint=policy,
            plans=missing_plans,
            sampling=config.sampling(temperature=1.0, max_new_tokens=config.max_new_tokens, logprobs=True),
            max_steps=config.max_steps,
            repeats=config.repeats,
            limits=config.limits,
            done=len(ids) - len(missing_plans),
            total=len(ids),
        )
        effort = await self._played(shard, step)
        trajectories = load_trajectories(store, list(ids.values()))
        derivations: list[Derivation] = []
        for family, plans in wave:
            own = {ids[plan.key]: plan for plan in plans}
            derivations += family.take(
                {key: (plan, trajectories[key]) for key, plan in own.items() if key in trajectories}
            )
        store.write(derivation_rows(derivations, iteration_id=iteration_id))
        return effort

    async def _played(self, shard: EpisodeShard, step: int) -> Effort:
        """Play a shard to its end and store its episodes; return the effort that they took."""
        if not shard.plans:
            return Effort()
        steps = self.place.recipe.grpo.steps
        shard = with_ungraded(self.place.store, shard, self.place.iteration_id(self.iteration))

        def progress(done: int, of: int, note: str) -> None:
            self.place.progress(step - 1, steps, f"steps, {done} of {of} {note}")

        effort = await shard.play(replace(self.place, progress=progress), self.writer, self.sampler, self.helper)
        await self.writer.flush()
        return effort
