"""A bad prefix, a turn of reflection and a good suffix as one conversation to train on. Source:
Agent-R section 3.2.

    opening, bad steps up to the first error | revision turn | "ok." | rest of the good path
    never trained                            | trained       | never | replies trained

The good path goes on where it leaves the kept steps: where the two paths part or, if the first
error is one of the steps that they share, after that step.

The good steps were recorded in the state where the two paths part, not in the one that the kept bad
steps lead to, so the observations of a blind splice may be impossible. A verified splice is played
and has the live observations, but its thoughts are still those of another state. A continued splice
ends with what the acting model played from the revision turn on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentr_core.episodes.replay import play
from agentr_core.episodes.steps import Outcome
from agentr_core.episodes.transcript import transcript
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.cutting import cut_of, good_rest, reject
from agentr_core.methods.agent_r.pruning import needed
from agentr_core.methods.agent_r.reflections import ACKNOWLEDGEMENT, revision_text
from agentr_core.methods.agent_r.replaying import at, check_replay, divergence, live
from agentr_core.protocols.abilities import Calling
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.splicing import SpliceConfig
from agentr_core.recipes.thresholds import AlphaRule, clears
from agentr_core.types import (
    Critique,
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


def pair_stream(pair: PathPair) -> str:
    """Return the name of a pair's random stream, from which its seeds are derived: a pair of the
    same instance and leaves has the same one in every run.
    """
    return f"{pair.bad.trajectory.instance.key}:{pair.good.leaf}:{pair.bad.leaf}"


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
    """Return the revision sample of a pair in mode blind, direct or verified, or why there is none.

    The mode `verified` plays the splice in `env`, which may block; the other two only read its
    texts.

    Args:
        critique: of the pair's bad path; ignored in mode `direct`, required in the others
            (`ValueError`).
        alpha: the lowest live reward of a verified splice, compared by `rule`.
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
        turn=_pause(pair, env, config, seed),
        suffix=good_rest(pair, cut),
        extra=_extra(pair, critique, config.mode),
    )


def turned_back(
    pair: PathPair, critique: Critique | None, env: Environment, config: SpliceConfig, *, seed: int
) -> tuple[Step, ...] | Rejection:
    """Return the kept steps and the revision turn as played, for another try to go on from, or why
    there are none.

    They are played in `env`, which may block.
    """
    cut = cut_of(pair, critique, config)
    if isinstance(cut, Rejection):
        return cut
    kept = pair.bad.trajectory.steps[:cut]
    recorded = (*kept, _pause(pair, env, config, seed))
    replies = [step.reply for step in recorded]
    first_observation, outcomes = play(env, pair.bad.trajectory.instance, replies, recorded=kept)
    check_replay(env, pair, first_observation, outcomes[:cut])
    last = outcomes[-1]
    if last.stop is not None:
        return reject(pair, "ended-at-revision-turn", f"{last.stop}, {at(len(outcomes) - 1, last.step)}")
    return tuple(live(step, outcome) for step, outcome in zip(recorded, outcomes, strict=True))


def continued(
    pair: PathPair,
    critique: Critique | None,
    begun: Sequence[Step],
    tries: Mapping[str, Trajectory],
    env: Environment,
    config: SpliceConfig,
    *,
    alpha: float,
    rule: AlphaRule = "at_least",
    seed: int,
) -> dict[str, Sample] | Rejection:
    """Return the samples of the tries that clear alpha and gain reward after the revision turn,
    shortest first, by the keys of the tries, or why there are none.

    Args:
        begun: what `turned_back` returned for the pair.
        tries: episodes that begin with `begun`, in the order of their numbers, which settles ties.
    """
    cut = len(begun) - 1
    cleared = [
        (len(episode.steps), number, key)
        for number, (key, episode) in enumerate(tries.items())
        if episode.steps and not episode.steps[-1].disaster and clears(episode.reward, alpha, rule)
    ]
    gaining = [one for one in cleared if tries[one[-1]].reward > tries[one[-1]].steps[cut].reward]
    if cleared and not gaining:
        return reject(pair, "no-gain", f"{len(cleared)} tries end with the reward that they had at the revision turn")
    if not cleared:
        best = max((episode.reward for episode in tries.values()), default=0.0)
        return reject(pair, "no-try-cleared-alpha", f"{len(tries)} tries, best reward {best:g}, alpha {alpha:g}")
    extra = _extra(pair, critique, "continued") | {"tries": len(tries), "cleared": len(gaining)}
    samples = {}
    for *_, key in sorted(gaining)[: config.continuation.per_pair or None]:
        episode = tries[key]
        samples[key] = _sample(
            pair,
            env,
            kept=episode.steps[:cut],
            turn=replace(_pause(pair, env, config, seed), observation=episode.steps[cut].observation),
            suffix=episode.steps[cut + 1 :],
            extra=extra | {"live_reward": episode.reward, "live_success": episode.success},
        )
    return samples


