"""A bad prefix, a turn of reflection and a good suffix as one conversation to train on. Source:
Agent-R section 3.2.

    opening, bad steps up to the first error | revision turn | "ok." | good steps after the split
    never trained                            | trained       | never | replies trained

The good steps were recorded in the state where both paths part, not in the one the kept bad steps
lead to, so the observations of a blind splice may be impossible. A verified splice is played and
has the live observations; still its thoughts are those of another state. A continued one ends as
the acting model played it from the revision turn on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentr_core.episodes.conversation import opening, turns
from agentr_core.episodes.rollout import Outcome, diverged, play
from agentr_core.errors import IllTypedAnswer, ReplayDrifted
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.pruning import needed
from agentr_core.methods.agent_r.reflections import ACKNOWLEDGEMENT, revision_turn
from agentr_core.protocols import Environment
from agentr_core.recipes import SpliceConfig
from agentr_core.recipes.thresholds import AlphaRule, clears
from agentr_core.repeating import Repeatability, repeatability_of, repeats
from agentr_core.types import (
    Critique,
    Message,
    Path,
    PathPair,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    Step,
    StopReason,
    Trajectory,
)

STAGE = "splice"
UNPLAYABLE = (IllTypedAnswer, ReplayDrifted)
"""What costs a path that is played again its sample, and nothing else."""


def pair_key(pair: PathPair) -> str:
    """Return `tree_id:good_leaf:bad_leaf`, the subject of rejections of a pair."""
    return f"{pair.bad.tree_id}:{pair.good.leaf}:{pair.bad.leaf}"


def pair_stream(pair: PathPair) -> str:
    """Return what seeds of a pair are derived from: the same for the same pair of a tree's copy in
    another run.
    """
    return f"{pair.bad.seeded_by}:{pair.good.leaf}:{pair.bad.leaf}"


def splice(
    pair: PathPair,
    critique: Critique | None,
    env: Environment,
    config: SpliceConfig,
    *,
    alpha: float,
    rule: AlphaRule = "at_least",
    seed: int,
) -> Sample | Rejection:
    """Return the revision sample of a pair by the mode blind, direct or verified, or why there is
    none.

    The mode `verified` plays the splice in `env`, which may block; the other two only read its
    texts.

    Args:
        critique: of the pair's bad path; not read in mode `direct`, and required in the others
            (`ValueError`).
        alpha: the least live reward of a verified splice, by `rule`.
        seed: of the run; the reflection is drawn from a stream of the pair.
    """
    cut = cut_of(pair, critique, config)
    if isinstance(cut, Rejection):
        return cut
    if config.mode == "verified":
        return _verified(pair, cut, critique, env, config, alpha=alpha, rule=rule, seed=seed)
    return _sample(
        pair,
        env,
        kept=pair.bad.trajectory.steps[:cut],
        turn=_turn(pair, config, seed),
        suffix=pair.good.trajectory.steps[pair.split :],
        extra=_extra(pair, critique, config.mode),
    )


def turned_back(
    pair: PathPair, critique: Critique | None, env: Environment, config: SpliceConfig, *, seed: int
) -> tuple[Step, ...] | Rejection:
    """Return the kept steps and the turn of revision as they are played, for another try to go on
    from; or why not.

    They are played in `env`, which may block.
    """
    cut = cut_of(pair, critique, config)
    if isinstance(cut, Rejection):
        return cut
    recorded = (*pair.bad.trajectory.steps[:cut], _pause(pair, config, seed))
    first_observation, outcomes = play(env, pair.bad.trajectory.instance, [step.reply for step in recorded])
    _check_replay(env, pair, first_observation, outcomes[:cut])
    last = outcomes[-1]
    if last.stop is not None:
        return _reject(pair, "ended-at-revision-turn", f"{last.stop}, {_at(len(outcomes) - 1, last.step)}")
    return tuple(_live(step, outcome) for step, outcome in zip(recorded, outcomes, strict=True))


def continued(
    pair: PathPair,
    critique: Critique | None,
    tries: Mapping[str, Trajectory],
    env: Environment,
    config: SpliceConfig,
    *,
    alpha: float,
    rule: AlphaRule = "at_least",
    seed: int,
) -> dict[str, Sample] | Rejection:
    """Return the samples of the tries that clear alpha, shortest first, by the keys of the tries;
    or why none does.

    Args:
        tries: episodes that begin with what `turned_back` returned for the pair.
    """
    begun = turned_back(pair, critique, env, config, seed=seed)
    if isinstance(begun, Rejection):
        return begun
    cut = len(begun) - 1
    cleared = [
        (len(episode.steps), key)
        for key, episode in tries.items()
        if episode.steps and not episode.steps[-1].disaster and clears(episode.reward, alpha, rule)
    ]
    if not cleared:
        best = max((episode.reward for episode in tries.values()), default=0.0)
        return _reject(pair, "no-try-cleared-alpha", f"{len(tries)} tries, best reward {best:g}, alpha {alpha:g}")
    extra = _extra(pair, critique, "continued") | {"tries": len(tries), "cleared": len(cleared)}
    samples = {}
    for _, key in sorted(cleared)[: config.continuation.per_pair or None]:
        episode = tries[key]
        samples[key] = _sample(
            pair,
            env,
            kept=episode.steps[:cut],
            turn=_turn(pair, config, seed),
            acknowledgement=episode.steps[cut].observation,
            suffix=episode.steps[cut + 1 :],
            extra=extra | {"live_reward": episode.reward, "live_success": episode.success},
        )
    return samples


def cut_of(pair: PathPair, critique: Critique | None, config: SpliceConfig) -> int | Rejection:
    """Return how many steps of the bad path are kept, first error included, or why the pair cannot
    be spliced.

    Good paths with nothing left after the shared steps are rejected, and unless `config.impossible`
    is `keep`, so are cuts that keep no step of the bad path's own, and kept parts after which the
    episode is over.
    """
    steps = pair.bad.trajectory.steps
    if config.mode == "direct":
        cut = len(steps)
    elif critique is None:
        raise ValueError(
            f"pair {pair_key(pair)} has no critique, which splice mode {config.mode} needs; judge it first"
        )
    elif critique.first_error is not None:
        cut = critique.first_error + 1
    elif config.no_error == "keep":
        cut = len(steps)
    else:
        return _reject(pair, "no-error-found", f"none of {len(critique.verdicts)} judged steps is bad")
    if cut == 0:
        return _reject(pair, "nothing-kept", "the bad path has no steps")
    if pair.split >= len(pair.good.trajectory.steps):
        return _reject(pair, "no-good-suffix", f"the good path ends with the {pair.split} shared steps")
    return cut if config.impossible == "keep" else _impossible(pair, cut) or cut


def _impossible(pair: PathPair, cut: int) -> Rejection | None:
    """Return why nobody can have turned back after the first `cut` steps of the bad path, or
    None.
    """
    if cut <= pair.split:
        return _reject(pair, "cut-in-shared-prefix", f"{cut} steps are kept and both paths share {pair.split}")
    last = pair.bad.trajectory.steps[cut - 1]
    if last.disaster:
        return _reject(pair, "kept-part-ends-in-disaster", _at(cut - 1, last))
    if last.terminated:
        return _reject(pair, "kept-part-ends-the-episode", _at(cut - 1, last))
    return None


def good_sample(path: Path, env: Environment, *, prune: bool = False) -> Sample:
    """Return a whole path as a sample with all its replies trained.

    With `prune` only the steps that its reward needs are kept, played anew in `env`, which may
    block.
    """
    trajectory = path.trajectory
    steps = trajectory.steps
    if prune:
        replies = [step.reply for step in steps]
        kept = needed(env, trajectory.instance, replies)
        _, outcomes = play(env, trajectory.instance, [replies[position] for position in kept])
        steps = tuple(_live(steps[position], outcome) for position, outcome in zip(kept, outcomes, strict=False))
    return Sample(
        kind=SampleKind.GOOD,
        messages=opening(env, trajectory.first_observation) + _without_last(turns(steps, train=True)),
        instance=trajectory.instance,
        provenance=Provenance(
            tree_id=path.tree_id,
            good_leaf=path.leaf,
            good_reward=trajectory.reward,
            extra={"stop": trajectory.stop.value, "pruned_steps": len(trajectory.steps) - len(steps)},
        ),
    )


def _verified(
    pair: PathPair,
    cut: int,
    critique: Critique | None,
    env: Environment,
    config: SpliceConfig,
    *,
    alpha: float,
    rule: AlphaRule,
    seed: int,
) -> Sample | Rejection:
    """Play kept steps, revision turn and good steps; an agent will really send the dummy action, so
    it is played.
    """
    pause = _pause(pair, config, seed)
    recorded = (*pair.bad.trajectory.steps[:cut], pause, *pair.good.trajectory.steps[pair.split :])
    whole = len(recorded)
    if config.prune:
        positions = needed(env, pair.bad.trajectory.instance, [step.reply for step in recorded], start=cut + 1)
        recorded = tuple(recorded[position] for position in positions)
    first_observation, outcomes = play(env, pair.bad.trajectory.instance, [step.reply for step in recorded])
    _check_replay(env, pair, first_observation, outcomes[:cut])
    last = outcomes[-1]
    live = tuple(_live(step, outcome) for step, outcome in zip(recorded, outcomes, strict=False))
    suffix = live[cut + 1 :]
    if not suffix:
        where = "in the kept part" if len(live) <= cut else "at the revision turn"
        return _reject(pair, "verify-ended-early", f"{last.stop} {where}, {_at(len(outcomes) - 1, last.step)}")
    if last.step.disaster or not clears(last.step.reward, alpha, rule):
        early = len(outcomes) < len(recorded)
        where = _divergence(recorded, outcomes, cut + 1)
        end = (
            f"{last.stop} at step {len(outcomes) - 1} of {len(recorded)}" if early else f"played {len(recorded)} steps"
        )
        detail = f"live reward {last.step.reward:g}, alpha {alpha:g}; {end}; {where}"
        return _reject(pair, "verify-ended-early" if early else "verify-reward-below-alpha", detail)
    changed = sum(now.observation != then.observation for now, then in zip(suffix, recorded[cut + 1 :], strict=False))
    extra = {
        "live_reward": last.step.reward,
        "live_success": last.stop is StopReason.SUCCESS,
        "changed_observations": changed,
        "dropped_good_steps": whole - len(outcomes),
    }
    return _sample(
        pair,
        env,
        kept=live[:cut],
        turn=_turn(pair, config, seed),
        acknowledgement=live[cut].observation,
        suffix=suffix,
        extra=_extra(pair, critique, "verified") | extra,
    )


def _turn(pair: PathPair, config: SpliceConfig, seed: int) -> Message:
    return revision_turn(derive_seed(seed, "reflection", pair_stream(pair)), config.action, config.reflections)


def _pause(pair: PathPair, config: SpliceConfig, seed: int) -> Step:
    reply = _turn(pair, config, seed).text
    return Step(reply=reply, action=config.action, observation=ACKNOWLEDGEMENT, reward=0.0)


def _sample(
    pair: PathPair,
    env: Environment,
    *,
    kept: Sequence[Step],
    turn: Message,
    suffix: Sequence[Step],
    acknowledgement: str = ACKNOWLEDGEMENT,
    extra: Mapping[str, Any],
) -> Sample:
    bad = pair.bad.trajectory
    return Sample(
        kind=SampleKind.REVISION,
        messages=(
            *opening(env, bad.first_observation),
            *turns(kept),
            turn,
            Message(role="user", text=acknowledgement),
            *_without_last(turns(suffix, train=True)),
        ),
        instance=bad.instance,
        provenance=Provenance(
            tree_id=pair.bad.tree_id,
            good_leaf=pair.good.leaf,
            bad_leaf=pair.bad.leaf,
            split=pair.split,
            cut=len(kept),
            good_reward=pair.good.trajectory.reward,
            bad_reward=bad.reward,
            extra=extra,
        ),
    )


def _without_last(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    # Nothing follows the last observation: it would lengthen the sample and teach nothing.
    return messages[:-1]


def _extra(pair: PathPair, critique: Critique | None, mode: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "first_error": critique.first_error if critique is not None and mode != "direct" else None,
        "bad_stop": pair.bad.trajectory.stop.value,
    }


def _live(recorded: Step, outcome: Outcome) -> Step:
    """Return what happened now, with the recorded reply, its tokens and why it ended."""
    return replace(
        outcome.step,
        token_ids=recorded.token_ids,
        logprobs=recorded.logprobs,
        finish_reason=recorded.finish_reason,
        tokenizer=recorded.tokenizer,
    )


def _check_replay(env: Environment, pair: PathPair, first_observation: str, outcomes: Sequence[Outcome]) -> None:
    promise = repeatability_of(env)
    bad = pair.bad.trajectory
    seen = [first_observation, *(outcome.step.observation for outcome in outcomes)]
    known = [bad.first_observation, *(step.observation for step in bad.steps)]
    for number, (now, then) in enumerate(zip(seen, known, strict=False)):
        # A world that promises nothing may begin with another text; a sample keeps the one that its
        # steps followed on.
        free = number == 0 and promise is Repeatability.NEVER
        if not (free or repeats(now, then, promise)):
            raise diverged(
                env,
                f"{bad.instance.key}, leaf {pair.bad.leaf} of tree {pair.bad.tree_id}: after {number} steps the "
                f"recording has {_short(then)} and the replay {_short(now)}",
            )


def _divergence(recorded: Sequence[Step], outcomes: Sequence[Outcome], start: int) -> str:
    """Return where the live observations went wrong: at the first invalid action, or else at the
    first difference.
    """
    differing = [
        (position, outcome)
        for position, (step, outcome) in enumerate(zip(recorded, outcomes, strict=False))
        if position >= start and outcome.step.observation != step.observation
    ]
    if not differing:
        return "all observations are as recorded"
    position, outcome = next((d for d in differing if d[1].step.valid is False), differing[0])
    then = recorded[position].observation
    return f"{_at(position, outcome.step)} gave {_short(outcome.step.observation)}, recorded was {_short(then)}"


def _at(position: int, step: Step) -> str:
    return f"step {position} ({_short(step.action)})"


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def _reject(pair: PathPair, reason: str, detail: str) -> Rejection:
    return Rejection(stage=STAGE, subject=pair_key(pair), reason=reason, detail=detail)
