"""Preference training: where the loss falls, against what reference, and that it survives
interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from training_jobs import columns, dpo_job, pairs, set_clock, unread, watched
from transformers import AutoModelForCausalLM

from agentr_core.errors import AlarmRaised, DataFault, NonFiniteLoss
from agentr_core.recipes.alarms import AlarmsConfig, Crossing
from agentr_core.recipes.training import UNREAD_FIELDS
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.training.checkpoints import read_history, read_manifest
from agentr_core.training.job import PreferenceLoss, TrainingJob
from agentr_core.training.packing import TokenPair, TokenRow, make_plan, num_trained_tokens
from agentr_core.training.parent import load_parent
from agentr_core.training.run import run
from agentr_core.training.trainers import collate, preference_arguments, preference_trainer, samples_per_step

pytestmark = [
    pytest.mark.slow,
    # peft reads an attribute that transformers renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Interruption(Exception):
    """Stands for a crash after a step."""


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def finish(job: TrainingJob, tell: Any = lambda step: None) -> Any:
    job.work_folder.root.mkdir(parents=True, exist_ok=True)
    return run(job, tell)


def trainer_of(job: TrainingJob, rows: list[TokenPair]) -> Any:
    job.work_folder.root.mkdir(parents=True, exist_ok=True)
    plan = make_plan(
        [num_trained_tokens(row) for row in rows], per_step=samples_per_step(job.config), epochs=1, max_tokens=0, seed=0
    )
    parent = load_parent(job.model_dir, job.config, zero3=False)
    settings = preference_arguments(job, steps=len(plan.steps))
    return preference_trainer(job, plan, rows, parent=parent, settings=settings, on_report=lambda step: None)


def log_probability(model: Any, row: TokenRow) -> torch.Tensor:
    """Return the summed log-probability of the trained tokens of a row, by textbook means."""
    scores = model(torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
    return sum((scores[at - 1, label] for at, label in enumerate(row.labels) if label != IGNORE_INDEX), torch.zeros(()))


def test_the_mask_covers_the_labels_and_nothing_else() -> None:
    rows = pairs()[:2]
    flat = columns(rows)
    batch = collate([{name: values[at] for name, values in flat.items()} for at in range(2)])

    order = [rows[0].chosen, rows[1].chosen, rows[0].rejected, rows[1].rejected]
    assert batch["input_ids"].shape == (4, 64)
    for ids, attention, mask, row in zip(
        batch["input_ids"], batch["attention_mask"], batch["completion_mask"], order, strict=True
    ):
        length = len(row.input_ids)
        assert ids[:length].tolist() == list(row.input_ids)
        assert attention.tolist() == [1] * length + [0] * (64 - length)
        assert mask.tolist() == [int(label != IGNORE_INDEX) for label in row.labels] + [0] * (64 - length)


def test_loss_and_gradient_are_those_of_the_formula(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Source: ETO section 3.3, with log-probabilities summed over the tokens of replies."""
    rows, beta = pairs()[:2], 0.3
    job = dpo_job(tiny_model_dir, tmp_path, loss=PreferenceLoss(beta=beta))
    trainer = trainer_of(job, rows)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    policy = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    with torch.no_grad():
        # A policy that has moved: at its start the loss is log 2 whatever the data.
        for mine, theirs in zip(policy.parameters(), trainer.model.parameters(), strict=True):
            noise = torch.randn(mine.shape, generator=torch.Generator().manual_seed(mine.numel())) * 0.02
            mine.add_(noise)
            theirs.add_(noise)
        before = [(log_probability(reference, row.chosen), log_probability(reference, row.rejected)) for row in rows]
    terms = []
    for row, (chosen, rejected) in zip(rows, before, strict=True):
        ratio = (log_probability(policy, row.chosen) - chosen) - (log_probability(policy, row.rejected) - rejected)
        terms.append(-torch.nn.functional.logsigmoid(beta * ratio))
    expected = sum(terms, torch.zeros(())) / len(terms)
    expected.backward()  # type: ignore[no-untyped-call]

    (batch,) = trainer.get_train_dataloader()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(trainer.model, batch)

    assert abs(expected.item() - math.log(2)) > 1e-3
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    for mine, theirs in zip(policy.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-2)


def test_training_prefers_the_chosen_side(tmp_path: Path, tiny_model_dir: Path) -> None:
    job = dpo_job(tiny_model_dir, tmp_path, epochs=6.0)
    reports: list[Any] = []
    manifest = finish(job, reports.append)

    assert reports[0].loss == pytest.approx(math.log(2), abs=1e-4), "policy and reference are still one"
    assert reports[-1].loss < 0.5
    assert reports[-1].scores["reward_accuracy"] == 1.0
    assert set(reports[0].scores) == {
        "chosen_logps",
        "rejected_logps",
        "chosen_rewards",
        "rejected_rewards",
        "reward_accuracy",
    }
    assert reports[-1].scores["chosen_rewards"] > reports[-1].scores["rejected_rewards"]
    assert {step.learning_rate for step in reports} == {job.config.learning_rate}
    assert all(step.grad_norm is not None and step.grad_norm > 0 for step in reports)
    assert [step.scores for step in read_history(job.output_dir)] == [step.scores for step in reports]
    assert manifest.trained_tokens == 6 * sum(num_trained_tokens(row) for row in pairs())


