"""The family of a question: its members, which of them a round varies, and how. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agentr_core.recipes.et_agent import FlywheelConfig
from agentr_core.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A trajectory of a family.

    `name` tells how it was made, and is the same in every run: `0`, `1` and so on before the first
    round, then the parent's name, the round and the operator, such as `0.1C1`. `cost` counts its
    tool calls or steps, and `tokens` the tokens that the policy wrote.
    """

    name: str
    id: str
    trajectory: Trajectory
    cost: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChild:
    """A child that an operator may make; before the first round it has no parent."""

    name: str
    round: int = 0
    operator: str = "C0"
    parent: Member | None = None


def subject_of(planned: PlannedChild, operator: str) -> str:
    """Return the name of an operator's request to a model: the parent's name, the round and the
    operator.
    """
    parent = "" if planned.parent is None else planned.parent.name
    return f"{parent}.{planned.round}{operator}"


def round_of(subject: str) -> int:
    """Return the round of a request, read from the name that `subject_of` gave it."""
    return int("".join(takewhile(str.isdigit, subject.rpartition(".")[2])))


def begun(config: FlywheelConfig) -> tuple[PlannedChild, ...]:
    """Return the fresh trajectories, which come before the first round."""
    return tuple(PlannedChild(name=str(number)) for number in range(config.fresh))


def operators_for(member: Member, config: FlywheelConfig) -> Sequence[str]:
    """Return the operators that vary a member, by whether it is right."""
    return config.correct if member.trajectory.success else config.incorrect


def parents(members: Sequence[Member], used: Collection[str], config: FlywheelConfig) -> list[Member]:
    """Return the members that a round varies, best first: by high reward, then low cost, then age.
    Those that no operator is for are left out.

    With `best-one`, it is the best one whose name is not in `used`, or the best of all if all are
    used.
    """
    varied = [member for member in members if operators_for(member, config)]
    ranked = sorted(varied, key=lambda member: (-member.trajectory.reward, member.cost))
    if config.policy == "expand-all":
        return ranked
    return [next((member for member in ranked if member.name not in used), ranked[0])] if ranked else []


def planned_children(
    varied: Sequence[Member], round_: int, config: FlywheelConfig, *, room: int
) -> tuple[PlannedChild, ...]:
    """Return the children that a round may make, in order, at most as many as there is room for."""
    wanted = [
        PlannedChild(name=f"{parent.name}.{round_}{operator}", round=round_, operator=operator, parent=parent)
        for parent in varied
        for operator in operators_for(parent, config)
    ]
    return tuple(wanted[: max(room, 0)])
