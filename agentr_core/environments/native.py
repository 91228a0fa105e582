"""Worlds in which a model acts by native tool calls: any world, with one tool for its actions.

The model writes a tool call; the world's own parser reads the action in it. A reply that cannot be
read is answered with a sentence, and the world never sees it. If a reply has several calls, they
are made one after the other, and each has its own result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import (
    NativeCall,
    NativeTurns,
    Tool,
    UnreadableCall,
    call_reply,
    format_results,
    read_calls,
    read_results,
    text_arguments,
)
from agentr_core.replies import LABEL
from agentr_core.types import Instance, Step, Transition, Verdict

ACT_TOOL = Tool(name="act", description="Do one thing in the world.", arguments=(("action", "The action."),))
ACT_NOTE = (
    f'Here you act by calling the tool {ACT_TOOL.name}, once in a reply; its argument is what would follow "Action:". '
    "Before the call you may say in a sentence why. Write no labels."
)
MISREAD_PREFIX = "misread call: "
"""The start of the action that stands for a call that cannot be read; the reason follows."""
NO_CALL = "There was no call of a tool in your reply. Call one."
NOT_MADE_RESULT = "This call was not made: the episode was over before it."
_JOINED_PREFIX = "calls: "
"""The start of an action that joins several actions; a JSON list of them follows."""


def join_actions(actions: Sequence[str]) -> str:
    """Return the actions of the calls in a reply as one action; a single one is returned unchanged.
    `actions_in` is the inverse for any list of at least one action.
    """
    if len(actions) == 1 and not actions[0].startswith(_JOINED_PREFIX):
        return actions[0]
    return _JOINED_PREFIX + json.dumps(list(actions), ensure_ascii=False)


def actions_in(action: str) -> list[str]:
    """Return the actions that `join_actions` joined; for any other text, a list of just that
    text.
    """
    if not action.startswith(_JOINED_PREFIX):
        return [action]
    try:
        actions = json.loads(action.removeprefix(_JOINED_PREFIX))
    except (ValueError, RecursionError):
        return [action]
    is_list = isinstance(actions, list) and bool(actions) and all(isinstance(item, str) for item in actions)
    return actions if is_list else [action]


def misread_action(misread: UnreadableCall) -> str:
    """Return the action that stands for a call that cannot be read."""
    return f"{MISREAD_PREFIX}{misread.reason}"


def is_misread(action: str) -> bool:
    """Return whether an action, or one of several joined ones, stands for a call that could not be
    read.
    """
    return any(single_action.startswith(MISREAD_PREFIX) for single_action in actions_in(action))


def no_call_observation(action: str) -> str:
    """Return the observation after a reply without a call (an empty action) or with an unreadable
    one.
    """
    return f"The call could not be read: {action.removeprefix(MISREAD_PREFIX)}." if action else NO_CALL


def native_class(world_class: type[Environment]) -> type[Any]:
    """Return a subclass of a world's class that acts by native tool calls. A world with its own
    tools names a mixin for it in its attribute `native`; any other world gets the tool `act`.

    The mixin's `parse` joins the actions of several calls with `join_actions`; its `step` and
    `answer` then get them one at a time.
    """
    mixin: type[Any] | None = getattr(world_class, "native", None)
    mixins: tuple[type[Any], ...]
    if mixin:
        mixins = (mixin,)
    else:
        optional_mixins = (
            (Environment.answer, _AnswerMixin),
            (Environment.resume, _ResumeMixin),
            (Environment.oracle, _OracleMixin),
        )
        mixins = (*(mixin for method, mixin in optional_mixins if world_class.has(method)), _ActMixin)
    return _native_subclass(
        world_class, (_SeveralCallsAnswerMixin if world_class.has(Environment.answer) else _SeveralCallsMixin, *mixins)
    )


# Worlds of one run are of one class.
@lru_cache(maxsize=64)
def _native_subclass(world_class: type[Environment], mixins: tuple[type[Any], ...]) -> type[Any]:
    return type(
        f"Native{world_class.__name__}",
        (*mixins, world_class),
        {"__doc__": world_class.__doc__, "can_snapshot": world_class.can_snapshot},
    )


class _SeveralCallsMixin:
    """A mixin that makes the calls of a reply one after the other, until the episode is over."""

    _calls_left: Sequence[str] = ()
    _calls_made: tuple[Transition, ...] = ()

    def step(self, action: str) -> Transition:
        """Make the calls of a reply and return one transition: the results of all of them, with the
        reward of the last call that was made.
        """
        first_action, *self._calls_left = actions_in(action)
        self._calls_made = ()
        return self._make_calls(super().step(first_action))  # type: ignore[misc]

    def _make_calls(self, transition: Transition) -> Transition:
        """Make the calls that are left, after the transition of one call, and return their joint
        transition, or the first one that asks a question.
        """
        while transition.info.get("question") is None:
            self._calls_made = (*self._calls_made, transition)
            is_over = transition.terminated or transition.truncated or transition.reward < 0
            if is_over or not self._calls_left:
                return _merged_transition(self._calls_made, len(self._calls_left))
            next_action, *self._calls_left = self._calls_left
            transition = super().step(next_action)  # type: ignore[misc]
        return transition


def _merged_transition(transitions: Sequence[Transition], num_not_made: int) -> Transition:
    """Return the transitions of several calls as one; `num_not_made` more calls were not made,
    since the episode was over.
    """
    if len(transitions) + num_not_made == 1:
        return transitions[0]
    infos = [transition.info for transition in transitions]
    info = dict(infos[-1])
    if valid_flags := [item["valid"] for item in infos if item.get("valid") is not None]:
        info["valid"] = all(valid_flags)
    if any(item.get("matched") is not None for item in infos):
        info["matched"] = join_actions([item.get("matched") or "" for item in infos])
    if tool_calls := [call for item in infos for call in item.get("tool_calls", ())]:
        info["tool_calls"] = tuple(tool_calls)
    observation = format_results(
        [*(transition.observation for transition in transitions), *[NOT_MADE_RESULT] * num_not_made]
    )
    return transitions[-1]._replace(observation=observation, info=info)


class _SeveralCallsAnswerMixin(_SeveralCallsMixin):
    """A mixin for worlds whose steps ask models; see `Environment.answer`."""

    def answer(self, reply: str) -> Transition:
        return self._make_calls(super().answer(reply))  # type: ignore[misc]


class _ActMixin:
    """A mixin that adds native calls to the class of a world. A reply that cannot be read changes
    neither the world's state nor its reward.
    """

    transcript = NativeTurns(tools=(ACT_TOOL,), note=ACT_NOTE)
    _last_reward = 0.0

    def reset(self, instance: Instance) -> str:
        self._last_reward = 0.0
        first_observation: str = super().reset(instance)  # type: ignore[misc]
        return first_observation

    def parse(self, reply: str) -> str:
        """Return the action in the call of a reply, joined if there are several calls; empty if
        there is no call, and the action of `misread_action` for a call that cannot be read.
        """
        calls = read_calls(reply)
        if calls is None or isinstance(calls, UnreadableCall):
            return "" if calls is None else misread_action(calls)
        return join_actions([self._action_of(call) for call in calls])

    def _action_of(self, call: NativeCall) -> str:
        texts = text_arguments(call, (ACT_TOOL,))
        if isinstance(texts, UnreadableCall):
            return misread_action(texts)
        action_text = texts["action"]
        parse = super().parse  # type: ignore[misc]
        # Some worlds mark an action in another way than with a label.
        action: str = parse(f"{LABEL} {action_text}") or parse(action_text)
        return action or misread_action(UnreadableCall("its action has not the form that is asked for"))

    def step(self, action: str) -> Transition:
        if not action or is_misread(action):
            return Transition(
                no_call_observation(action), self._last_reward, False, False, {"success": False, "valid": False}
            )
        return self._record_reward(super().step(action))  # type: ignore[misc]

    def snapshot(self) -> Any:
        return super().snapshot(), self._last_reward  # type: ignore[misc]

    def restore(self, snapshot: Any) -> None:
        world_snapshot, self._last_reward = snapshot
        super().restore(world_snapshot)  # type: ignore[misc]

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the expert's replies with calls in place of labels."""
        replies: Sequence[str] | None = super().expert(instance)  # type: ignore[misc]
        return None if replies is None else [self.called(reply) for reply in replies]

    def called(self, reply: str) -> str:
        """Return a reply with a labelled action as one with a call; see `Environment.called`."""
        action: str = super().parse(reply)  # type: ignore[misc]
        thought = reply.partition(LABEL)[0] if LABEL in reply else ""
        return call_reply(ACT_TOOL, action, before=thought.removeprefix("Thought:").strip())

    def _record_reward(self, transition: Transition) -> Transition:
        if transition.info.get("question") is None:
            self._last_reward = max(0.0, transition.reward)
        return transition


