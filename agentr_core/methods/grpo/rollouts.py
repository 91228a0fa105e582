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
from agentr_core.methods.grpo.readings import expert_episode_of
from agentr_core.models.checkpoint_dir import check_same_tokens
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.grpo import BranchingConfig, GrpoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.episode_shard import EpisodeShard, rollout_id, with_ungraded
from agentr_core.runtime.equipment import Checkpoint, Effort, Worlds
from agentr_core.runtime.instances import held_out_by_set
from agentr_core.stages.demonstrate import expert_id, expert_rows, require_expert
from agentr_core.stages.evaluate import with_step_limits
from agentr_core.store.codec.ledger import VALIDATION, Group, load_failed_ids, rejection_rows, validation_rows
from agentr_core.store.codec.samples import derivation_rows
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Writer
from agentr_core.system import run_in_thread
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
    `parent_id`. Without any, the episodes begin at the start. `operator` says whose trajectory it
    is.
    """

    steps: tuple[Step, ...] = ()
    parent_id: str = ""
    operator: Operator = "revision"


def choose_failures(
    instances: Sequence[Instance], failures: Mapping[str, Sequence[str]], *, share: float, seed: int
) -> dict[str, str]:
    """Return the ids of the failed episodes to go on from, by instance key: one for each of at most
    a `share` of all `instances`, drawn by the seed.

    At least one instance is always left out, so that each step has episodes from the start.

    Args:
        failures: the ids of failed episodes with at least two steps, by the key of their instance,
            in the order in which they were planned.
    """
    candidate_keys = sorted({instance.key for instance in instances if failures.get(instance.key)})
    rng = random.Random(seed)
    max_chosen = min(round(share * len(instances)), len(instances) - 1)
    keys = rng.sample(candidate_keys, min(len(candidate_keys), max_chosen))
    return {key: rng.choice(failures[key]) for key in sorted(keys)}


def cut_beginning(
    trajectory_id: str, trajectory: Trajectory, *, seed: int, operator: Operator = "revision", cut: int | None = None
) -> Beginning:
    """Return a beginning of the trajectory with id `trajectory_id`, which has at least two steps:
    its first `cut` steps, fewer than all. Without `cut` the number is drawn by the seed and the
    instance so that at least one step is kept and at least one is cut off: no beginning ends the
    episode.
    """
    if cut is None:
        cut = random.Random(derive_seed(seed, "cut", trajectory.instance.key)).randrange(1, len(trajectory.steps))
    return Beginning(steps=trajectory.steps[:cut], parent_id=trajectory_id, operator=operator)


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
    """A played episode of a group. `trajectory_id` is the id of its trajectory.

    A branch has the first steps of its parent, and therefore also the first entropy, with which
    those of later steps are compared.
    """

    trajectory_id: str
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


def reply_entropy(step: Step, branching: BranchingConfig, vocabulary_size: int) -> float:
    """Return an estimate of the entropy of a reply's first tokens, summed over them, in units of
    `ln(vocabulary)`.

    Raises `DataFault` if the reply has no log-probabilities.
    """
    if step.logprobs is None:
        raise DataFault(f"the reply {step.reply[:60]!r} has no log-probabilities, so its entropy is not known")
    return -sum(step.logprobs[: branching.entropy_tokens]) / math.log(vocabulary_size)


def branch_chance(entropy_rise: float, branching: BranchingConfig) -> float:
    """Return the probability of a branch after a reply whose entropy is `entropy_rise` above that
    of the first one.
    """
    return min(1.0, max(0.0, branching.branch_probability + branching.entropy_weight * entropy_rise))


def forks(
    members: Sequence[Member], branching: BranchingConfig, vocabulary_size: int, *, max_forks: int, num_given: int = 0
) -> list[Fork]:
    """Return where members branch: at most `max_forks` places, the earliest in the episodes first.

    Each observation of a member's own, as opposed to its parent's, gives one chance to branch,
    which is drawn with a seed of its own. The first `num_given` steps of each member were not
    sampled for the group.
    """
    candidates: list[Fork] = []
    for member in members:
        steps = member.trajectory.steps
        for position in range(len(member.plan.prefix) + 1, len(steps)):
            if not steps[position - 1].observation:
                continue
            entropy_rise = reply_entropy(steps[position - 1], branching, vocabulary_size) - reply_entropy(
                steps[num_given], branching, vocabulary_size
            )
            draw = random.Random(derive_seed(member.plan.seed, OPERATOR, position)).random()
            if draw < branch_chance(entropy_rise, branching):
                candidates.append(Fork(parent=member, position=position))
    return sorted(candidates, key=lambda fork: (fork.position, fork.parent.plan.number))[:max_forks]


# A group while it is sampled: which episodes of an instance to play, batch by batch.


@dataclass(slots=True, kw_only=True)
class GroupInProgress:
    """The episodes of one instance in a draw, a group in the making. `first_number` is the number
    of its first episode, `num_planned` how many episodes were planned so far.
    """

    instance: Instance
    first_number: int
    seed_of: Callable[[int], int]
    """Returns the seed of an episode, given its number."""
    beginning: Beginning = field(default_factory=Beginning)
    """The steps that all of its episodes go on from."""
    episodes: dict[str, Trajectory] = field(default_factory=dict)
    """The episodes played so far, by the id of the trajectory."""
    num_given_by_id: dict[str, int] = field(default_factory=dict)
    """How many steps an episode began with, by the id of the trajectory, for those that do not
    begin at the start.
    """
    num_planned: int = 0
    _newest_members: list[Member] = field(default_factory=list)
    _forks_by_plan: dict[str, Fork] = field(default_factory=dict)

    def next_plans(self, config: GrpoConfig, vocabulary_size: int) -> list[EpisodePlan]:
        """Return the episodes to play next, and count them as planned; none once the group is full.

        Without branching there is one batch. With it, a batch of fresh episodes is followed by
        batches of branches from the last one; if none branches, fresh ones fill the group.
        """
        num_missing, branching = config.num_generations - self.num_planned, config.branching
        if not num_missing or branching is None:
            return self._fresh_plans(num_missing)
        if not self.num_planned:
            return self._fresh_plans(branching.initial_rollouts)
        branches: list[EpisodePlan] = []
        num_given = len(self.beginning.steps)
        for fork in forks(self._newest_members, branching, vocabulary_size, max_forks=num_missing, num_given=num_given):
            (number,) = self._reserve_numbers(1)
            plan = EpisodePlan(
                instance=self.instance,
                number=number,
                seed=self.seed_of(number),
                prefix=fork.prefix,
                max_steps=config.max_steps - (fork.position - num_given),
            )
            self._forks_by_plan[plan.key] = fork
            branches.append(plan)
        return branches or self._fresh_plans(num_missing)

    def add_episodes(self, episodes: Mapping[str, tuple[EpisodePlan, Trajectory]]) -> list[Derivation]:
        """Add the played episodes of a batch, given by trajectory id; return the derivations of
        those that do not begin at the start.
        """
        self._newest_members = [
            Member(trajectory_id=key, plan=plan, trajectory=trajectory) for key, (plan, trajectory) in episodes.items()
        ]
        self.episodes |= {member.trajectory_id: member.trajectory for member in self._newest_members}
        derivations: list[Derivation] = []
        for member in self._newest_members:
            if not member.plan.prefix:
                continue
            self.num_given_by_id[member.trajectory_id] = len(member.plan.prefix)
            fork = self._forks_by_plan.get(member.plan.key)
            derivations.append(
                Derivation(
                    child=member.trajectory_id,
                    parent=fork.parent.trajectory_id if fork else self.beginning.parent_id,
                    operator=OPERATOR if fork else self.beginning.operator,
                    position=len(member.plan.prefix),
                    seed=member.plan.seed,
                )
            )
        return derivations

    def _fresh_plans(self, count: int) -> list[EpisodePlan]:
        return [
            EpisodePlan(instance=self.instance, number=n, seed=self.seed_of(n), prefix=self.beginning.steps)
            for n in self._reserve_numbers(count)
        ]

    def _reserve_numbers(self, count: int) -> range:
        start = self.first_number + self.num_planned
        self.num_planned += count
        return range(start, start + count)


# Which instances a step draws: those whose groups are likely to have contrast, judging by their
# latest episodes.

_PRIOR_WON, _PRIOR_MISSED = 0.5, 0.1
"""The prior wins and losses of every instance. Most instances are hopeless or mastered, and the
policy improves: of groups of eight, a third were mixed where the instance had always been lost
before, and 4% where it had always been won (`deployments/LOG.md`, "which instances have contrast").
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTally:
    """Rewards of an instance, won and missed, summed over its episodes; earlier ones count less."""

    won: float = 0.0
    missed: float = 0.0

    def updated(self, *, episodes: int, reward: float, memory: float) -> RewardTally:
        """Return the tally after a group with a mean reward in [0, 1]; earlier groups count
        `memory` times as much.
        """
        return RewardTally(
            won=memory * self.won + episodes * reward, missed=memory * self.missed + episodes * (1.0 - reward)
        )


