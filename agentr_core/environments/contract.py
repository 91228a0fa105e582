"""The contract checker: the rules that every environment must keep, tested on real episodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentr_core.environment import MOST_ELSEWHERE, Environment, Instances, Repeatability, own_fault, repeats
from agentr_core.episodes.rollout import state_key
from agentr_core.episodes.transcript import AlternatingTurns, transcript_of
from agentr_core.errors import AgentrError, ConfigError, IllTypedAnswer, MissingPart
from agentr_core.fingerprint import derive_seed
from agentr_core.texts import cause
from agentr_core.types import Instance, Step, StopReason, Trajectory, Transition

MAX_STEPS = 60
MAX_COMPARED = 100_000
ALL = MAX_COMPARED
"""The value of `instances_per_split` that means all instances; a split with more is refused."""
NONSENSE = "florble the quux"
ANSWER = "There is nothing to say about that."
STATE_EPISODES = 4
STATE_STEPS = 20


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
    def sound(self) -> bool:
        """Whether the share of pairs with another result is at most `MOST_ELSEWHERE`."""
        return self.elsewhere <= MOST_ELSEWHERE * self.pairs


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
            if the environment's calls block. `ALL` means all of them.
        gold: replies that must succeed in place of the expert's, by instance. Only these instances
            are then played, by default all of them.
        on_instance: is called with each instance before it is played.
        on_states: is called once at the end with the pairs of all instances, if states were
            compared.
        progress: is called with the number of instances of a split that were played, the number to
            play, and a note that names the split.

    Raises `ConfigError` if `gold` names an unknown instance, or if all instances of a split are to
    be played and it has more than `ALL`.
    """
    env, other = make(), make()
    instances: list[Instance] = []

    def begin(instance: Instance) -> None:
        instances.append(instance)
        on_instance(instance)

    try:
        violations = tuple(_violations(env, other, instances_per_split, gold, begin, progress))
        if violations or not env.has(Environment.state):
            return violations
        states = StatePairs()
        for instance in instances:
            replies = env.expert(instance) if gold is None else gold[instance]
            actions = [*map(env.parse, (replies or ())[:MAX_STEPS]), NONSENSE]
            states += state_pairs((env, other), instance, actions)
        on_states(states)
        return () if states.sound else (Violation(rule="state", detail=f"{states}, such as {states.example}"),)
    finally:
        env.close()
        env.close()
        other.close()


def _violations(
    env: Environment,
    other: Environment,
    per_split: int | None,
    gold: Mapping[Instance, Sequence[str]] | None,
    on_instance: Callable[[Instance], None],
    progress: Callable[[int, int, str], None],
) -> Iterator[Violation]:
    turns = isinstance(transcript_of(env), AlternatingTurns)
    for field in ("name", "instruction", *(("acknowledgement",) if turns else ())):
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
    by_identity: dict[str, Instance] = {}
    for split in env.splits():
        try:
            instances = env.instances(split)
        except MissingPart:
            raise
        except ConfigError as fault:
            yield Violation(rule="splits", detail=str(fault))
            continue
        first = instances[0]
        if (first.environment, first.split) != (env.name, split):
            yield Violation(rule="instances", detail=f"{first.key} is in split {split} of {env.name}")
        if len(instances) <= MAX_COMPARED and len(set(instances)) < len(instances):
            yield Violation(rule="instances", detail=f"split {split} has an instance twice")
        chosen = _chosen(env, instances, split, per_split, gold)
        for number, instance in enumerate(chosen):
            progress(number, len(chosen), f"instances of split {split} played")
            on_instance(instance)
            try:
                identity = env.identity(instance)
                if identity in by_identity and by_identity[identity].split != split:
                    yield Violation(rule="leakage", detail=f"{instance.key} and {by_identity[identity].key} are alike")
                by_identity[identity] = instance
                yield from _episode(env, other, instance, None if gold is None else gold[instance])
                yield from _idle(env, instance)
            except IllTypedAnswer as fault:
                yield Violation(rule="types", detail=f"{instance.key}: {fault}")
            except AgentrError:
                raise
            except Exception as error:
                detail = f"{instance.key}: {cause(error)}"
                if isinstance(world_fault := own_fault(env.name, error, detail), MissingPart):
                    raise world_fault from error
                yield Violation(rule="exception", detail=detail)
        progress(len(chosen), len(chosen), f"instances of split {split} played")


def _chosen(
    env: Environment,
    instances: Sequence[Instance],
    split: str,
    per_split: int | None,
    gold: Mapping[Instance, Sequence[str]] | None,
) -> Sequence[Instance]:
    """Return the instances of a split to play. Raises `ConfigError` as `check` does."""
    if gold is None:
        if per_split == ALL < len(instances):
            raise ConfigError(
                f"split {split} of {env.name} has {len(instances):,} instances, too many to play all; give a number"
            )
        return _spread(instances, per_split or (1 if env.blocking else 3))
    of_split = [instance for instance in gold if instance.split == split]
    members = instances if isinstance(instances, Instances) else set(instances)
    for instance in of_split:
        if instance not in members:
            raise ConfigError(f"{env.name} has no instance {instance.key}; correct the gold answers")
    return _spread(of_split, per_split or len(of_split))


