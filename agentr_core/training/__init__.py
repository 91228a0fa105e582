"""Fine-tuning in a process of its own, with checkpoints that are published all at once."""

from agentr_core.training.checkpoints import Manifest, is_complete, publish, read_history, read_manifest
from agentr_core.training.job import TrainingJob, TrainingStep
from agentr_core.training.objectives import Preference, PreferenceLoss, Supervised
from agentr_core.training.sft import train

__all__ = [
    "Manifest",
    "Preference",
    "PreferenceLoss",
    "Supervised",
    "TrainingJob",
    "TrainingStep",
    "is_complete",
    "publish",
    "read_history",
    "read_manifest",
    "train",
]
