"""Splicing: turn each judged pair into revision samples or a rejection, and good paths into
samples. Source: Agent-R section 3.2.

A revision sample is a bad prefix, a turn of reflection and a good suffix as one conversation:

    opening, bad steps up to the first error | revision turn | "ok." | rest of the good path
    never trained                            | trained       | never | replies trained

The suffix begins with the step at which the good path leaves the kept bad steps: where the two
paths part or, if the first error is one of the steps that they share, the step after it.

The good steps were recorded from the state where the two paths part, not from the one that the kept
bad steps lead to, so the observations of a blind splice may be impossible. A verified splice is
played in the environment and has the live observations, but its thoughts still belong to the other
state. In a continued splice, a model plays the suffix from the revision turn on.

A rollback has no revision turn. A model plays on from before the first error with a message that
describes the error; the message is left out of the sample (LEAFE, arXiv 2603.16843):

    opening, bad steps before the first error | what the model played
    never trained                             | replies trained
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

from agentr_core.environment import Environment, Repeatability, is_repetition
from agentr_core.episodes.rollout import Outcome, divergence_error, play_replies, steps_may_ask
from agentr_core.episodes.transcript import FitsContext, whole_episode
from agentr_core.errors import ConfigError, EnvironmentFault, IllTypedAnswer, ReplayDrifted
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.agent_r.collect import finished_trees
from agentr_core.methods.agent_r.critique import pairs_of_iteration, reason_of
from agentr_core.methods.agent_r.pairs import good_paths, pair_id
from agentr_core.methods.agent_r.pruning import needed_positions
from agentr_core.models.checkpoint_dir import context_length_of
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.recipes.fields import AlphaRule, clears, sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.episode_shard import play_rollouts, rollout_id
from agentr_core.runtime.equipment import Worlds, teacher_of
from agentr_core.samples.dataset import count_dropped, split_windowed
from agentr_core.samples.identity import sample_id
from agentr_core.samples.rendering import load_renderer
from agentr_core.stages.dataset import whole_samples
from agentr_core.stages.regrade import rescored_paths
from agentr_core.store.codec.ledger import rejection_rows, replace_stage_output
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.codec.trajectories import load_critiques, load_trajectories, trajectory_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.system import raise_if_cancelled, run_in_thread
from agentr_core.texts import quoted
from agentr_core.types import (
    Critique,
    Instance,
    PathPair,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    Step,
    StopReason,
    Trajectory,
    Tree,
    TreePath,
)

# How an agent turns back from a mistake. Source: Agent-R section 3.2 (themes; own wording).

REFLECTIONS = (
    "That was a mistake; let me choose another way.",
    "My last steps do not lead to the goal; I must rethink them.",
    "Something went wrong here; I will go back to what the task asks.",
    "This approach does not work; I need a different one.",
    "I took a wrong turn and should correct it now.",
    "My decision was wrong; let me look at the task again.",
    "That action did not help; I have to change my plan.",
    "I see the error now and will fix it.",
    "I overlooked something; let me deal with it first.",
    "My judgement was off; I should reconsider the next step.",
    "The result shows that I was wrong; I will try again with care.",
    "I have strayed from the goal; time to find the right path.",
    "What I did was not needed; I will do what is.",
    "These steps failed; I learn from them and go on differently.",
    "I misread the situation; let me read it once more.",
    "The plan so far is flawed; here is a better start.",
    "I should not have done that; let me put it right.",
    "This is not getting me closer; I will take another route.",
    "I made an error and must work out the correction.",
    "Wrong step; back to the last point where all was well.",
)
ACTION = "wait"
"""The dummy action of a revision turn, as published."""
ACKNOWLEDGEMENT = "ok."
"""The user turn that follows a revision turn which was not played in the environment."""


def has_reflection(reply: str) -> bool:
    """Return whether a reply contains one of `REFLECTIONS`, ignoring case and spacing."""
    text = _normalized(reply)
    return any(_normalized(sentence) in text for sentence in REFLECTIONS)


def revision_text(seed: int, action: str = ACTION, sentences: int = len(REFLECTIONS)) -> str:
    """Return the text of a revision turn: a thought, drawn with `seed` from the first `sentences`
    of `REFLECTIONS`, and the action.
    """
    return f"Thought: {random.Random(seed).choice(REFLECTIONS[:sentences])}\nAction: {action}"


def _normalized(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")


# Replay recorded steps, and find where the result differs from the recording.


def _quote(text: str) -> str:
    """Return an action or observation as messages quote it."""
    return quoted(text, 80)


def live_step(recorded_step: Step, outcome: Outcome) -> Step:
    """Return the step of a replay, with what was recorded of how its reply was sampled."""
    return replace(
        outcome.step,
        token_ids=recorded_step.token_ids,
        logprobs=recorded_step.logprobs,
        finish_reason=recorded_step.finish_reason,
        tokenizer=recorded_step.tokenizer,
    )


def check_replay(env: Environment, pair: PathPair, first_observation: str, outcomes: Sequence[Outcome]) -> None:
    """Raise `ReplayDiverged` if a replay of the kept steps of a bad path gave other observations
    than recorded, compared as strictly as `env.repeatability` promises.
    """
    promise = Repeatability(env.repeatability)
    bad_path = pair.bad.trajectory
    observations = [first_observation, *(outcome.step.observation for outcome in outcomes)]
    recorded_observations = [bad_path.first_observation, *(step.observation for step in bad_path.steps)]
    for number, (replayed, recorded) in enumerate(zip(observations, recorded_observations, strict=False)):
        # An environment that promises no repetition may begin with another text. The sample keeps
        # the first observation that its steps were recorded after.
        is_exempt = number == 0 and promise is Repeatability.NEVER
        if not (is_exempt or is_repetition(replayed, recorded, promise)):
            raise divergence_error(
                env,
                f"{bad_path.instance.key}, leaf {pair.bad.leaf} of tree {pair.bad.tree_id}: after {number} steps the "
                f"recording has {_quote(recorded)} and the replay {_quote(replayed)}",
            )


def divergence_message(recorded_steps: Sequence[Step], outcomes: Sequence[Outcome], start: int) -> str:
    """Return a message about where the live observations, from step `start` on, first differ from
    the recorded ones; a difference at an invalid action comes before all others.
    """
    differences = [
        (position, outcome)
        for position, (step, outcome) in enumerate(zip(recorded_steps, outcomes, strict=False))
        if position >= start and outcome.step.observation != step.observation
    ]
    if not differences:
        return "all observations are as recorded"
    position, outcome = next((d for d in differences if d[1].step.valid is False), differences[0])
    replayed, recorded = outcome.step.observation, recorded_steps[position].observation
    return f"{step_label(position, outcome.step)} gave {_quote(replayed)}, recorded was {_quote(recorded)}"


def step_label(position: int, step: Step) -> str:
    """Return the position and the quoted action of a step, for messages."""
    return f"step {position} ({_quote(step.action)})"


# Where the bad path of a pair is cut, and why a pair cannot be spliced.

STAGE = "splice"
UNPLAYABLE = (IllTypedAnswer, ReplayDrifted)
"""Replay errors that only reject the pair or path; all others stop the stage."""


def cut_of(pair: PathPair, critique: Critique | None, config: SpliceConfig) -> int | Rejection:
    """Return how many steps of the bad path are kept, or the rejection of the pair.

    The first error is the last step kept; mode `rollback` leaves it out. Without an error, the
    whole bad path is kept or the pair rejected, by `config.no_error`; mode `rollback` rejects it,
    mode `direct` always keeps the whole path. A pair is also rejected if the bad path is empty or
    no good step is left to append; if both paths share the first error (by `config.shared_cut`);
    and, except in `rollback`, if the kept steps end the episode or fill the context (by
    `config.impossible`).

    Raises `ValueError` if a mode other than `direct` is given no critique.
    """
    steps = pair.bad.trajectory.steps
    if config.mode == "direct":
        cut = len(steps)
    elif critique is None:
        raise ValueError(f"pair {pair_id(pair)} has no critique, which splice mode {config.mode} needs; judge it first")
    elif critique.first_error is not None:
        cut = critique.first_error + 1
    elif config.no_error == "keep" and config.mode != "rollback":
        cut = len(steps)
    else:
        return rejection_of(pair, "no-error-found", f"none of {len(critique.verdicts)} judged steps is bad")
    if cut == 0:
        return rejection_of(pair, "nothing-kept", "the bad path has no steps")
    prefix_length = len(pair.good.trajectory.steps) - len(good_suffix(pair, cut))
    if prefix_length == len(pair.good.trajectory.steps):
        return rejection_of(pair, "no-good-suffix", f"the good path ends with the {prefix_length} shared steps")
    if cut <= pair.split and config.shared_cut == "reject":
        return rejection_of(pair, "cut-in-shared-prefix", f"{cut} steps are kept and both paths share {pair.split}")
    if config.mode == "rollback":
        return cut - 1
    if config.impossible == "keep":
        return cut
    # An agent cannot act after such an end, so it cannot revise anything either.
    last = steps[cut - 1]
    if last.disaster:
        return rejection_of(pair, "kept-part-ends-in-disaster", step_label(cut - 1, last))
    if last.terminated:
        return rejection_of(pair, "kept-part-ends-the-episode", step_label(cut - 1, last))
    if cut == len(steps) and pair.bad.trajectory.stop is StopReason.CONTEXT_LIMIT:
        return rejection_of(pair, "kept-part-fills-the-context", step_label(cut - 1, last))
    return cut


def good_suffix(pair: PathPair, cut: int) -> tuple[Step, ...]:
    """Return the steps of the good path from the first one whose reply differs from that of the bad
    path's first `cut` steps; if none differs, the steps after the first `cut` ones.
    """
    prefix, steps = pair.bad.trajectory.steps[:cut], pair.good.trajectory.steps
    shared_replies = takewhile(lambda both: both[0].reply == both[1].reply, zip(prefix, steps, strict=False))
    return steps[len(list(shared_replies)) :]


def rejection_of(pair: PathPair, reason: str, detail: str) -> Rejection:
    """Return the rejection of a pair by the stage `splice`."""
    return Rejection(stage=STAGE, subject=pair_id(pair), reason=reason, detail=detail)


def unplayable_rejection(subject: str, error: EnvironmentFault) -> Rejection:
    """Return the rejection of a pair or path whose replay raised one of `UNPLAYABLE`."""
    reason = "ill-typed-answer" if isinstance(error, IllTypedAnswer) else "replay-drifted"
    return Rejection(stage=STAGE, subject=subject, reason=reason, detail=str(error))


def pair_seed_name(pair: PathPair) -> str:
    """Return the name that a pair's seeds are derived from, which is the same in every run."""
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
    """Return the revision sample of a pair in mode blind, direct or verified, or its rejection.

    Mode `verified` plays the splice in `env`, which may block, and raises as `check_replay`.

    Args:
        critique: of the pair's bad path; ignored in mode `direct`, required in the others
            (`ValueError`).
        alpha: the lowest live reward of a verified splice, compared by `rule`.
        seed: decides, together with the pair, which reflection is drawn.
    """
    cut = cut_of(pair, critique, config)
    if isinstance(cut, Rejection):
        return cut
    if config.mode == "verified":
        return _verified_sample(pair, cut, critique, env, config, alpha=alpha, rule=rule, seed=seed)
    return _revision_sample(
        pair,
        env,
        prefix=pair.bad.trajectory.steps[:cut],
        trained_steps=(_revision_step(pair, env, config, seed), *good_suffix(pair, cut)),
        extra=_provenance_extra(pair, critique, config.mode),
    )


