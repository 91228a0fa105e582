"""Choose where to cut the failed episodes that groups go on from (`grpo.revision_cut`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr_core.episodes.rollout import Helper
from agentr_core.episodes.units import run_all
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.catalogue import FIRST_ERROR
from agentr_core.runtime.context import RunContext
from agentr_core.store.codec.ledger import load_group_members, rejection_rows
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
_MAX_CONCURRENCY = 512
"""The maximum number of episodes that are judged at once."""


def largest_drop(group: Sequence[Trajectory], index: int) -> int | None:
    """Return the position of the step at which the value falls most in episode `index` of a group,
    the first of several; None if it falls nowhere. The value is the mean reward of the episodes
    that have the same actions and observations up to there (`sibling_advantages`).
    """
    rewards = [episode.reward for episode in group]
    changes = sibling_advantages(group, rewards, scale="none")[index]
    lowest = min(changes, default=0.0)
    return changes.index(lowest) if lowest < 0 else None


async def cuts_of(
    ctx: RunContext, iteration: int, failures: Mapping[str, Trajectory], helper: Helper, writer: Writer, *, seed: int
) -> dict[str, int]:
    """Return how many first steps of each failed episode to keep, by the id of its trajectory;
    episodes to be cut at random are left out.

    Episodes for which no cut is found, or whose first step is the one to undo, are stored as
    rejections. The judge's replies are stored too, so that no question is asked twice in an
    iteration.

    Raises `ErrorBudgetSpent` and `UserError` as `run_all` does, if the judge is asked.
    """
    rule = ctx.recipe.grpo.revision_cut
    if rule == "random":
        return {}
    iteration_id = ctx.iteration_id(iteration)
    cuts: dict[str, int | None]
    if rule == "verdict":
        cuts = await first_errors(ctx, iteration, failures, helper, writer, seed=seed)
    else:
        # The trees of a search are no help: they hold replies of another policy, and an episode
        # leaves them after few steps. Its own group was sampled from the same start by the same
        # policy.
        companions = load_group_members(ctx.store, list(failures))
        trajectories = load_trajectories(
            ctx.store,
            sorted({companion_id for companion_ids in companions.values() for companion_id in companion_ids}),
        )
        cuts = {
            key: largest_drop([trajectories[companion_id] for companion_id in companion_ids], companion_ids.index(key))
            for key, companion_ids in companions.items()
        }
    not_found = (
        ("no-error-found", "no step is bad")
        if rule == "verdict"
        else ("no-drop-found", "the mean of its group falls nowhere")
    )
    rejections = []
    for key in failures:
        cut = cuts.get(key)
        if key not in cuts:
            reason, detail = "not-judged", "table event has the error; it is cut at random"
        elif cut is None:
            reason, detail = not_found[0], f"{not_found[1]}; it is cut at random"
        elif cut == 0:
            reason, detail = AT_START, "the group begins at the start"
        else:
            continue
        rejections.append(Rejection(stage=STAGE, subject=key, reason=reason, detail=detail))
    ctx.store.write(rejection_rows(rejections, iteration_id=iteration_id))
    return {key: cut for key, cut in cuts.items() if cut is not None}


async def first_errors(
    ctx: RunContext, iteration: int, failures: Mapping[str, Trajectory], helper: Helper, writer: Writer, *, seed: int
) -> dict[str, int | None]:
    """Return the position of the first error that the judge names in each episode, by the id of its
    trajectory, None where it names none; episodes that could not be judged are left out. Raises as
    `cuts_of`.
    """
    iteration_id, config = ctx.iteration_id(iteration), ctx.recipe.critique
    answers_by_id = {edit.edit_id: edit.answer for edit in load_edits(ctx.store, iteration_id)}

    async def judge_episode(item: tuple[str, Trajectory]) -> int | None:
        key, trajectory = item
        instance = trajectory.instance

        async def ask(request: Request) -> list[Generation]:
            texts = [(message.role, message.text) for message in request.messages]
            replies = []
            for number in range(request.n):
                edit_id = fingerprint("edit", iteration_id, instance.key, number, texts, request.sampling)
                if edit_id not in answers_by_id:
                    question = Question(role="judge", messages=request.messages, sampling=request.sampling)
                    vote_seed = derive_seed(request.seed, "vote", number)
                    answer = await helper(question, seed=vote_seed, session=f"{instance.key}#judge")
                    answers_by_id[edit_id] = answer
                    row = edit_rows(
                        edit_id, answer, subject=key, prompt="judge", instance=instance, iteration_id=iteration_id
                    )
                    writer.add(row)
                reply = answers_by_id[edit_id]
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
        judge_episode,
        key=lambda item: item[0],
        errors=ctx.recipe.errors,
        on_error=ctx.on_error(writer, STAGE, iteration),
        concurrency=_MAX_CONCURRENCY,
    )
    await writer.flush()
    return errors