def good_sample(path: Path, env: Environment, *, prune: bool = False) -> Sample:
    """Return a whole path as a sample with all its replies trained.

    With `prune`, only the steps that its reward needs are kept, replayed in `env`, which may block.
    A path that no longer plays as recorded stays whole, as it was sampled.
    """
    trajectory = path.trajectory
    steps = (prune and _pruned(trajectory, env)) or trajectory.steps
    return Sample(
        kind=SampleKind.GOOD,
        messages=transcript(env, trajectory.first_observation, steps, train=[True] * len(steps)),
        instance=trajectory.instance,
        provenance=Provenance(
            tree_id=path.tree_id,
            good_leaf=path.leaf,
            good_reward=trajectory.reward,
            extra={"stop": trajectory.stop.value, "pruned_steps": len(trajectory.steps) - len(steps)},
        ),
    )


def _pruned(trajectory: Trajectory, env: Environment) -> tuple[Step, ...]:
    """Return the steps that a good path needs, as played; none if it no longer begins as recorded,
    or no longer reaches its reward.
    """
    replies = [step.reply for step in trajectory.steps]
    kept = needed(env, trajectory.instance, replies)
    first_observation, outcomes = play(env, trajectory.instance, [replies[position] for position in kept])
    last = outcomes[-1].step
    if first_observation != trajectory.first_observation or last.disaster or last.reward < trajectory.reward:
        return ()
    return tuple(live(trajectory.steps[position], outcome) for position, outcome in zip(kept, outcomes, strict=False))


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
    """Return the sample of the kept steps, revision turn and good steps as played, or why it fails.

    The dummy action is played as well, since an agent will really send it.
    """
    pause = _pause(pair, env, config, seed)
    recorded = (*pair.bad.trajectory.steps[:cut], pause, *good_rest(pair, cut))
    whole = len(recorded)
    if config.prune:
        positions = needed(env, pair.bad.trajectory.instance, [step.reply for step in recorded], start=cut + 1)
        recorded = tuple(recorded[position] for position in positions)
    first_observation, outcomes = play(env, pair.bad.trajectory.instance, [step.reply for step in recorded])
    check_replay(env, pair, first_observation, outcomes[:cut])
    failed = _failed(pair, cut, recorded, outcomes, alpha=alpha, rule=rule)
    if failed is not None:
        return failed
    steps = tuple(live(step, outcome) for step, outcome in zip(recorded, outcomes, strict=False))
    suffix, last = steps[cut + 1 :], outcomes[-1]
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
        kept=steps[:cut],
        turn=replace(pause, observation=steps[cut].observation),
        suffix=suffix,
        extra=_extra(pair, critique, "verified") | extra,
    )


def _failed(
    pair: PathPair,
    cut: int,
    recorded: Sequence[Step],
    outcomes: Sequence[Outcome],
    *,
    alpha: float,
    rule: AlphaRule,
) -> Rejection | None:
    """Return why a played splice fails, or None."""
    last, number = outcomes[-1], len(outcomes) - 1
    if number <= cut:
        where = "in the kept part" if number < cut else "at the revision turn"
        return reject(pair, "verify-ended-early", f"{last.stop} {where}, {at(number, last.step)}")
    if not last.step.disaster and clears(last.step.reward, alpha, rule):
        before = outcomes[cut].step.reward
        # Otherwise the sample would teach steps that achieve nothing.
        if last.step.reward > before:
            return None
        return reject(pair, "verify-no-gain", f"{before:g} at the revision turn, too")
    early = len(outcomes) < len(recorded)
    end = f"{last.stop} at step {number} of {len(recorded)}" if early else f"played {len(recorded)} steps"
    where = divergence(recorded, outcomes, cut + 1)
    detail = f"live reward {last.step.reward:g}, alpha {alpha:g}; {end}; {where}"
    return reject(pair, "verify-ended-early" if early else "verify-reward-below-alpha", detail)


def _pause(pair: PathPair, env: Environment, config: SpliceConfig, seed: int) -> Step:
    """Return the revision turn as a step that was not played."""
    reply = revision_text(derive_seed(seed, "reflection", pair_stream(pair)), config.action, config.reflections)
    reply = env.called(reply) if isinstance(env, Calling) else reply
    return Step(reply=reply, action=config.action, observation=ACKNOWLEDGEMENT, reward=0.0)


def _sample(
    pair: PathPair,
    env: Environment,
    *,
    kept: Sequence[Step],
    turn: Step,
    suffix: Sequence[Step],
    extra: Mapping[str, Any],
) -> Sample:
    bad = pair.bad.trajectory
    return Sample(
        kind=SampleKind.REVISION,
        messages=transcript(
            env,
            bad.first_observation,
            (*kept, turn, *suffix),
            train=[False] * len(kept) + [True] * (1 + len(suffix)),
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


def _extra(pair: PathPair, critique: Critique | None, mode: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "first_error": critique.first_error if critique is not None and mode != "direct" else None,
        "bad_stop": pair.bad.trajectory.stop.value,
    }
