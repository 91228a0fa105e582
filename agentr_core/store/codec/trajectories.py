"""Trajectories, and the episodes of an evaluation, to rows and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from agentr_core.fingerprint import canonical, fingerprint
from agentr_core.store.database import Store, snapshot
from agentr_core.store.tables import Row, Rows, merge
from agentr_core.types import (
    Answer,
    FinishReason,
    Generation,
    Grading,
    Instance,
    Step,
    StopReason,
    ToolCall,
    Trajectory,
)

# Long texts by their hash.


# The rows of one expansion name each text up to three times.
@lru_cache(maxsize=4096)
def text_id(text: str) -> str:
    """Return the id under which a text is stored."""
    return fingerprint(text)


def text_rows(texts: Iterable[str]) -> list[Row]:
    """Return one row of table `text` for each different text."""
    return [{"text_id": text_id(text), "text": text} for text in dict.fromkeys(texts)]


def instance_row(instance: Instance, depth: int | None = None, origin: Instance | None = None) -> Row:
    """Return the row of table `instance`; `depth` is its difficulty class, `origin` the instance it
    is a variant of, if any.

    The first row of an instance stays: store those with a depth before anything refers to them.
    """
    return {
        "instance_id": instance.key,
        "environment": instance.environment,
        "split": instance.split,
        "instance_index": instance.index,
        "depth": depth,
        "origin_id": None if origin is None or origin == instance else origin.key,
    }


# The generations of a sampler, to rows and back.

Kind = Literal["node", "step", "judgement"]

TOKENS_ONLY = -1
"""The number of a reply of which only the tokens are known, such as a replayed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One reply: number `number` of the request with seed `seed`."""

    seed: int
    number: int
    generation: Generation


def draw_row(kind: Kind, owner_id: str, position: int, draw: Draw) -> Row:
    """Return the row of a reply; store its text with it."""
    generation = draw.generation
    return {
        "kind": kind,
        "owner_id": owner_id,
        "position": position,
        "draw": draw.number,
        "reply_id": text_id(generation.text),
        "token_ids": list(generation.token_ids),
        "logprobs": None if generation.logprobs is None else list(generation.logprobs),
        "seed": draw.seed,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "tokenizer": generation.tokenizer,
        "thinks": generation.thinks,
    }


def step_tokens(kind: Kind, owner_id: str, position: int, step: Step) -> Iterator[Row]:
    """Yield the row of a step of which only the tokens and the finish reason are known; none if
    these are not known.
    """
    if has_tokens(step):
        yield {
            "kind": kind,
            "owner_id": owner_id,
            "position": position,
            "draw": TOKENS_ONLY,
            "reply_id": text_id(step.reply),
            "token_ids": list(step.token_ids),
            "logprobs": None if step.logprobs is None else list(step.logprobs),
            "seed": None,
            "finish_reason": step.finish_reason,
            "prompt_tokens": None,
            "completion_tokens": len(step.token_ids),
            "tokenizer": step.tokenizer,
            "thinks": False,
        }


def has_tokens(step: Step) -> bool:
    """Return whether anything is known about how the reply of a step was sampled."""
    known = (step.logprobs, step.finish_reason, step.tokenizer)
    return bool(step.token_ids) or any(value is not None for value in known)


def sampled(
    token_ids: list[int] | None,
    logprobs: list[float] | None,
    finish_reason: FinishReason | None,
    tokenizer: str | None,
) -> dict[str, Any]:
    """Return the fields of a `Step` that say how its reply was sampled, from the columns of an
    outer join.
    """
    return {
        "token_ids": tuple(token_ids or ()),
        "logprobs": None if logprobs is None else tuple(logprobs),
        "finish_reason": finish_reason,
        "tokenizer": tokenizer,
    }


def load_draws(store: Store, kind: Kind, owner_ids: Sequence[str]) -> dict[str, dict[int, tuple[Draw, ...]]]:
    """Return the stored replies of trees or trajectories: by owner, then by position, in the order
    of their numbers.

    Replies of which only the tokens are known (a replayed or imported step) are left out.
    """
    records = store.rows(_DRAWS, kind, list(owner_ids))
    draws: dict[str, dict[int, tuple[Draw, ...]]] = {}
    for owner_id, position, number, seed, text, token_ids, finish_reason, prompt, completion, *more in records:
        logprobs, tokenizer, thinks = more
        generation = Generation(
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            prompt_tokens=prompt,
            completion_tokens=completion,
            logprobs=None if logprobs is None else tuple(logprobs),
            tokenizer=tokenizer,
            thinks=bool(thinks),
        )
        of_owner = draws.setdefault(owner_id, {})
        of_owner[position] = (*of_owner.get(position, ()), Draw(seed=seed, number=number, generation=generation))
    return draws


_DRAWS = """
select g.owner_id, g.position, g.draw, g.seed, t.text, g.token_ids, g.finish_reason, g.prompt_tokens,
    g.completion_tokens, g.logprobs, g.tokenizer, g.thinks
