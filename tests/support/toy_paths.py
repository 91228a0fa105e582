"""Paths of a toy tree, played on the number line, and a small real tokenizer to render them
with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from base_tokenizers import END, build_tokenizer
from toy import ACTIONS, Line, instance

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import play_replies
from agentr_core.episodes.transcript import whole_episode
from agentr_core.methods.agent_r.pairs import num_shared_steps
from agentr_core.methods.agent_r.splice import REFLECTIONS, path_provenance
from agentr_core.samples.rendering import Renderer
from agentr_core.types import (
    Critique,
    Instance,
    PathPair,
    Sample,
    SampleKind,
    StepVerdict,
    StopReason,
    Trajectory,
    TreePath,
    Verdict,
)


def reply(action: str, thought: str = "I go on.") -> str:
    return f"Thought: {thought}\nAction: {action}"


def good_sample(path: TreePath, env: Environment) -> Sample:
    """Return a whole good path as a sample, which no window divides."""
    return Sample(
        kind=SampleKind.GOOD,
        messages=whole_episode(env, path.trajectory),
        instance=path.trajectory.instance,
        provenance=path_provenance(path),
    )


class ToyTree:
    """Makes paths of one tree: equal beginnings share their nodes."""

    def __init__(
        self, index: int = 0, *, tree_id: str = "t", env: Line | None = None, thought: str = "I go on."
    ) -> None:
        self.instance: Instance = instance(index)
        self.tree_id = tree_id
        self._env = env or Line()
        self._thought = thought
        self._nodes: dict[tuple[str, ...], int] = {}

    def path(self, *actions: str, thought: str = "") -> TreePath:
        replies = [reply(action, thought or self._thought) for action in actions]
        observation, outcomes = play_replies(self._env, self.instance, replies)
        replies = replies[: len(outcomes)]
        nodes = [self._nodes.setdefault(tuple(replies[: i + 1]), len(self._nodes) + 1) for i in range(len(replies))]
        steps = tuple(replace(o.step, token_ids=sampled_ids(o.step.reply)) for o in outcomes)
        trajectory = Trajectory.ended(self.instance, observation, steps, outcomes[-1].stop or StopReason.STEP_LIMIT)
        return TreePath(tree_id=self.tree_id, nodes=tuple(nodes), trajectory=trajectory)

    def pair(self, good: Sequence[str], bad: Sequence[str]) -> PathPair:
        good_path, bad_path = self.path(*good), self.path(*bad)
        return PathPair(good=good_path, bad=bad_path, split=num_shared_steps(good_path, bad_path))


def critique(first_error: int | None, length: int = 0) -> Critique:
    verdicts = [
        StepVerdict(position=i, verdict=Verdict.BAD if i == first_error else Verdict.GOOD, reply="")
        for i in range(max(length, (first_error or 0) + 1))
    ]
    return Critique(verdicts=tuple(verdicts), first_error=first_error)


@cache
def tokenizer() -> Any:
    """A tokenizer that knows the toy's words; others are bytes."""
    texts: Iterable[str] = [*(reply(action) for action in ACTIONS), *REFLECTIONS, "You are at 1.", "You stopped."]
    return build_tokenizer(texts, wholes=[Line.instruction])


@cache
def renderer() -> Renderer:
    return Renderer(tokenizer())


def sampled_ids(text: str) -> tuple[int, ...]:
    """What a sampler might have produced: one token a byte, which is not what encoding the text
    gives.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    marks = "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))
    return (*tokenizer().convert_tokens_to_ids(list(marks)), tokenizer().convert_tokens_to_ids(END))