def contrast_probability(rate: float, group_size: int) -> float:
    """Return the chance, in [0, 1), that some of `group_size` episodes succeed and some fail at
    this rate of success.
    """
    return 1.0 - rate**group_size - (1.0 - rate) ** group_size


def choose_instances(
    instances: Sequence[Instance],
    tallies: Mapping[str, RewardTally] | None,
    *,
    count: int,
    group_size: int,
    seed: int,
    avoided_keys: Collection[str] = (),
) -> list[Instance]:
    """Return `count` instances, starting with those whose groups of `group_size` episodes are
    likely to have contrast.

    A rate of success is drawn for each from the Beta distribution given by its tally and a prior,
    and the instances with the highest chances of contrast are taken (Thompson sampling). So an
    instance of which little is known is chosen now and then, as is one that was always lost, since
    the policy improves. If `tallies` is None, all have the same chance.

    Instances in `avoided_keys` are chosen only after all others; if there are fewer than `count`
    instances, they repeat.
    """
    rng = np.random.default_rng(seed)
    if tallies is None:
        scores = rng.random(len(instances))
    else:
        instance_tallies = [tallies.get(instance.key, RewardTally()) for instance in instances]
        rates = rng.beta(
            [_PRIOR_WON + tally.won for tally in instance_tallies],
            [_PRIOR_MISSED + tally.missed for tally in instance_tallies],
        )
        scores = np.array([contrast_probability(rate, group_size) for rate in rates])
    scores_by_key = {instance.key: score for instance, score in zip(instances, scores, strict=True)}
    order = sorted(
        instances, key=lambda instance: (instance.key in avoided_keys, -scores_by_key[instance.key], instance.key)
    )
    return [order[position % len(order)] for position in range(count)]


