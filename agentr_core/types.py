"""Every noun of the domain, as frozen records; this docstring is the glossary.

instance    one problem of an environment: (environment, split, index).
task        only ever a Prefect task.
step        one reply of the model and what it led to: reply, action, observation, reward.
trajectory  the steps of one episode, with its final reward and the reason it stopped.
node        a step in a search tree, with the statistics of the search.
reward      comes from the environment, in [0, 1].
value       a backed-up mean of rewards in a search tree, in [0, 1].
score       an aggregate over the episodes of an evaluation.
verdict     a judge's word on one step: good, bad, uncertain; or unparsable.
critique    the verdicts on one bad path, and where its first error is.
sample      messages with a train flag each: what fine-tuning sees.
preference  two samples that go on from one conversation, the chosen one better than the other.
recipe      one configuration file; run: one execution of it; iteration: one turn of its wheel.
comparison  a run whose samples are the pool of its arms: several seeds each, an equal budget.
arm         a way of learning: what it takes of the pool, and how it is trained on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length"]
"""Why a reply ended: the model ended it (or a stop string did), or the token limit cut it."""


class StopReason(StrEnum):
    """Why an episode or a path of a tree ended."""

    SUCCESS = "success"
    """The environment ended the episode and set its success flag."""
    FAILURE = "failure"
    """The environment ended the episode without success."""
    DISASTER = "disaster"
    """The environment gave a negative reward: the episode counts as reward 0."""
    STEP_LIMIT = "step_limit"
    """The episode used all the steps it was given."""
    CONTEXT_LIMIT = "context_limit"
    """The conversation no longer fits the model's context."""
    REPEATS = "repeats"
    """The model gave the same reply in the same state so often that the episode was ended; it
    counts as failed.
    """


class Verdict(StrEnum):
    """A judge's word on one step."""

    GOOD = "good"
    BAD = "bad"
    UNCERTAIN = "uncertain"
    UNPARSABLE = "unparsable"


class SampleKind(StrEnum):
    """Where a training sample comes from."""

    REVISION = "revision"
    GOOD = "good"
    GENERAL = "general"
    EXPERT = "expert"
    JUDGE = "judge"
    CHOSEN = "chosen"
    REJECTED = "rejected"


class PreferenceCase(StrEnum):
    """What made one side of a preference better than the other."""

    LOSE = "lose"
    """The policy got less than the expert."""
    WIN = "win"
    """The policy got more than the expert."""
    STEP = "step"
    """The expert and the policy took different steps from the same state, and one of them got more
    in the end.
    """
    OWN = "own"
    """The best of the policy's episodes against its worst."""
    TREE = "tree"
    """Two branches that leave one node of a search tree."""
    FILE = "file"
    """A ready pair from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One problem of an environment. `split` is a name the environment knows; `index` counts from
    0.
    """

    environment: str
    split: str
    index: int

    @property
    def key(self) -> str:
        """`environment/split/index`, unique across all environments."""
        return f"{self.environment}/{self.split}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation; `train` says whether its tokens carry loss.

    `token_ids` are the tokens the sampler produced for an assistant turn (end-of-turn token
    included), or None for a turn that was not sampled. Training uses them as they are.
    `finish_reason` says why a sampled turn ended, None where that is not known. A turn that was cut
    ends without a trained end of turn, since the model never said one. `tokenizer` is the
    fingerprint of the tokenizer whose ids they are; with any other one the text is tokenised anew.
    None stands for that of the run's own model.
    """

    role: Role
    text: str
    train: bool = False
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How replies are drawn. `temperature` 0 means greedy; `stop` strings end a reply and are not
    part of it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 500
    stop: tuple[str, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how many replies are wanted.

    Reply i of a request is drawn from the random stream (`seed`, i): it does not depend on `n` or
    on what else is in the batch. `session` groups requests that share a prefix (one tree, one
    episode).
    """

    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int
    n: int = 1
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One reply of a model.

    `token_ids` includes the end-of-turn token when the model ended its turn (`finish_reason`
    "stop"); it is empty for a backend that cannot tell. `logprobs` has one natural-log probability
    per token id when they were asked for; from a server that gives no ids, one for each token that
    it reports. `prompt_tokens` counts the whole prompt, also for a reply that shared its prefill
    with others. `tokenizer` is the fingerprint of the tokenizer whose ids they are, None where the
    backend does not know it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[float, ...] | None = None
    tokenizer: str | None = None


class Transition(NamedTuple):
    """What `Environment.step` returns, in Gymnasium's order.

    `reward` is the standing score of the episode after this step, in [0, 1], or negative for a
    disaster. `info` has the key "success" (bool), the environment's own flag; "valid" (bool) from
    an environment that tells whether it took the action; and "matched" (str) from one that puts a
    possible action in the place of the agent's. It may have more for the log.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One reply and what it led to. `action` is what the environment's parser took out of `reply`.

    `matched` is the possible action that the environment carried out in its place, which may be the
    same; None from an environment that takes actions as they are. A replay sends `action`, which is
    matched again. `valid` is whether the environment took the action; None from one that does not
    tell. `finish_reason` and `tokenizer` are those of the reply's generation, None for a reply that
    no model gave.
    """

    reply: str
    action: str
    observation: str
    reward: float
    matched: str | None = None
    valid: bool | None = None
    terminated: bool = False
    success: bool = False
    disaster: bool = False
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    tokenizer: str | None = None
    dropped: int = 0
    """How many of the oldest exchanges were left out of the conversation that the reply was drawn
    from, since the whole of it no longer fitted; see `conversation.windowed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The steps of one episode. `reward` is in [0, 1]; `success` is the environment's own flag."""

    instance: Instance
    first_observation: str
    steps: tuple[Step, ...]
    reward: float
    success: bool
    stop: StopReason


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
    """How many sampled replies this child stands for, after siblings were merged."""

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

    `stream` names the random streams of the tree, so that its copies in other runs have the same;
    empty: its id does.
    """

    tree_id: str
    nodes: tuple[int, ...]
    trajectory: Trajectory
    stream: str = ""

    @property
    def seeded_by(self) -> str:
        """What seeds of the tree are derived from."""
        return self.stream or self.tree_id

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a sample comes from: ids in the store, enough to walk back to every node, verdict and
    seed.
    """

    tree_id: str = ""
    good_leaf: int | None = None
    bad_leaf: int | None = None
    split: int | None = None
    """Steps shared by both paths."""
    cut: int | None = None
    """Steps of the bad path that were kept: first error included."""
    good_reward: float | None = None
    bad_reward: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A conversation to train on. Only turns with `train=True` carry loss."""

    kind: SampleKind
    messages: tuple[Message, ...]
    instance: Instance | None
    provenance: Provenance = Provenance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A better and a worse way on from the same conversation.

    The untrained turns before the first trained one are the same in both samples, and both end with
    a trained turn. Rewards are those of the whole trajectories, in [0, 1]; None where a file does
    not tell. `dropped` counts the steps that were cut off the end of the rejected side.
    """

    case: PreferenceCase
    chosen: Sample
    rejected: Sample
    chosen_reward: float | None
    rejected_reward: float | None
    dropped: int = 0

    @property
    def margin(self) -> float | None:
        """How much more reward the chosen side has."""
        if self.chosen_reward is None or self.rejected_reward is None:
            return None
        return self.chosen_reward - self.rejected_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Something a filter turned away. `subject` is the id or key of what it was; `reason` is a
    short slug.
    """

    stage: str
    subject: str
    reason: str
    detail: str = ""
