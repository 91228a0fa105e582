"""The answers of worlds and models, with types and ranges checked in one place.

Worlds and models are other people's code. A wrong type that gets in here shows up much later, and
elsewhere: the text "False" is true, a NaN is below no threshold, half of a surrogate pair cannot be
stored.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentr_core.errors import AgentrError, ConfigError, EnvironmentFault, IllTypedAnswer, ModelFault
from agentr_core.protocols import Asking, Environment, Identifying, Resuming
from agentr_core.texts import cause, lone_surrogate
from agentr_core.types import Answer, Generation, Instance, Question, Request, Step, ToolCall, Transition

MOST_TOKENS = 2**31 - 1
"""The largest token id, and the largest number of tokens, that is accepted and can be stored."""
_SCALE = "it must be a finite number, and an environment scales its rewards to [0, 1]"
HIGHEST_LOGPROB = 0.01
"""The largest accepted log-probability: rounding may lift that of a certain token above 0."""
_THOUGHT_ENDS = "</think>"
# A tag within a sentence is quoted: it opens no thought.
_THOUGHT_OPENS = re.compile(r"(?:^|[.!?:])\s*<think>", re.MULTILINE)
_TAG = re.compile(r"</?think>")


def instances(env: Environment, split: str) -> Sequence[Instance]:
    """Return all instances of a split. Raises `ConfigError` when the environment has no such split
    or the split is empty, and `IllTypedAnswer` when they are no sequence of `Instance`.
    """
    with _own_code(env, f"its instances of split {split}"):
        try:
            given = env.instances(split)
        except LookupError as error:
            if split in (known := env.splits()):
                raise
            raise ConfigError(f"environment {env.name} has no split {split!r}; it has {', '.join(known)}") from error
        what = f"{env.name}: the instances of split {split}"
        if not isinstance(given, Sequence):
            raise IllTypedAnswer(f"{what} are {shown(given)}; they must be a sequence, such as a list")
        if not len(given):
            raise ConfigError(f"split {split} of environment {env.name} is empty; name another one")
        if not isinstance(given[0], Instance):
            raise IllTypedAnswer(f"{what} begin with {shown(given[0])}; each must be a types.Instance")
    return given


def reset(env: Environment, instance: Instance) -> str:
    """Return the first observation of an episode. Raises `IllTypedAnswer` when it is not a text."""
    return text(env.reset(instance), f"{env.name}: the first observation of {instance.key}")


def resume(env: Resuming, instance: Instance, steps: Sequence[Step]) -> str:
    """Return the first observation of an episode that goes on from recorded steps. Raises as
    `reset` does.
    """
    return text(env.resume(instance, steps), f"the first observation of {instance.key}")


def step(env: Environment, action: str, said: Sequence[Answer] = ()) -> Transition:
    """Return the transition that an action leads to, with plain Python numbers and flags.

    `said` are recorded answers to what the step asks of models. Raises `IllTypedAnswer` when a part
    has a type other than `Transition` says or the reward is above 1, and `ConfigError` when the
    step asks for more, since no model can be asked here.
    """
    found = repeated(env, action, said)
    if found.info.get("question") is not None:
        raise ConfigError(f"environment {env.name} asks a model in its steps, but no model can be asked here")
    return found


def repeated(env: Environment, action: str, said: Sequence[Answer]) -> Transition:
    """Return the transition that an action leads to after recorded answers of models; it is a
    question if they do not suffice. Raises `IllTypedAnswer` as `step` does.
    """
    found = begun(env, action)
    for recorded in said:
        if (question := found.info.get("question")) is not None:
            found = resumed(env, question, readable(recorded) or "")
    return found


def begun(env: Environment, action: str) -> Transition:
    """Return the transition that an action leads to, which may be a question; its reply goes to
    `resumed`.

    Raises `IllTypedAnswer` as `step` does.
    """
    return transition(env.step(action), f"{env.name}: action {shown(action)}")


def resumed(env: Environment, question: Question, reply: str) -> Transition:
    """Return how a step goes on after the part of the reply to its question that is `readable`.
    Raises `IllTypedAnswer` as `step` does, and when the environment takes no replies.
    """
    where = f"{env.name}: the step that asked a model of role {question.role}"
    if not isinstance(env, Asking):
        raise IllTypedAnswer(f"{where} cannot go on; an environment that asks needs a method answer")
    return transition(env.answer(reply), where)


def action_in(env: Environment, reply: str) -> str:
    """Return the action in a reply. Raises `IllTypedAnswer` when the environment's parser does not
    return a text.
    """
    return text(env.parse(reply), f"{env.name}: the action that was found in a reply")


def identity(env: Environment, instance: Instance) -> str:
    """Return the text that identifies an instance: the environment's own, or else its first
    observation.

    Raises `IllTypedAnswer` when it is not a text.
    """
    with _own_code(env, f"the beginning of {instance.key}"):
        if isinstance(env, Identifying):
            return text(env.identity(instance), f"{env.name}: the identity of {instance.key}")
        return reset(env, instance)


def depth(env: Environment, instance: Instance) -> int | None:
    """Return the difficulty class of an instance. Raises `IllTypedAnswer` when it is not a small
    whole number.
    """
    with _own_code(env, f"the depth of {instance.key}"):
        given = env.depth(instance)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or abs(int(given)) > MOST_TOKENS:
        raise IllTypedAnswer(
            f"{env.name}: the depth of {instance.key} is {shown(given)}; it must be a whole number or None"
        )
    return int(given)


def expert(env: Environment, instance: Instance) -> tuple[str, ...] | None:
    """Return the replies of the environment's expert. Raises `IllTypedAnswer` when they are not
    texts.
    """
    with _own_code(env, f"the expert's replies to {instance.key}"):
        given = env.expert(instance)
    if given is None:
        return None
    what = f"{env.name}: the expert's replies to {instance.key}"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise IllTypedAnswer(f"{what} are {shown(given)}; they must be a sequence of texts")
    return tuple(text(reply, what) for reply in given)


def transition(given: Any, where: str) -> Transition:
    """Return the answer to a step with plain Python numbers and flags; `where` begins an error
    message.

    Raises `IllTypedAnswer` when a part has a wrong type, or the reward is not finite or above 1.
    """
    if not isinstance(given, tuple | list) or len(given) != 5:
        raise IllTypedAnswer(
            f"{where} gave {shown(given)}; a step returns observation, reward, terminated, truncated and info"
        )
    observation, reward, terminated, truncated, info = given
    standing = number(reward, f"{where}: the reward", ought=_SCALE)
    if standing > 1:
        raise IllTypedAnswer(f"{where}: the reward is {standing!r}; {_SCALE}")
    if not isinstance(info, Mapping) or "success" not in info:
        raise IllTypedAnswer(f'{where}: info is {shown(info)}; it must be a mapping with the flag "success"')
    checked = {**info, "success": flag(info["success"], f'{where}: info["success"]')}
    if info.get("valid") is not None:
        checked["valid"] = flag(info["valid"], f'{where}: info["valid"]')
    if info.get("matched") is not None:
        checked["matched"] = text(info["matched"], f'{where}: info["matched"]')
    if not isinstance(info.get("question"), Question | None):
        raise IllTypedAnswer(f'{where}: info["question"] is {shown(info["question"])}; it must be a types.Question')
    calls, what = info.get("tool_calls", ()), f'{where}: info["tool_calls"]'
    if not isinstance(calls, tuple | list) or not all(isinstance(call, ToolCall) for call in calls):
        raise IllTypedAnswer(f"{what} are {shown(calls)}; they must be a sequence of types.ToolCall")
    for call in calls:
        for name in ("tool", "provider", "key", "status", "output"):
            text(getattr(call, name), f"{what}: {name}")
        number(call.milliseconds, f"{what}: milliseconds")
        flag(call.cached, f"{what}: cached")
        try:
            plain = json.dumps(call.parameters, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise IllTypedAnswer(f"{what}: parameters are {shown(call.parameters)}, not JSON: {error}") from error
        text(plain, f"{what}: parameters")
    checked["tool_calls"] = tuple(calls)
    return Transition(
        text(observation, f"{where}: the observation"),
        standing,
        flag(terminated, f"{where}: terminated"),
        flag(truncated, f"{where}: truncated"),
        checked,
    )


@contextmanager
def _own_code(env: Environment, what: str) -> Iterator[None]:
    """Turn an exception of an environment's own code into an `EnvironmentFault` that says where it
    was raised. Calls of an episode are not treated so: their exceptions become events.
    """
    try:
        yield
    except AgentrError:
        raise
    except Exception as error:
        raise EnvironmentFault(
            f"environment {env.name} cannot tell {what} ({cause(error)}); correct the environment"
        ) from error


def text(given: Any, what: str) -> str:
    """Return a text that can be stored. Raises `IllTypedAnswer` for any other type and for half a
    surrogate pair.
    """
    if not isinstance(given, str):
        raise IllTypedAnswer(f"{what} is {shown(given)}; it must be a text")
    if (place := lone_surrogate(given)) is not None:
        raise IllTypedAnswer(f"{what} has half a surrogate pair at {place}; it must be text that UTF-8 can write")
    return str(given)


def number(given: Any, what: str, *, ought: str = "it must be a finite number") -> float:
    """Return a finite number. Raises `IllTypedAnswer` for any other type, NaN and infinity."""
    if not isinstance(given, bool) and isinstance(given, numbers.Real):
        try:
            if math.isfinite(plain := float(given)):
                return plain
        except OverflowError:
            pass
    raise IllTypedAnswer(f"{what} is {shown(given)}; {ought}")


def flag(given: Any, what: str) -> bool:
    """Return a flag, which may be NumPy's. Raises `IllTypedAnswer` for anything else, numbers and
    texts included.
    """
    kind = type(given)
    # Gymnasium's worlds return NumPy's bool, whose name depends on the version.
    if kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")):
        return bool(given)
    raise IllTypedAnswer(f"{what} is {shown(given)}; it must be true or false")


def readable(answer: Answer | Generation, *, tags: bool = False) -> str | None:
    """Return the part of a helper's reply that counts, which is the text after its thoughts; None
    if nothing of it does.

    `tags` says that the reply may itself have thoughts in tags, as a step that an editor writes
    has: then only the thought that comes before the reply is left out.
    """
    return None if is_unreadable(answer) else after_thoughts(answer.text, tags=tags)


def is_unreadable(answer: Answer | Generation) -> bool:
    """Return whether a helper's reply was cut at its token limit before its thought had an end.

    That is certain of a reply that opened a thought itself, and of one without `</think>` whose
    model `thinks`. In any other cut reply, what is whole counts.
    """
    if answer.finish_reason != "length":
        return False
    _, closed, rest = answer.text.rpartition(_THOUGHT_ENDS)
    return (answer.thinks and not closed) or _THOUGHT_OPENS.search(rest) is not None


def after_thoughts(reply: str, *, tags: bool = False) -> str | None:
    """Return the text of a reply after its last `</think>`; None if it ends within a thought.

    `tags` is as in `readable`.
    """
    if not tags:
        rest = reply.rpartition(_THOUGHT_ENDS)[2]
        return None if _THOUGHT_OPENS.search(rest) else rest
    # The thought that a reply begins with ends where the fewest tags are open for the first time:
    # pairs in it are quotes, and pairs after it belong to the reply.
    level = lowest = end = 0
    begins = reply.lstrip().startswith("<think>")
    for tag in _TAG.finditer(reply):
        closes = tag[0] == _THOUGHT_ENDS
        level += -1 if closes else 1
        if closes and (not end or level < lowest):
            lowest, end = level, tag.end()
    if begins and not end:
        return None
    # Where the prompt opened the thought, more tags are closed than opened.
    return reply[end:] if begins or lowest < 0 else reply


def checked_generations(given: Sequence[Generation], request: Request, model: str) -> list[Generation]:
    """Return the replies of a model to one request, checked against what `Generation` says.

    Raises `ModelFault` for a wrong type or range: a text that cannot be stored, NaN among the
    log-probabilities, or other than one log-probability per token.
    """
    for reply in given:
        if fault := _fault_of(reply):
            raise ModelFault(f"model {model}: a reply to {request.session or 'a request'} {fault}")
    return list(given)


def shown(value: Any, limit: int = 120) -> str:
    """Return a value as text, cut to a length that fits into an error message."""
    try:
        seen = repr(value)
    except ValueError:
        # Python refuses to write out an integer of thousands of digits.
        seen = f"a very long {type(value).__name__}"
    return seen if len(seen) <= limit else seen[: limit - 1] + "…"


def _fault_of(reply: Any) -> str:
    if not isinstance(reply, Generation):
        return f"is {shown(reply)}, not a Generation"
    if not isinstance(reply.text, str) or lone_surrogate(reply.text) is not None:
        return f"has the text {shown(reply.text)}, which cannot be stored"
    if reply.finish_reason not in ("stop", "length"):
        return f"has the finish reason {shown(reply.finish_reason)}"
    for name, count in (("prompt_tokens", reply.prompt_tokens), ("completion_tokens", reply.completion_tokens)):
        if not _is_count(count):
            return f"has {shown(count)} as {name}"
    if not all(map(_is_count, reply.token_ids)):
        return f"has token ids that are none: {shown(reply.token_ids)}"
    if reply.logprobs is None:
        return ""
    if any(type(one) not in (float, int) or not -math.inf < one <= HIGHEST_LOGPROB for one in reply.logprobs):
        return f"has log-probabilities that are none: {shown(reply.logprobs)}"
    if reply.token_ids and len(reply.logprobs) != len(reply.token_ids):
        return f"has {len(reply.logprobs)} log-probabilities for {len(reply.token_ids)} tokens"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_TOKENS