def _episode(
    env: Environment, other: Environment, instance: Instance, gold: Sequence[str] | None
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
    firsts = env.reset(instance), other.reset(instance)
    if repeatability is not Repeatability.NEVER and not repeats(*firsts, repeatability):
        yield Violation(rule="determinism", detail=f"{instance.key}: two objects begin differently")
    nonsense = _step(env, NONSENSE)
    if nonsense.reward > 0 or nonsense.info.get("success"):
        yield Violation(rule="nonsense", detail=f"{instance.key}: nonsense is rewarded with {nonsense.reward:g}")
    first_observation = env.reset(instance)
    transitions: list[Transition] = []
    for position, action in enumerate(actions[:MAX_STEPS] if gold is None else actions):
        before = env.snapshot() if env.can_snapshot else None
        last = _step(env, action)
        transitions.append(last)
        if not _same_transition(_step(other, action), last, repeatability):
            yield Violation(rule="determinism", detail=f"{instance.key}: step {position} differs between two objects")
        if env.can_snapshot:
            env.restore(before)
            if not _same_transition(_step(env, action), last, repeatability):
                yield Violation(rule="snapshot", detail=f"{instance.key}: step {position} differs after a restore")
        if replies is not None and last.reward < 0:
            detail = (
                f"{instance.key}: step {position} has reward {last.reward:g}, and one below 0 ends an episode as lost"
            )
            yield Violation(rule=rule, detail=detail)
            return
        if last.terminated or last.truncated:
            break
    if replies is None or (gold is None and len(actions) > MAX_STEPS):
        return
    if _wins(env, _trajectory(instance, first_observation, replies, actions, transitions)) is False:
        sentence = "the expert does not succeed" if gold is None else "the gold answer does not succeed"
        yield Violation(rule=rule, detail=f"{instance.key}: {sentence}")


def _idle(env: Environment, instance: Instance) -> Iterator[Violation]:
    """Yield a violation if the instance is won by doing nothing."""
    first_observation, idle = env.reset(instance), ""
    action = env.parse(idle)
    transitions: list[Transition] = []
    for _ in range(min(env.step_limit, MAX_STEPS)):
        transitions.append(_step(env, action))
        if transitions[-1].terminated or transitions[-1].truncated or transitions[-1].reward < 0:
            break
    replies = [idle] * len(transitions)
    if _wins(env, _trajectory(instance, first_observation, replies, [action] * len(replies), transitions)):
        yield Violation(rule="idle", detail=f"{instance.key}: doing nothing wins")


def state_pairs(
    envs: Sequence[Environment],
    instance: Instance,
    actions: Sequence[str] | Callable[[Environment], Sequence[str]],
    *,
    episodes: int = STATE_EPISODES,
    steps: int = STATE_STEPS,
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
    results: dict[str | None, dict[str, tuple[Transition, str | None]]] = {}
    total = StatePairs()
    for env in itertools.islice(itertools.cycle(envs), episodes):
        # Things that were picked up in another order are listed in another order; the state is the
        # same.
        is_compared = Repeatability(env.repeatability) is not Repeatability.NEVER
        repeatability = Repeatability.UNORDERED if is_compared else Repeatability.NEVER
        env.reset(instance)
        state = state_key(env)
        for position in range(steps):
            before = results.setdefault(state, {})
            again = before and rng.random() < 0.5
            pool = list(before) if again else actions if isinstance(actions, Sequence) else actions(env)
            action = rng.choice(pool)
            transition = _step(env, action)
            next_state = state_key(env)
            if action in before:
                earlier, led_to = before[action]
                same = next_state == led_to and _same_transition(
                    transition._replace(truncated=earlier.truncated), earlier, repeatability
                )
                example = "" if same else f"{instance.key}, step {position}, {action!r}"
                total += StatePairs(pairs=1, elsewhere=int(not same), example=example)
            else:
                before[action] = transition, next_state
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


def _wins(env: Environment, trajectory: Trajectory) -> bool | None:
    """Return whether an episode succeeds; None if its grader would have to ask a model."""
    if env.grader is None or not trajectory.steps:
        return trajectory.success
    grade = env.grader.rule(trajectory)
    return None if grade is None else grade.success


def _same_transition(transition: Transition, original: Transition, repeatability: Repeatability) -> bool:
    """Return whether a step repeats a recorded one as far as the environment promises."""
    same = repeats(transition.observation, original.observation, repeatability) and transition[1:4] == original[1:4]
    return repeatability is Repeatability.NEVER or same


def _step(env: Environment, action: str) -> Transition:
    """Return the transition after an action. If the step asks a model, the answer is always
    `ANSWER`.
    """
    transition = env.step(action)
    while transition.info.get("question") is not None:
        transition = env.answer(ANSWER)
    return transition


def _spread(instances: Sequence[Instance], count: int) -> list[Instance]:
    """Return `count` instances, or all if there are fewer, spread evenly over a split."""
    count = min(count, len(instances))
    return [instances[(2 * part + 1) * len(instances) // (2 * count)] for part in range(count)]
