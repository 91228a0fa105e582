"""What an episode cost, and whether it keeps the format: in worlds with tools and in others."""

from __future__ import annotations

from collections.abc import Mapping

from agentr_core.environments.native import is_misread
from agentr_core.environments.reasoning.grammar import CALLS, call_in, format_fault
from agentr_core.environments.reasoning.reading import text_of
from agentr_core.recipes.curriculum import Counts
from agentr_core.types import ToolCall, Trajectory


def tool_calls(trajectory: Trajectory) -> list[ToolCall]:
    """Return the tool calls of an episode, in order."""
    return [call for step in trajectory.steps for call in step.tool_calls]


def cost(trajectory: Trajectory, counts: Counts, *, refused: bool = False) -> int:
    """Return the number of tool calls that an episode made, with `refused` also of those that it
    was refused, or of steps that it took.
    """
    return len(_called(trajectory, refused)) if counts == "calls" else len(trajectory.steps)


def weighed_cost(
    trajectory: Trajectory, counts: Counts, weights: Mapping[str, float], *, refused: bool = False
) -> float:
    """Return the cost as `cost` does, but with each call weighed by its tool; a tool without a
    weight counts 1.
    """
    if counts == "steps" or not weights:
        return cost(trajectory, counts, refused=refused)
    return sum(weights.get(tool, 1.0) for tool in _called(trajectory, refused))


def _called(trajectory: Trajectory, refused: bool) -> list[str]:
    """Return the tool of each call."""
    tools = [call.tool for call in tool_calls(trajectory)]
    written = (call_in(step.action) for step in trajectory.steps if refused and step.valid is False)
    return tools + [call.name for call in written if call is not None and call.name in CALLS]


def well_formed(trajectory: Trajectory, counts: Counts) -> bool:
    """Return whether an episode keeps the format: the tags of a reasoning episode, or, where steps
    are counted, an action in every reply.
    """
    if counts == "calls":
        return not format_fault(text_of(trajectory))
    return all(step.action and not is_misread(step.action) for step in trajectory.steps)
