"""The making of a shard's families: their children are made, or taken from what is known."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentr_core.episodes.asking import Helper, graded
from agentr_core.episodes.shared import SharedEnvironments
from agentr_core.episodes.steps import EpisodeTimer
from agentr_core.errors import PromptTooLong
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.et_agent.flywheel.carrying import DrawnTrajectory, carry_out
from agentr_core.methods.et_agent.flywheel.drafts import Draft, Manner, Unmade
from agentr_core.methods.et_agent.flywheel.family import Member, PlannedChild, subject_of
from agentr_core.methods.et_agent.flywheel.growing import grow
from agentr_core.methods.et_agent.flywheel.operators import OPERATORS, Case
from agentr_core.methods.et_agent.flywheel.prompts import PromptName, version
from agentr_core.methods.et_agent.flywheel.turns import manner_of
from agentr_core.models.samplers import Sampler
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.et_agent import FlywheelConfig
from agentr_core.recipes.sampling import sampling_of
from agentr_core.runtime.equipment import Checkpoint, Equipment, Sink, held_back, tokens_in, window
from agentr_core.runtime.ungraded import UNGRADED, ungraded_id
from agentr_core.store.codec.derivations import derivation_rows
from agentr_core.store.codec.families import FLYWHEEL, edit_rows, family_rows
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Answer, Derivation, Grading, Instance, Question, Rejection, Trajectory

STAGE = "evolve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A stored trajectory, and how many tokens were drawn for it."""

    trajectory: Trajectory
    tokens: int


class Said(NamedTuple):
    """A model's answer, and the round in which it was asked."""

    answer: Answer
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyWork:
    """A question whose flywheel is not finished, with its stored members, model answers and
    trajectories that wait for their grade, each by id.
    """

    family_id: str
    instance: Instance
    members: Mapping[str, Kept] = field(default_factory=dict)
    said: Mapping[str, Said] = field(default_factory=dict)
    ungraded: Mapping[str, DrawnTrajectory] = field(default_factory=dict)


class Known:
    """The known parts of a family while it grows; a further try goes on from them."""

    def __init__(self, work: FamilyWork) -> None:
        self.work = work
        self.members = dict(work.members)
        self.said = dict(work.said)
        self.ungraded = dict(work.ungraded)
        self.asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def answered(self, before: int) -> int:
        """Return how many tokens models wrote in answers before a round."""
        return sum(said.answer.completion_tokens for said in self.said.values() if said.round < before)