from generation g join text t on t.text_id = g.reply_id
where g.kind = ? and g.seed is not null and g.owner_id in (select unnest(?))
order by g.owner_id, g.position, g.draw
"""


# Steps, which both nodes of trees and trajectories have, to columns and back.

COLUMNS = """
    r.text, s.action, s.matched, s.valid, o.text, s.reward, s.terminated, s.success, s.disaster, s.dropped,
    g.token_ids, g.logprobs, g.finish_reason, g.tokenizer
"""
"""The columns that `read_step` reads: from `s`, its reply `r`, its observation `o` and its
generation `g`.
"""
_WRITTEN = (
    "reply_id",
    "action",
    "matched",
    "valid",
    "observation_id",
    "reward",
    "terminated",
    "success",
    "disaster",
    "dropped",
)


def step_columns(step: Step | None) -> Row:
    """Return the columns of a step, all of them empty for the root of a tree; texts are stored
    separately.
    """
    if step is None:
        return dict.fromkeys(_WRITTEN)
    return {
        "reply_id": text_id(step.reply),
        "action": step.action,
        "matched": step.matched,
        "valid": step.valid,
        "observation_id": text_id(step.observation),
        "reward": float(step.reward),
        "terminated": step.terminated,
        "success": step.success,
        "disaster": step.disaster,
        "dropped": step.dropped,
    }


def read_step(record: Sequence[Any], calls: Mapping[str, Any]) -> Step:
    """Return the step of a record of `COLUMNS`; `calls` are its fields from `load_calls`."""
    reply, action, matched, valid, observation, reward, terminated, success, disaster, dropped, *how = record
    return Step(
        reply=reply,
        action=action,
        matched=matched,
        valid=valid,
        observation=observation,
        reward=reward,
        terminated=terminated,
        success=success,
        disaster=disaster,
        dropped=dropped or 0,
        **sampled(*how),
        **calls,
    )


# Tool calls and model questions of steps, and grades after the last step, to rows and back.
#
# They are addressed like a generation: by the table of the step (node or step), its owner (a tree
# or a trajectory) and its position there.

CallKind = Literal["node", "step"]
Purpose = str
"""`step`, `grade`, or a word chosen by the method that asks about a finished episode."""


def call_rows(kind: CallKind, owner_id: str, steps: Iterable[tuple[int, Step]], *, given: int = 0) -> Rows:
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
            {
                "kind": kind,
                "owner_id": owner_id,
                "position": position,
                "number": number,
                **answered_columns(call),
                "cached": call.cached,
                "output_bytes": len(call.output.encode()),
                "given": position < given,
            }
            for position, step in steps
            for number, call in enumerate(step.tool_calls)
        ],
        "answer": [
            _answer_row(kind, owner_id, position, "step", number, answer, given=position < given)
            for position, step in steps
            for number, answer in enumerate(step.answers)
        ],
    }


def grade_rows(kind: CallKind, owner_id: str, position: int, grading: Grading) -> Rows:
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


def load_calls(con: Any, kind: CallKind, owner_ids: Sequence[str]) -> dict[tuple[str, int], dict[str, Any]]:
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
    for owner_id, position, *columns in con.execute(_ANSWERS_OF_STEPS, [kind, owner_ids]).fetchall():
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
    kind: CallKind, owner_id: str, position: int, purpose: Purpose, number: int, answer: Answer, *, given: bool = False
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
_ANSWERS_OF_STEPS = """
select a.owner_id, a.position, a.role, a.model, a.prompt_hash, a.seed, t.text, a.finish_reason, a.prompt_tokens,
    a.completion_tokens, a.thinks
