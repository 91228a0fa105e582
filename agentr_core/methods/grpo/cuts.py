"""Choose where to cut the failed episodes that groups go on from (`grpo.revision_cut`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr_core.episodes.rollout import Helper
from agentr_core.episodes.units import run_all
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.catalogue import FIRST_ERROR
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.ledger import load_companions, rejection_rows
from agentr_core.store.codec.samples import edit_rows, load_edits
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Writer
from agentr_core.training.group.advantages import sibling_advantages
from agentr_core.types import Generation, Question, Rejection, Request, Trajectory

STAGE = "reinforce"
AT_START = "error-at-the-start"
"""The reason of a rejection when the first step is the one to undo, so that the group begins at the
start.
"""
_MOST = 512
"""The maximum number of episodes that are judged at once."""


def largest_drop(group: Sequence[Trajectory], number: int) -> int | None:
    """Return the position of the step at which the value falls most in episode `number` of a group,
    the first of several; None if it falls nowhere. The value is the mean reward of the episodes
    that have the same actions and observations up to there (`sibling_advantages`).
    """
    rewards = [episode.reward for episode in group]
    changes = sibling_advantages(group, rewards, scale="none")[number]
    lowest = min(changes, default=0.0)
    return changes.index(lowest) if lowest < 0 else None


async def cuts_of(
    place: Workplace, iteration: int, failures: Mapping[str, Trajectory], helper: Helper, writer: Writer, *, seed: int
) -> dict[str, int]:
    """Return how many first steps of each failed episode to keep, by the id of its trajectory;
    episodes to be cut at random are left out.

    Episodes for which no cut is found, or whose first step is the one to undo, are stored as
    rejections. The judge's replies are stored too, so that no question is asked twice in an
    iteration.

    Raises `ErrorBudgetSpent` and `UserError` as `run_all` does, if the judge is asked.
    """
    by = place.recipe.grpo.revision_cut
    if by == "random":
        return {}
    iteration_id = place.iteration_id(iteration)
    cuts: dict[str, int | None]
    if by == "verdict":
        cuts = await first_errors(place, iteration, failures, helper, writer, seed=seed)
    else:
        # The trees of a search are no help: they hold replies of another policy, and an episode
        # leaves them after few steps. Its own group was sampled from the same start by the same
        # policy.
        companions = load_companions(place.store, list(failures))
        trajectories = load_trajectories(
            place.store, sorted({other for others in companions.values() for other in others})
        )
        cuts = {
            key: largest_drop([trajectories[other] for other in others], others.index(key))
            for key, others in companions.items()
        }
    none = (
        ("no-error-found", "no step is bad")
        if by == "verdict"
        else ("no-drop-found", "the mean of its group falls nowhere")
    )
    rejections = []
    for key in failures:
        cut = cuts.get(key)
        if key not in cuts:
            reason, detail = "not-judged", "table event has the error; it is cut at random"
        elif cut is None:
            reason, detail = none[0], f"{none[1]}; it is cut at random"
        elif cut == 0:
            reason, detail = AT_START, "the group begins at the start"
        else:
            continue
        rejections.append(Rejection(stage=STAGE, subject=key, reason=reason, detail=detail))
    place.store.write(rejection_rows(rejections, iteration_id=iteration_id))
    return {key: cut for key, cut in cuts.items() if cut is not None}


async def first_errors(
    place: Workplace, iteration: int, failures: Mapping[str, Trajectory], helper: Helper, writer: Writer, *, seed: int
) -> dict[str, int | None]:
    """Return the position of the first error that the judge names in each episode, by the id of its
    trajectory, None where it names none; episodes that could not be judged are left out. Raises as
    `cuts_of`.
    """
    iteration_id, config = place.iteration_id(iteration), place.recipe.critique
    answers = {edit.edit_id: edit.answer for edit in load_edits(place.store, iteration_id)}

    async def work(item: tuple[str, Trajectory]) -> int | None:
        key, trajectory = item
        instance = trajectory.instance

        async def ask(request: Request) -> list[Generation]:
            words = [(message.role, message.text) for message in request.messages]
            replies = []
            for number in range(request.n):
                edit_id = fingerprint("edit", iteration_id, instance.key, number, words, request.sampling)
                if edit_id not in answers:
                    question = Question(role="judge", messages=request.messages, sampling=request.sampling)
                    vote_seed = derive_seed(request.seed, "vote", number)
                    answer = await helper(question, seed=vote_seed, session=f"{instance.key}#judge")
                    answers[edit_id] = answer
                    row = edit_rows(
                        edit_id, answer, subject=key, prompt="judge", instance=instance, iteration_id=iteration_id
                    )
                    writer.add(row)
                reply = answers[edit_id]
                replies.append(
                    Generation(
                        text=reply.text,
                        token_ids=(),
                        finish_reason=reply.finish_reason,
                        prompt_tokens=reply.prompt_tokens,
                        completion_tokens=reply.completion_tokens,
                        thinks=reply.thinks,
                    )
                )
            return replies

        error: int | None = await FIRST_ERROR(key, trajectory, ask, config, seed=seed)
        return error

    errors = await run_all(
        list(failures.items()),
        work,
        key=lambda item: item[0],
        errors=place.recipe.errors,
        on_error=place.on_error(writer, STAGE, iteration),
        concurrency=_MOST,
    )
    await writer.flush()
    return errors