@dataclass(frozen=True, slots=True)
class FamilyMaker:
    """The maker of a shard's families, which stores every part as soon as it is made."""

    iteration: int
    checkpoint: Checkpoint
    equipment: Equipment
    sink: Sink
    environments: SharedEnvironments
    sampler: Sampler
    helper: Helper
    timer: EpisodeTimer

    @property
    def config(self) -> FlywheelConfig:
        return self.equipment.recipe.et_agent.flywheel

    @property
    def iteration_id(self) -> str:
        return self.equipment.iteration_id(self.iteration)

    async def grow(self, known: Known) -> None:
        """Grow a family to its end, from its known parts."""
        grown = await grow(self.config, lambda planned: self._child(known, planned), known.answered)
        self.sink.add(
            family_rows(
                known.work.family_id,
                known.work.instance,
                iteration_id=self.iteration_id,
                checkpoint_id=self.checkpoint.id,
                members=len(grown.members),
                rounds=grown.rounds,
                ended_by=grown.ended_by,
            )
        )

    async def _child(self, known: Known, planned: PlannedChild) -> Member | None:
        work = known.work
        child_id = fingerprint("member", work.family_id, planned.name)
        async with self.environments.lend(work.instance) as env:
            manner = manner_of(env, work.instance)
        if child_id not in known.members and not await self._make(known, planned, child_id, manner):
            return None
        kept = known.members[child_id]
        return Member(
            name=planned.name,
            id=child_id,
            trajectory=kept.trajectory,
            cost=manner.cost(kept.trajectory),
            tokens=kept.tokens,
        )

    async def _make(self, known: Known, planned: PlannedChild, child_id: str, manner: Manner) -> bool:
        """Make a child and store it; return whether there is one."""
        seed = self._seed(known, planned.name)
        draft = await self._draft(known, planned, manner, seed)
        if isinstance(draft, Unmade):
            self.sink.add(self._unmade(known, planned, draft))
            return False
        if draft.whole is None:
            # No environment is held while models are asked for the draft.
            async with self.environments.lend(known.work.instance) as env:
                made, grading = await self._played(known, draft, child_id, env, seed)
        else:
            made, grading = DrawnTrajectory(trajectory=draft.whole), None
        rows = self._rows(child_id, made, FLYWHEEL, grading, given=draft.given)
        self.sink.add(merge([rows, self._derived(child_id, planned, draft, seed)]))
        known.members[child_id] = Kept(trajectory=made.trajectory, tokens=made.tokens)
        return True

    async def _played(
        self, known: Known, draft: Draft, child_id: str, env: Environment, seed: int
    ) -> tuple[DrawnTrajectory, Grading | None]:
        """Return the trajectory that a draft becomes, and its grade. A trajectory that cannot be
        graded is stored to be graded later.
        """
        waiting = ungraded_id(child_id)
        played = known.ungraded.get(waiting)
        if played is None:
            played = await carry_out(
                draft,
                known.work.instance,
                env,
                held_back(self.sampler, self.sink),
                self.config,
                seed=seed,
                fits=window(self.equipment.recipe, self.sampler, sampling_of(self.config)),
                timer=self.timer,
                helper=self.helper,
                tokens_of=tokens_in(self.sampler),
            )
        try:
            trajectory, grading = await graded(env, played.trajectory, self.helper, seed=seed)
        except BaseException:
            known.ungraded[waiting] = played
            self.sink.add(self._rows(waiting, played, UNGRADED, None, given=draft.given))
            raise
        return replace(played, trajectory=trajectory), grading

    async def _draft(self, known: Known, planned: PlannedChild, manner: Manner, seed: int) -> Draft | Unmade:
        """Return the beginning of a child. A prompt that no longer fits a model's context makes no
        child.
        """
        if planned.parent is None:
            return Draft()

        async def consult(operator: str, name: PromptName, question: Question) -> Answer:
            return await self._consult(known, planned, operator, name, question)

        case = Case(parent=planned.parent.trajectory, manner=manner, config=self.config, seed=seed, consult=consult)
        try:
            return await OPERATORS[planned.operator](case)
        except PromptTooLong as error:
            return Unmade("prompt-too-long", str(error))

    async def _consult(
        self, known: Known, planned: PlannedChild, operator: str, name: PromptName, question: Question
    ) -> Answer:
        """Return a model's stored answer to the same question, or else a new one."""
        subject = subject_of(planned, operator)
        words = [(message.role, message.text) for message in question.messages]
        edit_id = fingerprint("edit", known.work.family_id, subject, name, words, question.sampling)
        async with known.asking[edit_id]:
            if edit_id not in known.said:
                seed = derive_seed(self._seed(known, subject), name)
                session = f"{known.work.instance.key}#{question.role}"
                answer = await self.helper(question, seed=seed, session=session)
                known.said[edit_id] = Said(answer, planned.round)
                self.sink.add(
                    edit_rows(
                        edit_id,
                        answer,
                        subject=subject,
                        prompt=version(name),
                        instance=known.work.instance,
                        iteration_id=self.iteration_id,
                    )
                )
        return known.said[edit_id].answer

    def _seed(self, known: Known, name: str) -> int:
        recipe = self.equipment.recipe
        return derive_seed(recipe.seed, STAGE, self.iteration, known.work.instance.key, name)

    def _rows(
        self, trajectory_id: str, played: DrawnTrajectory, source: str, grading: Grading | None, *, given: int
    ) -> Rows:
        return trajectory_rows(
            trajectory_id,
            played.trajectory,
            source=source,
            iteration_id=self.iteration_id,
            draws=played.draws,
            grading=grading,
            given=given,
        )

    def _derived(self, child_id: str, planned: PlannedChild, draft: Draft, seed: int) -> Rows:
        if planned.parent is None:
            return {}
        made = Derivation(
            child=child_id,
            parent=planned.parent.id,
            operator=planned.operator,
            position=draft.position,
            prompt_hash=draft.prompt_hash,
            seed=seed,
            round=planned.round,
        )
        return derivation_rows([made], iteration_id=self.iteration_id)

    def _unmade(self, known: Known, planned: PlannedChild, why: Unmade) -> Rows:
        subject = f"{known.work.instance.key} {planned.name}"
        rejection = Rejection(stage=STAGE, subject=subject, reason=why.reason, detail=why.detail)
        return rejection_rows([rejection], iteration_id=self.iteration_id)