def play_prefix(
    pair: PathPair, critique: Critique | None, env: Environment, config: SpliceConfig, *, seed: int
) -> tuple[Step, ...] | Rejection:
    """Play, in `env`, which may block, the kept steps of the bad path and, unless the mode is
    `rollback`, the revision turn. Return them as played, or a rejection if the pair cannot be cut
    or the episode ends on the way. Raises as `check_replay`.
    """
    cut = cut_of(pair, critique, config)
    if isinstance(cut, Rejection):
        return cut
    prefix = pair.bad.trajectory.steps[:cut]
    steps = prefix if config.mode == "rollback" else (*prefix, _revision_step(pair, env, config, seed))
    first_observation, outcomes = play_replies(env, pair.bad.trajectory.instance, steps, recorded=prefix)
    check_replay(env, pair, first_observation, outcomes[:cut])
    if outcomes and (stop := outcomes[-1].stop) is not None:
        reason = "kept-part-ends-the-episode" if config.mode == "rollback" else "ended-at-revision-turn"
        return rejection_of(pair, reason, f"{stop}, {step_label(len(outcomes) - 1, outcomes[-1].step)}")
    return tuple(live_step(step, outcome) for step, outcome in zip(steps, outcomes, strict=True))


def diagnosis(pair: PathPair, critique: Critique) -> str:
    """Return the message to a model that goes on from before the first error of a bad path: the
    wrong action, its observation, and the judge's reason. Raises `ValueError` without an error.
    """
    error = critique.first_error
    if error is None:
        raise ValueError(f"pair {pair_id(pair)} has no first error to tell of")
    step = pair.bad.trajectory.steps[error]
    verdict = next(verdict for verdict in critique.verdicts if verdict.position == error)
    lines = (
        "You were here before and went on like this:",
        f"Action: {step.action}",
        f"Observation: {step.observation}",
        f"That was a mistake. {reason_of(verdict.reply)}".rstrip(),
        "Do something else.",
    )
    return "\n".join(lines)


