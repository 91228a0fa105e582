"""Tool calls and model questions of steps, and grades after the last step, to rows and back.

They are addressed like a generation: by the table of the step (node or step), its owner (a tree or
a trajectory) and its position there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from agentr_core.fingerprint import canonical
from agentr_core.store.codec.texts import text_id, text_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import Row, Rows, merge
from agentr_core.types import Answer, Grading, Step, ToolCall

Kind = Literal["node", "step"]
Purpose = str
"""`step`, `grade`, or a word chosen by the method that asks about a finished episode."""


def call_rows(kind: Kind, owner_id: str, steps: Iterable[tuple[int, Step]], *, given: int = 0) -> Rows:
    """Return the rows of the tool calls and answers of steps, each given with its position.

    The first `given` steps were recorded earlier: none of their calls and questions was repeated.
    """
    steps = list(steps)
    return {
        "text": text_rows(
            text
            for _, step in steps
            for text in (*(call.output for call in step.tool_calls), *(answer.text for answer in step.answers))
        ),
        "tool_call": [
            {**_call_row(kind, owner_id, position, number, call), "given": position < given}
            for position, step in steps
            for number, call in enumerate(step.tool_calls)
        ],
        "answer": [
            _answer_row(kind, owner_id, position, "step", number, answer, given=position < given)
            for position, step in steps
            for number, answer in enumerate(step.answers)
        ],
    }


def grade_rows(kind: Kind, owner_id: str, position: int, grading: Grading) -> Rows:
    """Return the rows of a grade given after the step at `position`, with the model's reply."""
    answer = grading.answer
    row = {
        "kind": kind,
        "owner_id": owner_id,
        "position": position,
        "given_by": "rule" if answer is None else "model",
        "reward": float(grading.grade.reward),
        "success": grading.grade.success,
        "environment_reward": float(grading.before.reward),
        "environment_success": grading.before.success,
    }
    if answer is None:
        return {"grade": [row]}
    said = {"text": text_rows([answer.text]), "answer": [_answer_row(kind, owner_id, position, "grade", 0, answer)]}
    return merge([{"grade": [row]}, said])


def answer_rows(owner_id: str, position: int, purpose: Purpose, number: int, answer: Answer) -> Rows:
    """Return the rows of a model's reply about a finished trajectory, as answer `number` for a
    purpose; `position` is that of the trajectory's last step.
    """
    return {
        "text": text_rows([answer.text]),
        "answer": [_answer_row("step", owner_id, position, purpose, number, answer)],
    }


def load_answers(store: Store, purpose: Purpose, owner_ids: Sequence[str]) -> dict[str, dict[int, Answer]]:
    """Return the answers of models about trajectories for a purpose, by trajectory and number."""
    found: dict[str, dict[int, Answer]] = {}
    for owner_id, number, *columns in store.rows(_ABOUT, purpose, list(owner_ids)):
        found.setdefault(owner_id, {})[number] = answer_of(columns)
    return found


def load_calls(con: Any, kind: Kind, owner_ids: Sequence[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the fields `tool_calls` and `answers` of stored steps that have any, by owner and
    position.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for owner_id, position, tool, provider, parameters, *rest in con.execute(_CALLS, [kind, owner_ids]).fetchall():
        key, status, milliseconds, cached, output = rest
        call = ToolCall(
            tool=tool,
            provider=provider,
            parameters=json.loads(parameters),
            key=key,
            status=status,
            milliseconds=milliseconds,
            cached=cached,
            output=output,
        )
        fields = found.setdefault((owner_id, position), {})
        fields["tool_calls"] = (*fields.get("tool_calls", ()), call)
    for owner_id, position, *columns in con.execute(_ANSWERS, [kind, owner_ids]).fetchall():
        fields = found.setdefault((owner_id, position), {})
        fields["answers"] = (*fields.get("answers", ()), answer_of(columns))
    return found


def answer_of(columns: Sequence[Any]) -> Answer:
    """Return an answer from its columns: role, model, prompt hash, seed, text, finish reason,
    prompt tokens, completion tokens, and whether the model thinks.
    """
    role, model, prompt_hash, seed, text, finish_reason, prompt_tokens, completion_tokens, thinks = columns
    return Answer(
        role=role,
        model=model,
        prompt_hash=prompt_hash,
        seed=seed,
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        thinks=bool(thinks),
    )


def _call_row(kind: Kind, owner_id: str, position: int, number: int, call: ToolCall) -> Row:
    return {
        "kind": kind,
        "owner_id": owner_id,
        "position": position,
        "number": number,
        **answered_columns(call),
        "cached": call.cached,
        "output_bytes": len(call.output.encode()),
    }


def answered_columns(call: ToolCall) -> Row:
    """Return the columns of a call and its result, for any table that stores them."""
    return {
        "tool": call.tool,
        "provider": call.provider,
        "parameters": canonical(call.parameters),
        "key": call.key,
        "status": call.status,
        "milliseconds": float(call.milliseconds),
        "output_id": text_id(call.output),
    }


def _answer_row(
    kind: Kind, owner_id: str, position: int, purpose: Purpose, number: int, answer: Answer, *, given: bool = False
) -> Row:
    return {
        "kind": kind,
        "owner_id": owner_id,
        "position": position,
        "purpose": purpose,
        "number": number,
        **answer_columns(answer),
        "given": given,
    }


def answer_columns(answer: Answer) -> Row:
    """Return the columns of an answer, for any table that stores them."""
    return {
        "role": answer.role,
        "model": answer.model,
        "prompt_hash": answer.prompt_hash,
        "seed": answer.seed,
        "reply_id": text_id(answer.text),
        "finish_reason": answer.finish_reason,
        "thinks": answer.thinks,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
    }


_ABOUT = """
select a.owner_id, a.number, a.role, a.model, a.prompt_hash, a.seed, t.text, a.finish_reason, a.prompt_tokens,
    a.completion_tokens, a.thinks
from answer a join text t on t.text_id = a.reply_id
where a.kind = 'step' and a.purpose = ? and a.owner_id in (select unnest(?::varchar[]))
order by a.owner_id, a.number
"""
_CALLS = """
select c.owner_id, c.position, c.tool, c.provider, c.parameters, c.key, c.status, c.milliseconds, c.cached, t.text
from tool_call c join text t on t.text_id = c.output_id
where c.kind = ? and c.owner_id in (select unnest(?::varchar[]))
order by c.owner_id, c.position, c.number
"""
_ANSWERS = """
select a.owner_id, a.position, a.role, a.model, a.prompt_hash, a.seed, t.text, a.finish_reason, a.prompt_tokens,
    a.completion_tokens, a.thinks
from answer a join text t on t.text_id = a.reply_id
where a.kind = ? and a.purpose = 'step' and a.owner_id in (select unnest(?::varchar[]))
order by a.owner_id, a.position, a.number
"""