def test_reference_log_probabilities_are_computed_once(tmp_path: Path, tiny_model_dir: Path, monkeypatch: Any) -> None:
    from trl import DPOTrainer

    calls: list[int] = []
    compute = DPOTrainer.compute_ref_log_probs

    def count_calls(self: Any, model: Any, inputs: Any) -> Any:
        calls.append(len(inputs["input_ids"]) // 2)
        return compute(self, model, inputs)

    monkeypatch.setattr(DPOTrainer, "compute_ref_log_probs", count_calls)

    def crash(step: Any) -> None:
        if step.step == 3:
            raise Interruption

    job = dpo_job(tiny_model_dir, tmp_path, epochs=3.0)
    with pytest.raises(Interruption):
        finish(job, crash)
    assert sum(calls) == len(pairs())
    reports: list[Any] = []
    finish(job, reports.append)

    assert sum(calls) == len(pairs()), "the second attempt found them"
    assert reports[0].step == 3


def test_an_interrupted_training_goes_on_to_the_same_weights(tmp_path: Path, tiny_model_dir: Path) -> None:
    whole = finish(dpo_job(tiny_model_dir, tmp_path, name="whole", epochs=3.0))
    cut = dpo_job(tiny_model_dir, tmp_path, name="cut", epochs=3.0)

    def crash(step: Any) -> None:
        if step.step == 5:
            raise Interruption

    with pytest.raises(Interruption):
        finish(cut, crash)

    assert finish(cut).weights_sha256 == whole.weights_sha256
    assert [step.loss for step in read_history(cut.output_dir)] == [
        step.loss for step in read_history(tmp_path / "whole")
    ]


def test_lora_has_the_model_without_adapters_as_reference(tmp_path: Path, tiny_model_dir: Path) -> None:
    job = dpo_job(tiny_model_dir, tmp_path, lora_r=4, learning_rate=1e-2, epochs=4.0)
    reports: list[Any] = []
    finish(job, reports.append)

    assert reports[0].loss == pytest.approx(math.log(2), abs=1e-4)
    assert reports[-1].loss < reports[0].loss
    assert sorted(path.name for path in (job.output_dir / "adapter").iterdir() if path.is_dir()) == []


def test_lora_trains_preferences_without_dropout_and_the_recipe_may_not_ask_for_it(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    shape: dict[str, Any] = {"lora_r": 4, "learning_rate": 1e-2, "epochs": 1.0}
    plain = finish(dpo_job(tiny_model_dir, tmp_path, name="plain", **shape))
    with_dropout = finish(dpo_job(tiny_model_dir, tmp_path, name="dropped", lora_dropout=0.5, **shape))

    assert with_dropout.weights_sha256 == plain.weights_sha256
    assert "lora_dropout" in UNREAD_FIELDS["dpo"]


def test_lora_on_an_adapter_has_that_adapter_as_reference(tmp_path: Path, tiny_model_dir: Path) -> None:
    shape: dict[str, Any] = {"lora_r": 4, "learning_rate": 1e-2, "publish": "adapter", "epochs": 3.0}
    first = dpo_job(tiny_model_dir, tmp_path, name="first", **shape)
    finish(first)
    second = dpo_job(first.output_dir, tmp_path, name="second", **shape)
    reports: list[Any] = []
    finish(second, reports.append)

    assert reports[0].loss == pytest.approx(math.log(2), abs=1e-4), "not the base below the adapter"
    assert [path.name for path in second.output_dir.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    "loss",
    [
        PreferenceLoss(beta=0.1, loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.5)),
        PreferenceLoss(beta=0.1, loss_type=("ipo",)),
        PreferenceLoss(beta=0.1, loss_type=("sigmoid_norm",)),
        PreferenceLoss(beta=0.1, ld_alpha=0.5),
    ],
    ids=["rpo", "ipo", "length-normalised", "ld"],
)
def test_the_variants_of_the_library_train(tmp_path: Path, tiny_model_dir: Path, loss: PreferenceLoss) -> None:
    plain = finish(dpo_job(tiny_model_dir, tmp_path, name="plain", epochs=1.0))
    variant = finish(dpo_job(tiny_model_dir, tmp_path, name="other", epochs=1.0, loss=loss))

    assert variant.weights_sha256 != plain.weights_sha256
    assert variant.job != plain.job
    assert math.isfinite(read_manifest(tmp_path / "other").final_loss)


def test_a_time_budget_ends_training(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch)
    manifest = finish(dpo_job(tiny_model_dir, tmp_path, epochs=1.0, max_seconds=40.0))
    seconds = [step.seconds for step in read_history(tmp_path / "out")]

    assert manifest.ended_by == "max_seconds"
    assert manifest.epochs > 1
    assert seconds[-2] < 40 <= seconds[-1]


def test_a_training_ends_when_the_chosen_side_collapses(tmp_path: Path, tiny_model_dir: Path) -> None:
    # One token is all that both sides train: to make it unlikely in many places of the one is to
    # make it unlikely in the other.
    context = tuple(range(20, 40))
    alike = [TokenPair(_ending(context[at:], 2), _ending(context[at:], 30)) for at in range(6)]
    parquet.write_table(pa.table(columns(alike)), tmp_path / "pairs.parquet")

    def train_model(
        name: str, *, every: int = 1, told: Any = lambda event: None, **alarms: Any
    ) -> tuple[Any, list[Any]]:
        job = dpo_job(tiny_model_dir, tmp_path, name=name, epochs=12.0, learning_rate=1e-3, checkpoint_every=every)
        result = finish(replace(job, alarms=AlarmsConfig(**{"gradient_norm": None} | alarms)), told)
        return result, read_history(job.output_dir)

    whole, steps = train_model("whole", chosen_drop=None)
    drops = [-fmean(step.scores["chosen_rewards"] / 0.1 for step in steps[at - 5 : at]) for at in range(5, 37)]
    # A bound that the chosen side passes once there are checkpoints to go back to.
    drop_step = next(at for at in range(10, 37) if drops[at - 5] > max(drops[: at - 5]))
    bound = (drops[drop_step - 5] + max(drops[: drop_step - 5])) / 2
    assert (whole.steps, whole.ended_by) == (36, "num_train_epochs")

    events: list[Any] = []
    result, _ = train_model("told", chosen_drop=bound, told=events.append)
    assert (result.weights_sha256, result.ended_by) == (whole.weights_sha256, "num_train_epochs"), "it only tells"
    crossings = [event for event in events if isinstance(event, Crossing)]
    assert (crossings[0].name, crossings[0].step, crossings[0].threshold) == ("chosen_drop", drop_step, bound)
    assert crossings[0].value == pytest.approx(drops[drop_step - 5])

    for every in (1, 4):
        rollback, history = train_model(f"back {every}", every=every, chosen_drop=bound, reaction="back")
        assert rollback.steps == len(history) == (drop_step - 1) // every * every
        assert [step.loss for step in history] == [step.loss for step in steps[: len(history)]]
        with pytest.raises(
            AlarmRaised, match=f"alarm chosen_drop ended the training; the weights of step {len(history)}"
        ):
            rollback.check_ending()
    with pytest.raises(AlarmRaised, match="trains anew, since nothing was saved before"):
        train_model("none", every=100, chosen_drop=bound, reaction="back")

    message = (
        rf"alarm chosen_drop in step {drop_step}: the chosen side has become .* nats less likely.*command trains on"
    )
    for _ in range(2):
        with pytest.raises(AlarmRaised, match=message):
            train_model("stopped", every=2, chosen_drop=bound, reaction="stop")
    resumption, _ = train_model("stopped", every=2, chosen_drop=None, reaction="stop")
    assert resumption.weights_sha256 == whole.weights_sha256, "the same command goes on once the alarm is silent"


def _ending(context: tuple[int, ...], times: int) -> TokenRow:
    return TokenRow((*context, *[7] * times), (*[IGNORE_INDEX] * len(context), *[7] * times))


def test_a_broken_side_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    job = dpo_job(tiny_model_dir, tmp_path)
    broken = columns(pairs())
    broken["rejected_labels"][2] = [IGNORE_INDEX] * len(broken["rejected_labels"][2])
    parquet.write_table(pa.table(broken), job.dataset_file)

    with pytest.raises(DataFault, match=r"row 2 \(rejected side\): no token is trained"):
        finish(job)


def test_padding_beyond_a_layers_window_spoils_no_loss(windowed_model_dir: Path, tmp_path: Path) -> None:
    reports: list[Any] = []
    finish(dpo_job(windowed_model_dir, tmp_path, epochs=2.0), reports.append)
    assert reports
    assert all(math.isfinite(step.loss) for step in reports)


def test_a_reference_without_numbers_is_told_and_not_kept(save_tiny_model: Any, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    model.save_pretrained(path)
    job = dpo_job(path, tmp_path)
    with pytest.raises(NonFiniteLoss, match="log-probabilities of the reference"):
        finish(job)
    assert not job.work_folder.reference_dataset.exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_preferences_do_not_read_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    job = dpo_job(tiny_model_dir, tmp_path, epochs=1.0, lora_r=4)
    config, fields = watched(job.config)
    job = replace(job, config=config)
    job.work_folder.root.mkdir(parents=True)
    run(job, lambda step: None)
    assert unread(fields) <= set(UNREAD_FIELDS["dpo"])
