"""The world with native tool calls: search and Python as tools, the answer in a reply without a
call.

An action is the same text as with tags, so budgets, rewards and statistics use the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentr_core.environments.native import misread, told
from agentr_core.environments.reasoning.grammar import PYTHON, SEARCH, boxed, call_in
from agentr_core.environments.reasoning.prompt import native_instruction
from agentr_core.episodes.native_calls import Misread, NativeCall, Tool, calling, read_call, text_arguments
from agentr_core.episodes.native_turns import NativeTurns
from agentr_core.texts import outside_thoughts

if TYPE_CHECKING:
    from agentr_core.environments.reasoning.problems import Problem
    from agentr_core.types import Instance

TOOLS = {
    SEARCH: Tool(
        name=SEARCH,
        description="Look up a fact; passages of an encyclopaedia come back.",
        arguments=(("query", "What to look up."),),
    ),
    PYTHON: Tool(
        name=PYTHON,
        description="Run code and get what it prints. Nothing is left of the codes before.",
        arguments=(("code", "The code."),),
    ),
}
NEITHER = "In your reply there was neither a call nor an answer in a box. Call a tool, or answer."


class InCalls:
    """A mixin that adds native calls to the class of the world."""

    _toolbox: Any
    problem: Any

    @property
    def transcript(self) -> NativeTurns:
        """The transcript, with the available tools."""
        return NativeTurns(tools=tuple(TOOLS[tool] for tool in TOOLS if tool in self._toolbox.tools))

    def parse(self, reply: str) -> str:
        """Return the call of a reply, or the box of its answer, in tags; an empty string if it has
        neither, and the action of `misread` for a call that cannot be read.
        """
        call = read_call(reply)
        if isinstance(call, Misread):
            return misread(call)
        return _answer(reply) if call is None else _tagged(call)

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the question set's solution as calls; None if it has none, or one of its tools is
        missing.
        """
        problem: Problem = self.problem(instance)
        if not problem.solution or not {move.tool for move in problem.solution[:-1]} <= set(self._toolbox.tools):
            return None
        *moves, last = problem.solution
        calls = [calling(TOOLS[move.tool], move.query, beside=move.thought) for move in moves]
        return [*calls, f"{last.thought}\nIt is \\boxed{{{problem.golds[0]}}}."]

    def _instruction(self, tools: Sequence[str]) -> str:
        return native_instruction()

    def _shown(self, output: str, limit: int) -> str:
        return output.strip() if len(output) <= limit else f"{output[:limit].strip()}..."

    def _told(self, action: str) -> str:
        return told(action) if action else NEITHER


def _tagged(call: NativeCall) -> str:
    texts = text_arguments(call, tuple(TOOLS.values()))
    if isinstance(texts, Misread):
        return misread(texts)
    (text,) = texts.values()
    action = f"<{call.name}>{text.strip()}</{call.name}>"
    found = call_in(action)
    return action if found == (call.name, text.strip()) else misread(Misread(f"a {call.name} cannot hold its own tags"))


def _answer(reply: str) -> str:
    box = boxed(outside_thoughts(reply))
    if box is None:
        return ""
    action = f"<answer>\\boxed{{{box}}}</answer>"
    found = call_in(action)
    return action if found and found.name == "answer" else misread(Misread("an answer cannot hold a call"))
