"""What one training run computes, in this process: the loss, the weights, the schedule, the
published files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from training_jobs import make_job, random_row, set_clock, unread, watched, write_dataset
from transformers import AutoModelForCausalLM

from agentr_core.errors import NonFiniteLoss
from agentr_core.models.checkpoint_dir import weights_sha256
from agentr_core.recipes.training import UNREAD_FIELDS
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.training.checkpoints import (
    HISTORY,
    Manifest,
    is_complete,
    published_steps,
    read_history,
    read_manifest,
)
from agentr_core.training.job import TrainingJob, TrainingStep
from agentr_core.training.packing import TokenRow, make_plan, num_trained_tokens
from agentr_core.training.parent import load_parent
from agentr_core.training.run import run
from agentr_core.training.trainers import samples_per_step, supervised_arguments, supervised_trainer

pytestmark = pytest.mark.slow
# peft reads an attribute that transformers renamed.
PEFT_WARNING = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class Crash(Exception):
    """Stands for a crash after a step."""


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def finish(job: TrainingJob, tell: Callable[[Any], None] = lambda step: None) -> Manifest:
    job.work_folder.root.mkdir(parents=True, exist_ok=True)
    manifest = run(job, tell)
    assert manifest is not None
    return manifest


def mean_loss(model_dir: Path, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Return the mean loss over all trained tokens of rows, one row at a time, by textbook
    means.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    total = 0.0
    for ids, labels in rows:
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(float(scores[at - 1, label]) for at, label in enumerate(labels) if label != IGNORE_INDEX)
    return total / sum(label != IGNORE_INDEX for _, labels in rows for label in labels)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_of_a_step_is_the_mean_over_its_trained_tokens(
    tmp_path: Path, tiny_model_dir: Path, packing: bool, accumulation: int
) -> None:
    lengths = [12, 90, 33, 250, 41, 18, 160, 27, 70, 55, 31, 140]
    write_dataset(tmp_path / "rows.parquet", lengths)
    rows = [random_row(length, seed) for seed, length in enumerate(lengths)]
    settings: dict[str, Any] = {"packing": packing, "gradient_accumulation_steps": accumulation}
    job = make_job(tiny_model_dir, tmp_path, epochs=1.0, **settings)
    tokens = [num_trained_tokens(TokenRow(*row)) for row in rows]
    plan = make_plan(tokens, per_step=4 * accumulation, epochs=1.0, max_tokens=0, seed=job.seed)
    steps: list[Any] = []

    finish(job, steps.append)

    expected = mean_loss(tiny_model_dir, [rows[number] for number in plan.steps[0]])
    assert steps[0].loss == pytest.approx(expected, abs=2e-5)
    assert [step.trained_tokens for step in steps] == list(plan.cumulative_tokens)
    assert steps[-1].trained_tokens == sum(tokens)


def test_each_step_tells_its_learning_rate_and_the_norm_of_its_gradient(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [random_row(length, seed) for seed, length in enumerate([20, 90, 33, 250])]
    write_dataset(tmp_path / "rows.parquet", [20, 90, 33, 250])
    schedule: dict[str, Any] = {"lr_scheduler_type": "linear", "warmup_ratio": 0.0}
    # Clipping changes the gradient, but not what is told of it.
    job = make_job(tiny_model_dir, tmp_path, epochs=4.0, max_grad_norm=0.01, **schedule)
    steps: list[TrainingStep] = []
    finish(job, steps.append)

    assert [step.learning_rate for step in steps] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    num_trained = sum(label != IGNORE_INDEX for _, labels in rows for label in labels)
    for ids, labels in rows:
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        (
            -sum(scores[at - 1, label] for at, label in enumerate(labels) if label != IGNORE_INDEX) / num_trained
        ).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert steps[0].grad_norm == pytest.approx(float(expected), rel=1e-3)
    assert expected > 0.01
    history = [(step.learning_rate, step.grad_norm) for step in read_history(job.output_dir)]
    assert history == [(step.learning_rate, step.grad_norm) for step in steps]


def test_a_history_of_before_they_were_told_has_neither_rate_nor_norm(tmp_path: Path) -> None:
    line = '{"step": 1, "total_steps": 2, "loss": 0.5, "trained_tokens": 3, "seconds": 4.0, "scores": {}}'
    (tmp_path / HISTORY).write_text(f"{line}\n", encoding="utf-8")
    assert read_history(tmp_path) == [TrainingStep(step=1, total_steps=2, loss=0.5, trained_tokens=3, seconds=4.0)]


def test_scoring_only_trained_positions_changes_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Our loss on CPU and TRL's own, which CUDA uses, agree in loss and gradient."""
    lengths = [12, 90, 33, 250]
    rows = [TokenRow(*random_row(length, seed)) for seed, length in enumerate(lengths)]
    job = make_job(tiny_model_dir, tmp_path)
    tokens = [num_trained_tokens(row) for row in rows]
    plan = make_plan(tokens, per_step=samples_per_step(job.config), epochs=1, max_tokens=0, seed=0)

    def first_step(keeps_logits: bool) -> tuple[float, list[torch.Tensor | None]]:
        parent = load_parent(tiny_model_dir, job.config, zero3=False)
        settings = supervised_arguments(job, steps=len(plan.steps))
        trainer = supervised_trainer(job, plan, rows, parent=parent, settings=settings, on_report=lambda step: None)
        trainer._keeps_logits = keeps_logits
        (batch,) = trainer.get_train_dataloader()
        loss = trainer.training_step(trainer.model, batch)
        return float(loss), [parameter.grad for parameter in trainer.model.parameters()]

    (ours, our_gradients), (theirs, their_gradients) = first_step(True), first_step(False)
    assert ours == pytest.approx(theirs, abs=1e-5)
    for our_gradient, their_gradient in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(our_gradient, their_gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_same_job_gives_the_same_weights(tmp_path: Path, tiny_model_dir: Path, bf16: bool) -> None:
    first, second = (finish(make_job(tiny_model_dir, tmp_path, name=name, bf16=bf16)) for name in ("a", "b"))
    job = make_job(tiny_model_dir, tmp_path, name="c", bf16=bf16)
    other_seed = finish(dataclasses.replace(job, seed=4))

    assert first.weights_sha256 == second.weights_sha256
    assert first.job == second.job
    assert other_seed.weights_sha256 != first.weights_sha256
    assert other_seed.job != first.job


def test_packing_leads_to_the_same_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    models = []
    for packing in (True, False):
        job = make_job(tiny_model_dir, tmp_path, name=f"packing-{packing}", packing=packing)
        finish(job)
        models.append(AutoModelForCausalLM.from_pretrained(job.output_dir).state_dict())

    for name, weights in models[0].items():
        torch.testing.assert_close(weights, models[1][name], atol=1e-3, rtol=0)
        # Training moved the weights by much more than packing does.
    start = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    assert max(float((weights - start[name]).abs().max()) for name, weights in models[0].items()) > 2e-3


def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path: Path, tiny_model_dir: Path) -> None:
    whole = make_job(tiny_model_dir, tmp_path, name="whole", epochs=3.0, lora_r=0)
    finish(whole)
    cut = make_job(tiny_model_dir, tmp_path, name="cut", epochs=3.0)

    def crash(step: TrainingStep) -> None:
        if step.step == 6:
            raise Crash

    with pytest.raises(Crash):
        finish(cut, crash)
    # A crash while a checkpoint is written leaves one without its mark.
    torn = cut.work_folder.checkpoints / "checkpoint-6"
    torn.mkdir(exist_ok=True)
    (torn / "model.safetensors").write_bytes(b"half")
    steps: list[Any] = []
    finish(cut, steps.append)

    assert [step.step for step in steps] == [5, 6, 7, 8, 9]
    assert read_manifest(cut.output_dir).weights_sha256 == read_manifest(whole.output_dir).weights_sha256
    history, whole_history = read_history(cut.output_dir), read_history(whole.output_dir)
    assert [(step.step, step.loss, step.trained_tokens) for step in history] == [
        (step.step, step.loss, step.trained_tokens) for step in whole_history
    ]
    assert all(later.seconds > earlier.seconds for earlier, later in pairwise(history))


