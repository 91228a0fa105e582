"""The episodes of a step: which to play, with which policy, and which are stored already."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentr_core.episodes.asking import Helper
from agentr_core.episodes.rollout import stateful
from agentr_core.errors import EnvironmentFault, Transient
from agentr_core.evaluation.episodes import EpisodePlan, episode_plans
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.grpo.curriculum import PastRewards, choose, lost
from agentr_core.methods.grpo.families import Family
from agentr_core.methods.grpo.revisiting import Beginning, beginning, revisited
from agentr_core.models.samplers import Sampler
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.episode_shard import EpisodeShard, rollout_id, with_ungraded
from agentr_core.runtime.equipment import Checkpoint
from agentr_core.runtime.instances import held_out
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.shards import Effort
from agentr_core.runtime.worlds import Worlds
from agentr_core.stages.demonstrate import expert_id, expert_rows, expert_trajectory, need_expert
from agentr_core.stages.evaluate import limited
from agentr_core.store import Writer
from agentr_core.store.codec.derivations import derivation_rows
from agentr_core.store.codec.groups import VALIDATION, Group, load_failures, validation_rows
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.threads import in_thread
from agentr_core.training.group.advantages import has_contrast
from agentr_core.training.objectives import GroupReward
from agentr_core.types import Derivation, Instance, Rejection, Trajectory

STAGE = "reinforce"
_LEAST = 2
"""The fewest episodes that can be compared."""


def check_world(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` when groups should go on from an expert's first steps and there is no
    expert, or should end where they repeat themselves and the world does not tell its state.
    """
    if recipe.grpo.repeats:
        stateful(env, "grpo.repeats")
    if recipe.grpo.expert_share:
        need_expert(env, instances, "grpo.expert_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The player of the episodes of an iteration's steps. `reward` is that of the objective;
    `vocabulary` is the number of tokens.
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
        self, step: int, policy: Checkpoint, known: dict[str, PastRewards], worlds: Worlds
    ) -> tuple[list[Group], Effort]:
        """Return the groups of a step and the effort that they took. Every episode is stored, and
        stored ones are not played again.

        Where groups have no contrast, others are drawn, at most `grpo.resample` times.

        Raises `ErrorBudgetSpent` when more episodes fail for good than the recipe allows.
        """
        config = self.place.recipe.grpo
        groups: list[Group] = []
        effort = Effort()
        for draw in range(1 + config.resample):
            missing = config.groups - sum(has_contrast(group.compared) for group in groups)
            if not missing:
                break
            drawn = {group.instance.key for group in groups}
            led = self._led(step, draw, missing, known, drawn)
            chosen = self._choose(step, draw, missing - len(led), known, drawn | {instance.key for instance in led})
            families = await self._families(step, draw, chosen, led, worlds)
            more, took = await self._round(step, draw, policy, families, worlds, first=len(groups))
            groups += more
            effort += took
        return groups, effort

    async def validate(self, step: int, policy: Checkpoint) -> None:
        """Have a policy play the development set after a step, and store its episodes as a
        validation. Those that are stored already are not played again.

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
        lost = set(store.missing("trajectory", list(ids.values())))
        store.write(validation_rows(iteration_id, step, [key for key in ids.values() if key not in lost]))

    def _choose(
        self, step: int, draw: int, count: int, known: dict[str, PastRewards], drawn: set[str]
    ) -> list[tuple[int, Instance]]:
        """Return the instances of a draw, each with how often it was chosen before in this draw."""
        recipe = self.place.recipe
        chosen = choose(
            self.instances,
            None if recipe.grpo.curriculum == "uniform" else known,
            count=count,
            size=recipe.grpo.num_generations,
            seed=derive_seed(recipe.seed, "groups", self.iteration, step, draw),
            avoid=drawn,
        )
        return [(position // len(self.instances), instance) for position, instance in enumerate(chosen)]

    def _led(self, step: int, draw: int, count: int, known: dict[str, PastRewards], drawn: set[str]) -> list[Instance]:
        """Return the instances of a draw whose groups go on from the expert's first steps."""
        recipe = self.place.recipe
        hopeless = [instance for instance in lost(self.instances, known) if instance.key not in drawn]
        most = min(round(recipe.grpo.expert_share * count), count - 1, len(hopeless))
        return random.Random(derive_seed(recipe.seed, "led", self.iteration, step, draw)).sample(hopeless, most)

    async def _families(
        self, step: int, draw: int, chosen: Sequence[tuple[int, Instance]], led: Sequence[Instance], worlds: Worlds
    ) -> list[Family]:
        """Return the groups of a draw before any of their episodes is played."""
        beginnings = self._beginnings(step, draw, [instance for _, instance in chosen])
        shown = await in_thread(self._expert_beginnings, step, draw, led, worlds) if led else {}
        taken = {instance.key for instance in led}
        # With few instances, one may be chosen again; its episodes then differ.
        return [
            *(
                self._family(step, draw, instance, {} if again else beginnings, again=again + (instance.key in taken))
                for again, instance in chosen
            ),
            *(self._family(step, draw, instance, shown, again=0) for instance in led),
        ]

    def _family(
        self, step: int, draw: int, instance: Instance, beginnings: Mapping[str, Beginning], *, again: int
    ) -> Family:
        config = self.place.recipe.grpo
        return Family(
            instance=instance,
            first=(draw * config.groups + again) * config.num_generations,
            seed=partial(self._seed, step, instance),
            beginning=beginnings.get(instance.key, Beginning()),
        )

    async def _round(
        self, step: int, draw: int, policy: Checkpoint, families: Sequence[Family], worlds: Worlds, *, first: int
    ) -> tuple[list[Group], Effort]:
        config = self.place.recipe.grpo
        effort = Effort()
        while any(wanted := [family.next_wave(config, self.vocabulary) for family in families]):
            effort += await self._wave(step, policy, list(zip(families, wanted, strict=True)))
        groups: list[Group] = []
        for family in families:
            if len(family.episodes) >= _LEAST:
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
                        shaped=self._shaped(step, list(family.episodes.values()), worlds),
                    )
                )
        return groups, effort

    def _beginnings(self, step: int, draw: int, chosen: Sequence[Instance]) -> dict[str, Beginning]:
        """Return the beginnings of the groups of a draw, by instance key; groups that begin at the
        start are left out.
        """
        share, store = self.place.recipe.grpo.revision_share, self.place.store
        if not share:
            return {}
        seed = derive_seed(self.place.recipe.seed, "revisions", self.iteration, step, draw)
        failed = load_failures(store, self.place.iteration_id(self.iteration), until=step - 1)
        picked = revisited(chosen, failed, share=share, seed=seed)
        played = load_trajectories(store, list(picked.values()))
        return {key: beginning(found, played[found], seed=seed) for key, found in picked.items()}

    def _expert_beginnings(self, step: int, draw: int, led: Sequence[Instance], worlds: Worlds) -> dict[str, Beginning]:
        """Return beginnings of the expert's episodes, by instance key, and store these episodes.
        Instances that the expert does not solve, or solves at once, are left out; where it fails
        what it claims to solve, that is stored as a rejection.
        """
        seed = derive_seed(self.place.recipe.seed, "led", self.iteration, step, draw)
        iteration_id = self.place.iteration_id(self.iteration)
        found: dict[str, Beginning] = {}
        for instance in led:
            env = worlds.of(instance)
            try:
                played = expert_trajectory(env, instance)
            except Transient:
                raise
            except EnvironmentFault as fault:
                failed = Rejection(stage=STAGE, subject=instance.key, reason="failed-replay", detail=str(fault))
                self.place.store.write(rejection_rows([failed], iteration_id=iteration_id))
                continue
            if played is not None and len(played.steps) > 1:
                self.place.store.write(expert_rows(iteration_id, played, 0, env=env, samples=False))
                key = expert_id(iteration_id, instance)
                found[instance.key] = beginning(key, played, seed=seed, operator="continuation")
        return found

    def _shaped(self, step: int, episodes: Sequence[Trajectory], worlds: Worlds) -> tuple[float, ...] | None:
        if self.reward is None:
            return None
        env, steps = worlds.of(episodes[0].instance), self.place.recipe.grpo.steps
        return tuple(self.reward.rewards(episodes, step=step, steps=steps, env=env))

    def _seed(self, step: int, instance: Instance, number: int) -> int:
        return derive_seed(self.place.recipe.seed, "rollout", self.iteration, step, instance.key, number)

    async def _wave(
        self, step: int, policy: Checkpoint, wanted: Sequence[tuple[Family, Sequence[EpisodePlan]]]
    ) -> Effort:
        """Play the missing episodes of a wave and give each family its own; return the effort that
        they took.
        """
        store, iteration_id = self.place.store, self.place.iteration_id(self.iteration)
        ids = {plan.key: rollout_id(iteration_id, policy.id, plan) for _, plans in wanted for plan in plans}
        missing = set(store.missing("trajectory", list(ids.values())))
        left = tuple(plan for _, plans in wanted for plan in plans if ids[plan.key] in missing)
        effort = await self._sample(step, policy, left, total=len(ids))
        played = load_trajectories(store, list(ids.values()))
        made: list[Derivation] = []
        for family, plans in wanted:
            own = {ids[plan.key]: plan for plan in plans}
            made += family.take({key: (plan, played[key]) for key, plan in own.items() if key in played})
        store.write(derivation_rows(made, iteration_id=iteration_id))
        return effort

    async def _sample(self, step: int, policy: Checkpoint, plans: tuple[EpisodePlan, ...], *, total: int) -> Effort:
        config = self.place.recipe.grpo
        shard = EpisodeShard(
            stage=STAGE,
            evaluation_id="",
            name=f"step {step}",
            iteration=self.iteration,
            checkpoint=policy,
            plans=plans,
            sampling=config.sampling(temperature=1.0, max_new_tokens=config.max_new_tokens, logprobs=True),
            max_steps=config.max_steps,
            repeats=config.repeats,
            limits=config.limits,
            done=total - len(plans),
            total=total,
        )
        return await self._played(shard, step)

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