class _AnswerMixin:
    """A mixin for worlds whose steps ask models; see `Environment.answer`."""

    def answer(self, reply: str) -> Transition:
        transition: Transition = self._record_reward(super().answer(reply))  # type: ignore[misc,attr-defined]
        return transition


class _ResumeMixin:
    """A mixin for worlds with their own `resume`; see `Environment.resume`."""

    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        # A step of several calls becomes one step for each call; the last one gets the reward and
        # tool calls of the whole step.
        single_steps: list[Step] = []
        for step in steps:
            actions = actions_in(step.action)
            results = read_results(step.observation, len(actions)) or [step.observation] * len(actions)
            for action, result in zip(actions, results, strict=True):
                single_steps.append(replace(step, action=action, observation=result, reward=0.0, tool_calls=()))
            single_steps[-1] = replace(single_steps[-1], reward=step.reward, tool_calls=step.tool_calls)
        first_observation: str = super().resume(instance, single_steps)  # type: ignore[misc]
        self._last_reward = steps[-1].reward if steps else 0.0
        return first_observation


class _OracleMixin:
    """A mixin for worlds with their own `oracle`; see `Environment.oracle`."""

    def oracle(self, instance: Instance, actions: Sequence[str]) -> Sequence[Verdict]:
        """Return the verdict on each action; for several joined ones, the worst of theirs."""
        groups = [actions_in(action) for action in actions]
        verdicts = iter(super().oracle(instance, [action for group in groups for action in group]))  # type: ignore[misc]
        return [max((next(verdicts) for _ in group), key=_VERDICTS_FROM_BEST.index) for group in groups]


_VERDICTS_FROM_BEST = (Verdict.GOOD, Verdict.UNCERTAIN, Verdict.BAD)
