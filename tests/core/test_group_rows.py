"""Episodes as rows of sampled tokens, and the updates that a learner makes of them."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from growing import GrowingLine
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from agentr_core.episodes.transcript import whole_episode
from agentr_core.errors import DataFault, ModelFault, NonFiniteLoss, TrainingFault
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import LaunchConfig, TrainingConfig
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.system import run_in_thread
from agentr_core.training.group.learner import Learner, ProcessLearner, load_snapshot, make_learner, save_snapshot
from agentr_core.training.group.policy import Policy, PolicyRow, Totals, number_tokens, policy_row
from agentr_core.training.packing import balanced_shares
from agentr_core.types import (
    FinishReason,
    Generation,
    Instance,
    Message,
    Request,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)

TRAINING = TrainingConfig(learning_rate=1e-3, bf16=False, warmup_ratio=0.0, lr_scheduler_type="constant")


def step(renderer: Renderer, ids: tuple[int, ...], reason: FinishReason) -> Step:
    return Step(
        reply="said",
        action="said",
        observation="seen",
        reward=0.0,
        terminated=False,
        success=False,
        token_ids=ids,
        logprobs=tuple(-0.5 - 0.1 * n for n in range(len(ids))),
        finish_reason=reason,
        tokenizer=renderer.fingerprint,
    )


def make_trajectory(steps: list[Step]) -> Trajectory:
    return Trajectory(
        instance=Instance(environment="line", split="train", index=0),
        first_observation="Begin.",
        steps=tuple(steps),
        reward=0.0,
        success=False,
        stop=StopReason.STEP_LIMIT,
    )


def messages(steps: list[Step]) -> list[Message]:
    turns = [Message(role="user", text="Begin.")]
    for item in steps:
        reply = Message(
            role="assistant",
            text=item.reply,
            train=True,
            token_ids=item.token_ids,
            finish_reason=item.finish_reason,
            tokenizer=item.tokenizer,
        )
        turns += [reply, Message(role="user", text=item.observation)]
    return turns[:-1]


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> Renderer:
    return load_renderer(tiny_model_dir)


def test_only_sampled_tokens_carry_loss(renderer: Renderer) -> None:
    end = renderer.end_of_turn
    steps = [step(renderer, (50, 51, 52), "length"), step(renderer, (60, end), "stop")]
    row = policy_row(messages(steps), steps, renderer, [0.25, -0.5])
    assert [row.input_ids[position] for position in row.positions] == [50, 51, 52, 60, end]
    assert row.input_ids[row.positions[2] + 1] == end, "the template ends the turn that its limit cut"
    assert row.logprobs == (*steps[0].logprobs, *steps[1].logprobs)  # type: ignore[misc]
    assert row.advantages == (0.25, 0.25, 0.25, -0.5, -0.5)


def test_what_an_episode_went_on_from_is_read_and_not_trained(renderer: Renderer) -> None:
    end = renderer.end_of_turn
    steps = [step(renderer, (50, 51, 52), "length"), step(renderer, (60, end), "stop")]
    whole = policy_row(messages(steps), steps, renderer, [0.25, -0.5])
    row = policy_row(messages(steps), steps, renderer, [0.25, -0.5], num_given=1)
    assert row.input_ids == whole.input_ids
    assert row.positions == whole.positions[3:]
    assert row.logprobs == steps[1].logprobs
    assert row.advantages == (-0.5, -0.5)
    assert policy_row(messages(steps), steps, renderer, [0.25, -0.5], num_given=2).positions == ()


def test_what_an_expert_wrote_is_read_and_not_trained(renderer: Renderer) -> None:
    end = renderer.end_of_turn
    expert_step = Step(reply="go on", action="go on", observation="seen", reward=0.0)
    steps = [expert_step, step(renderer, (60, end), "stop"), step(renderer, (61, end), "stop")]
    row = policy_row(messages(steps), steps, renderer, [0.25, -0.5, 1.0], num_given=1)
    assert [row.input_ids[position] for position in row.positions] == [60, end, 61, end]
    assert row.logprobs == (*steps[1].logprobs, *steps[2].logprobs)  # type: ignore[misc]
    assert row.advantages == (-0.5, -0.5, 1.0, 1.0)
    with pytest.raises(DataFault, match="the reply 'go on' has no log-probability for each of its tokens"):
        policy_row(messages(steps), steps, renderer, [0.25, -0.5, 1.0])


def test_of_a_turn_that_grew_only_what_is_read_is_trained(renderer: Renderer) -> None:
    end = renderer.end_of_turn
    steps = [step(renderer, ids, "stop") for ids in ((50, 51, end), (end,), (60, 61))]
    steps[1] = dataclasses.replace(steps[1], reply="")
    row = policy_row(whole_episode(GrowingLine(), make_trajectory(steps)), steps, renderer, [1.0, 2.0, 3.0])
    assert [row.input_ids[position] for position in row.positions] == [50, 51, 60, 61]
    assert row.logprobs == (*steps[0].logprobs[:2], *steps[2].logprobs)  # type: ignore[index,misc]
    assert row.advantages == (1.0, 1.0, 3.0, 3.0)


def test_an_end_of_turn_that_the_server_kept_is_not_trained(renderer: Renderer) -> None:
    steps = [step(renderer, (50, 51), "stop")]
    row = policy_row(messages(steps), steps, renderer, [1.0])
    assert [row.input_ids[position] for position in row.positions] == [50, 51]


def test_a_reply_without_log_probabilities_is_refused(renderer: Renderer) -> None:
    steps = [dataclasses.replace(step(renderer, (50, 51), "stop"), logprobs=None)]
    with pytest.raises(DataFault, match="has no log-probability for each of its tokens"):
        policy_row(messages(steps), steps, renderer, [1.0])


def test_labels_number_the_tokens_of_all_rows() -> None:
    rows = [PolicyRow((1, 2, 3), (1, 2), (0.0, 0.0), (1.0, 1.0), 2), PolicyRow((4, 5), (1,), (0.0,), (-1.0,), 1)]
    assert [row.labels for row in number_tokens(rows)] == [(IGNORE_INDEX, 0, 1), (IGNORE_INDEX, 2)]


def rows(count: int = 6) -> list[PolicyRow]:
    """Return random rows of several lengths, whose tokens are as if a uniform policy had sampled
    them.
    """
    generator = torch.Generator().manual_seed(5)
    policy_rows = []
    for number in range(count):
        length = 20 + 30 * number
        ids = torch.randint(3, 300, (length,), generator=generator).tolist()
        positions = tuple(range(5, length, 3))
        num_sampled = len(positions)
        policy_rows.append(
            PolicyRow(tuple(ids), positions, (-6.0,) * num_sampled, ((-1.0) ** number,) * num_sampled, num_sampled)
        )
    return policy_rows


def learner(path: Path, training: TrainingConfig = TRAINING, **settings: Any) -> Learner:
    grpo = GrpoConfig(**settings)
    return Learner(path, training, grpo, updates=4, max_tokens=100)


def update_learner(path: Path, *, updates: int = 1, **settings: Any) -> tuple[dict[str, torch.Tensor], Totals]:
    policy_learner, totals = learner(path, **settings), Totals()
    for _ in range(updates):
        totals += policy_learner.update(rows())
    return policy_learner.policy.model.state_dict(), totals


@pytest.mark.slow
def test_how_an_update_is_cut_into_passes_changes_only_the_rounding(tiny_model_dir: Path) -> None:
    (narrow, narrow_totals), (wide, wide_totals) = (
        update_learner(tiny_model_dir, micro_batch_tokens=n) for n in (512, 4096)
    )
    assert narrow_totals.tokens == wide_totals.tokens == sum(len(row.positions) for row in rows())
    assert narrow_totals.loss == pytest.approx(wide_totals.loss, rel=1e-5)
    assert narrow_totals.entropy == pytest.approx(wide_totals.entropy, rel=1e-5)
    for name, weight in narrow.items():
        torch.testing.assert_close(weight, wide[name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lora_r", [0, 4], ids=["all", "lora"])
def test_activations_that_are_computed_again_give_the_same_gradient(tiny_model_dir: Path, lora_r: int) -> None:
    def gradients_of(checkpointing: bool) -> tuple[dict[str, torch.Tensor], int]:
        training = dataclasses.replace(TRAINING, lora_r=lora_r, gradient_checkpointing=checkpointing)
        policy = Policy(tiny_model_dir, training, GrpoConfig())
        # Adapters begin at zero, and so would the gradient of what they read.
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.add_(0.01)
        calls: list[int] = []
        modules = policy.model.named_modules()
        layer = next(module for name, module in modules if name.endswith("layers.0.input_layernorm"))
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        policy.accumulate_gradient(rows(), [1.0] * len(rows()))
        return {name: p.grad for name, p in policy.parameters.items() if p.grad is not None}, len(calls)

    (plain_grads, once), (other_grads, twice) = gradients_of(False), gradients_of(True)
    assert twice == 2 * once > 0
    assert plain_grads.keys() == other_grads.keys()
    assert all(torch.equal(plain_grads[name], other_grads[name]) for name in plain_grads)


@pytest.mark.slow
def test_processes_that_share_a_gradient_change_only_the_rounding(tiny_model_dir: Path, tmp_path: Path) -> None:
    alone, alone_totals = update_learner(tiny_model_dir)
    two = dataclasses.replace(TRAINING, launch=LaunchConfig(num_processes=2), num_threads=1)
    process_learner = ProcessLearner(tiny_model_dir, two, GrpoConfig(), updates=4, max_tokens=100, folder=tmp_path)
    try:
        process_totals = process_learner.update(rows())
        process_learner.write_weights(tmp_path / "weights.safetensors")
    finally:
        process_learner.close()
    assert process_totals.tokens == alone_totals.tokens
    assert process_totals.loss == pytest.approx(alone_totals.loss, rel=1e-5)
    assert process_totals.norm == pytest.approx(alone_totals.norm, rel=1e-4)
    for name, weight in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(weight, alone[name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
async def test_a_process_that_hangs_holds_up_no_end_and_one_that_died_is_reported_in_a_sentence(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    two = dataclasses.replace(TRAINING, launch=LaunchConfig(num_processes=2), num_threads=1)
    process_learner = ProcessLearner(tiny_model_dir, two, GrpoConfig(), updates=4, max_tokens=100, folder=tmp_path)
    try:
        process_learner.update(rows())
        process, _ = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        working = asyncio.create_task(run_in_thread(process_learner.update, rows()))
        await asyncio.sleep(0.5)
        assert not working.done()
        working.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await working
        # Stopped as it is.
        process_learner.close()
        assert not multiprocessing.active_children()
        for work in (process_learner.update, process_learner.remove_rounding_noise):
            with pytest.raises(TrainingFault, match="shares the updates of the training ended, probably"):
                work(rows())
    finally:
        process_learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_last_bits_of_a_sampler_do_not_reach_the_weights(
    tiny_model_dir: Path, tmp_path: Path, processes: int
) -> None:
    launch = LaunchConfig(num_processes=processes) if processes > 1 else None
    training = dataclasses.replace(TRAINING, launch=launch, num_threads=1)
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    exact = [row._replace(logprobs=tuple(_logprobs(before, row))) for row in rows()]
    noisy = [row._replace(logprobs=tuple(value + 1e-5 for value in row.logprobs)) for row in exact]
    outlier_rows = [noisy[0]._replace(logprobs=tuple(value - 0.1 for value in noisy[0].logprobs)), *noisy[1:]]
    policy_learner = make_learner(tiny_model_dir, training, GrpoConfig(), updates=4, max_tokens=100, folder=tmp_path)
    try:
        clean_rows = policy_learner.remove_rounding_noise(exact)
        assert policy_learner.remove_rounding_noise(noisy) == clean_rows
        outlier, *rest = policy_learner.remove_rounding_noise(outlier_rows)
    finally:
        policy_learner.close()
    assert rest == clean_rows[1:]
    assert outlier.logprobs == pytest.approx(outlier_rows[0].logprobs, abs=1e-6)
    for row, same in zip(exact, clean_rows, strict=True):
        assert same.logprobs == pytest.approx(row.logprobs, abs=1e-5)


def test_in_bfloat16_the_log_probabilities_of_the_sampler_stay(tiny_model_dir: Path) -> None:
    policy_learner = learner(tiny_model_dir, dataclasses.replace(TRAINING, bf16=True))
    assert policy_learner.remove_rounding_noise(rows()) == rows()


def test_the_longest_rows_are_shared_out_first() -> None:
    assert balanced_shares([3, 9, 4, 5], 2) == [[1, 0], [3, 2]]
    assert balanced_shares([7], 2) == [[0], []]


@pytest.mark.slow
def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_so(tiny_model_dir: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    policy_learner = learner(tiny_model_dir, scale_rewards="none", epsilon=1e9, epsilon_high=1e9)
    episodes = [row._replace(logprobs=tuple(_logprobs(before, row))) for row in rows()]
    policy_learner.update(episodes)
    gains = [sum(_logprobs(policy_learner.policy.model, row)) - sum(row.logprobs) for row in episodes]
    assert sum(gain * row.advantages[0] for gain, row in zip(gains, episodes, strict=True)) > 0


@pytest.mark.slow
def test_ratios_begin_at_one_and_divergences_at_zero(tiny_model_dir: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    episodes = [row._replace(logprobs=tuple(_logprobs(before, row))) for row in rows()]
    totals = learner(tiny_model_dir, beta=0.1).update(episodes)
    assert totals.clipped == 0
    assert totals.sampler_kl == pytest.approx(0, abs=1e-6)
    assert totals.kl == pytest.approx(0, abs=1e-6)
    worth = sum(sum(row.advantages) for row in episodes) / totals.tokens
    assert totals.loss == pytest.approx(-worth, abs=1e-5)


def _logprobs(model: torch.nn.Module, row: PolicyRow) -> list[float]:
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
    return [scores[position - 1, row.input_ids[position]].item() for position in row.positions]


@pytest.mark.slow
def test_a_restored_learner_goes_on_to_the_same_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    whole, _ = update_learner(tiny_model_dir, updates=3)
    first = learner(tiny_model_dir)
    first.update(rows())
    for number in (1, 2, 3):
        save_snapshot(tmp_path, number, first.state, [], [])
    assert len(list(tmp_path.glob("*"))) == 1
    snapshot = load_snapshot(tmp_path)
    assert snapshot is not None
    assert snapshot[0] == 3
    second = learner(tiny_model_dir)
    second.restore(snapshot.learner_state, snapshot.parts_folder)
    for _ in range(2):
        second.update(rows())
    assert all(torch.equal(weight, second.policy.model.state_dict()[name]) for name, weight in whole.items())


@pytest.mark.slow
def test_a_schedule_goes_its_way_though_updates_have_nothing_to_train_on(tiny_model_dir: Path) -> None:
    decaying = dataclasses.replace(TRAINING, lr_scheduler_type="linear", learning_rate=1.0)
    policy_learner = learner(tiny_model_dir, decaying)
    policy_learner.update(rows())
    policy_learner.skip(2)
    assert policy_learner.learning_rate == pytest.approx(0.25)
    # Warnings are errors: that of PyTorch about a schedule without its optimizer, too.
    second_learner = learner(tiny_model_dir, decaying)
    before = {name: weight.clone() for name, weight in second_learner.policy.model.state_dict().items()}
    second_learner.skip(3)
    assert second_learner.learning_rate == pytest.approx(0.25)
    assert all(torch.equal(weight, before[name]) for name, weight in second_learner.policy.model.state_dict().items())


@pytest.mark.slow
def test_a_schedule_gets_its_arguments(tiny_model_dir: Path) -> None:
    training = dataclasses.replace(
        TRAINING, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.5}, learning_rate=1.0
    )
    policy_learner = learner(tiny_model_dir, training)
    for _ in range(4):
        policy_learner.update(rows())
    assert policy_learner.learning_rate == pytest.approx(0.5)


ADAPTED = dataclasses.replace(TRAINING, lora_r=4, learning_rate=1e-2, num_threads=1)


@pytest.mark.slow
# PEFT asks for an attribute that Transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_alone_are_trained_and_samplers_get_them_merged(tiny_model_dir: Path, tmp_path: Path) -> None:
    policy_learner = learner(tiny_model_dir, ADAPTED)
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    weights = dict(before.named_parameters())
    policy_learner.write_weights(tmp_path / "first.safetensors")
    for name, weight in load_file(tmp_path / "first.safetensors").items():
        torch.testing.assert_close(weight, weights.pop(name).detach(), rtol=0, atol=0)
    assert not weights, "every parameter is there"

    for _ in range(2):
        policy_learner.update(rows())
    state = policy_learner.state(tmp_path)["model"]
    assert state
    assert all("lora_" in name for name in state)
    policy_learner.write_weights(tmp_path / "then.safetensors")
    policy_learner.policy.model.save_pretrained(tmp_path / "adapter")
    whole = dict(PeftModel.from_pretrained(before, tmp_path / "adapter").merge_and_unload().named_parameters())
    first, then = load_file(tmp_path / "first.safetensors"), load_file(tmp_path / "then.safetensors")
    assert then.keys() == whole.keys()
    for name, weight in then.items():
        torch.testing.assert_close(weight, whole[name].detach(), rtol=1e-6, atol=1e-6)
    names = [name for name in then if not torch.equal(then[name], first[name])]
    assert names
    assert all(name.endswith("_proj.weight") for name in names)

    policy_learner.write_weights(tmp_path / "half.safetensors", torch.bfloat16)
    half = load_file(tmp_path / "half.safetensors")
    assert all(torch.equal(half[name], weight.bfloat16()) for name, weight in then.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_go_on_from_a_state_and_are_the_same_for_two_processes(tiny_model_dir: Path, tmp_path: Path) -> None:
    whole, cut = learner(tiny_model_dir, ADAPTED), learner(tiny_model_dir, ADAPTED)
    for _ in range(3):
        whole.update(rows())
    cut.update(rows())
    save_snapshot(tmp_path / "states", 1, cut.state, [], [])
    two = dataclasses.replace(ADAPTED, launch=LaunchConfig(num_processes=2))
    for training, exact in ((ADAPTED, True), (two, False)):
        snapshot = load_snapshot(tmp_path / "states")
        assert snapshot is not None
        policy_learner = make_learner(
            tiny_model_dir, training, GrpoConfig(), updates=4, max_tokens=100, folder=tmp_path, seed=9
        )
        try:
            policy_learner.restore(snapshot.learner_state, snapshot.parts_folder)
            for _ in range(2):
                policy_learner.update(rows())
            state = policy_learner.state(tmp_path)["model"]
        finally:
            policy_learner.close()
        for name, weight in whole.state(tmp_path)["model"].items():
            tolerance = 0.0 if exact else 1e-4
            torch.testing.assert_close(state[name], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_loading_draws_no_progress_bar_of_its_own(tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()
    learner(tiny_model_dir)
    assert not "".join(capfd.readouterr()).strip()


@pytest.mark.slow
def test_what_is_not_finite_changes_no_weight(tiny_model_dir: Path) -> None:
    policy_learner = learner(tiny_model_dir)
    before = {name: weight.clone() for name, weight in policy_learner.policy.model.state_dict().items()}
    broken = [row._replace(advantages=(float("nan"),) * len(row.positions)) for row in rows()]
    with pytest.raises(NonFiniteLoss, match=r"lower training\.learning_rate"):
        policy_learner.update(broken)
    assert all(torch.equal(weight, policy_learner.policy.model.state_dict()[name]) for name, weight in before.items())


@pytest.mark.slow
async def test_a_sampler_takes_over_weights_in_place(tiny_model_dir: Path, tmp_path: Path) -> None:
    policy_learner = learner(tiny_model_dir)
    policy_learner.update(rows())
    file = tmp_path / "weights.safetensors"
    policy_learner.write_weights(file)
    policy_learner.policy.model.save_pretrained(tmp_path / "model")
    load_renderer(tiny_model_dir)._tokenizer.save_pretrained(tmp_path / "model")
    request = Request(
        messages=(Message(role="user", text="get oak log"),), sampling=Sampling(max_new_tokens=8, logprobs=True), seed=4
    )

    async def generate(model: TransformersModel) -> list[Generation]:
        return (await model.generate([request]))[0]

    sampler = TransformersModel.load(tiny_model_dir, device="cpu")
    before = await generate(sampler)
    await sampler.reload(file)
    reference = TransformersModel.load(tmp_path / "model", device="cpu")
    assert await generate(sampler) == await generate(reference) != before

    weights = load_file(file)
    weights.pop(next(iter(weights)))
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "less.safetensors")
    with pytest.raises(ModelFault, match="the new weights are of another model"):
        await sampler.reload(tmp_path / "less.safetensors")
    for model in (sampler, reference):
        await model.close()