from answer a join text t on t.text_id = a.reply_id
where a.kind = ? and a.purpose = 'step' and a.owner_id in (select unnest(?::varchar[]))
order by a.owner_id, a.position, a.number
"""


# Tool answers that later calls reuse.


class AnsweredCalls:
    """The tool answers in a store. Threads and processes may share one; two on the same file are
    equal.

    Each method is one burst of the store, so it suits tools that take longer than a burst, such as
    a web search.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnsweredCalls) and self._store.path == other._store.path

    def __hash__(self) -> int:
        return hash(self._store.path)

    def identities(self) -> frozenset[str]:
        """Return the identities of all calls with an answer; none if there is no store yet. Raises
        as `Store.reading` does.
        """
        return frozenset(call_id for (call_id,) in self._store.rows("select call_id from answered_call"))

    def find(self, calls: Sequence[ToolCall]) -> dict[str, ToolCall]:
        """Return the calls that have a stored answer, with that answer and its duration, by
        identity. Raises as `Store.reading` does.
        """
        asked = {call.identity: call for call in calls}
        return {
            key: replace(asked[key], status=status, milliseconds=milliseconds, output=output)
            for key, status, milliseconds, output in self._store.rows(_ANSWERS, list(asked))
        }

    def keep(self, calls: Sequence[ToolCall]) -> None:
        """Store answered calls in one transaction; the first answer to each stays. Raises as
        `Store.write` does.
        """
        rows = [{"call_id": call.identity, **answered_columns(call)} for call in calls]
        self._store.write({"text": text_rows([call.output for call in calls]), "answered_call": rows})


_ANSWERS = """
select a.call_id, a.status, a.milliseconds, t.text
from answered_call a join text t on t.text_id = a.output_id
where a.call_id in (select unnest(?::varchar[]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode of an evaluation: number `repeat` of its instance, after `cut` replayed steps."""

    trajectory_id: str
    instance: Instance
    repeat: int
    cut: int
    trajectory: Trajectory
    depth: int | None = None
    origin: str = ""
    """The instance that its instance is a variant of, or that instance itself."""


def trajectory_rows(
    trajectory_id: str,
    trajectory: Trajectory,
    *,
    source: str,
    iteration_id: str | None = None,
    evaluation_id: str | None = None,
    tree_id: str | None = None,
    leaf: int | None = None,
    draws: Mapping[int, Draw] | None = None,
    grading: Grading | None = None,
    given: int = 0,
) -> Rows:
    """Return the rows of a trajectory; they are one unit.

    Args:
        source: where it comes from: tree, rollout, episode, splice, expert, or a word chosen by the
            method that made it.
        tree_id, leaf: the tree and the last node, if it is a path of a tree.
        draws: the draws that the replies come from, by step position.
        grading: the grade of a trajectory whose reward a grader gave.
        given: how many of its first steps were recorded earlier; their calls were not made again.
    """
    replies_from = draws or {}
    numbers = {position: TOKENS_ONLY for position, step in enumerate(trajectory.steps) if has_tokens(step)}
    numbers |= {position: draw.number for position, draw in replies_from.items()}
    texts = [text for step in trajectory.steps for text in (step.reply, step.observation)]
    rows: Rows = {
        "instance": [instance_row(trajectory.instance)],
        "text": text_rows([trajectory.first_observation, *texts]),
        "trajectory": [
            {
                "trajectory_id": trajectory_id,
                "instance_id": trajectory.instance.key,
                "first_observation_id": text_id(trajectory.first_observation),
                "reward": float(trajectory.reward),
                "success": trajectory.success,
                "stop": str(trajectory.stop),
                "num_steps": len(trajectory.steps),
                "source": source,
                "iteration_id": iteration_id,
                "evaluation_id": evaluation_id,
                "tree_id": tree_id,
                "leaf": leaf,
            }
        ],
        "step": [
            {
                "trajectory_id": trajectory_id,
                "position": position,
                **step_columns(step),
                "draw": numbers.get(position),
            }
            for position, step in enumerate(trajectory.steps)
        ],
        "generation": [
            row
            for position, step in enumerate(trajectory.steps)
            for row in (
                [draw_row("step", trajectory_id, position, replies_from[position])]
                if position in replies_from
                else step_tokens("step", trajectory_id, position, step)
            )
        ],
    }
    calls = call_rows("step", trajectory_id, enumerate(trajectory.steps), given=given)
    graded = grade_rows("step", trajectory_id, len(trajectory.steps) - 1, grading) if grading else {}
    return merge([rows, calls, graded])


