"""TRL's DPOTrainer on token pairs: the loss applies to the replies of both sides, and to nothing
else.

TRL masks only the prompt, so observations between two replies would count as text of the agent. Its
loss reads a mask with one flag for each token, however, and here that is the mask of the labels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars, load_from_disk
from trl import DPOConfig, DPOTrainer

from agentr_core.errors import NonFiniteLoss
from agentr_core.samples.identity import IGNORED
from agentr_core.training.job import Preference, Report, TrainingJob
from agentr_core.training.packing import Plan, TokenPair, TokenRow, padded_length
from agentr_core.training.parent import Parent
from agentr_core.training.planned import FollowsPlan, MarkSaved, plain_arguments


class PlannedDPOTrainer(FollowsPlan, DPOTrainer):  # type: ignore[misc]
    """A DPOTrainer that follows a `Plan` over rows of token ids.

    The loss of a step is the mean over its pairs; if the last batch of a training is not full, its
    pairs weigh more.
    """

    def _watched(self, entry: dict[str, float]) -> dict[str, float | None]:
        objective, reward = self._job.objective, entry.get("rewards/chosen")
        assert isinstance(objective, Preference)
        fell = None if reward is None else -reward / objective.preference.beta
        return {**super()._watched(entry), "chosen_drop": fell}

    def training_step(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Return the loss of one batch, its gradients added to those of the step. Raises
        `NonFiniteLoss`.
        """
        loss: torch.Tensor = super().training_step(*inputs, **options)
        self.check_finite(self.model, loss)
        return loss

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        # TRL's own method would render and tokenise texts, with a mask of its own.
        return dataset


def make_trainer(
    job: TrainingJob,
    plan: Plan,
    rows: Sequence[TokenPair],
    *,
    parent: Parent,
    settings: Any,
    tell: Callable[[Report], None],
) -> PlannedDPOTrainer:
    """Return the trainer of a job; `settings` are its `arguments`. This computes the
    log-probabilities of the reference.

    The reference is the model that training starts from: without adapters if training adds new
    ones, or with a copy of those that it starts with. Raises `NonFiniteLoss`.
    """
    disable_progress_bars()
    assert isinstance(job.objective, Preference)
    # A dataset with files of its own: TRL keeps what it computes from them beside these.
    folder = job.work.references
    with PartialState().main_process_first():
        if not folder.exists():
            draft = folder.with_suffix(".new")
            columns = {
                f"{side}_{name}": [list(getattr(getattr(row, side), name)) for row in rows]
                for side in SIDES
                for name in TokenRow._fields
            }
            Dataset.from_dict(columns).save_to_disk(draft)
            draft.replace(folder)
    trainer = PlannedDPOTrainer(
        job=job,
        plan=plan,
        tell=tell,
        model=parent.model,
        args=settings,
        data_collator=collate,
        train_dataset=load_from_disk(folder),
        processing_class=parent.tokenizer,
        peft_config=parent.lora,
        callbacks=[MarkSaved()],
    )
    if not all(np.isfinite(trainer.train_dataset[f"ref_{side}_logps"]).all() for side in SIDES):
        # A later try computes them again.
        if PartialState().is_main_process:
            shutil.rmtree(job.work.references)
        raise NonFiniteLoss(
            "the log-probabilities of the reference are NaN or infinite; look at the weights of the model that "
            "training starts from, or set training.bf16=false"
        )
    trainer.train_dataset = trainer.train_dataset.select([row for step in plan.steps for row in step])
    return trainer


def arguments(job: TrainingJob, *, steps: int) -> Any:
    """Return the Trainer's arguments for a job of `steps` optimizer steps; see
    `planned.plain_arguments`.
    """
    assert isinstance(job.objective, Preference)
    loss = job.objective.preference
    common = plain_arguments(job, steps=steps)
    return DPOConfig(
        **common,
        per_device_train_batch_size=job.config.per_device_train_batch_size,
        gradient_accumulation_steps=job.config.gradient_accumulation_steps,
        max_length=None,
        precompute_ref_log_probs=True,
        beta=loss.beta,
        loss_type=list(loss.loss_type),
        loss_weights=list(loss.loss_weights) or None,
        label_smoothing=loss.label_smoothing,
        ld_alpha=loss.ld_alpha,
    )


def collate(batch: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the batch that TRL's loss reads: first the chosen rows, then the rejected ones, padded
    to one of a few lengths.

    `completion_mask` has a 1 for each token that carries loss.
    """
    rows = [TokenRow(pair[f"{side}_input_ids"], pair[f"{side}_labels"]) for side in SIDES for pair in batch]
    length = padded_length(max(len(row.labels) for row in rows))

    def filled(values: Sequence[int]) -> list[int]:
        return [*values, *[0] * (length - len(values))]

    tensors = {
        "input_ids": torch.tensor([filled(row.input_ids) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row.labels)) for row in rows]),
        # The first token has nothing before it from which to predict it.
        "completion_mask": torch.tensor([filled([0, *(label != IGNORED for label in row.labels[1:])]) for row in rows]),
    }
    for side in SIDES:
        if f"ref_{side}_logps" in batch[0]:
            tensors[f"ref_{side}_logps"] = torch.tensor([pair[f"ref_{side}_logps"] for pair in batch])
    return tensors


SIDES = ("chosen", "rejected")
