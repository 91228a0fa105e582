"""The job of a training, its reports while it runs, and the folder of its unfinished work."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, TypeAdapter

from agentr_core.environment import Environment
from agentr_core.fingerprint import fingerprint, later_field, omitted_fields
from agentr_core.recipes.alarms import AlarmsConfig, Crossing
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.types import Trajectory

# The objectives that a training minimises, as records with a name, the kind of data and the
# settings of each.
#
# They import neither torch nor TRL; `training.run` chooses the trainer of a `TrainingJob`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """A quantity that a training minimises. `kind` is the tag that identifies it in files; the
    other fields are its settings.
    """

    kind: str
    row_type: ClassVar[Literal["samples", "pairs", "episodes"]]
    """What its data consists of."""

    @property
    def settings(self) -> dict[str, Any]:
        """The objective's settings by name: part of the id of a checkpoint, and stored with it.
        Fields that were added later are left out while they have their default.
        """
        excluded_names = {"kind"} | omitted_fields(self)
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in excluded_names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised(Objective):
    """Supervised fine-tuning: the mean cross-entropy, in nats, of the labelled tokens of
    samples.
    """

    kind: Literal["sft"] = "sft"
    row_type: ClassVar[Literal["samples"]] = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """The loss of preference training; fields are named as in TRL. The reference is the model that
    the training starts from.
    """

    beta: float
    loss_type: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0
    ld_alpha: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference(Objective):
    """Preference training: direct preference optimisation (arXiv 2305.18290) and its variants."""

    kind: Literal["dpo"] = "dpo"
    row_type: ClassVar[Literal["pairs"]] = "pairs"
    preference: PreferenceLoss


class GroupReward(Protocol):
    """A replacement for the episodes' own rewards within a group. Its implementations are records,
    since they are part of the id of a checkpoint.
    """

    def rewards(self, group: Sequence[Trajectory], *, step: int, steps: int, env: Environment) -> list[float]:
        """Return the reward to use for each episode of a group, in order, in step `step` of 1 to
        `steps`; `env` is the environment of the group's instance.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(Objective):
    """Group-relative policy optimisation on episodes that are sampled during training: samplers get
    the policy's weights after each step.
    """

    kind: Literal["grpo"] = "grpo"
    row_type: ClassVar[Literal["episodes"]] = "episodes"
    grpo: GrpoConfig
    reward: GroupReward | None = later_field(None)  # noqa: RUF009
    """Computes the rewards that are compared within a group; None: use those that the environment,
    or its grader, gave.
    """


Trainable = Annotated[Supervised | Preference, Field(discriminator="kind")]
"""Every objective that a `TrainingJob` may have, told apart by `kind` in its file. `GroupRelative`,
which samples while it trains, belongs to an `OnlineJob` instead.
"""


