"""The contract checker: the rules that every environment must keep, tested on real episodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentr_core.environment import (
    MAX_DIFFERENT_SHARE,
    Environment,
    Instances,
    Repeatability,
    error_of_own_code,
    is_repetition,
)
from agentr_core.episodes.rollout import state_key
from agentr_core.episodes.transcript import AlternatingTurns, transcript_of
from agentr_core.errors import AgentrError, ConfigError, IllTypedAnswer, MissingPart
from agentr_core.fingerprint import derive_seed
from agentr_core.texts import error_summary
from agentr_core.types import Instance, Step, StopReason, Trajectory, Transition

MAX_STEPS = 60
MAX_NUM_COMPARED = 100_000
ALL_INSTANCES = MAX_NUM_COMPARED
"""The value of `instances_per_split` that means all instances; a split with more is refused."""
NONSENSE = "florble the quux"
MODEL_REPLY = "There is nothing to say about that."
NUM_STATE_EPISODES = 4
MAX_STATE_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule of the contract."""

    rule: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePairs:
    """How often an action was repeated in a state in which it had been taken before (`pairs`), and
    how often it then had another result (`elsewhere`): another text, reward, ending or state.
    `example` describes one such case; empty if there is none.
    """

    pairs: int = 0
    elsewhere: int = 0
    example: str = ""

    def __add__(self, other: StatePairs) -> StatePairs:
        return StatePairs(
            pairs=self.pairs + other.pairs,
            elsewhere=self.elsewhere + other.elsewhere,
            example=self.example or other.example,
        )

    def __str__(self) -> str:
        return f"{self.pairs:,} pairs of equal state and action, {self.elsewhere:,} led elsewhere"

    @property
    def is_sound(self) -> bool:
        """Whether the share of pairs with another result is at most `MAX_DIFFERENT_SHARE`."""
        return self.elsewhere <= MAX_DIFFERENT_SHARE * self.pairs


