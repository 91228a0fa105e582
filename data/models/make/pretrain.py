"""Make a tiny base model: tokenizer, random weights, one pass over generated samples.

    python data/models/make/pretrain.py data/models/make/textcraft-tiny.yaml runs/models/textcraft

Ctrl-C, or SIGTERM, saves a checkpoint in the folder TARGET.work after the current step; the same
command then goes on from there. The directory appears when the model is complete, and its
`recipe.json` says what it was made with.

The learning rate is constant in the first half of the training and falls to 0 in the second, so a
run with fewer tokens is a prefix of a longer one up to its own decay: a longer run's checkpoint can
be finished early.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from base_settings import SETTINGS, BaseConfig, QuestionsConfig, load
from base_tokenizers import build_question_tokenizer, build_tokenizer
from crafting_samples import Curriculum
from question_samples import Questions
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from agentr_core.environments.crafting.game import INSTRUCTION
from agentr_core.errors import ConfigError, TrainingFault
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION
from agentr_core.methods.agent_r.splice import ACKNOWLEDGEMENT, ACTION, REFLECTIONS
from agentr_core.models.checkpoint_dir import read_json
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.samples.rendering import RenderedSample, Renderer
from agentr_core.system import keep_freed_memory
from agentr_core.training.attention import register
from agentr_core.training.run import use_threads
from agentr_core.training.worker import hold_lock
from agentr_core.types import Sample

RECORD = "recipe.json"
"""The file of a model's directory that says what it was made with."""
LENGTHS = (192, 256, 320, 448, 640, 896, 1280, 2048)
"""Batches have few shapes: every new one would make the CPU compile new kernels."""
TOKENIZER_SAMPLES = 5000
TOKENIZER_QUESTIONS = 4
"""Questions in each universe that the tokenizer is trained on."""
SHORT = (64, 96, 128)
"""Lengths of batches besides those of `LENGTHS`: an episode with a guessed answer is short."""
DECAY_SHARE = 0.5


def make_stream(config: BaseConfig, seed: int) -> Iterable[Sample]:
    """Return the stream of samples that the base model learns from."""
    if config.questions is not None:
        return Questions(config.questions, seed)
    return Curriculum(config, seed)


def make_tokenizer(config: BaseConfig, seed: int) -> Any:
    """Return the tokenizer of the base model: its phrases are those of the curriculum's first
    samples.
    """
    if config.questions is not None:
        return _question_tokenizer(config.questions, seed)
    # Drills lack most of what a model has to say.
    curriculum = Curriculum(replace(config, drills=0), seed)
    samples = itertools.islice(curriculum, TOKENIZER_SAMPLES)
    numbers = "".join(f" {number} , {number}" for number in range(129))
    revision = f"\nAction: {ACTION}\nCould not execute {ACTION}\n{ACKNOWLEDGEMENT}"
    texts = itertools.chain([numbers, revision], curriculum.name_texts(), (m.text for s in samples for m in s.messages))
    reflections = (f" {sentence}" for sentence in REFLECTIONS)
    return build_tokenizer(texts, wholes=(INSTRUCTION, JUDGE_INSTRUCTION, *reflections))


def _question_tokenizer(config: QuestionsConfig, seed: int) -> Any:
    # Samples without habits lack some of what a model has to say, and few universes have few names.
    questions = Questions(replace(config, plain=0, questions=TOKENIZER_QUESTIONS), seed)
    samples = itertools.islice(questions, config.tokenizer_samples)
    texts = (part.text for sample in samples for message in sample.messages[1:] for part in message.parts)
    return build_question_tokenizer(texts, whole=questions.instruction, vocabulary=config.vocabulary)


