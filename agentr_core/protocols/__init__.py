"""The interfaces of the system: an environment to act in, a transcript that makes its steps a
conversation, and a chat model that acts.
"""

from agentr_core.protocols.abilities import (
    Asking,
    Calling,
    Deriving,
    Graded,
    Grader,
    Identifying,
    Keeping,
    Kept,
    Labelled,
    Labels,
    Limited,
    Listening,
    Oracle,
    Relaying,
    Resuming,
    Sandboxed,
    Served,
    Stateful,
    Undelivered,
)
from agentr_core.protocols.environment import Dividing, Environment, Toolbox, Transcript
from agentr_core.protocols.model import Abandoning, Caching, ChatModel, Estimating, Reloading, Starting

__all__ = [
    "Abandoning",
    "Asking",
    "Caching",
    "Calling",
    "ChatModel",
    "Deriving",
    "Dividing",
    "Environment",
    "Estimating",
    "Graded",
    "Grader",
    "Identifying",
    "Keeping",
    "Kept",
    "Labelled",
    "Labels",
    "Limited",
    "Listening",
    "Oracle",
    "Relaying",
    "Reloading",
    "Resuming",
    "Sandboxed",
    "Served",
    "Starting",
    "Stateful",
    "Toolbox",
    "Transcript",
    "Undelivered",
]