def check(
    make: Callable[[], Environment],
    *,
    instances_per_split: int | None = None,
    gold: Mapping[Instance, Sequence[str]] | None = None,
    on_instance: Callable[[Instance], None] = lambda instance: None,
    on_states: Callable[[StatePairs], None] = lambda pairs: None,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> tuple[Violation, ...]:
    """Return the violations of the contract; empty if there are none. Two environments are made and
    closed.

    The checks cover names and texts; splits, which must not be empty, contain an instance twice, or
    share an instance by `identity`, by default the first observation; determinism, across objects
    and after a restore, as far as `repeatability` promises it; rewards, in [0, 1] or negative for a
    disaster, and success flags; nonsense, which must be parsed and answered, not raise; doing
    nothing, which must not win; and the expert, whose replies must parse, meet no disaster and
    succeed. In a graded world the grader's rule decides what succeeds; where it would ask a model,
    success is not checked. If there is no violation and the environment has `state`, that is
    checked with `state_pairs`.

    Args:
        instances_per_split: how many instances of each split are played; by default three, or one
            if the environment's calls block. `ALL_INSTANCES` means all of them.
        gold: replies that must succeed in place of the expert's, by instance. Only these instances
            are then played, by default all of them.
        on_instance: is called with each instance before it is played.
        on_states: is called once at the end with the pairs of all instances, if states were
            compared.
        progress: is called with the number of instances of a split that were played, the number to
            play, and a note that names the split.

    Raises `ConfigError` if `gold` names an unknown instance, or if all instances of a split are to
    be played and it has more than `ALL_INSTANCES`.
    """
    env, second_env = make(), make()
    instances: list[Instance] = []

    def record_instance(instance: Instance) -> None:
        instances.append(instance)
        on_instance(instance)

    try:
        violations = tuple(_violations(env, second_env, instances_per_split, gold, record_instance, progress))
        if violations or not env.has(Environment.state):
            return violations
        states = StatePairs()
        for instance in instances:
            replies = env.expert(instance) if gold is None else gold[instance]
            actions = [*map(env.parse, (replies or ())[:MAX_STEPS]), NONSENSE]
            states += state_pairs((env, second_env), instance, actions)
        on_states(states)
        return () if states.is_sound else (Violation(rule="state", detail=f"{states}, such as {states.example}"),)
    finally:
        env.close()
        env.close()
        second_env.close()


def _violations(
    env: Environment,
    second_env: Environment,
    instances_per_split: int | None,
    gold: Mapping[Instance, Sequence[str]] | None,
    on_instance: Callable[[Instance], None],
    progress: Callable[[int, int, str], None],
) -> Iterator[Violation]:
    has_alternating_turns = isinstance(transcript_of(env), AlternatingTurns)
    for field in ("name", "instruction", *(("acknowledgement",) if has_alternating_turns else ())):
        if not getattr(env, field, ""):
            yield Violation(rule="texts", detail=f"{field} is empty")
    if not isinstance(env.step_limit, int) or env.step_limit < 1:
        yield Violation(rule="step-limit", detail=f"step_limit is {env.step_limit!r}")
    if env.time_limit is not None and not (isinstance(env.time_limit, int | float) and env.time_limit > 0):
        yield Violation(rule="time-limit", detail=f"time_limit is {env.time_limit!r}, not a number of seconds above 0")
    if not {"train", "test"} <= set(env.splits()):
        yield Violation(rule="splits", detail=f"train and test are needed, there are {', '.join(env.splits())}")
    if gold and (missing := {instance.split for instance in gold} - set(env.splits())):
        raise ConfigError(f"{env.name} has no split {min(missing)}; it has {', '.join(env.splits())}")
    for rule, sentence in env.flaws():
        yield Violation(rule=rule, detail=sentence)
    instance_by_identity: dict[str, Instance] = {}
    for split in env.splits():
        try:
            instances = env.instances(split)
        except MissingPart:
            raise
        except ConfigError as fault:
            yield Violation(rule="splits", detail=str(fault))
            continue
        first_instance = instances[0]
        if (first_instance.environment, first_instance.split) != (env.name, split):
            yield Violation(rule="instances", detail=f"{first_instance.key} is in split {split} of {env.name}")
        if len(instances) <= MAX_NUM_COMPARED and len(set(instances)) < len(instances):
            yield Violation(rule="instances", detail=f"split {split} has an instance twice")
        played_instances = _instances_to_play(env, instances, split, instances_per_split, gold)
        for number, instance in enumerate(played_instances):
            progress(number, len(played_instances), f"instances of split {split} played")
            on_instance(instance)
            try:
                identity = env.identity(instance)
                if identity in instance_by_identity and instance_by_identity[identity].split != split:
                    yield Violation(
                        rule="leakage", detail=f"{instance.key} and {instance_by_identity[identity].key} are alike"
                    )
                instance_by_identity[identity] = instance
                yield from _episode_violations(env, second_env, instance, None if gold is None else gold[instance])
                yield from _idle_violations(env, instance)
            except IllTypedAnswer as fault:
                yield Violation(rule="types", detail=f"{instance.key}: {fault}")
            except AgentrError:
                raise
            except Exception as error:
                detail = f"{instance.key}: {error_summary(error)}"
                if isinstance(world_fault := error_of_own_code(env.name, error, detail), MissingPart):
                    raise world_fault from error
                yield Violation(rule="exception", detail=detail)
        progress(len(played_instances), len(played_instances), f"instances of split {split} played")


def _instances_to_play(
    env: Environment,
    instances: Sequence[Instance],
    split: str,
    instances_per_split: int | None,
    gold: Mapping[Instance, Sequence[str]] | None,
) -> Sequence[Instance]:
    """Return the instances of a split to play. Raises `ConfigError` as `check` does."""
    if gold is None:
        if instances_per_split == ALL_INSTANCES < len(instances):
            raise ConfigError(
                f"split {split} of {env.name} has {len(instances):,} instances, too many to play all; give a number"
            )
        return _spread_evenly(instances, instances_per_split or (1 if env.blocking else 3))
    gold_instances = [instance for instance in gold if instance.split == split]
    split_instances = instances if isinstance(instances, Instances) else set(instances)
    for instance in gold_instances:
        if instance not in split_instances:
            raise ConfigError(f"{env.name} has no instance {instance.key}; correct the gold answers")
    return _spread_evenly(gold_instances, instances_per_split or len(gold_instances))


def _episode_violations(
    env: Environment, second_env: Environment, instance: Instance, gold: Sequence[str] | None
) -> Iterator[Violation]:
    env.depth(instance)
    env.facts(instance)
    for reply in ("", NONSENSE):
        env.parse(reply)
    rule, replies = ("expert", env.expert(instance)) if gold is None else ("gold", gold)
    # The expert is third-party code, and may return an endless sequence.
    replies = replies if replies is None or gold is not None else replies[: MAX_STEPS + 1]
    actions = [NONSENSE, ""] if replies is None else [env.parse(reply) for reply in replies]
    if replies is not None and not all(actions):
        subject = "an expert reply" if gold is None else "a gold reply"
        yield Violation(rule="parse", detail=f"{instance.key}: {subject} has no action")
    repeatability = Repeatability(env.repeatability)
    first_observations = env.reset(instance), second_env.reset(instance)
    if repeatability is not Repeatability.NEVER and not is_repetition(*first_observations, repeatability):
        yield Violation(rule="determinism", detail=f"{instance.key}: two objects begin differently")
    nonsense_transition = _take_step(env, NONSENSE)
    if nonsense_transition.reward > 0 or nonsense_transition.info.get("success"):
        yield Violation(
            rule="nonsense", detail=f"{instance.key}: nonsense is rewarded with {nonsense_transition.reward:g}"
        )
    first_observation = env.reset(instance)
    transitions: list[Transition] = []
    for position, action in enumerate(actions[:MAX_STEPS] if gold is None else actions):
        snapshot = env.snapshot() if env.can_snapshot else None
        transition = _take_step(env, action)
        transitions.append(transition)
        if not _is_same_transition(_take_step(second_env, action), transition, repeatability):
            yield Violation(rule="determinism", detail=f"{instance.key}: step {position} differs between two objects")
        if env.can_snapshot:
            env.restore(snapshot)
            if not _is_same_transition(_take_step(env, action), transition, repeatability):
                yield Violation(rule="snapshot", detail=f"{instance.key}: step {position} differs after a restore")
        if replies is not None and transition.reward < 0:
            detail = (
                f"{instance.key}: step {position} has reward {transition.reward:g}, and one below 0 ends an episode as "
                "lost"
            )
            yield Violation(rule=rule, detail=detail)
            return
        if transition.terminated or transition.truncated:
            break
    if replies is None or (gold is None and len(actions) > MAX_STEPS):
        return
    if _is_success(env, _trajectory(instance, first_observation, replies, actions, transitions)) is False:
        sentence = "the expert does not succeed" if gold is None else "the gold answer does not succeed"
        yield Violation(rule=rule, detail=f"{instance.key}: {sentence}")


def _idle_violations(env: Environment, instance: Instance) -> Iterator[Violation]:
    """Yield a violation if the instance is won by doing nothing."""
    first_observation, empty_reply = env.reset(instance), ""
    action = env.parse(empty_reply)
    transitions: list[Transition] = []
    for _ in range(min(env.step_limit, MAX_STEPS)):
        transitions.append(_take_step(env, action))
        if transitions[-1].terminated or transitions[-1].truncated or transitions[-1].reward < 0:
            break
    replies = [empty_reply] * len(transitions)
    if _is_success(env, _trajectory(instance, first_observation, replies, [action] * len(replies), transitions)):
        yield Violation(rule="idle", detail=f"{instance.key}: doing nothing wins")


def state_pairs(
    envs: Sequence[Environment],
    instance: Instance,
    actions: Sequence[str] | Callable[[Environment], Sequence[str]],
    *,
    num_episodes: int = NUM_STATE_EPISODES,
    max_steps: int = MAX_STATE_STEPS,
) -> StatePairs:
    """Play episodes of random actions, each in the next of the environments, and return how often a
    repeated pair of state and action had another result. Texts are compared up to the order of what
    they list. Truncation is not compared, since a state may leave out the number of steps.

    Args:
        actions: the actions to choose from, or a function that returns them for the present state.
            In a state seen before, half of the actions are ones that were taken there before.
        episodes: the number of episodes.
        steps: the most steps of an episode.
    """
    rng = random.Random(derive_seed("states", instance.key))
    results_by_state: dict[str | None, dict[str, tuple[Transition, str | None]]] = {}
    total = StatePairs()
    for env in itertools.islice(itertools.cycle(envs), num_episodes):
        # Things that were picked up in another order are listed in another order; the state is the
        # same.
        is_compared = Repeatability(env.repeatability) is not Repeatability.NEVER
        repeatability = Repeatability.UNORDERED if is_compared else Repeatability.NEVER
        env.reset(instance)
        state = state_key(env)
        for position in range(max_steps):
            result_by_action = results_by_state.setdefault(state, {})
            repeats_action = result_by_action and rng.random() < 0.5
            candidate_actions = (
                list(result_by_action) if repeats_action else actions if isinstance(actions, Sequence) else actions(env)
            )
            action = rng.choice(candidate_actions)
            transition = _take_step(env, action)
            next_state = state_key(env)
            if action in result_by_action:
                earlier_transition, earlier_next_state = result_by_action[action]
                is_same = next_state == earlier_next_state and _is_same_transition(
                    transition._replace(truncated=earlier_transition.truncated), earlier_transition, repeatability
                )
                example = "" if is_same else f"{instance.key}, step {position}, {action!r}"
                total += StatePairs(pairs=1, elsewhere=int(not is_same), example=example)
            else:
                result_by_action[action] = transition, next_state
            if transition.terminated or transition.truncated or transition.reward < 0:
                break
            state = next_state
    return total


def _trajectory(
    instance: Instance,
    first_observation: str,
    replies: Sequence[str],
    actions: Sequence[str],
    transitions: Sequence[Transition],
) -> Trajectory:
    """Return the trajectory of an episode; replies beyond the last transition are left out."""
    steps = [
        Step(
            reply=reply,
            action=action,
            observation=transition.observation,
            reward=max(transition.reward, 0.0),
            terminated=transition.terminated or transition.truncated,
            success=transition.info["success"] and transition.reward >= 0,
            disaster=transition.reward < 0,
        )
        for reply, action, transition in zip(replies, actions, transitions, strict=False)
    ]
    stop = StopReason.STEP_LIMIT
    if steps and steps[-1].terminated:
        stop = StopReason.SUCCESS if steps[-1].success else StopReason.FAILURE
    return Trajectory.ended(instance, first_observation, steps, stop)


def _is_success(env: Environment, trajectory: Trajectory) -> bool | None:
    """Return whether an episode succeeds; None if its grader would have to ask a model."""
    if env.grader is None or not trajectory.steps:
        return trajectory.success
    grade = env.grader.rule(trajectory)
    return None if grade is None else grade.success


def _is_same_transition(transition: Transition, original: Transition, repeatability: Repeatability) -> bool:
    """Return whether a step repeats a recorded one as far as the environment promises."""
    is_same = (
        is_repetition(transition.observation, original.observation, repeatability) and transition[1:4] == original[1:4]
    )
    return repeatability is Repeatability.NEVER or is_same


def _take_step(env: Environment, action: str) -> Transition:
    """Return the transition after an action. If the step asks a model, the answer is always
    `MODEL_REPLY`.
    """
    transition = env.step(action)
    while transition.info.get("question") is not None:
        transition = env.answer(MODEL_REPLY)
    return transition


def _spread_evenly(instances: Sequence[Instance], num_instances: int) -> list[Instance]:
    """Return `num_instances` instances, or all if there are fewer, spread evenly over a split."""
    num_instances = min(num_instances, len(instances))
    return [instances[(2 * number + 1) * len(instances) // (2 * num_instances)] for number in range(num_instances)]
