"""A group while it is sampled: which episodes of an instance to play, wave by wave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.methods.grpo import branching
from agentr_core.methods.grpo.branching import Fork, Member, forks
from agentr_core.methods.grpo.revisiting import Beginning
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.types import Derivation, Instance, Trajectory


@dataclass(slots=True, kw_only=True)
class Family:
    """The episodes of one instance in a draw. `first` is the number of its first episode."""

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
        """Return the episodes to play next; none once the group is full.

        Without branching there is one wave. With it, a wave of fresh episodes is followed by waves
        of branches from the last one; if none branches, fresh ones fill the group.
        """
        room, settings = config.num_generations - self.planned, config.branching
        if not room or settings is None:
            return self._fresh(room)
        if not self.planned:
            return self._fresh(settings.initial_rollouts)
        found = forks(self._newest, settings, vocabulary, room=room, given=len(self.beginning.steps))
        return [self._branch(fork, config) for fork in found] or self._fresh(room)

    def take(self, played: Mapping[str, tuple[EpisodePlan, Trajectory]]) -> list[Derivation]:
        """Take the played episodes of a wave, by trajectory id; return the derivations of those
        that do not begin at the start.
        """
        self._newest = [Member(key=key, plan=plan, trajectory=done) for key, (plan, done) in played.items()]
        self.episodes |= {one.key: one.trajectory for one in self._newest}
        self.given |= {one.key: len(one.plan.prefix) for one in self._newest if one.plan.prefix}
        return [self._derivation(one) for one in self._newest if one.plan.prefix]

    def _derivation(self, one: Member) -> Derivation:
        fork = self._forks.get(one.plan.key)
        return Derivation(
            child=one.key,
            parent=fork.parent.key if fork else self.beginning.parent,
            operator=branching.OPERATOR if fork else self.beginning.operator,
            position=len(one.plan.prefix),
            seed=one.plan.seed,
        )

    def _fresh(self, count: int) -> list[EpisodePlan]:
        return [
            EpisodePlan(instance=self.instance, number=n, seed=self.seed(n), prefix=self.beginning.steps)
            for n in self._numbers(count)
        ]

    def _branch(self, fork: Fork, config: GrpoConfig) -> EpisodePlan:
        (number,) = self._numbers(1)
        plan = EpisodePlan(
            instance=self.instance,
            number=number,
            seed=self.seed(number),
            prefix=fork.prefix,
            max_steps=config.max_steps - (fork.position - len(self.beginning.steps)),
        )
        self._forks[plan.key] = fork
        return plan

    def _numbers(self, count: int) -> range:
        start = self.first + self.planned
        self.planned += count
        return range(start, start + count)
