"""The policy says the replies of samples anew, where they now stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentr_core.episodes.transcript import AlternatingTurns, transcript_of
from agentr_core.episodes.units import run_all
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.rethinking import NAME, Anew, rethinking
from agentr_core.models.samplers import Sampler
from agentr_core.protocols import Environment, Listening
from agentr_core.recipes import Recipe
from agentr_core.recipes.sampling import sampling_of
from agentr_core.runtime.equipment import in_flight, speed
from agentr_core.runtime.helpers import answer
from agentr_core.runtime.place import Clock, Workplace
from agentr_core.runtime.worlds import Worlds
from agentr_core.samples.identity import sample_id
from agentr_core.store import Writer
from agentr_core.store.codec import edit_rows, load_edits
from agentr_core.types import Answer, Instance, Sample

STAGE = "splice"


def check_world(recipe: Recipe, env: Environment) -> None:
    """Raise `ConfigError` when the thoughts of a world's replies cannot be said anew."""
    if not recipe.splice.rethink:
        return
    if not isinstance(transcript_of(env), AlternatingTurns):
        raise ConfigError(
            f"splice.rethink: in {env.name} the model goes on with its own turn, whose parts cannot be said anew; "
            "leave it out"
        )
    if isinstance(env, Listening):
        raise ConfigError(
            f"splice.rethink: {env.name} hears whole replies, and another thought may lead elsewhere; leave it out"
        )


async def rethink(place: Workplace, iteration: int, samples: Sequence[Sample], clock: Clock) -> dict[str, Sample]:
    """Return samples with the replies that the policy says anew, by the ids of the given ones.

    Each answer is stored, and what was answered before is not asked again. A sample whose questions
    fail for good stays as it is; the error is stored as an event.

    Raises `ErrorBudgetSpent` when more samples fail than the recipe allows.
    """
    units, done = {sample_id(sample): sample for sample in samples}, 0
    known = {edit.edit_id: edit.answer for edit in load_edits(place.store, place.iteration_id(iteration))}
    with place.worlds() as worlds:
        async with place.sampling(place.policy(iteration).path) as sampler, Writer(place.store) as writer:
            policy = _Policy(place, iteration, sampler, writer, worlds, known)

            def show(*_: object) -> None:
                nonlocal done
                done += 1
                place.progress(done, len(units), f"samples said anew, {speed(sampler)}")

            made = await run_all(
                list(units.items()),
                policy.says_anew,
                key=lambda item: item[0],
                errors=place.recipe.errors,
                on_error=place.on_error(writer, STAGE, iteration),
                concurrency=in_flight(sampler, 1, wanted=place.recipe.scale.concurrency),
                on_result=show,
            )
            clock.add_batcher(sampler)
        clock.add({"store": writer.seconds})
    return units | made


@dataclass(frozen=True, slots=True)
class _Policy:
    """The policy of an iteration, asked about the replies of samples; `known` are its stored
    answers, by id.
    """

    place: Workplace
    iteration: int
    sampler: Sampler
    writer: Writer
    worlds: Worlds
    known: Mapping[str, Answer]

    async def says_anew(self, item: tuple[str, Sample]) -> Sample:
        """Return a sample, given with its id, as the policy says it anew."""
        name, sample = item
        if sample.instance is None:
            return sample
        recipe = self.place.recipe.in_world(sample.instance.environment)
        sampling = replace(sampling_of(recipe.search), temperature=0.0, top_p=1.0)
        questions = rethinking(sample, self.worlds.of(sample.instance), sampling, name=name)
        try:
            asked = next(questions)
            while True:
                answered = self.known.get(asked.answer_id) or await self._ask(asked, sample.instance)
                asked = questions.send(answered)
        except StopIteration as end:
            made: Sample = end.value
            return made

    async def _ask(self, asked: Anew, instance: Instance) -> Answer | None:
        """Return the answer to a question and store it; None if there is no room for a reply."""
        seed = derive_seed(self.place.recipe.seed, "rethink", asked.answer_id)
        await self.writer.room()
        try:
            said = await answer(self.sampler, asked.question, seed=seed, session=f"{instance.key}#rethink")
        except PromptTooLong:
            return None
        iteration_id = self.place.iteration_id(self.iteration)
        self.writer.add(
            edit_rows(
                asked.answer_id, said, subject=asked.subject, prompt=NAME, instance=instance, iteration_id=iteration_id
            )
        )
        return said
