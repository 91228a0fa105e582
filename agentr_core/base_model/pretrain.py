"""Make the tiny base model: tokenizer, random weights, one pass over the curriculum.

The learning rate is constant in the first half of the training and falls to 0 in the second, so a
run with fewer tokens is a prefix of a longer one up to its own decay: a longer run's checkpoint can
be finished early.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from agentr_core.base_model.batches import LENGTHS, batches
from agentr_core.base_model.curriculum import Curriculum
from agentr_core.base_model.optimizer import MuonWithAdamW
from agentr_core.base_model.question_tokenizer import build_question_tokenizer
from agentr_core.base_model.questions import Questions
from agentr_core.base_model.tokenizer import build_tokenizer
from agentr_core.environments.crafting.text import INSTRUCTION
from agentr_core.methods.agent_r.critique.prompt import JUDGE_INSTRUCTION
from agentr_core.methods.agent_r.reflections import ACKNOWLEDGEMENT, ACTION, REFLECTIONS
from agentr_core.recipes.questions_base import QuestionsConfig
from agentr_core.recipes.training import BaseConfig
from agentr_core.samples.labels import IGNORED
from agentr_core.samples.rendering import Renderer
from agentr_core.training.attention import register
from agentr_core.training.cpu_threads import use_threads
from agentr_core.types import Sample

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
        )
        return self.accelerator.prepare(loader)

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **_: Any
    ) -> torch.Tensor:
        """Return the mean cross-entropy of the trained tokens."""
        targets = inputs["labels"][:, 1:]
        trained = targets != IGNORED
        decoder = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():
            hidden = decoder.model(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state[:, :-1][trained]
            logits = decoder.lm_head(hidden)
        return torch.nn.functional.cross_entropy(logits.float(), targets[trained])


def pretrain(config: BaseConfig, *, seed: int, work: Path, callbacks: list[Any]) -> tuple[Any, Any]:
    """Train the model, after an interruption from the last checkpoint in `work`; return (model,
    tokenizer).
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
