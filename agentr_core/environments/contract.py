"""The contract checker: the rules that every environment must keep, tested on real episodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentr_core.environment import Environment, Repeatability, own_fault, repeats
from agentr_core.episodes.transcript import AlternatingTurns, transcript_of
from agentr_core.errors import AgentrError, ConfigError, IllTypedAnswer, MissingPart
from agentr_core.texts import cause
from agentr_core.types import Instance, Transition

MAX_STEPS = 60
MAX_COMPARED = 100_000
NONSENSE = "florble the quux"
ANSWER = "There is nothing to say about that."


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule of the contract."""

    rule: str
    detail: str


def check(make: Callable[[], Environment], *, instances_per_split: int | None = None) -> tuple[Violation, ...]:
    """Return the violations of the contract, none if all is well. Two environments are made and
    closed.

    By default, three instances of each split are played, or one if the environment's calls block.

    The checks cover names and texts; splits, which must not be empty, have an instance twice, nor
    overlap by first observation, or by `identity` if there is one; determinism across objects and
    of snapshots, as far as the environment says that it repeats itself; rewards, in [0, 1] or
    negative for a disaster, and success flags; nonsense, which must be parsed and answered, not
    raise; and the expert, whose replies must parse, meet no disaster and, unless a grader decides,
    succeed.
    """
    env, other = make(), make()
    try:
        return tuple(_violations(env, other, instances_per_split))
    finally:
        env.close()
        env.close()
        other.close()


def _violations(env: Environment, other: Environment, per_split: int | None) -> Iterator[Violation]:
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
        for instance in _spread(instances, per_split or (1 if env.blocking else 3)):
            try:
                identity = env.identity(instance)
                if identity in by_identity and by_identity[identity].split != split:
                    yield Violation(rule="leakage", detail=f"{instance.key} and {by_identity[identity].key} are alike")
                by_identity[identity] = instance
                yield from _episode(env, other, instance)
            except IllTypedAnswer as fault:
                yield Violation(rule="types", detail=f"{instance.key}: {fault}")
            except AgentrError:
                raise
            except Exception as error:
                detail = f"{instance.key}: {cause(error)}"
                if isinstance(fault := own_fault(env.name, error, detail), MissingPart):
                    raise fault from error
                yield Violation(rule="exception", detail=detail)


def _episode(env: Environment, other: Environment, instance: Instance) -> Iterator[Violation]:
    env.depth(instance)
    for reply in ("", NONSENSE):
        env.parse(reply)
    replies = env.expert(instance)
    actions = [NONSENSE, ""] if replies is None else [env.parse(reply) for reply in replies]
    if replies is not None and not all(actions):
        yield Violation(rule="parse", detail=f"{instance.key}: an expert reply has no action")
    repeatability = Repeatability(env.repeatability)
    firsts = env.reset(instance), other.reset(instance)
    if repeatability is not Repeatability.NEVER and not repeats(*firsts, repeatability):
        yield Violation(rule="determinism", detail=f"{instance.key}: two objects begin differently")
    nonsense = _step(env, NONSENSE)
    if nonsense.reward > 0 or nonsense.info.get("success"):
        yield Violation(rule="nonsense", detail=f"{instance.key}: nonsense is rewarded with {nonsense.reward:g}")
    env.reset(instance)
    last: Transition | None = None
    for position, action in enumerate(itertools.islice(actions, MAX_STEPS)):
        before = env.snapshot() if env.can_snapshot else None
        last = _step(env, action)
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
            yield Violation(rule="expert", detail=detail)
            return
        if last.terminated or last.truncated:
            break
    # In a graded world, the grader decides about success.
    must_succeed = replies is not None and len(actions) <= MAX_STEPS and env.grader is None
    if must_succeed and not (last and last.info.get("success")):
        yield Violation(rule="expert", detail=f"{instance.key}: the expert does not succeed")


def _same_transition(transition: Transition, recorded: Transition, repeatability: Repeatability) -> bool:
    """Return whether a step repeats a recorded one as far as the environment promises."""
    same = repeats(transition.observation, recorded.observation, repeatability) and transition[1:4] == recorded[1:4]
    return repeatability is Repeatability.NEVER or same


def _step(env: Environment, action: str) -> Transition:
    """Return the transition after an action; a question that the step asks a model always gets the
    same answer.
    """
    transition = env.step(action)
    while transition.info.get("question") is not None:
        transition = env.answer(ANSWER)
    return transition


def _spread(instances: Sequence[Instance], count: int) -> list[Instance]:
    """Return instances from the whole length of a split, each from the middle of its part."""
    count = min(count, len(instances))
    return [instances[(2 * part + 1) * len(instances) // (2 * count)] for part in range(count)]