def episode_rows(
    trajectory_id: str,
    trajectory: Trajectory,
    *,
    evaluation_id: str,
    iteration_id: str,
    repeat: int = 0,
    cut: int = 0,
    invalid_actions: int | None = None,
    environment_seconds: float | None = None,
    sampling_seconds: float | None = None,
    draws: Mapping[int, Draw] | None = None,
    grading: Grading | None = None,
) -> Rows:
    """Return the rows of one episode of an evaluation with its trajectory; they are one unit.

    `repeat` is its number among the episodes of its instance, in a revision test that of the failed
    episode; `cut` is how many steps were replayed before the model took over.
    """
    episode = {
        "evaluation_id": evaluation_id,
        "instance_id": trajectory.instance.key,
        "repeat": repeat,
        "cut": cut,
        "trajectory_id": trajectory_id,
        "invalid_actions": invalid_actions,
        "environment_seconds": environment_seconds,
        "sampling_seconds": sampling_seconds,
    }
    steps = trajectory_rows(
        trajectory_id,
        trajectory,
        source="episode",
        iteration_id=iteration_id,
        evaluation_id=evaluation_id,
        draws=draws,
        grading=grading,
        given=cut,
    )
    return merge([steps, {"episode": [episode]}])


def load_trajectories(
    store: Store,
    ids: Sequence[str] | None = None,
    *,
    iteration_id: str | None = None,
    source: str | None = None,
) -> dict[str, Trajectory]:
    """Return stored trajectories by id: those of the given ids in their order, or those of an
    iteration and a source sorted by id.
    """
    if not store.path.exists():
        return {}
    chosen = {"ids": None if ids is None else list(ids), "iteration_id": iteration_id, "source": source}
    with store.reading() as con:
        heads = con.execute(_TRAJECTORIES, chosen).fetchall()
        records = con.execute(_STEPS, chosen).fetchall()
        calls = load_calls(con, "step", [key for key, *_ in heads])
    steps = {
        key: tuple(read_step(record[1:], calls.get((key, position), {})) for position, record in enumerate(group))
        for key, group in groupby(records, key=itemgetter(0))
    }
    found = {
        key: Trajectory(
            instance=Instance(environment=environment, split=split, index=index),
            first_observation=first_observation,
            steps=steps.get(key, ()),
            reward=reward,
            success=success,
            stop=StopReason(stop),
        )
        for key, environment, split, index, first_observation, reward, success, stop in heads
    }
    return found if ids is None else {key: found[key] for key in ids if key in found}


def load_episodes(store: Store, evaluation_id: str) -> list[Episode]:
    """Return the episodes of an evaluation that are stored, by instance, repeat and cut."""
    if not store.path.exists():
        return []
    with snapshot(store) as state:
        rows = state.rows(_EPISODES, evaluation_id)
        trajectories = load_trajectories(state, [row[0] for row in rows]) if rows else {}
    return [
        Episode(
            trajectory_id=key,
            instance=trajectories[key].instance,
            repeat=repeat,
            cut=cut,
            trajectory=trajectories[key],
            depth=depth,
            origin=origin,
        )
        for key, repeat, cut, depth, origin in rows
    ]


_EPISODES = """
    select e.trajectory_id, e.repeat, e.cut, i.depth, coalesce(i.origin_id, i.instance_id)
    from episode e join instance i using (instance_id)
    where e.evaluation_id = ?
    order by i.environment, i.split, i.instance_index, e.repeat, e.cut
"""

_CHOSEN = """
($ids::varchar[] is null or t.trajectory_id in (select unnest($ids::varchar[])))
    and ($iteration_id::varchar is null or t.iteration_id = $iteration_id)
    and ($source::varchar is null or t.source = $source)
"""
_TRAJECTORIES = f"""
select t.trajectory_id, i.environment, i.split, i.instance_index, o.text, t.reward, t.success, t.stop
from trajectory t
join instance i using (instance_id)
join text o on o.text_id = t.first_observation_id
where {_CHOSEN}
order by t.trajectory_id
"""
_STEPS = f"""
select s.trajectory_id, {COLUMNS}
from step s
join trajectory t using (trajectory_id)
join text r on r.text_id = s.reply_id
join text o on o.text_id = s.observation_id
left join generation g
    on g.kind = 'step' and g.owner_id = s.trajectory_id and g.position = s.position and g.draw = s.draw
where {_CHOSEN}
order by s.trajectory_id, s.position
"""
