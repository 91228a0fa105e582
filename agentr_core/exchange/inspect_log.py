"""Export of evaluations as Inspect logs, for Inspect's viewer, log reader and data frames.

Source: inspect_ai 0.3.285. A JSON file of version 2 holds one evaluation, and each sample in it is
an episode. `make test-inspect` opens the files written here with Inspect's own reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentr_core.texts import count_text
from agentr_core.types import Message, StopReason, Trajectory

VERSION = 2
_CHAT = ("system", "user", "assistant", "tool")
_LIMITS = {StopReason.TOKEN_LIMIT: "token", StopReason.TIME_LIMIT: "time", StopReason.STEP_LIMIT: "custom"}
"""Inspect's names for the types of limits that end an episode, by stop reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEpisode:
    """One episode of an evaluation: number `number`, counted from 1, of instance `key`. In Inspect,
    it is epoch `number` of sample `key`.

    `messages` is the whole conversation; the first `num_opening_turns` come before the first reply.
    `scores` has a value by the name of each measure; it is empty for an episode that failed for
    good and does not count. `error` says why an episode failed for good; otherwise it is empty.
    `target` has the right answers, if the environment knows them. Tokens and seconds are None where
    they are not known.
    """

    key: str
    number: int
    trajectory: Trajectory
    messages: tuple[Message, ...] = ()
    num_opening_turns: int = 0
    target: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    explanation: str = ""
    error: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """One evaluation with its episodes.

    `measures` has for each score its mean, the lower and upper bound of the mean's 95 % confidence
    interval (None where there is none), and the number of episodes. `sampling` has the sampling
    settings by Inspect's names, and `limits` the limits of an episode by the stop reason of an
    episode that reaches them.
    """

    evaluation_id: str
    run_id: str
    task: str
    split: str
    model: str
    started_at: datetime
    ended_at: datetime
    episodes: Sequence[LoggedEpisode]
    measures: Mapping[str, tuple[float, float | None, float | None, int]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[StopReason, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The name of the log's file, in the form that Inspect needs to list logs."""
        task = re.sub(r"[^A-Za-z0-9]+", "-", self.task)
        return f"{self.started_at:%Y-%m-%dT%H-%M-%S}+00-00_{task}_{self.evaluation_id}.json"


def write_log(evaluation: LoggedEvaluation, folder: Path) -> str:
    """Write the log of an evaluation into a folder, and return the name of its file."""
    text = json.dumps(log_of(evaluation), ensure_ascii=False, allow_nan=False, indent=1)
    (folder / evaluation.file_name).write_text(f"{text}\n", encoding="utf-8")
    return evaluation.file_name


def log_of(evaluation: LoggedEvaluation) -> dict[str, Any]:
    """Return an evaluation as the JSON object of an Inspect log. `samples` is the last key, so that
    Inspect can read the header without them.
    """
    episodes = evaluation.episodes
    usage = {evaluation.model: _usage(episodes)}
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": evaluation.evaluation_id,
            "run_id": evaluation.run_id,
            "created": _time(evaluation.started_at),
            "task": evaluation.task,
            "task_id": f"{evaluation.run_id}-{evaluation.task}",
            "dataset": {
                "name": evaluation.split,
                "samples": len({episode.key for episode in episodes}),
                "sample_ids": list(dict.fromkeys(episode.key for episode in episodes)),
                "shuffled": False,
            },
            "model": evaluation.model,
            "config": {"epochs": max((episode.number for episode in episodes), default=1), "epochs_reducer": ["mean"]},
            "packages": dict(evaluation.versions),
            "metadata": dict(evaluation.facts),
            "scorers": [{"name": name} for name in evaluation.measures],
        },
        "plan": {"name": "agentr", "steps": [{"solver": "agentr"}], "config": dict(evaluation.sampling)},
        "results": {
            "total_samples": len(episodes),
            "completed_samples": sum(not episode.error for episode in episodes),
            "scores": [_score(name, *measure) for name, measure in evaluation.measures.items()],
        },
        "stats": {
            "started_at": _time(evaluation.started_at),
            "completed_at": _time(evaluation.ended_at),
            "model_usage": usage,
        },
        "samples": [_sample(episode, evaluation) for episode in episodes],
    }


def _score(name: str, mean: float, low: float | None, high: float | None, n: int) -> dict[str, Any]:
    metrics = {"mean": mean, "ci95_low": low, "ci95_high": high}
    return {
        "name": name,
        "scorer": name,
        "reducer": "mean",
        "scored_samples": n,
        "metrics": {key: {"name": key, "value": value} for key, value in metrics.items() if value is not None},
    }