VERSION = 1
"""Increase this when the code changes so that the same job would give other weights."""
LESS_MEMORY_HINT = (
    "set training.gradient_checkpointing=true, or lower training.per_device_train_batch_size (and raise "
    "gradient_accumulation_steps) or data.max_length"
)
"""What a user can do when a fine-tuning runs out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(ABC):
    """The common part of all trainings: a model to start from, settings, and a place for the
    checkpoint.

    `output_dir` is where the finished checkpoint appears, all at once. `seed` is in [0, 2**31).
    `parent` is the id of the model in `model_dir`: a hash of its content or, if it was trained on
    data that it sampled itself, of that training's inputs. `parent_weights` is the hash of its
    weights. `iteration` is the id of the iteration that trains.
    """

    model_dir: Path
    output_dir: Path
    config: TrainingConfig
    seed: int
    parent: str
    parent_weights: str = ""
    iteration: str = ""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The id of everything that determines the weights: inputs by content, settings, seed and
        the version of this code.
        """

    @property
    def logger_folder(self) -> Path:
        """The folder for loggers that write files, such as TensorBoard: beside the output. Training
        never removes it.
        """
        return self.output_dir.with_name(f"{self.output_dir.name}.logs")

    @property
    def work_folder(self) -> WorkFolder:
        """The folder of this job's unfinished work: next to the output, on the same file system."""
        return WorkFolder(self.output_dir.with_name(f".{self.output_dir.name}.{self.fingerprint}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(Job):
    """One fine-tuning on a dataset, with every setting resolved.

    `dataset_file` is a .parquet, .arrow or .feather file with the columns that the objective reads,
    and `dataset_hash` identifies it by its content. `num_train_epochs` is the number of passes over
    it; `config.ended_by` says whether that or another limit ends the training. `checkpoint_every`
    is in optimizer steps: an interrupted training loses at most that many.
    """

    dataset_file: Path
    num_train_epochs: float
    dataset_hash: str
    checkpoint_every: int = 50
    objective: Trainable = field(default_factory=Supervised)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """Thresholds that are watched during training; they are not part of the fingerprint."""

    @property
    def fingerprint(self) -> str:
        """The id of everything that determines the weights: inputs by content, settings, seed and
        the version of this code.
        """
        return fingerprint(
            self.objective.kind,
            *self.objective.settings.values(),
            VERSION,
            self.parent,
            self.dataset_hash,
            self.config.without_addresses(),
            self.num_train_epochs,
            self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob(Job):
    """One training whose data is sampled while it runs.

    `experience` is the id of the source of that data: the iteration of a run, with its environment
    and instances.
    """

    objective: GroupRelative
    experience: str

    @property
    def fingerprint(self) -> str:
        """The id of everything that determines the weights: the source of its experience, settings,
        seed and the version of this code.
        """
        return fingerprint(
            self.objective.kind,
            *self.objective.settings.values(),
            VERSION,
            self.parent,
            self.experience,
            self.config.without_addresses(),
            self.seed,
        )


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """The files of an unfinished training."""

    root: Path

    @property
    def job_file(self) -> Path:
        """The file with the job, which the trainer's process reads."""
        return self.root / "job.json"

    @property
    def log_file(self) -> Path:
        """The standard output and error of the trainer's process, over all attempts."""
        return self.root / "trainer.log"

    @property
    def lock_file(self) -> Path:
        """The file that the trainer's process locks while it lives; it contains the process id."""
        return self.root / "lock"

    @property
    def checkpoints(self) -> Path:
        """The intermediate checkpoints of the Hugging Face Trainer."""
        return self.root / "checkpoints"

    @property
    def reference_dataset(self) -> Path:
        """The folder of the tokenised pairs, beside which TRL keeps the reference model's
        log-probabilities of them for later attempts.
        """
        return self.root / "references"

    @property
    def staging(self) -> Path:
        """The finished checkpoint while it is being written."""
        return self.root / "staging"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The progress of a training after an optimizer step.

    `loss` is the mean over that step's trained tokens, in nats, or over its pairs. `trained_tokens`
    counts all tokens that carried loss up to here. `seconds` is the time spent in training,
    including earlier attempts up to their checkpoint. `total_steps` is an estimate if time is the
    budget. `learning_rate` is that of the step, `grad_norm` the norm of its gradient before
    clipping; both are None in histories of earlier versions, and where nothing was trained.
    `scores` are the other metrics of preference training: means over the pairs of the step.
    """

    step: int
    total_steps: int
    loss: float
    trained_tokens: int
    seconds: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The reason why the trainer's process gave up: `kind` is the name of a class in
    `agentr_core.errors`.
    """

    kind: str
    message: str


Report = TrainingStep | Crossing
"""What a training reports while it runs: each step, and the alarm thresholds that a step has
crossed.
"""
Event = Report | Fault
JOB: TypeAdapter[TrainingJob] = TypeAdapter(TrainingJob)
STEP: TypeAdapter[TrainingStep] = TypeAdapter(TrainingStep)
EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new, even after a crash."""
    temporary = file.with_name(f".{file.name}.new")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