def make_model(config: BaseConfig, tokenizer: Any, seed: int) -> Any:
    """Return a Qwen3 decoder with random weights, in which layers that see a few tokens alternate
    with layers that see all of them.

    Copying what a command says takes a layer that gathers the last words and a later one that finds
    where they occurred. If all layers see everything, the first of the two emerges tens of millions
    of tokens later (deployments/LOG.md).
    """
    heads = config.hidden_size // config.head_dim
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            # No extra rows: an engine that knows nothing of the tokenizer would sample ids without
            # a token.
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads or heads,
            head_dim=config.head_dim,
            use_sliding_window=True,
            sliding_window=config.sliding_window,
            layer_types=[
                "full_attention" if number % 2 else "sliding_attention" for number in range(config.num_hidden_layers)
            ],
            max_position_embeddings=config.max_position_embeddings,
            # The published model does not keep it.
            attn_implementation=register(),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class FullPrecisionMuon(torch.optim.Muon):
    """Torch's Muon with its Newton-Schulz iteration in the precision of the gradients.

    Torch casts every matrix to bfloat16, and a processor without bfloat16 then spends most of a
    training step in the optimizer (deployments/LOG.md).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; a closure is not supported."""
        if closure is not None:
            raise ValueError("FullPrecisionMuon takes no closure")
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                average = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(average, group["momentum"]) if group["nesterov"] else average
                update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                taller = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * taller)


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return a matrix of the same shape and singular vectors, with singular values near 1: the
    quintic Newton-Schulz iteration of Muon (Jordan et al., 2024).
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    found: torch.Tensor = matrix.mT if tall else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.mT if tall else found


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step as one: Muon (matrices of the layers) and AdamW (embeddings, norms).

    Args:
        model: all its parameters that need a gradient are optimised.
        learning_rate: of Muon; an update is an orthogonal matrix times this, so the scale is not
            AdamW's.
        embedding_learning_rate: of AdamW.
        bf16: whether Muon computes in bfloat16, as Torch's does, or in the gradients' precision.
    """

    def __init__(
        self, model: torch.nn.Module, *, learning_rate: float, embedding_learning_rate: float, bf16: bool
    ) -> None:
        muon = torch.optim.Muon if bf16 else FullPrecisionMuon
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            in_layers = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if in_layers else others).append(parameter)
        super().__init__([*matrices, *others], {})
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": muon(matrices, lr=learning_rate, momentum=0.95, weight_decay=0.01),
            "adamw": torch.optim.AdamW(others, lr=embedding_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        }
        # The same group objects as the parts': a scheduler that sets a learning rate here sets it
        # there.
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter once; a closure is not supported."""
        if closure is not None:
            raise ValueError("MuonWithAdamW takes no closure")
        for part in self._parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both parts by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both parts."""
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]


def batches(
    rows: Iterable[RenderedSample], *, batch_tokens: int, pad: int, lengths: Sequence[int] = LENGTHS
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield right-padded batches of about `batch_tokens` tokens, each of rows of one length; rows
    that are too long are left out.

    Causal attention never looks ahead, so padding at the end needs no attention mask.
    Shapes: `input_ids` and `labels` are (B, L), with L in `lengths` and B = batch_tokens // L.
    """
    waiting: dict[int, list[RenderedSample]] = {length: [] for length in lengths}
    for row in rows:
        length = next((length for length in lengths if length >= len(row.input_ids)), None)
        if length is None:
            continue
        bucket = waiting[length]
        bucket.append(row)
        if len(bucket) == max(1, batch_tokens // length):
            yield {
                "input_ids": torch.tensor([[*r.input_ids, *[pad] * (length - len(r.input_ids))] for r in bucket]),
                "labels": torch.tensor([[*r.labels, *[IGNORE_INDEX] * (length - len(r.labels))] for r in bucket]),
            }
            bucket.clear()


class CurriculumBatches(IterableDataset[dict[str, torch.Tensor]]):
    """The batches of the curriculum, one for each step.

    The stream is finite, so that the process that makes it is done before the trainer ends it.
    """

    def __init__(self, config: BaseConfig, tokenizer: Any, seed: int, steps: int) -> None:
        self._config = config
        self._steps = steps
        self._tokenizer = tokenizer
        self._seed = seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches from the first one on."""
        renderer = Renderer(self._tokenizer)
        rows = (renderer.render_sample(sample.messages) for sample in make_stream(self._config, self._seed))
        lengths = (*SHORT, *LENGTHS) if self._config.questions is not None else LENGTHS
        endless = batches(
            rows, batch_tokens=self._config.batch_tokens, pad=self._tokenizer.pad_token_id, lengths=lengths
        )
        return itertools.islice(endless, self._steps)


class BaseTrainer(Trainer):  # type: ignore[misc]
    """A trainer whose output layer sees only the positions that carry loss: the others would cost a
    third of a step.
    """

    def get_train_dataloader(self) -> Any:
        """Return the loader of batches, which a separate process makes in the background.

        That process is spawned: a forked one would hold locks of threads that it does not have, and
        would run the exit handlers of this process.
        """
        loader = DataLoader(
            self.train_dataset,
            batch_size=1,
            collate_fn=self.data_collator,
            num_workers=1,
            multiprocessing_context="spawn",
            worker_init_fn=_uninterrupted,
        )
        return self.accelerator.prepare(loader)

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **_: Any
    ) -> torch.Tensor:
        """Return the mean cross-entropy of the trained tokens."""
        targets = inputs["labels"][:, 1:]
        trained = targets != IGNORE_INDEX
        decoder = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():
            hidden = decoder.model(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state[:, :-1][trained]
            logits = decoder.lm_head(hidden)
        return torch.nn.functional.cross_entropy(logits.float(), targets[trained])


def pretrain(config: BaseConfig, *, seed: int, work: Path, callbacks: list[Any]) -> tuple[Any, Any]:
    """Train the model, after an interruption from the last checkpoint in the folder `work`; return
    (model, tokenizer).
    """
    use_threads(config.num_threads)
    tokenizer = make_tokenizer(config, seed)
    model = make_model(config, tokenizer, seed)
    steps = config.tokens // config.batch_tokens
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=config.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int(steps * DECAY_SHARE)},
        warmup_steps=config.warmup_steps,
        max_grad_norm=1.0,
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=20,
        save_steps=200,
        save_total_limit=30,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    trainer = BaseTrainer(
        model=model,
        args=arguments,
        optimizers=(_optimizer(config, model), None),
        train_dataset=CurriculumBatches(config, tokenizer, seed, steps),
        data_collator=_only,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    has_checkpoint = any(work.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=has_checkpoint or None)
    return trainer.model, tokenizer


def _optimizer(config: BaseConfig, model: Any) -> MuonWithAdamW:
    return MuonWithAdamW(
        model,
        learning_rate=config.learning_rate,
        embedding_learning_rate=config.embedding_learning_rate,
        bf16=bool(config.bf16),
    )


def _only(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the one ready-made batch that the data loader was given."""
    return batch[0]


def make(config: BaseConfig, seed: int, target: Path) -> bool:
    """Make a base model in the directory `target`, or go on where the last call was stopped; return
    whether it is complete.

    Raises:
        ConfigError: something else stands there, or the folder of unfinished work is that of
            another model.
        TrainingFault: another process makes it already.
    """
    record = {"seed": seed, "base": SETTINGS.dump_python(config, mode="json")}
    work = target.with_name(f"{target.name}.work")
    if target.exists():
        if target.joinpath(RECORD).exists() and read_json(target / RECORD) == record:
            return True
        raise ConfigError(f"{target} is there already, and was made otherwise; name another folder, or move it away")
    work.mkdir(parents=True, exist_ok=True)
    report = Report()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: report.cancelled.set())
    with hold_lock(work / "lock"):
        if work.joinpath(RECORD).exists() and read_json(work / RECORD) != record:
            raise ConfigError(f"{work} has the unfinished work of other settings; remove it, or name another target")
        _write(work / RECORD, record)
        if not torch.cuda.is_available():
            keep_freed_memory()
        model, tokenizer = pretrain(config, seed=seed, work=work / "checkpoints", callbacks=[report])
        if report.cancelled.is_set():
            return False
        draft = work / "model"
        shutil.rmtree(draft, ignore_errors=True)
        model.config.use_cache = True  # the trainer turns it off
        model.float().save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        _write(draft / RECORD, record)
        draft.rename(target)
    return True


