"""Worlds in which a model acts by native tool calls: any world, with one tool for its actions.

The model writes a call; the world gets the action in it, as read by the world's own parser. A reply
that cannot be read is answered in words, and the world does not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import Misread, NativeCall, NativeTurns, Tool, calling, read_call, text_arguments
from agentr_core.replies import LABEL
from agentr_core.types import Instance, Step, Transition

ACT = Tool(name="act", description="Do one thing in the world.", arguments=(("action", "The action."),))
NOTE = (
    f'Here you act by calling the tool {ACT.name}, once in a reply; its argument is what would follow "Action:". '
    "Before the call you may say in a sentence why. Write no labels."
)
MISREAD = "misread call: "
"""The start of the action that stands for a call that cannot be read; the reason follows."""
NO_CALL = "There was no call of a tool in your reply. Call one."


def misread(call: Misread) -> str:
    """Return the action that stands for a call that cannot be read."""
    return f"{MISREAD}{call.why}"


def is_misread(action: str) -> bool:
    """Return whether an action stands for a call that could not be read."""
    return action.startswith(MISREAD)


def feedback(action: str) -> str:
    """Return what a model is told about a reply without a call, or with one that cannot be read."""
    return f"The call could not be read: {action.removeprefix(MISREAD)}." if action else NO_CALL


def native(kind: type[Environment]) -> type[Any]:
    """Return a subclass of a world's class that acts by native tool calls. A world with its own
    tools names a mixin for it in its attribute `native`; any other world gets the tool `act`.
    """
    mixin: type[Any] | None = getattr(kind, "native", None)
    mixins: tuple[type[Any], ...]
    if mixin:
        mixins = (mixin,)
    else:
        further = ((Environment.answer, _Answering), (Environment.resume, _Resumed))
        mixins = (*(mixin for method, mixin in further if kind.has(method)), _Acting)
    return _subclass(kind, mixins)


# Worlds of one run are of one class.
@lru_cache(maxsize=64)
def _subclass(kind: type[Environment], before: tuple[type[Any], ...]) -> type[Any]:
    return type(f"Native{kind.__name__}", (*before, kind), {"__doc__": kind.__doc__, "can_snapshot": kind.can_snapshot})


class _Acting:
    """A mixin that adds native calls to the class of a world. A misread reply leaves the world's
    state and reward as they are.
    """

    transcript = NativeTurns(tools=(ACT,), note=NOTE)
    _last_reward = 0.0

    def reset(self, instance: Instance) -> str:
        self._last_reward = 0.0
        first: str = super().reset(instance)  # type: ignore[misc]
        return first

    def parse(self, reply: str) -> str:
        """Return the action in the call of a reply; an empty string if it has none, and the action
        of `misread` for a call that cannot be read.
        """
        call = read_call(reply)
        texts = text_arguments(call, (ACT,)) if isinstance(call, NativeCall) else call
        if texts is None or isinstance(texts, Misread):
            return "" if texts is None else misread(texts)
        words = texts["action"]
        read = super().parse  # type: ignore[misc]
        # Some worlds mark an action by other means than a label.
        action: str = read(f"{LABEL} {words}") or read(words)
        return action or misread(Misread("its action has not the form that is asked for"))

    def step(self, action: str) -> Transition:
        if not action or is_misread(action):
            return Transition(feedback(action), self._last_reward, False, False, {"success": False, "valid": False})
        return self._record_reward(super().step(action))  # type: ignore[misc]

    def snapshot(self) -> Any:
        return super().snapshot(), self._last_reward  # type: ignore[misc]

    def restore(self, snapshot: Any) -> None:
        inner, self._last_reward = snapshot
        super().restore(inner)  # type: ignore[misc]

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the expert's replies with calls in place of labels."""
        replies: Sequence[str] | None = super().expert(instance)  # type: ignore[misc]
        return None if replies is None else [self.called(reply) for reply in replies]

    def called(self, reply: str) -> str:
        """Return a reply with a labelled action as one with a call; see `Environment.called`."""
        action: str = super().parse(reply)  # type: ignore[misc]
        thought = reply.partition(LABEL)[0] if LABEL in reply else ""
        return calling(ACT, action, beside=thought.removeprefix("Thought:").strip())

    def _record_reward(self, transition: Transition) -> Transition:
        if transition.info.get("question") is None:
            self._last_reward = max(0.0, transition.reward)
        return transition


class _Answering:
    """A mixin for worlds whose steps ask models; see `Environment.answer`."""

    def answer(self, reply: str) -> Transition:
        transition: Transition = self._record_reward(super().answer(reply))  # type: ignore[misc,attr-defined]
        return transition


class _Resumed:
    """A mixin for worlds that go on from recorded steps; see `Environment.resume`."""

    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        first: str = super().resume(instance, steps)  # type: ignore[misc]
        self._last_reward = steps[-1].reward if steps else 0.0
        return first