def _sample(episode: LoggedEpisode, evaluation: LoggedEvaluation) -> dict[str, Any]:
    trajectory = episode.trajectory
    turns = [
        _turn(message, evaluation.model, is_given=position < episode.num_opening_turns)
        for position, message in enumerate(episode.messages)
        if message.role in _CHAT
    ]
    num_given = sum(message.role in _CHAT for message in episode.messages[: episode.num_opening_turns])
    explanation = {"explanation": episode.explanation} if episode.explanation else {}
    record: dict[str, Any] = {
        "id": episode.key,
        "epoch": episode.number,
        "input": turns[:num_given],
        "target": list(episode.target),
        "messages": turns,
        "output": _output(episode, evaluation.model),
        "metadata": {
            **episode.facts,
            "stop_reason": str(trajectory.stop),
            "num_steps": len(trajectory.steps),
            "steps": [{"action": step.action, "reward": step.reward, "valid": step.valid} for step in trajectory.steps],
            **({"tools": json.loads(episode.messages[0].text)} if _has_tools(episode) else {}),
        },
        "model_usage": {evaluation.model: _usage([episode])},
    }
    if episode.scores:
        record["scores"] = {
            name: {"value": value, "answer": trajectory.steps[-1].action if trajectory.steps else None, **explanation}
            for name, value in episode.scores.items()
        }
    if episode.error:
        record["error"] = {"message": episode.error, "traceback": "", "traceback_ansi": ""}
    if episode.seconds is not None:
        record["total_time"] = episode.seconds
    if trajectory.stop in evaluation.limits:
        record["limit"] = {"type": _LIMITS[trajectory.stop], "limit": evaluation.limits[trajectory.stop]}
    return record


def _turn(message: Message, model: str, *, is_given: bool) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.text}
    if is_given:
        turn["source"] = "input"
    elif message.role == "assistant":
        turn |= {"source": "generate", "model": model}
        if message.spans:
            turn["metadata"] = {
                "spans": [{"text": span.text, "sampled": number % 2 == 0} for number, span in enumerate(message.spans)]
            }
    return turn


def _output(episode: LoggedEpisode, model: str) -> dict[str, Any]:
    """Return Inspect's `output` of a sample: the model and, if there is any, the last reply."""
    replies = [message for message in episode.messages[episode.num_opening_turns :] if message.role == "assistant"]
    if not replies:
        return {"model": model}
    text = replies[-1].parts[-1 if len(replies[-1].parts) % 2 else -2].text
    is_cut = episode.trajectory.steps[-1].finish_reason == "length"
    message = {"role": "assistant", "content": text, "source": "generate", "model": model}
    choice = {"message": message, "stop_reason": "max_tokens" if is_cut else "stop"}
    return {"model": model, "choices": [choice], "completion": text, "usage": _usage([episode])}


def _usage(episodes: Iterable[LoggedEpisode]) -> dict[str, int]:
    input_tokens, output_tokens = 0, 0
    for episode in episodes:
        input_tokens += episode.prompt_tokens or 0
        output_tokens += episode.completion_tokens or 0
    return {"input_tokens": input_tokens, "output_tokens": output_tokens, "total_tokens": input_tokens + output_tokens}


def _has_tools(episode: LoggedEpisode) -> bool:
    return bool(episode.messages) and episode.messages[0].role == "tools"


def _time(moment: datetime) -> str:
    # The store's times have no zone and are in UTC.
    return moment.replace(tzinfo=UTC).isoformat()


# Notes on what a log cannot hold.


def notes(evaluations: Sequence[LoggedEvaluation]) -> list[str]:
    """Return notes for readers of the logs, such as on what is left out, each with the number of
    episodes that it applies to; empty if none applies.
    """
    episodes = [episode for evaluation in evaluations for episode in evaluation.episodes]

    cases: list[tuple[Callable[[LoggedEpisode], object], str]] = [
        (
            lambda episode: any(step.token_ids or step.logprobs for step in episode.trajectory.steps),
            "left out are the token ids and log-probabilities of the replies of {}; Inspect has them of its own calls",
        ),
        (
            lambda episode: any(message.spans for message in episode.messages),
            "the turn of {} was grown by continuation: results are a part of its text, and metadata.spans of the turn "
            "tells them apart",
        ),
        (
            _has_tools,
            "{} offer tools, which stand in metadata.tools; a call is a part of its reply's text",
        ),
        (
            lambda episode: any(step.dropped for step in episode.trajectory.steps),
            "{} were read through a window; the log has the whole conversation",
        ),
        (
            lambda episode: episode.error and not episode.scores,
            "{} failed for good: they have an error and no score, and are not in the means",
        ),
        (
            lambda episode: episode.error and episode.scores,
            "{} failed for good: they have an error, and count as failures, as the recipe says",
        ),
    ]
    counts = [(sum(bool(applies(episode)) for episode in episodes), sentence) for applies, sentence in cases]
    return [sentence.format(count_text(count, "episode")) for count, sentence in counts if count]