def test_a_token_budget_decides_steps_and_schedule(tmp_path: Path, tiny_model_dir: Path) -> None:
    manifest = finish(make_job(tiny_model_dir, tmp_path, max_tokens=400, epochs=1.0))
    history = read_history(tmp_path / "out")

    assert 400 <= manifest.trained_tokens < 400 + 48
    assert manifest.epochs > 2
    assert manifest.ended_by == "max_tokens"
    assert manifest.steps == len(history) == history[0].total_steps
    assert manifest.final_loss == history[-1].loss


def rates(job: TrainingJob) -> list[float]:
    """Return the learning rate of each step, from the newest intermediate checkpoint."""
    newest = max(job.work_folder.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    log = json.loads((newest / "trainer_state.json").read_text("utf-8"))["log_history"]
    return [entry["learning_rate"] for entry in log if "loss" in entry]


def test_a_time_budget_ends_training_and_leads_the_schedule(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch)
    settings: dict[str, Any] = {"max_seconds": 60.0, "epochs": 0.5, "warmup_ratio": 0.0, "checkpoint_every": 1}
    job = make_job(tiny_model_dir, tmp_path, **settings)
    manifest = finish(job)
    history = read_history(job.output_dir)
    seconds, tokens = [step.seconds for step in history], [step.trained_tokens for step in history]

    assert manifest.ended_by == "max_seconds"
    assert manifest.steps == len(history) > 6, "a pass has three steps"
    assert manifest.epochs == len(history) / 3
    assert seconds == sorted(set(seconds))
    assert seconds[-2] < 60 <= seconds[-1] == manifest.seconds
    assert tokens[5] == 2 * tokens[2]
    assert manifest.trained_tokens == tokens[-1]
    assert rates(job) == sorted(rates(job), reverse=True)
    assert rates(job)[0] == 1e-3
    assert rates(job)[-1] < 2e-4


def test_time_before_an_interruption_counts(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch)
    settings: dict[str, Any] = {"max_seconds": 60.0, "warmup_ratio": 0.0, "checkpoint_every": 1}
    whole = finish(make_job(tiny_model_dir, tmp_path, name="whole", **settings))
    cut = make_job(tiny_model_dir, tmp_path, name="cut", **settings)

    def crash(step: TrainingStep) -> None:
        if step.seconds > 30:
            raise Crash

    with pytest.raises(Crash):
        finish(cut, crash)
    before = rates(cut)
    steps: list[Any] = []
    manifest = finish(cut, steps.append)

    assert steps[0].step == len(before) + 1
    assert steps[0].seconds > 30 - 60 / whole.steps
    assert abs(manifest.steps - whole.steps) <= 2
    assert rates(cut)[: len(before)] == before
    assert rates(cut) == sorted(rates(cut), reverse=True)
    assert manifest.ended_by == "max_seconds"


def test_a_loss_that_is_not_finite_ends_training_before_the_weights_change(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    job = make_job(tiny_model_dir, tmp_path, learning_rate=1e30, warmup_ratio=0.0, checkpoint_every=1)

    with pytest.raises(NonFiniteLoss, match=r"step 2 has loss .* lower training.learning_rate"):
        finish(job)
    assert not job.output_dir.exists()
    state = AutoModelForCausalLM.from_pretrained(job.work_folder.checkpoints / "checkpoint-1").state_dict()
    assert all(weights.isfinite().all() for weights in state.values())


@PEFT_WARNING
def test_lora_publishes_the_merged_model_and_the_adapter(tmp_path: Path, tiny_model_dir: Path) -> None:
    from peft import PeftModel

    job = make_job(tiny_model_dir, tmp_path, lora_r=4, learning_rate=1e-2)
    finish(job)
    ids = torch.tensor([random_row(40, 1)[0]])
    start = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    merged_model = AutoModelForCausalLM.from_pretrained(job.output_dir)

    with torch.no_grad():
        before, after = start(ids).logits, merged_model(ids).logits
        adapter_logits = PeftModel.from_pretrained(start, job.output_dir / "adapter")(ids).logits
    assert is_complete(job.output_dir)
    assert float((after - before).abs().max()) > 0.1
    torch.testing.assert_close(after, adapter_logits, atol=1e-3, rtol=1e-3)


@PEFT_WARNING
def test_an_interrupted_lora_run_goes_on_to_the_same_weights(tmp_path: Path, tiny_model_dir: Path) -> None:
    whole = finish(make_job(tiny_model_dir, tmp_path, name="whole", lora_r=4))
    cut = make_job(tiny_model_dir, tmp_path, name="cut", lora_r=4)

    def crash(step: TrainingStep) -> None:
        if step.step == 5:
            raise Crash

    with pytest.raises(Crash):
        finish(cut, crash)
    assert finish(cut).weights_sha256 == whole.weights_sha256


def test_tokenizer_and_number_format_of_the_parent_are_kept(
    tmp_path: Path, save_tiny_model: Callable[..., Path]
) -> None:
    parent = save_tiny_model(tmp_path / "parent")
    AutoModelForCausalLM.from_pretrained(parent, dtype=torch.bfloat16).save_pretrained(parent)
    job = make_job(parent, tmp_path)
    finish(job)

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (job.output_dir / name).read_bytes() == (parent / name).read_bytes()
    assert AutoModelForCausalLM.from_pretrained(job.output_dir, dtype="auto").dtype == torch.bfloat16


def test_checkpoints_of_steps_stay_as_models(tmp_path: Path, tiny_model_dir: Path) -> None:
    plain = finish(make_job(tiny_model_dir, tmp_path, name="plain", checkpoint_every=1, bf16=True))
    job = make_job(tiny_model_dir, tmp_path, checkpoint_every=1, bf16=True, save_total_limit=2)
    assert finish(job).weights_sha256 == plain.weights_sha256, "what is kept changes nothing"

    checkpoints = published_steps(job.output_dir)
    assert list(checkpoints) == [4, 5], "the last step is the checkpoint itself"
    assert not published_steps(tmp_path / "plain")
    hashes = [weights_sha256(path) for path in (*checkpoints.values(), job.output_dir)]
    assert len(set(hashes)) == len(hashes), "each step has weights of its own"
    manifest = read_manifest(checkpoints[4])
    assert (manifest.steps, manifest.ended_by, manifest.job) == (4, "save_steps", job.fingerprint)
    assert len(read_history(checkpoints[4])) == 4
    step_model, last_model = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (checkpoints[4], job.output_dir)
    )
    assert (
        step_model.dtype == last_model.dtype == AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="auto").dtype
    )
    assert {file.name for file in checkpoints[4].iterdir()} == {file.name for file in job.output_dir.iterdir()}
    assert json.loads((checkpoints[4] / "config.json").read_text()) == json.loads(
        (job.output_dir / "config.json").read_text()
    )


