"""Measures of a training step, as columns of table rl_step, and what is said where there is nothing
to train on.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentr_core.errors import TrainingFault
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.store.codec.groups import Group
from agentr_core.store.queries.groups import GroupCounts
from agentr_core.training.group.advantages import has_contrast
from agentr_core.training.group.policy import Totals


def measures(groups: Sequence[Group], totals: Totals, grpo: GrpoConfig) -> dict[str, float | None]:
    """Return the measures of a step's episodes and of the updates on them, each None where it does
    not apply.

    Reward and success are measured over the groups that begin at the start, recovery over those
    that go on from a failed episode.
    """
    fresh = [group for group in groups if not group.prefix]
    episodes = [episode for group in fresh for episode in group.episodes.values()]
    recovering = [episode for group in groups if group.prefix and not group.led for episode in group.episodes.values()]
    sampled = [steps for group in groups for steps in group.sampled]
    replies = [step for steps in sampled for step in steps]
    shaped = [one for group in groups for one in group.shaped or ()]
    tokens = sum(len(reply.token_ids) for reply in replies)
    return {
        "reward": fmean(episode.reward for episode in episodes) if episodes else 0.0,
        "shaped": fmean(shaped) if shaped else None,
        "pass_at_1": sum(episode.success for episode in episodes) / max(1, len(episodes)),
        "pass_at_n": sum(group.wins > 0 for group in fresh) / max(1, len(fresh)),
        "recovered": fmean(episode.success for episode in recovering) if recovering else None,
        "mixed_share": sum(has_contrast(group.compared) for group in groups) / max(1, len(groups)),
        "drawn_again": sum(group.draw > 0 for group in groups),
        "episode_tokens": tokens / max(1, len(sampled)),
        "episode_steps": len(replies) / max(1, len(sampled)),
        "cut_share": sum(reply.finish_reason == "length" for reply in replies) / max(1, len(replies)),
        "sampled_tokens": tokens,
        "trained_tokens": totals.tokens,
        **_updates(totals, grpo),
    }


def check_answers(step: int, groups: Sequence[Group]) -> None:
    """Raise `TrainingFault` when all replies of a step are empty: no further step would change
    that.
    """
    replies = [reply for group in groups for steps in group.sampled for reply in steps]
    if replies and not any(reply.reply.strip() for reply in replies):
        raise TrainingFault(
            f"all {len(replies)} replies of step {step} are empty, so the policy answers nothing and cannot be "
            "reinforced; if it answered in earlier steps, lower training.learning_rate and begin a new run, else look "
            "at the chat template and the weights of its directory"
        )


def untrained(counts: GroupCounts) -> str:
    """Return why the groups of an iteration trained nothing, as a sentence; the empty string if
    some did.
    """
    if counts.mixed:
        return ""
    lost = counts.groups - counts.alike_with_wins
    return (
        f"nothing was trained, and the weights are those that the iteration began with: in each of the "
        f"{counts.groups} groups all episodes have the same reward, so none is better than another ({lost} groups "
        f"without a win, {counts.alike_with_wins} with wins); take easier or harder instances, or raise "
        "grpo.num_generations"
    )


def _updates(totals: Totals, grpo: GrpoConfig) -> dict[str, float | None]:
    if not totals.updates:
        return dict.fromkeys(("loss", "entropy", "kl", "sampler_kl", "clip_share", "grad_norm"))
    return {
        "loss": totals.loss / totals.updates,
        "entropy": totals.mean("entropy"),
        "kl": totals.mean("kl") if grpo.beta else None,
        "sampler_kl": totals.mean("sampler_kl"),
        "clip_share": totals.mean("clipped"),
        "grad_norm": totals.norm / totals.updates,
    }