def continuation_samples(
    pair: PathPair,
    critique: Critique | None,
    prefix: Sequence[Step],
    tries: Mapping[str, Trajectory],
    env: Environment,
    config: SpliceConfig,
    *,
    alpha: float,
    rule: AlphaRule = "at_least",
    seed: int,
) -> dict[str, Sample] | Rejection:
    """Return a sample for each try that clears alpha and ends with more reward than `prefix`, keyed
    as in `tries`, shortest first, at most `config.continuation.per_pair` of them; or a rejection if
    there is none.

    Args:
        prefix: the steps that `play_prefix` returned for the pair.
        tries: episodes that begin with `prefix`; of the same length, earlier ones come first.
    """
    is_rollback, prefix_length = config.mode == "rollback", len(prefix)
    candidates = {
        key: episode
        for key, episode in tries.items()
        if episode.steps and not episode.steps[-1].disaster and clears(episode.reward, alpha, rule)
    }
    winners = {
        key: episode
        for key, episode in candidates.items()
        if episode.reward > (episode.steps[prefix_length - 1].reward if prefix_length else 0.0)
    }
    if candidates and not winners:
        moment = "before the first error" if is_rollback else "at the revision turn"
        return rejection_of(pair, "no-gain", f"{len(candidates)} tries end with the reward that they had {moment}")
    if not candidates:
        best = max((episode.reward for episode in tries.values()), default=0.0)
        return rejection_of(pair, "no-try-cleared-alpha", f"{len(tries)} tries, best reward {best:g}, alpha {alpha:g}")
    extra = _provenance_extra(pair, critique, config.mode) | {"tries": len(tries), "cleared": len(winners)}
    if config.continuation.by == "teacher":
        extra["by"] = "teacher"
    if is_rollback and critique is not None:
        extra["diagnosis"] = diagnosis(pair, critique)
    samples = {}
    shortest_first = sorted(winners.items(), key=lambda item: len(item[1].steps))
    for key, episode in shortest_first[: config.continuation.per_pair or None]:
        revision_turn: tuple[Step, ...] = ()
        if not is_rollback:
            observation = episode.steps[prefix_length - 1].observation
            revision_turn = (replace(_revision_step(pair, env, config, seed), observation=observation),)
        samples[key] = _revision_sample(
            pair,
            env,
            prefix=episode.steps[: prefix_length - len(revision_turn)],
            trained_steps=(*revision_turn, *episode.steps[prefix_length:]),
            extra=extra | {"live_reward": episode.reward, "live_success": episode.success},
        )
    return samples


