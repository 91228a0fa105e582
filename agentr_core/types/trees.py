"""Search trees, paths through them, and a judge's verdicts on these paths."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentr_core.types.episodes import Instance, Step, StopReason, Trajectory
from agentr_core.types.generation import Generation


class Verdict(StrEnum):
    """A judge's word on one step."""

    GOOD = "good"
    BAD = "bad"
    UNCERTAIN = "uncertain"
    UNPARSABLE = "unparsable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A step in a tree, or the root (index 0, `parent` -1, `step` None).

    `index` counts nodes in the order of their creation, and a parent's index is below its
    children's. `visits` and `value_sum` are the search statistics; `terminal` says no further
    expansion is possible here. `dive` is the dive that made the node. `stop` is set on nodes where
    the path itself ended.
    """

    index: int
    parent: int
    depth: int
    step: Step | None
    visits: int = 0
    value_sum: float = 0.0
    terminal: bool = False
    stop: StopReason | None = None
    dive: int = 0
    duplicates: int = 1
    """How many sampled replies this child stands for, after siblings were merged; 0 if its step is
    the expert's."""

    @property
    def value(self) -> float:
        """Mean backed-up reward in [0, 1]; 0 when the node was never visited."""
        return self.value_sum / self.visits if self.visits else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One finished or half-grown search tree. `nodes[i].index == i`; `dives_done` counts completed
    dives.
    """

    instance: Instance
    first_observation: str
    nodes: tuple[Node, ...]
    dives_done: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A root-to-leaf path of a tree: `nodes` are indices from the first node after the root to the
    leaf.
    """

    tree_id: str
    nodes: tuple[int, ...]
    trajectory: Trajectory

    @property
    def leaf(self) -> int:
        """Index of the leaf node."""
        return self.nodes[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPair:
    """A good and a bad path of one tree; `split` is the number of steps they share from the
    root.
    """

    good: Path
    bad: Path
    split: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judge's verdict on node `node`: the majority of its `votes`, each read from one of
    `generations`.

    `votes` and `generations` are empty and the verdict is unparsable for a step that does not fit
    the judge's context even without a log, by the judge's own count of tokens. `seed` is the
    request's; `dropped_steps` counts the steps left out of its log.
    """

    node: int
    seed: int
    dropped_steps: int
    verdict: Verdict
    votes: tuple[Verdict, ...]
    generations: tuple[Generation, ...]

    @property
    def reply(self) -> str:
        """The text of the first generation that agrees with the majority, or else of the first;
        empty if there are none.
        """
        agreeing = [g for g, vote in zip(self.generations, self.votes, strict=True) if vote is self.verdict]
        return next((generation.text for generation in agreeing or self.generations), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """A judge's word on step number `position` (from 0) of a path, with the judge's whole reply."""

    position: int
    verdict: Verdict
    reply: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Critique:
    """The verdicts on one bad path. `first_error` is the position of its first bad step, or None if
    none is bad.
    """

    verdicts: tuple[StepVerdict, ...]
    first_error: int | None
