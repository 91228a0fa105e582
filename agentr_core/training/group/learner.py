"""Training of a policy: AdamW, a schedule, and updates on episodes."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.optimization import get_scheduler

from agentr_core.errors import NonFiniteLoss
from agentr_core.recipes import GrpoConfig, TrainingConfig
from agentr_core.training.group.helpers import Helpers, result, shared_out
from agentr_core.training.group.loss import token_weights
from agentr_core.training.group.policy import Policy, Totals
from agentr_core.training.group.rows import PolicyRow


class Learner:
    """A policy with its optimizer. Not thread-safe; `close` it.

    Args:
        updates: the number of updates in the schedule.
        most: the most sampled tokens that an episode may have.
        folder: for files that are exchanged with other processes, ideally in memory.
        seed: for the initialisation of new adapters.

    Raises `ModelDirectoryError` if the model cannot be loaded.
    """

    def __init__(
        self,
        model_dir: Path,
        training: TrainingConfig,
        grpo: GrpoConfig,
        *,
        updates: int,
        most: int,
        folder: Path,
        seed: int = 0,
    ) -> None:
        self.policy = Policy(model_dir, training, grpo, seed=seed)
        # With a GPU, each process would put its policy on the first one, beside the sampler.
        self._processes = 1 if torch.cuda.is_available() else training.num_processes
        self._helpers = Helpers(self._processes - 1, model_dir, training, grpo, folder)
        self._training, self._grpo, self._most = training, grpo, most
        self._parameters = self.policy.parameters
        # As in the Trainer, norms and biases do not decay.
        groups = [
            {"params": [p for p in self._parameters.values() if p.ndim > 1], "weight_decay": training.weight_decay},
            {"params": [p for p in self._parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=training.learning_rate)
        self._schedule = get_scheduler(
            training.lr_scheduler_type,
            self._optimizer,
            num_warmup_steps=math.ceil(updates * training.warmup_ratio),
            num_training_steps=updates,
            scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._schedule.get_last_lr()[0])

    def settled(self, rows: Sequence[PolicyRow]) -> list[PolicyRow]:
        """Return episodes that the current weights sampled, as `Policy.settled` does; in bfloat16,
        where policy and sampler differ by more than rounding, return them unchanged.
        """
        if self._training.bf16 is True:
            return list(rows)
        shares = shared_out([len(row.input_ids) for row in rows], self._processes)
        own, *others = [[rows[index] for index in share] for share in shares]
        started = self._helpers.settle(others, self._parameters) if others else []
        parts = [self.policy.settled(own), *(result(future) for future in started)]
        settled = list(rows)
        for share, part in zip(shares, parts, strict=True):
            for index, row in zip(share, part, strict=True):
                settled[index] = row
        return settled

    def update(self, rows: Sequence[PolicyRow]) -> Totals:
        """Take one optimizer step on episodes, and return what was measured.

        Raises `NonFiniteLoss` before any weight is changed.
        """
        self._optimizer.zero_grad(set_to_none=True)
        totals = self._gradient(rows)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._training.max_grad_norm).item()
        if not (math.isfinite(totals.loss) and math.isfinite(norm)):
            raise NonFiniteLoss(
                f"an update has loss {totals.loss} and gradient norm {norm}; lower training.learning_rate (it is "
                f"{self._training.learning_rate})"
            )
        self._optimizer.step()
        self._schedule.step()
        totals += Totals(updates=1, norm=norm)
        return totals

    def skip(self, updates: int) -> None:
        """Move on in the schedule by updates that were planned and had nothing to train on."""
        self._optimizer.zero_grad(set_to_none=True)
        for _ in range(updates):
            # Without a gradient no weight and no state changes, and PyTorch warns of a schedule
            # that goes on without its optimizer.
            self._optimizer.step()
            self._schedule.step()

    def write_weights(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write all weights by name as safetensors, each once, in the number format of the samplers
        that load them.
        """
        save_file(self.policy.weights(dtype), file)

    def state(self) -> dict[str, Any]:
        """Return everything that the next update depends on, as tensors and plain values."""
        return {
            "model": self.policy.state(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to an earlier state of the same training."""
        self.policy.restore(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def close(self) -> None:
        """End the helper processes and give the memory of a GPU back, which a later training of the
        run needs. The policy is gone afterwards.
        """
        self._helpers.close()
        if torch.cuda.is_available():
            del self.policy, self._optimizer, self._schedule, self._parameters
            gc.collect()
            torch.cuda.empty_cache()

    def _gradient(self, rows: Sequence[PolicyRow]) -> Totals:
        weights = token_weights(
            [len(row.positions) for row in rows],
            wholes=[row.episode_tokens for row in rows],
            loss_type=self._grpo.loss_type,
            most=self._most,
        )
        own, *others = [
            ([rows[index] for index in share], [weights[index] for index in share])
            for share in shared_out([len(row.input_ids) for row in rows], self._processes)
        ]
        started = self._helpers.start(others, self._parameters) if others else []
        totals = self.policy.accumulate(*own)
        for more in self._helpers.collect(started, self._parameters):
            totals += more
        return totals