def pruned_sample(path: TreePath, env: Environment) -> Sample:
    """Return as a sample the steps of a path that its reward depends on, with all replies trained.

    The path is replayed in `env`, which may block; it stays whole if the replay begins differently
    or ends with less reward.
    """
    trajectory = path.trajectory
    steps = trajectory.steps
    positions = needed_positions(env, trajectory.instance, steps)
    needed_steps = [steps[position] for position in positions]
    first_observation, outcomes = play_replies(env, trajectory.instance, needed_steps)
    last = outcomes[-1].step
    as_recorded = first_observation == trajectory.first_observation
    if as_recorded and not last.disaster and last.reward >= trajectory.reward:
        steps = tuple(live_step(step, outcome) for step, outcome in zip(needed_steps, outcomes, strict=False))
    return Sample(
        kind=SampleKind.GOOD,
        messages=whole_episode(env, replace(trajectory, steps=steps)),
        instance=trajectory.instance,
        provenance=path_provenance(path, num_pruned=len(trajectory.steps) - len(steps)),
    )


def path_provenance(path: TreePath, num_pruned: int = 0) -> Provenance:
    """Return the origin of the samples of a good path."""
    return Provenance(
        tree_id=path.tree_id,
        good_leaf=path.leaf,
        good_reward=path.trajectory.reward,
        extra={"stop": path.trajectory.stop.value, "pruned_steps": num_pruned},
    )


