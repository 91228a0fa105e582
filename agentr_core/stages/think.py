"""Thoughts for the expert's episodes of an iteration: the editor is asked for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile
from typing import Any, NamedTuple

from agentr_core.episodes.units import run_all
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.models.samplers import Sampler
from agentr_core.runtime.equipment import following, in_flight, speed
from agentr_core.runtime.helpers import answer
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.readings import Readings
from agentr_core.runtime.worlds import Worlds
from agentr_core.stages.demonstrate import BARE, STAGE, bare_id, expert_id, expert_rows
from agentr_core.stages.thoughts import NAME, Asked, Bare, Thoughtful, Thoughtless, Written, writing, written
from agentr_core.store import Writer
from agentr_core.store.codec.derivations import derivation_rows
from agentr_core.store.codec.families import edit_rows, load_edits
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.tables import Rows, merge
from agentr_core.threads import in_thread
from agentr_core.types import Answer, Derivation, Rejection

THINK = "think"


async def think(place: Workplace, iteration: int) -> dict[str, Any]:
    """Have a thought written before each bare action of the expert's episodes of an iteration.

    Questions that the run answered before, in this iteration or an earlier one, are not asked
    again.

    Raises:
        ConfigError: no episode got its thoughts, or most answers of the editor are unreadable.
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was answered is kept.
    """
    return await _think(place, iteration, samples=False)


async def think_and_clone(place: Workplace, iteration: int) -> dict[str, Any]:
    """Do as `think`, and keep each episode as a sample."""
    return await _think(place, iteration, samples=True)


async def _think(place: Workplace, iteration: int, *, samples: bool) -> dict[str, Any]:
    known = _known(place, iteration)
    with place.worlds() as worlds:
        bare = await in_thread(_bare, place, iteration, worlds)
        looked_up = {key: written(one, known) for key, one in bare.items()}
        found = {key: one for key, one in looked_up.items() if one is not None}
        missing = {key: one for key, one in bare.items() if key not in found}
        if missing:
            found |= await _asked(place, iteration, missing, known, total=len(bare))
        made = {key: one for key, one in found.items() if isinstance(one, Thoughtful)}
        turned = [
            Rejection(stage=STAGE, subject=bare[key].name, reason=one.reason, detail=one.detail)
            for key, one in found.items()
            if isinstance(one, Thoughtless)
        ]
        iteration_id = place.iteration_id(iteration)
        units = [_rows(place, iteration, key, bare[key], one, samples=samples) for key, one in made.items()]
        place.store.write(merge([*units, rejection_rows(turned, iteration_id=iteration_id)]))
    if bare and not made:
        raise ConfigError(
            f"no thought could be read from what the editor wrote for any of {len(bare)} demonstrations; name another "
            "model in models.editor, or raise eto.expert.thoughts.max_new_tokens or .tries"
        )
    return {"expert": len(made), "rejected": len(turned), "asked": len(missing)}


def _bare(place: Workplace, iteration: int, worlds: Worlds) -> dict[str, Bare]:
    """Return the expert's episodes as they were played, by the id of the episode with thoughts."""
    iteration_id = place.iteration_id(iteration)
    played = load_trajectories(place.store, iteration_id=iteration_id, source=BARE)
    found: dict[str, Bare] = {}
    for instance in {one.instance.key: one.instance for one in played.values()}.values():
        ids = (bare_id(iteration_id, instance, number) for number in count())
        for number, key in enumerate(takewhile(played.__contains__, ids)):
            found[expert_id(iteration_id, instance, number)] = Bare(
                env=worlds.of(instance),
                trajectory=played[key],
                name=instance.episode(number),
                run_id=place.run_id,
                config=place.recipe.eto.expert.thoughts,
                seed=place.recipe.seed,
            )
    return found


def _known(place: Workplace, iteration: int) -> dict[str, Answer]:
    """Return the answers of an iteration and of those before it, by id."""
    return {
        edit.edit_id: edit.answer
        for number in range(1, iteration + 1)
        for edit in load_edits(place.store, place.iteration_id(number))
    }


async def _asked(
    place: Workplace, iteration: int, missing: Mapping[str, Bare], known: dict[str, Answer], *, total: int
) -> dict[str, Written]:
    """Return the outcome of episodes for which the editor must be asked; its answers are added to
    `known`. Episodes that fail for good are stored as events.
    """
    done = total - len(missing)
    # All iterations have the thoughts of one model: without an editor, the run's first model.
    async with place.asking("editor", place.trained(0).path, THINK, iteration) as (sampler, writer, readings):

        def ended(*_: Any) -> None:
            nonlocal done
            done += 1
            show()

        def show() -> None:
            place.progress(done, total, f"episodes with thoughts, {speed(sampler)}")

        async with following(sampler, show):
            found = await run_all(
                list(missing.items()),
                lambda item: _write(item[1], known, Editor(sampler, writer, readings, place.iteration_id(iteration))),
                key=lambda item: item[0],
                errors=place.recipe.errors,
                on_error=place.on_error(writer, THINK, iteration),
                concurrency=in_flight(sampler, 1, wanted=place.recipe.scale.concurrency),
                on_result=ended,
                total=total,
            )
    return found


class Editor(NamedTuple):
    """The editor of an iteration, where its answers are stored, and the count of them."""

    sampler: Sampler
    writer: Writer
    readings: Readings
    iteration_id: str


async def _write(bare: Bare, known: dict[str, Answer], editor: Editor) -> Written:
    questions = writing(bare)
    try:
        asked = next(questions)
        while True:
            if asked.answer_id not in known:
                known[asked.answer_id] = await _ask(asked, bare, editor)
            asked = questions.send(known[asked.answer_id])
    except StopIteration as end:
        made: Written = end.value
        return made
    except PromptTooLong as error:
        return Thoughtless("prompt-too-long", str(error))


async def _ask(asked: Asked, bare: Bare, editor: Editor) -> Answer:
    session = f"{bare.name}#editor"
    said = await answer(editor.sampler, asked.question, seed=asked.seed, session=session)
    editor.writer.add(
        edit_rows(
            asked.answer_id,
            said,
            subject=asked.subject,
            prompt=NAME,
            instance=bare.trajectory.instance,
            iteration_id=editor.iteration_id,
        )
    )
    # An editor is a large model: each answer is stored before the next question, and is never
    # requested again.
    await editor.writer.flush()
    editor.readings.count(said)
    return said


def _rows(place: Workplace, iteration: int, expert: str, bare: Bare, made: Thoughtful, *, samples: bool) -> Rows:
    iteration_id, instance = place.iteration_id(iteration), made.trajectory.instance
    number = int(bare.name.rpartition("#")[2])
    derived = Derivation(
        child=expert,
        parent=bare_id(iteration_id, instance, number),
        operator="thoughts",
        position=made.position,
        prompt_hash=made.prompt_hash,
        seed=place.recipe.seed,
    )
    rows = expert_rows(iteration_id, made.trajectory, number, env=bare.env, samples=samples)
    return merge([rows, derivation_rows([derived], iteration_id=iteration_id)])