@PEFT_WARNING
def test_after_an_interruption_the_same_checkpoints_stay(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 2, "save_total_limit": None, "lora_r": 4, "lora_dropout": 0.1}
    whole = make_job(tiny_model_dir, tmp_path, name="whole", **settings)
    plain = make_job(tiny_model_dir, tmp_path, name="plain", **(settings | {"save_total_limit": 0}))
    cut = make_job(tiny_model_dir, tmp_path, name="cut", **settings)

    def interrupt(step: TrainingStep) -> None:
        if step.step == 5:
            raise Crash

    with pytest.raises(Crash):
        finish(cut, interrupt)
    assert finish(cut).weights_sha256 == finish(whole).weights_sha256 == finish(plain).weights_sha256
    checkpoints = [published_steps(job.output_dir) for job in (cut, whole)]
    assert [list(paths) for paths in checkpoints] == [[2, 4], [2, 4]]
    hashes = [[weights_sha256(path) for path in paths.values()] for paths in checkpoints]
    assert hashes[0] == hashes[1]
    assert (checkpoints[0][4] / "adapter" / "adapter_config.json").is_file()


@PEFT_WARNING
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_fine_tuning_reads_every_setting(tmp_path: Path, tiny_model_dir: Path) -> None:
    job = make_job(tiny_model_dir, tmp_path, epochs=1.0, lora_r=4)
    config, fields = watched(job.config)
    finish(dataclasses.replace(job, config=config))
    assert unread(fields) == set()
    assert "sft" not in UNREAD_FIELDS
