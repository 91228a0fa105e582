"""What the world tells a model: one instruction for all stages, with the available tools."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.environments.reasoning.grammar import PYTHON, SEARCH

_OPENING = "You answer questions. Think step by step inside <think> and </think>."
_TOOLS = {
    SEARCH: "To look up a fact, write <search>your query</search>; passages of an encyclopaedia come back.",
    PYTHON: "To calculate, write <python>your code</python>; what the code prints comes back. "
    "Each code starts anew: nothing is left of the ones before.",
}
_RESULTS = (
    "What comes back stands inside <result> and </result>, right after the call. Never write a result yourself. "
    "After a result, go on with <think>. Call a tool when you need it, and do not call it again for what you know."
)
_ANSWER = r"End with <answer> and </answer>, and in it the final answer in LaTeX: \boxed{your final answer}."
_SKELETON = {
    SEARCH: "<think>what is missing</think>\n<search>query</search>\n<result>\npassages\n</result>\n",
    PYTHON: "<think>what to calculate</think>\n<python>\nprint(6 * 7)\n</python>\n<result>\n42\n</result>\n",
}
_LAST = "<think>what follows</think>\n<answer>So it is \\boxed{42}.</answer>"

_IN_CALLS = (
    "You answer questions. Think step by step.",
    "Call a tool when you need it, one in a reply, and do not call it again for what you know.",
    r"When you know the answer, give it without a call, in LaTeX: \boxed{your final answer}.",
)


def native_instruction() -> str:
    """Return the instruction for a model that is told about its tools separately."""
    return "\n".join(_IN_CALLS)


def instruction(tools: Sequence[str]) -> str:
    """Return the instruction for a model that has the given tools, which may be none."""
    parts = [_OPENING, *(_TOOLS[tool] for tool in tools), *([_RESULTS] if tools else []), _ANSWER]
    return "\n".join([*parts, "", "An example of the form:", "".join(_SKELETON[tool] for tool in tools) + _LAST])