def never_won(instances: Iterable[Instance], tallies: Mapping[str, RewardTally]) -> list[Instance]:
    """Return the instances that were played and never earned any reward."""
    return [instance for instance in instances if instance.key in tallies and not tallies[instance.key].won]


def reward_tallies(outcomes: Iterable[tuple[str, int, float]], *, memory: float) -> dict[str, RewardTally]:
    """Return the tally of each instance, by key, after a sequence of groups, each given as instance
    key, number of episodes and mean reward.
    """
    tallies: dict[str, RewardTally] = {}
    for key, episodes, reward in outcomes:
        tallies[key] = tallies.get(key, RewardTally()).updated(episodes=episodes, reward=reward, memory=memory)
    return tallies


_MIN_EPISODES = 2
"""The fewest episodes that can be compared."""


def check_world(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if `grpo` needs an expert or the state of the world and the world lacks
    it, or if the scorer and the policy are directories with different tokenizers.
    """
    if recipe.grpo.repeats:
        require_state(env, "grpo.repeats")
    if recipe.grpo.credit in ("states", "graph") and recipe.grpo.states.key == "world":
        require_state(env, "grpo.credit", remedy="set grpo.states.key to observation")
    if recipe.grpo.expert_share:
        require_expert(env, instances, "grpo.expert_share")
    if recipe.grpo.distil is None:
        return
    if recipe.grpo.distil.context == "expert":
        require_expert(env, instances, "grpo.distil.context")
    if recipe.grpo.distil.context == "records" and recipe.grpo.distil.key == "world":
        require_state(env, "grpo.distil.context", remedy="set grpo.distil.key to observation")
    paths = [Path(model.path) for model in (recipe.models.scorer, recipe.model) if model is not None]
    if len(paths) == 2 and all(path.is_dir() for path in paths):
        check_same_tokens(*paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The player of the episodes of an iteration's training steps. `reward` replaces the episodes'
    own rewards within a group if it is given; `vocabulary_size` is the number of different tokens.
    """

    ctx: RunContext
    iteration: int
    reward: GroupReward | None = None
    vocabulary_size: int
    instances: Sequence[Instance]
    sampler: Sampler
    helper: Helper
    writer: Writer

    async def play(
        self, step: int, policy: Checkpoint, tallies: dict[str, RewardTally], worlds: Worlds
    ) -> tuple[list[Group], Effort]:
        """Play the episodes of a training step; return its groups and the effort that they took.
        Every episode is stored, and stored ones are not played again.

        In place of groups without contrast others are drawn as well, at most `grpo.resample` times.

        Raises `ErrorBudgetSpent` when more episodes fail for good than the recipe allows.
        """
        seed, config = self.ctx.recipe.seed, self.ctx.recipe.grpo
        groups: list[Group] = []
        effort = Effort()
        for draw in range(1 + config.resample):
            num_missing = config.groups - sum(has_contrast(group.compared_rewards) for group in groups)
            if not num_missing:
                break
            drawn_keys = {group.instance.key for group in groups}
            # The instances whose groups go on from the expert's first steps.
            never_won_instances = [
                instance for instance in never_won(self.instances, tallies) if instance.key not in drawn_keys
            ]
            max_led = min(round(config.expert_share * num_missing), num_missing - 1, len(never_won_instances))
            expert_instances = random.Random(derive_seed(seed, "led", self.iteration, step, draw)).sample(
                never_won_instances, max_led
            )
            instances = choose_instances(
                self.instances,
                None if config.curriculum == "uniform" else tallies,
                count=num_missing - len(expert_instances),
                group_size=config.num_generations,
                seed=derive_seed(seed, "groups", self.iteration, step, draw),
                avoided_keys=drawn_keys | {instance.key for instance in expert_instances},
            )
            # Each instance with the number of times it was chosen before in this draw.
            counted_instances = [
                (position // len(self.instances), instance) for position, instance in enumerate(instances)
            ]
            open_groups = await self._open_groups(step, draw, counted_instances, expert_instances, worlds)
            new_groups, draw_effort = await self._play_groups(
                step, draw, policy, open_groups, worlds, first_number=len(groups)
            )
            groups += new_groups
            effort += draw_effort
        return groups, effort

    # This is not stored as an evaluation: an evaluation belongs to a checkpoint, and a policy
    # between two steps is none. It has seeds of its own, so that training gives the same weights
    # without it.
    async def validate(self, step: int, policy: Checkpoint) -> None:
        """Have a policy play the development set after a training step, and store its episodes as a
        validation. Episodes that are stored already are not played again.

        Raises `ErrorBudgetSpent` when more episodes fail for good than the recipe allows.
        """
        recipe, store, iteration_id = self.ctx.recipe, self.ctx.store, self.ctx.iteration_id(self.iteration)
        name, config = recipe.evaluation.development, recipe.evaluation
        seed = derive_seed(recipe.seed, "validate", self.iteration)
        plans = with_step_limits(recipe, name, episode_plans(held_out_by_set(self.ctx)[name], episodes=1, seed=seed))
        ids = {plan.key: rollout_id(iteration_id, policy.id, plan) for plan in plans}
        missing_ids = set(store.missing("trajectory", list(ids.values())))
        await self._play_shard(
            EpisodeShard(
                stage=STAGE,
                evaluation_id="",
                name=f"{name} after step {step}",
                iteration=self.iteration,
                checkpoint=policy,
                plans=tuple(plan for plan in plans if ids[plan.key] in missing_ids),
                sampling=config.sets[name].sampling(temperature=0.0, max_new_tokens=config.max_new_tokens),
                max_steps=config.max_steps,
                repeats=config.repeats,
                limits=config.limits,
                source=VALIDATION,
                done=len(plans) - len(missing_ids),
                total=len(plans),
            ),
            step,
        )
        lost_ids = set(store.missing("trajectory", list(ids.values())))
        store.write(validation_rows(iteration_id, step, [key for key in ids.values() if key not in lost_ids]))

    async def _open_groups(
        self,
        step: int,
        draw: int,
        counted_instances: Sequence[tuple[int, Instance]],
        expert_instances: Sequence[Instance],
        worlds: Worlds,
    ) -> list[GroupInProgress]:
        """Return the groups of a draw before any of their episodes is played: those of
        `counted_instances`, then those of `expert_instances`, which go on from the expert's first
        steps.
        """
        # By instance key; groups that begin at the start are left out.
        beginnings: dict[str, Beginning] = {}
        if revision_share := self.ctx.recipe.grpo.revision_share:
            store, seed = self.ctx.store, derive_seed(self.ctx.recipe.seed, "revisions", self.iteration, step, draw)
            failures = load_failed_ids(store, self.ctx.iteration_id(self.iteration), last_step=step - 1)
            parent_ids = choose_failures(
                [instance for _, instance in counted_instances], failures, share=revision_share, seed=seed
            )
            trajectories = load_trajectories(store, list(parent_ids.values()))
            cuts = await cuts_of(self.ctx, self.iteration, trajectories, self.helper, self.writer, seed=seed)
            beginnings = {
                key: cut_beginning(parent_id, trajectories[parent_id], seed=seed, cut=cuts.get(parent_id))
                for key, parent_id in parent_ids.items()
            }
        expert_beginnings = (
            await run_in_thread(self._expert_beginnings, step, draw, expert_instances, worlds)
            if expert_instances
            else {}
        )
        expert_keys = {instance.key for instance in expert_instances}
        # With few instances one may be chosen again; other episode numbers then give it other
        # seeds.
        return [
            *(
                self._open_group(
                    step,
                    draw,
                    instance,
                    {} if num_before else beginnings,
                    num_before=num_before + (instance.key in expert_keys),
                )
                for num_before, instance in counted_instances
            ),
            *(self._open_group(step, draw, instance, expert_beginnings, num_before=0) for instance in expert_instances),
        ]

    def _open_group(
        self, step: int, draw: int, instance: Instance, beginnings: Mapping[str, Beginning], *, num_before: int
    ) -> GroupInProgress:
        config = self.ctx.recipe.grpo
        return GroupInProgress(
            instance=instance,
            first_number=(draw * config.groups + num_before) * config.num_generations,
            seed_of=partial(derive_seed, self.ctx.recipe.seed, "rollout", self.iteration, step, instance.key),
            beginning=beginnings.get(instance.key, Beginning()),
        )

    async def _play_groups(
        self,
        step: int,
        draw: int,
        policy: Checkpoint,
        open_groups: Sequence[GroupInProgress],
        worlds: Worlds,
        *,
        first_number: int,
    ) -> tuple[list[Group], Effort]:
        config = self.ctx.recipe.grpo
        effort = Effort()
        while any(
            plans_by_group := [open_group.next_plans(config, self.vocabulary_size) for open_group in open_groups]
        ):
            effort += await self._play_plans(step, policy, list(zip(open_groups, plans_by_group, strict=True)))
        groups: list[Group] = []
        for open_group in open_groups:
            if len(open_group.episodes) >= _MIN_EPISODES:
                shaped_rewards: tuple[float, ...] | None = None
                if self.reward is not None:
                    env, episodes = worlds.env_of(open_group.instance), list(open_group.episodes.values())
                    shaped_rewards = tuple(self.reward.rewards(episodes, step=step, steps=config.steps, env=env))
                groups.append(
                    Group(
                        number=first_number + len(groups),
                        draw=draw,
                        policy=policy.id,
                        instance=open_group.instance,
                        prefix=len(open_group.beginning.steps),
                        is_expert_led=open_group.beginning.operator == "continuation",
                        episodes=open_group.episodes,
                        given=open_group.num_given_by_id,
                        shaped_rewards=shaped_rewards,
                    )
                )
        return groups, effort

    def _expert_beginnings(
        self, step: int, draw: int, expert_instances: Sequence[Instance], worlds: Worlds
    ) -> dict[str, Beginning]:
        """Return beginnings of the expert's episodes, by instance key, and store these episodes.
        Instances that the expert does not solve, or solves in one step, are left out; a replay of
        the expert that fails is stored as a rejection.
        """
        seed = derive_seed(self.ctx.recipe.seed, "led", self.iteration, step, draw)
        iteration_id = self.ctx.iteration_id(self.iteration)
        beginnings: dict[str, Beginning] = {}
        for instance in expert_instances:
            env = worlds.env_of(instance)
            replay = expert_episode_of(env, instance)
            if isinstance(replay, Rejection):
                self.ctx.store.write(rejection_rows([replay], iteration_id=iteration_id))
                continue
            if replay is not None and len(replay.steps) > 1:
                self.ctx.store.write(expert_rows(iteration_id, replay, 0, env=env, samples=False))
                key = expert_id(iteration_id, instance)
                beginnings[instance.key] = cut_beginning(key, replay, seed=seed, operator="continuation")
        return beginnings

    async def _play_plans(
        self, step: int, policy: Checkpoint, planned: Sequence[tuple[GroupInProgress, Sequence[EpisodePlan]]]
    ) -> Effort:
        """Play the planned episodes that are not stored yet, and add to each group its episodes;
        return the effort that they took.
        """
        store, iteration_id = self.ctx.store, self.ctx.iteration_id(self.iteration)
        if self.ctx.recipe.grpo.staleness:
            # The same policy samples the first two steps, which may have the same instances.
            policy = replace(policy, id=f"{policy.id}/{step}")
        ids = {plan.key: rollout_id(iteration_id, policy.id, plan) for _, plans in planned for plan in plans}
        missing_ids = set(store.missing("trajectory", list(ids.values())))
        missing_plans = tuple(plan for _, plans in planned for plan in plans if ids[plan.key] in missing_ids)
        config = self.ctx.recipe.grpo
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
        effort = await self._play_shard(shard, step)
        trajectories = load_trajectories(store, list(ids.values()))
        derivations: list[Derivation] = []
        for open_group, plans in planned:
            plans_by_id = {ids[plan.key]: plan for plan in plans}
            derivations += open_group.add_episodes(
                {key: (plan, trajectories[key]) for key, plan in plans_by_id.items() if key in trajectories}
            )
        store.write(derivation_rows(derivations, iteration_id=iteration_id))
        return effort

    async def _play_shard(self, shard: EpisodeShard, step: int) -> Effort:
        """Play a shard to its end and store its episodes; return the effort that they took."""
        if not shard.plans:
            return Effort()
        steps = self.ctx.recipe.grpo.steps
        shard = with_ungraded(self.ctx.store, shard, self.ctx.iteration_id(self.iteration))

        def progress(done: int, total: int, note: str) -> None:
            self.ctx.progress(step - 1, steps, f"steps, {done} of {total} {note}")

        effort = await shard.play(replace(self.ctx, progress=progress), self.writer, self.sampler, self.helper)
        await self.writer.flush()
        return effort