class Report(TrainerCallback):  # type: ignore[misc]
    """A callback that writes step and loss, and saves and stops once `cancelled` is set."""

    def __init__(self) -> None:
        self.cancelled = Event()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write step and loss, a mean over some steps in nats a token."""
        if logs and "loss" in logs:
            sys.stdout.write(f"step {state.global_step} of {state.max_steps}, loss {float(logs['loss']):.6f}\n")
            sys.stdout.flush()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop."""
        if self.cancelled.is_set():
            control.should_save = control.should_training_stop = True


def main(arguments: Sequence[str]) -> int | str:
    """Make the model that the arguments ask for; return the exit status, or what is wrong."""
    parser = argparse.ArgumentParser(description="Make a tiny base model.")
    parser.add_argument("settings", type=Path, help="a file such as data/models/make/textcraft-tiny.yaml")
    parser.add_argument("target", type=Path, help="the directory of the finished model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        complete = make(load(options.settings), options.seed, options.target)
    except (ConfigError, TrainingFault) as error:
        return str(error)
    sys.stdout.write(f"{options.target} is complete\n" if complete else "stopped; the same command goes on\n")
    return 0 if complete else 1


def _write(file: Path, record: dict[str, Any]) -> None:
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _uninterrupted(worker: int) -> None:
    """Let Ctrl-C in a terminal reach only the process that trains, which saves first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