def _verified_sample(
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
    """Play the kept steps, the revision turn and the good steps; return their sample, or reject the
    pair if the episode ends before the good steps, its reward is too low, or they gain nothing.

    The revision turn's action is played too, since a trained agent will send it.
    """
    instance, revision_step = pair.bad.trajectory.instance, _revision_step(pair, env, config, seed)
    planned_steps = (*pair.bad.trajectory.steps[:cut], revision_step, *good_suffix(pair, cut))
    num_planned = len(planned_steps)
    if config.prune:
        positions = needed_positions(env, instance, planned_steps, start=cut + 1)
        planned_steps = tuple(planned_steps[position] for position in positions)
    first_observation, outcomes = play_replies(env, instance, planned_steps)
    check_replay(env, pair, first_observation, outcomes[:cut])
    last, last_position = outcomes[-1], len(outcomes) - 1
    if last_position <= cut:
        location = "in the kept part" if last_position < cut else "at the revision turn"
        detail = f"{last.stop} {location}, {step_label(last_position, last.step)}"
        return rejection_of(pair, "verify-ended-early", detail)
    if last.step.disaster or not clears(last.step.reward, alpha, rule):
        ended_early = len(outcomes) < len(planned_steps)
        end = f"played {len(planned_steps)} steps"
        if ended_early:
            end = f"{last.stop} at step {last_position} of {len(planned_steps)}"
        difference = divergence_message(planned_steps, outcomes, cut + 1)
        detail = f"live reward {last.step.reward:g}, alpha {alpha:g}; {end}; {difference}"
        return rejection_of(pair, "verify-ended-early" if ended_early else "verify-reward-below-alpha", detail)
    reward_before = outcomes[cut].step.reward
    # Otherwise the sample would teach steps that achieve nothing.
    if last.step.reward <= reward_before:
        return rejection_of(pair, "verify-no-gain", f"{reward_before:g} at the revision turn, too")
    steps = tuple(live_step(step, outcome) for step, outcome in zip(planned_steps, outcomes, strict=False))
    suffix = steps[cut + 1 :]
    num_changed = sum(
        replayed.observation != recorded.observation
        for replayed, recorded in zip(suffix, planned_steps[cut + 1 :], strict=False)
    )
    extra = {
        "live_reward": last.step.reward,
        "live_success": last.stop is StopReason.SUCCESS,
        "changed_observations": num_changed,
        "dropped_good_steps": num_planned - len(outcomes),
    }
    return _revision_sample(
        pair,
        env,
        prefix=steps[:cut],
        trained_steps=(replace(revision_step, observation=steps[cut].observation), *suffix),
        extra=_provenance_extra(pair, critique, "verified") | extra,
    )


def _revision_step(pair: PathPair, env: Environment, config: SpliceConfig, seed: int) -> Step:
    """Return the revision turn as a step that was not played."""
    text = revision_text(derive_seed(seed, "reflection", pair_seed_name(pair)), config.action, config.reflections)
    reply = env.called(text)
    return Step(reply=reply, action=env.parse(reply), observation=ACKNOWLEDGEMENT, reward=0.0)


def _revision_sample(
    pair: PathPair,
    env: Environment,
    *,
    prefix: Sequence[Step],
    trained_steps: Sequence[Step],
    extra: Mapping[str, Any],
) -> Sample:
    bad_trajectory = pair.bad.trajectory
    train = [False] * len(prefix) + [True] * len(trained_steps)
    return Sample(
        kind=SampleKind.REVISION,
        messages=whole_episode(env, replace(bad_trajectory, steps=(*prefix, *trained_steps)), train),
        instance=bad_trajectory.instance,
        provenance=Provenance(
            tree_id=pair.bad.tree_id,
            good_leaf=pair.good.leaf,
            bad_leaf=pair.bad.leaf,
            split=pair.split,
            cut=len(prefix),
            good_reward=pair.good.trajectory.reward,
            bad_reward=bad_trajectory.reward,
            extra=extra,
        ),
    )


def _provenance_extra(pair: PathPair, critique: Critique | None, mode: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "first_error": critique.first_error if critique is not None and mode != "direct" else None,
        "bad_stop": pair.bad.trajectory.stop.value,
    }


# Continuation: after the revision turn, or from before the first error, a model plays on, several
# times for each pair.

CONTINUE = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairContinuation:
    """The continuations of a judged pair: the steps that all tries begin with, or the pair's
    rejection, and the tries that were played, by trajectory id.
    """

    prefix: tuple[Step, ...] | Rejection
    tries: Mapping[str, Trajectory]


async def play_continuations(
    ctx: RunContext, iteration: int, pairs: Sequence[PathPair], critiques: Mapping[str, Critique], *, seed: int
) -> dict[str, PairContinuation]:
    """Play the tries of judged pairs that are not stored yet; return the continuations of every
    judged pair, by pair id.

    Args:
        critiques: by pair id; pairs without one are not continued.
        seed: decides the reflections of the revision turns.

    Raises:
        ErrorBudgetSpent: more tries failed than the recipe allows; finished tries are kept.
        WorkerLost: the cluster lost one worker after another; finished tries are kept.
    """
    config = ctx.recipe.splice.continuation
    judged_pairs = {pair_id(pair): pair for pair in pairs if pair_id(pair) in critiques}
    prefixes_by_pair = await run_in_thread(_play_prefixes, ctx, judged_pairs, critiques, seed)
    iteration_id, player = ctx.iteration_id(iteration), ctx.collector(iteration)
    if config.by == "teacher" and (teacher := teacher_of(ctx.recipe)) is not None:
        player = teacher
    is_rollback = ctx.recipe.splice.mode == "rollback"
    # The pair id and the plan of each try, by trajectory id.
    plans: dict[str, tuple[str, EpisodePlan]] = {}
    counters_by_tree: defaultdict[str, count[int]] = defaultdict(count)
    for pair in pairs:
        # Numbered within the tree, so that a tree that is grown later changes no other number.
        key, pair_number = pair_id(pair), next(counters_by_tree[pair.bad.tree_id])
        prefix = prefixes_by_pair.get(key)
        if prefix is None or isinstance(prefix, Rejection):
            continue
        for number in range(config.samples):
            plan = EpisodePlan(
                instance=pair.bad.trajectory.instance,
                # Only numbers tell pairs of one instance apart that are cut at the same length.
                number=pair_number * config.samples + number,
                seed=derive_seed(ctx.recipe.seed, CONTINUE, iteration, pair_seed_name(pair), number),
                prefix=prefix,
                diagnosis=diagnosis(pair, critiques[key]) if is_rollback else "",
            )
            plans[rollout_id(iteration_id, player.id, plan)] = key, plan
    await play_rollouts(
        ctx,
        iteration,
        {key: plan for key, (_, plan) in plans.items()},
        stage=CONTINUE,
        name="revision",
        sampling=sampling_of(config),
        max_steps=config.max_steps,
        checkpoint=player,
    )
    tries_by_pair: dict[str, dict[str, Trajectory]] = {}
    for key, trajectory in load_trajectories(ctx.store, list(plans)).items():
        tries_by_pair.setdefault(plans[key][0], {})[key] = trajectory
    return {
        key: PairContinuation(prefix=steps, tries=tries_by_pair.get(key, {})) for key, steps in prefixes_by_pair.items()
    }


def _play_prefixes(
    ctx: RunContext, pairs_by_id: Mapping[str, PathPair], critiques: Mapping[str, Critique], seed: int
) -> dict[str, tuple[Step, ...] | Rejection]:
    """Return the steps that the tries of each pair begin with, or its rejection, by pair id."""
    prefixes_by_pair: dict[str, tuple[Step, ...] | Rejection] = {}
    with ctx.worlds() as worlds:
        for key, pair in pairs_by_id.items():
            raise_if_cancelled()
            env = worlds.env_of(pair.bad.trajectory.instance)
            try:
                prefixes_by_pair[key] = play_prefix(pair, critiques[key], env, ctx.recipe.splice, seed=seed)
            except UNPLAYABLE as error:
                prefixes_by_pair[key] = unplayable_rejection(key, error)
    return prefixes_by_pair


_SampleRows = tuple[list[Rows], list[Rejection]]
"""The rows of samples, one unit for each sample, and the rejections."""


def check_models(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if the splice mode cannot work in an environment: `rollback` where an
    agent outside sends the conversations, or `verified` where steps or the grader ask a model,
    since no model is asked when splices are played.
    """
    if recipe.splice.mode == "rollback" and env.has(Environment.relay):
        raise ConfigError(
            f"splice.mode: in {env.name} an agent outside sends the conversations that are read, so a model that goes "
            "on cannot be told of the first error; set it to continued"
        )
    if recipe.splice.mode != "verified":
        return
    if steps_may_ask(env):
        raise ConfigError(
            f"splice.mode: steps of {env.name} ask a model, and none is asked when splices are played; set it to "
            "continued or blind"
        )
    if env.grader is not None and env.grader.asks is not None:
        raise ConfigError(
            f"splice.mode: in {env.name} a model of role {env.grader.asks} grades episodes, and it is not asked when "
            "splices are played; set it to continued or blind"
        )


async def splice_pairs(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Make and store the samples of an iteration from its pairs, critiques and good paths; return
    the numbers of `revision` and `good` samples and of `rejected` pairs and paths.

    In the splice modes `continued` and `rollback`, a model plays the suffixes first, which raises
    as `play_continuations`.
    """
    trees = finished_trees(ctx, iteration)
    return await _make_samples(ctx, iteration, trees, pairs_of_iteration(ctx, iteration, trees))


async def keep_good_paths(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Make and store samples of an iteration's good paths only; return counts as `splice_pairs`."""
    return await _make_samples(ctx, iteration, finished_trees(ctx, iteration), [])


async def _make_samples(
    ctx: RunContext, iteration: int, trees: dict[str, Tree], pairs: list[PathPair]
) -> dict[str, Any]:
    recipe = ctx.recipe
    critiques = load_critiques(ctx.store, [pair_id(pair) for pair in pairs])
    seed = derive_seed(recipe.seed, "splice", iteration)
    continuations_by_pair: dict[str, PairContinuation] = {}
    if recipe.splice.goes_on:
        continuations_by_pair = await play_continuations(ctx, iteration, pairs, critiques, seed=seed)
    # Tells whether a prompt leaves the policy room for a reply.
    fits: FitsContext | None = None
    if recipe.context != "stop":
        policy = ctx.policy(iteration).path
        renderer = load_renderer(policy, at=ctx.started_at())
        context = context_length_of(policy, recipe.model.context_length)
        config = recipe.splice.continuation if recipe.splice.goes_on else recipe.search
        max_prompt_tokens = context - config.max_new_tokens
        fits = lambda messages: len(renderer.render_prompt(messages)) <= max_prompt_tokens  # noqa: E731

    def make_rows() -> tuple[_SampleRows, _SampleRows]:
        with ctx.worlds() as worlds:
            revisions = _revision_rows(ctx, worlds, pairs, critiques, continuations_by_pair, iteration, fits, seed)
            return revisions, _good_path_rows(ctx, worlds, trees, iteration, fits)

    with ctx.timed(STAGE, iteration):
        (revision_rows, pair_rejections), (good_path_rows, path_rejections) = await run_in_thread(make_rows)
        rejections = [*pair_rejections, *path_rejections]
        iteration_id = ctx.iteration_id(iteration)
        rows = merge([*revision_rows, *good_path_rows, rejection_rows(rejections, iteration_id=iteration_id)])
        replace_stage_output(
            ctx.store, rows, iteration_id=iteration_id, stage=STAGE, sample_kinds=[SampleKind.REVISION]
        )
    return {"revision": len(revision_rows), "good": len(good_path_rows), "rejected": len(rejections)}


def _revision_rows(
    ctx: RunContext,
    worlds: Worlds,
    pairs: Sequence[PathPair],
    critiques: Mapping[str, Critique],
    continuations_by_pair: Mapping[str, PairContinuation],
    iteration: int,
    fits: FitsContext | None,
    seed: int,
) -> _SampleRows:
    """Return the rows of the revision samples of pairs, and the rejections."""
    rows: list[Rows] = []
    rejections: list[Rejection] = []
    iteration_id, config = ctx.iteration_id(iteration), ctx.recipe.splice
    alpha, rule = ctx.recipe.alpha(iteration), ctx.recipe.pairs.alpha_rule
    for number, pair in enumerate(pairs, start=1):
        raise_if_cancelled()
        ctx.progress(number, len(pairs), "pairs spliced")
        key, env = pair_id(pair), worlds.env_of(pair.bad.trajectory.instance)
        critique, continuation = critiques.get(key), continuations_by_pair.get(key)
        result: Sample | dict[str, Sample] | Rejection
        try:
            if critique is None and config.mode != "direct":
                result = rejection_of(pair, "not-judged", "judging its tree failed; table event has the error")
            elif continuation is None:
                result = splice(pair, critique, env, config, alpha=alpha, rule=rule, seed=seed)
            elif isinstance(continuation.prefix, Rejection):
                result = continuation.prefix
            else:
                prefix, tries = continuation.prefix, continuation.tries
                result = continuation_samples(
                    pair, critique, prefix, tries, env, config, alpha=alpha, rule=rule, seed=seed
                )
        except UNPLAYABLE as error:
            result = unplayable_rejection(key, error)
        if isinstance(result, Rejection):
            rejections.append(result)
            continue
        # Each sample with the id of the continuation that it was made from, None without one.
        samples: Iterable[tuple[str | None, Sample]] = (
            [(None, result)] if isinstance(result, Sample) else result.items()
        )
        for trajectory_id, sample in samples:
            for part in _split_by_window(ctx, sample, fits, key):
                if isinstance(part, Rejection):
                    rejections.append(part)
                    continue
                part_id = sample_id(part)
                rows.append(
                    sample_rows(part_id, part, iteration_id=iteration_id, pair_id=key, trajectory_id=trajectory_id)
                )
    return rows, rejections


def _good_path_rows(
    ctx: RunContext, worlds: Worlds, trees: Mapping[str, Tree], iteration: int, fits: FitsContext | None
) -> _SampleRows:
    """Return the rows of the samples of good paths, and the rejections."""
    alpha, rule = ctx.recipe.alpha(iteration), ctx.recipe.pairs.alpha_rule
    iteration_id = ctx.iteration_id(iteration)
    rows: list[Rows] = []
    rejections: list[Rejection] = []
    for paths in rescored_paths(ctx, trees).values():
        for path in good_paths(paths, alpha, rule):
            tree_id, leaf = path.tree_id, path.leaf
            subject, env = f"{tree_id}:{leaf}", worlds.env_of(path.trajectory.instance)
            parts: Sequence[Sample | Rejection]
            if ctx.recipe.splice.prune:
                try:
                    parts = _split_by_window(ctx, pruned_sample(path, env), fits, subject)
                except UNPLAYABLE as error:
                    parts = [unplayable_rejection(subject, error)]
            else:
                windowed, origin = ctx.recipe.data.windowed, path_provenance(path)
                parts = [*whole_samples(env, subject, path.trajectory, windowed, stage=STAGE, provenance=origin)]
            trajectory_id = fingerprint("path", tree_id, leaf)
            # The path is stored beside its samples, as a trajectory of its own.
            path_rows = trajectory_rows(
                trajectory_id, path.trajectory, source="tree", iteration_id=iteration_id, tree_id=tree_id, leaf=leaf
            )
            for part in parts:
                if isinstance(part, Rejection):
                    rejections.append(part)
                    continue
                unit = sample_rows(sample_id(part), part, iteration_id=iteration_id, trajectory_id=trajectory_id)
                rows.append(merge([path_rows, unit]))
    return rows, rejections


def _split_by_window(
    ctx: RunContext, sample: Sample, fits: FitsContext | None, subject: str
) -> Sequence[Sample | Rejection]:
    """Return a sample as the parts that a policy with a context window would read, or a rejection.
    The turns of a splice were not sampled in sequence, so what the window drops is computed here.
    """
    if fits is None:
        return [sample]
    drop_counts = count_dropped(sample.messages, fits)
    result = split_windowed(sample, drop_counts, ctx.recipe.data.windowed, stage=STAGE, subject=subject)
    return [result] if isinstance(result, Rejection) else result
