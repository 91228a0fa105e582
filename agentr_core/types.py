"""The domain types: conversations, requests to models and their replies, instances and the steps of
their episodes, search trees and verdicts on their paths, training samples and preferences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from agentr_core.fingerprint import fingerprint, later_field

Role = Literal["system", "user", "assistant", "tool", "tools"]
"""The role of a turn's speaker. A `tool` turn is the result of a call; a `tools` turn, always the
first, defines the tools that may be called, as a JSON list: chat templates and servers take it
separately from the other turns.
"""
FinishReason = Literal["stop", "length"]
"""Why a reply ended: the model ended it (or a stop string did), or the token limit cut it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of an assistant turn: what the model wrote between two stops, or a text from outside
    that was appended to it, such as a tool's result. The fields are those of `Message`.
    """

    text: str
    train: bool = False
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    tokenizer: str | None = None

    @property
    def is_external(self) -> bool:
        """Whether the text comes from outside: no model sampled it."""
        return not self.token_ids and self.finish_reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation; `train` says whether its tokens carry loss.

    `token_ids` are the tokens the sampler produced for an assistant turn (end-of-turn token
    included), or None for a turn that was not sampled. Training uses them as they are.
    `finish_reason` says why a sampled turn ended, None if that is not known. A turn that was cut
    ends without a trained end of turn, since the model never produced one. `tokenizer` is the
    fingerprint of the tokenizer that made the ids, None for that of the run's own model; with any
    other tokenizer the text is tokenised again.

    An `example` is a turn of an episode that is shown before the problem; it is never trained.

    An assistant turn that was grown by continuation has `spans`, each with its own tokens, `train`
    flag and finish reason; make it with `grown_turn`. As the last turn of a prompt it is
    unfinished, and the reply continues it.
    """

    role: Role
    text: str
    train: bool = False
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    tokenizer: str | None = None
    spans: tuple[Span, ...] = later_field(())
    example: bool = later_field(False)

    def __post_init__(self) -> None:
        if self.spans and (self.role, self.text, self.train, self.token_ids) != _of_spans(self.spans):
            raise ValueError(
                "a turn with spans must have the role, text and flag of its spans; make it with `grown_turn`"
            )

    @property
    def parts(self) -> tuple[Span, ...]:
        """The spans of the turn; a turn without any is one span."""
        if self.spans:
            return self.spans
        span = Span(
            text=self.text,
            train=self.train,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            tokenizer=self.tokenizer,
        )
        return (span,)


def grown_turn(spans: Sequence[Span]) -> Message:
    """Return the assistant turn made of one or more spans; its `train` says whether any of them
    carries loss.
    """
    role, text, train, _ = _of_spans(spans)
    return Message(role=role, text=text, train=train, spans=tuple(spans))


