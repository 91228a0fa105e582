"""The error tree. A message says what went wrong, with which one, and what to do.

    AgentrError
    ├── UserError                     the user's mistake: the command line exits with 2
    │   ├── ConfigError (ValueError)  a recipe, an override or an option
    │   │   └── MissingPart           a package, program or file that a world needs is not here
    │   ├── ModelDirectoryError       a model directory that is missing, incomplete or corrupt
    │   ├── EndpointError             a model server that cannot be used: address, key or name
    │   ├── ModelServerError          a model server of ours that cannot be installed or started
    │   ├── EnvironmentServerError    an environment server that cannot be used: address or content
    │   ├── StoreError                a workspace that cannot be opened
    │   │   ├── CorruptStore          the database file is damaged
    │   │   └── StoreBusy (Transient) another process holds the workspace
    │   ├── SandboxError              the Python tool cannot be confined as strictly as asked
    │   ├── RunBusy                   another process is working on this run
    │   ├── DiskError                 a file that cannot be written: a full disk, a missing folder
    │   └── DataFileError             a data file that is missing or malformed
    ├── EnvironmentFault              the environment broke (never: an agent's invalid action)
    │   ├── EnvironmentUnavailable (Transient)
    │   │   └── EnvironmentTimeout    it gave no answer in time
    │   ├── EnvironmentRefusal        a server answered with an error: an unknown id, a crash
    │   ├── MalformedAnswer (Transient) a server's answer that is not what its contract says
    │   ├── IllTypedAnswer            what a world returned is of a wrong type, or out of its range
    │   └── ReplayDiverged            replaying recorded actions gave another observation
    │       └── ReplayDrifted (Transient) in a world that does not promise to repeat itself
    ├── ModelFault                    the model's backend broke
    │   ├── ModelUnavailable (Transient)
    │   ├── MalformedReply (Transient) a server's answer that is cut, not JSON, or empty
    │   ├── RequestTooLong            a server refused conversation and reply as too long
    │   └── PromptTooLong             a conversation that leaves no room for a reply
    ├── DataFault                     a broken rule of the data: leakage, an empty or wrong mask
    ├── TrainingFault                 a trainer ended without a usable checkpoint
    │   ├── NonFiniteLoss
    │   └── OutOfMemory
    ├── AlarmRaised                   an alarm at which the recipe ends a run
    ├── ServerLost                    the server of the flows no longer answers
    ├── ArmsFailed                    a comparison lacks some arms, which could not be made
    ├── WorkerLost (Transient)        one worker after another was lost at a shard, or all at once
    └── ErrorBudgetSpent              a stage met more episode errors than its recipe allows

`Transient` marks errors that may pass by themselves: Prefect tasks retry these and no others. To
add a class: inherit from the right branch (and the matching builtin), keep it picklable with a
message as its only argument, and list it above.
"""

from __future__ import annotations

from typing import Self


class Transient(Exception):
    """Marks an error that may pass by itself; what failed is tried again with back-off."""


class AgentrError(Exception):
    """Base of all errors raised on purpose."""


class UserError(AgentrError):
    """The user's mistake; the command line answers with this one sentence and exits with 2."""


class ConfigError(UserError, ValueError):
    """A recipe, an override or a command-line option is wrong."""


class MissingPart(ConfigError):
    """Something that an environment needs is not on this machine."""


class ModelDirectoryError(UserError):
    """A model directory is missing, incomplete or corrupt."""


class EndpointError(UserError):
    """A model server cannot be used: its address, the key, the model's name or the account is
    wrong.
    """


class ModelServerError(UserError):
    """A model server of ours cannot be installed or started."""


class EnvironmentServerError(UserError):
    """An environment server cannot be used: its address is wrong, or it serves something else."""


class StoreError(UserError):
    """A workspace cannot be opened."""


class CorruptStore(StoreError):
    """The database file of a workspace is damaged."""


class StoreBusy(StoreError, Transient):
    """Another process has held the workspace for longer than we wait."""


class SandboxError(UserError):
    """The Python tool's code cannot be confined here as strictly as asked, so it does not run."""


class RunBusy(UserError):
    """Another process is working on this run; two would do the same work twice."""


class DiskError(UserError):
    """A file cannot be written."""


class DataFileError(UserError):
    """A data file is missing or malformed."""


class EnvironmentFault(AgentrError):
    """An environment broke."""


class EnvironmentUnavailable(EnvironmentFault, Transient):
    """An environment cannot be reached."""


class EnvironmentTimeout(EnvironmentUnavailable):
    """An environment, or a tool in it, gave no answer in time."""


class EnvironmentRefusal(EnvironmentFault):
    """An environment server answered with an error."""


class MalformedAnswer(EnvironmentFault, Transient):
    """An environment server's answer is not what its contract says."""


class IllTypedAnswer(EnvironmentFault):
    """An environment returned a value of a wrong type or out of range."""


class ReplayDiverged(EnvironmentFault):
    """Replaying recorded actions gave an observation that differs from the recorded one."""


class ReplayDrifted(ReplayDiverged, Transient):
    """An environment that does not promise to repeat itself did not do so; a new try of the episode
    may succeed.
    """


class ModelFault(AgentrError):
    """A model's backend broke."""


class ModelUnavailable(ModelFault, Transient):
    """A model's backend cannot be reached."""


class MalformedReply(ModelFault, Transient):
    """A model server's answer is cut off, does not follow the protocol, is empty, or has the wrong
    number of replies.
    """


class RequestTooLong(ModelFault):
    """A server refuses a request, because conversation and reply limit together are too long; a
    shorter reply may fit.
    """


class PromptTooLong(ModelFault):
    """A conversation leaves no room for a reply, by the token count of the model or its server.

    `tokens` and `context_length` are 0 where only the server knows them.
    """

    tokens = 0
    context_length = 0

    @classmethod
    def counted(cls, tokens: int, context_length: int, model: str) -> Self:
        """Return the error for a prompt whose tokens were counted before it was sent."""
        error = cls(
            f"a prompt of {tokens} tokens leaves no room for a reply in the context of {context_length} of {model}"
        )
        error.tokens, error.context_length = tokens, context_length
        return error


class DataFault(AgentrError):
    """A rule of the data is broken."""


class TrainingFault(AgentrError):
    """A trainer ended without a usable checkpoint."""


class NonFiniteLoss(TrainingFault):
    """The loss became NaN or infinite."""


class OutOfMemory(TrainingFault):
    """The trainer ran out of memory."""


class AlarmRaised(AgentrError):
    """An alarm fired at which the recipe ends a run."""


class WorkerLost(AgentrError, Transient):
    """A cluster lost one worker after another at the same shard, or was lost itself."""


class ServerLost(AgentrError):
    """The server that keeps the state of flows no longer answers."""


class ArmsFailed(AgentrError):
    """Some arms of a comparison could not be made; the others were."""


class ErrorBudgetSpent(AgentrError):
    """A stage had more episode errors than its recipe allows."""
