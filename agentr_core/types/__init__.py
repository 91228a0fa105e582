"""The domain types, as frozen records; this docstring is the glossary.

instance    one problem of an environment: (environment, split, index).
task        only ever a Prefect task.
step        one reply of the model, with its action, observation and reward.
trajectory  the steps of one episode, with its final reward and the reason it stopped.
node        a step in a search tree, with the statistics of the search.
reward      comes from the environment, in [0, 1].
value       a backed-up mean of rewards in a search tree, in [0, 1].
score       an aggregate over the episodes of an evaluation.
verdict     a judge's word on one step: good, bad, uncertain; or unparsable.
critique    the verdicts on one bad path, and where its first error is.
transcript  how the steps of an episode become a conversation: a property of a world.
span        a part of an assistant turn that was grown by continuation.
sample      messages with a train flag each: what fine-tuning sees.
preference  two samples that continue one conversation, the chosen one better than the other.
recipe      one configuration file; run: one execution of it; iteration: one turn of its wheel.
comparison  a run whose samples are the pool of its arms: several seeds each, an equal budget.
arm         a way of learning: what it takes from the pool, and how it trains on that.
"""

from agentr_core.types.conversation import FinishReason, Message, Role, Span, grown_turn
from agentr_core.types.episodes import (
    NO_LIMITS,
    OUT_OF_ROOM,
    Derivation,
    EpisodeLimits,
    Grade,
    Grading,
    Instance,
    Step,
    StopReason,
    ToolCall,
    Trajectory,
    Transition,
)
from agentr_core.types.generation import Answer, Generation, Question, Request, Sampling
from agentr_core.types.samples import Preference, PreferenceCase, Provenance, Rejection, Sample, SampleKind
from agentr_core.types.trees import Critique, Judgement, Node, Path, PathPair, StepVerdict, Tree, Verdict

__all__ = [
    "NO_LIMITS",
    "OUT_OF_ROOM",
    "Answer",
    "Critique",
    "Derivation",
    "EpisodeLimits",
    "FinishReason",
    "Generation",
    "Grade",
    "Grading",
    "Instance",
    "Judgement",
    "Message",
    "Node",
    "Path",
    "PathPair",
    "Preference",
    "PreferenceCase",
    "Provenance",
    "Question",
    "Rejection",
    "Request",
    "Role",
    "Sample",
    "SampleKind",
    "Sampling",
    "Span",
    "Step",
    "StepVerdict",
    "StopReason",
    "ToolCall",
    "Trajectory",
    "Transition",
    "Tree",
    "Verdict",
    "grown_turn",
]
