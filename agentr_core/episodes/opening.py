"""What a recipe puts before the first observation: a system turn, another instruction, examples.

It is kept on the environment, where its transcript finds it, so that search, episodes, samples and
previews all begin alike. Nothing of it carries loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.types import Message

ATTRIBUTE = "opening"
_OBSERVED = "Observation: "
_ONE = "Here is an example of an episode."
_SEVERAL = "Here are {} examples of episodes."
_OWN_TURN = "That was the last example. What comes next is the problem that you solve."


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A recipe's changes to what a world puts before the first observation."""

    system: str = ""
    """The text of the system turn; if the instruction is a system turn already, that turn begins
    with it.
    """
    instruction: str | None = None
    """The instruction that replaces the world's."""
    examples: tuple[str, ...] = ()
    """Episodes as texts; they follow the instruction in its turn."""
    turns: tuple[Message, ...] = ()
    """Episodes as turns; they stand before the first observation."""


def open_with(env: Any, opening: Opening) -> None:
    """Make the episodes of an environment begin with an opening. Raises `ConfigError` when its
    class does not let one be set.
    """
    try:
        setattr(env, ATTRIBUTE, opening)
    except AttributeError as error:
        raise ConfigError(
            f"environment {env.name} takes no attribute {ATTRIBUTE}; let its class have one, or leave the prompt out"
        ) from error


def instruction_of(env: Any) -> str:
    """Return the instruction of an environment with its examples that are texts."""
    opening = _opening_of(env)
    said: str = env.instruction if opening.instruction is None else opening.instruction
    if not opening.examples:
        return said
    number = len(opening.examples)
    title = _ONE if number == 1 else _SEVERAL.format(number)
    return "\n\n".join((said, title, *opening.examples, _OWN_TURN))


def with_system(env: Any, instruction: str) -> str:
    """Return an instruction that is a system turn, with the recipe's system text before it."""
    return "\n\n".join(filter(None, (_opening_of(env).system, instruction)))


def system_turns(env: Any) -> tuple[Message, ...]:
    """Return the system turn before an instruction that is a user turn; none if the recipe has
    none.
    """
    system = _opening_of(env).system
    return (Message(role="system", text=system),) if system else ()


def example_turns(env: Any) -> tuple[Message, ...]:
    """Return the turns of the examples; none if the recipe has none, or has them as texts."""
    return _opening_of(env).turns


def example_text(turns: Sequence[Message]) -> str:
    """Return the turns of an episode as one text. The first is the problem's; what the world says
    later is marked, and what it says after the last reply is left out.
    """
    last = max((number for number, turn in enumerate(turns) if turn.role == "assistant"), default=0)
    return "\n\n".join(
        f"{_OBSERVED}{turn.text}"
        if number and turn.role == "user" and not turn.text.startswith(_OBSERVED)
        else turn.text
        for number, turn in enumerate(turns[: last + 1])
    )


def _opening_of(env: Any) -> Opening:
    found: Opening = getattr(env, ATTRIBUTE, None) or Opening()
    return found