def _of_spans(spans: Sequence[Span]) -> tuple[Role, str, bool, None]:
    return "assistant", "".join(span.text for span in spans), any(span.train for span in spans), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for sampling replies. `temperature` 0 means greedy; `stop` strings end a reply and
    are not part of it, unless `include_stop` keeps the one that ended it.

    The token ids of a reply include those of its stop string in both cases. The last token may
    reach beyond the stop string; the text does not.

    `until` is a regular expression that is searched for, outside thoughts, after each line break
    and colon; a reply ends at the end of its first match. If it is set, the token ids end where the
    text ends, whatever cut it: tokens beyond the text are dropped.

    `repetition_penalty` changes the logits of tokens in the prompt and the reply so far (1: no
    change), `temperature` those of all tokens; `top_k` (0: all), `top_p` and `min_p` then filter,
    in this order, with the semantics of Transformers' logits processors. Log-probabilities are
    those of the model alone, before all of these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 500
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    include_stop: bool = later_field(False)
    top_k: int = later_field(0)
    min_p: float = later_field(0.0)
    repetition_penalty: float = later_field(1.0)
    until: str = later_field("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how many replies are wanted.

    Reply i of a request is sampled with the random stream (`seed`, i): it does not depend on `n` or
    on what else is in the batch. `session` groups requests that share a prefix (one tree, one
    episode). `helper` marks a question asked alongside an episode. If a server that returns
    thoughts apart from the text cuts such a reply within its thought, the result is an empty reply
    with `thinks` set; for a model that acts it is an error, `MalformedReply`.
    """

    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int
    n: int = 1
    session: str = ""
    helper: bool = later_field(False)
    on_text: Callable[[str], None] | None = field(default=None, compare=False, repr=False)
    """Called with the text so far of a request's only reply, without what may be the beginning of a
    stop string, from a thread of the model and at no fixed rate; not every model calls it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One reply of a model.

    `token_ids` includes the end-of-turn token when the model ended its turn (`finish_reason`
    "stop"); it is empty for a backend that does not report them. `logprobs` has one natural-log
    probability per token id when they were asked for; from a server that gives no ids, one for each
    token that it reports. `prompt_tokens` counts the whole prompt, even for a reply that shared its
    prefill with others. `tokenizer` is the fingerprint of the tokenizer that made the ids, None if
    the backend does not know it. `thinks` says that the model is known to think before it replies:
    its prompt opened a thought, so that `text` begins within one, or the server returned the
    thought apart from it. `unfinished_thought` says that `text` lies within a thought that its
    prompt opened, since its token limit cut it there; it is not stored.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[float, ...] | None = None
    tokenizer: str | None = None
    thinks: bool = False
    unfinished_thought: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to a model of another role, asked alongside an episode."""

    role: str
    """A role of the recipe: judge, reflector, editor, summariser, or actor."""
    messages: tuple[Message, ...]
    sampling: Sampling = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A model's answer to a `Question`.

    `model` is the model's fingerprint, `prompt_hash` the hash of the messages, `seed` the seed of
    the request; `thinks` is that of the `Generation`. `replies.answer_text` returns the part of
    `text` that counts, without the thoughts.
    """

    role: str
    model: str
    prompt_hash: str
    seed: int
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    thinks: bool = False


class StopReason(StrEnum):
    """Why an episode or a path of a tree ended."""

    SUCCESS = "success"
    """The environment ended the episode and set its success flag."""
    FAILURE = "failure"
    """The environment ended the episode without success."""
    DISASTER = "disaster"
    """The environment gave a negative reward: the episode counts as reward 0."""
    STEP_LIMIT = "step_limit"
    """The episode used up all the steps it was allowed."""
    CONTEXT_LIMIT = "context_limit"
    """The conversation no longer fits the model's context."""
    REPEATS = "repeats"
    """The model gave the same reply in the same state so often that the episode was ended; it
    counts as failed.
    """
    TOKEN_LIMIT = "token_limit"
    """The episode used up its tokens, `max_episode_tokens`."""
    TIME_LIMIT = "time_limit"
    """The episode used up its time, `max_episode_seconds`."""


OUT_OF_ROOM = frozenset({StopReason.CONTEXT_LIMIT, StopReason.TOKEN_LIMIT, StopReason.TIME_LIMIT})
"""The reasons for which an episode is cut off, so that it has no end that could be graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The most tokens and seconds of a whole episode, as the fields of recipes say; 0: no limit."""

    tokens: int = 0
    seconds: float = 0.0


NO_LIMITS = EpisodeLimits()


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

    def episode(self, number: int, prefix_length: int = 0) -> str:
        """Return the key of an episode of this instance: `key#number`, with `@prefix_length` if the
        episode continues from `prefix_length` recorded steps.
        """
        return f"{self.key}#{number}" + (f"@{prefix_length}" if prefix_length else "")


class Transition(NamedTuple):
    """What `Environment.step` returns, in Gymnasium's order.

    `reward` is the standing score of the episode after this step, in [0, 1], or negative for a
    disaster. `info` has the key "success" (bool), the environment's own flag; "valid" (bool) from
    an environment that reports whether it accepted the action; and "matched" (str) from one that
    replaces the agent's action with a possible one. "tool_calls" are `ToolCall`s that the step
    made. "question" is a `Question` that a model has to answer before the step is done; see
    `environment.Environment.step`. `info` may have further keys for the log.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool in a step.

    `provider` is the service that answered, if there are several; `key` is the query in normal
    form, so that calls with the same tool, provider and key ask the same. `status` is ok, empty,
    error, timeout, or a word of the tool's own. `output` is the tool's whole result; the
    observation may show less of it.
    """

    tool: str
    provider: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    status: str = "ok"
    milliseconds: float = 0.0
    cached: bool = False
    output: str = ""

    @property
    def identity(self) -> str:
        """A hash that two calls share if and only if they ask the same of the same provider."""
        return fingerprint(self.tool, self.provider, self.parameters, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A grader's result for an episode: `reward` in [0, 1], and whether the episode succeeded."""

    reward: float
    success: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """The grade of an episode, and the grade it had before.

    `answer` is the model's answer that the grade was read from; None if a rule decided.
    """

    grade: Grade
    before: Grade
    answer: Answer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One reply and its results. `action` is what the environment's parser found in `reply`.

    `matched` is the possible action that the environment carried out in place of `action`, which
    may be the same; None from an environment that takes actions as they are. A replay sends
    `action`, which is matched again. `terminated` says that the environment ended the episode, by
    its rules or by a limit of its own. `valid` says whether it accepted the action; None if it does
    not report that. `finish_reason` and `tokenizer` are those of the reply's generation, None for a
    reply that no model gave.
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
    """How many of the oldest exchanges were left out of the reply's prompt, since the whole
    conversation no longer fitted the context; see `transcript.without_exchanges`.
    """
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls that the step made, in order."""
    answers: tuple[Answer, ...] = ()
    """The answers of models of other roles to the environment's questions, in order."""
    summary_of: int | None = None
    """For a step that is a summary (`context: summary`): how many of the trajectory's first steps
    it sums up. Such a step is not sent to the world; it has no action and no observation, and its
    reward is that of the step before. None for a step that acts.
    """
    state_key: str | None = None
    """The key of the state in which the action was taken, from `rollout.state_key`; None for a
    summary, and in an environment that does not report its state.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The steps of one episode. `reward`, in [0, 1], and `success` come from the environment, or
    from its grader once the episode is graded.
    """

    instance: Instance
    first_observation: str
    steps: tuple[Step, ...]
    reward: float
    success: bool
    stop: StopReason

    @classmethod
    def ended(cls, instance: Instance, first_observation: str, steps: Sequence[Step], stop: StopReason) -> Trajectory:
        """Return the trajectory with these steps. Its reward and success are those of the last
        step, or 0 and False without steps.
        """
        return cls(
            instance=instance,
            first_observation=first_observation,
            steps=tuple(steps),
            reward=steps[-1].reward if steps else 0.0,
            success=bool(steps) and steps[-1].success,
            stop=stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """A trajectory that a method made from another one, both named by their ids.

    `operator` is the method's name for the way it was made; `position` is the step at which the
    child departs from the parent, None if it differs as a whole. `prompt_hash` is the hash of the
    prompt of a model that helped make it, or of an inserted hint; empty without either. `seed` is
    the one that the child was made with. `round` is the round of a flywheel, None outside one.
    """

    child: str
    parent: str
    operator: str
    position: int | None = None
    prompt_hash: str = ""
    seed: int | None = None
    round: int | None = None


class Verdict(StrEnum):
    """A judge's verdict on one step."""

    GOOD = "good"
    BAD = "bad"
    UNCERTAIN = "uncertain"
    UNPARSABLE = "unparsable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A step in a tree, or the root (index 0, `parent` -1, `step` None).

    `index` counts nodes in the order of their creation, and a parent's index is below its
    children's. `visits` and `value_sum` are the search statistics; `terminal` says that no further
    expansion is possible here. `dive` is the number of the dive, one descent of the search, that
    made the node. `stop` says why the path ended, None if it did not end at this node.
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
    """A search tree, finished or not. `nodes[i].index == i`; `dives_done` counts completed
    dives.
    """

    instance: Instance
    first_observation: str
    nodes: tuple[Node, ...]
    dives_done: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePath:
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

    good: TreePath
    bad: TreePath
    split: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judge's verdict on node `node`: the majority of its `votes`, each read from one of
    `generations`.

    `votes` and `generations` are empty and the verdict is unparsable for a step that does not fit
    the judge's context even without a log, by the judge's own count of tokens. `seed` is the
    request's; `dropped_steps` counts the oldest steps that were left out of its log to make it fit.
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
        majority = [g for g, vote in zip(self.generations, self.votes, strict=True) if vote is self.verdict]
        return next((generation.text for generation in majority or self.generations), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """A judge's verdict on step number `position` (from 0) of a path, with the judge's whole
    reply.
    """

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


class SampleKind(StrEnum):
    """Where a training sample comes from: the kinds of the shipped methods.

    The list is open: `Sample.kind` is any short word, and a method may have kinds of its own.
    """

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
    """The policy got less reward than the expert."""
    WIN = "win"
    """The policy got more reward than the expert."""
    STEP = "step"
    """The expert and the policy took different steps from the same state, and one of them got more
    reward in the end.
    """
    OWN = "own"
    """The best of the policy's episodes against its worst."""
    TREE = "tree"
    """Two branches that leave one node of a search tree."""
    FILE = "file"
    """A ready pair from a file."""


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
    """Steps of the bad path that were kept, the first error included."""
    good_reward: float | None = None
    bad_reward: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A conversation to train on. Only turns with `train=True` carry loss."""

    kind: str
    """A `SampleKind`, or a kind of its own that the method defines."""
    messages: tuple[Message, ...]
    instance: Instance | None
    provenance: Provenance = Provenance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A better and a worse continuation of the same conversation.

    The untrained turns before the first trained one are the same in both samples, and both end with
    a trained turn. Rewards are those of the whole trajectories, in [0, 1]; None if a file does not
    give them. `dropped` counts the steps that were cut off the end of the rejected side.
    """

    case: PreferenceCase
    chosen: Sample
    rejected: Sample
    chosen_reward: float | None
    rejected_reward: float | None
    dropped: int = 0

    @property
    def margin(self) -> float | None:
        """The chosen side's reward minus the rejected side's; None if either is unknown."""
        if self.chosen_reward is None or self.rejected_reward is None:
            return None
        return self.chosen_reward - self.rejected_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The record of something that was rejected, such as a trajectory by a filter. `subject` is its
    id or key; `reason` is a short slug.
    """

    stage: str
    subject: str
    reason: str
    detail: str = ""
