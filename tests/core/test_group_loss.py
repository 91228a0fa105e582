"""Advantages, token weights and the clipped loss against numbers worked out by hand and TRL's."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentr_core.training.group.advantages import group_advantages, has_contrast, sibling_advantages
from agentr_core.training.group.policy import surrogate_loss, token_weights
from agentr_core.types import Instance, Step, StopReason, Trajectory


def test_advantages_are_rewards_less_their_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale="none") == [0.75, -0.25, -0.25, -0.25]
    deviation = 0.5 + 1e-4  # of a sample: sqrt((0.75^2 + 3 * 0.25^2) / 3)
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale="group") == pytest.approx(
        [0.75 / deviation, *[-0.25 / deviation] * 3]
    )


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_group_without_contrast_teaches_nothing(scale: Any) -> None:
    assert group_advantages([0.5] * 4, scale=scale) == [0.0] * 4
    assert not has_contrast([0.5] * 4)
    assert has_contrast([0.5, 0.5, 0.4])


def episode(actions: str, reward: float, *, seen: str = "") -> Trajectory:
    """Return an episode of one action a letter that saw `seen`, letter by letter, or nothing."""
    steps = [
        Step(reply=f"thought {reward}: {action}", action=action, observation=seen[place : place + 1], reward=0.0)
        for place, action in enumerate(actions)
    ]
    door = Instance(environment="door", split="train", index=0)
    stop = StopReason.SUCCESS if reward == 1 else StopReason.FAILURE
    return Trajectory(
        instance=door, first_observation="", steps=tuple(steps), reward=reward, success=reward == 1, stop=stop
    )


def test_a_step_is_held_against_its_siblings() -> None:
    #        go (1/2) -- left (1/3) -- dig 1, dig 0, rest 0
    # (1/2)           \ right (1) --- dig 1
    group = [episode("gld", 1), episode("gld", 0), episode("glr", 0), episode("grd", 1)]
    advantages = sibling_advantages(group, [e.reward for e in group], scale="none")
    left, right = 1 / 3 - 1 / 2, 1 - 1 / 2
    # All went; left or right was a choice, and on the left to dig or to rest; on the right all dug.
    assert advantages == [
        pytest.approx([0.0, left, 1 / 2 - 1 / 3]),
        pytest.approx([0.0, left, 1 / 2 - 1 / 3]),
        pytest.approx([0.0, left, 0 - 1 / 3]),
        pytest.approx([0.0, right, right]),
    ]
    unit = math.sqrt(1 / 3) + 1e-4
    scaled_advantages = sibling_advantages(group, [e.reward for e in group], scale="group")
    assert scaled_advantages == [pytest.approx([value / unit for value in of_steps]) for of_steps in advantages]


def test_what_the_world_answers_is_part_of_a_state_and_no_choice() -> None:
    group = [episode("ab", 1, seen="xz"), episode("ac", 0, seen="yz"), episode("ab", 0, seen="yz")]
    advantages = sibling_advantages(group, [e.reward for e in group], scale="none")
    # After `a` the first saw something else, so its `b` has no sibling.
    assert advantages == [pytest.approx([0.0, 0.0]), pytest.approx([0.0, 0.0]), pytest.approx([0.0, 0.0])]


def test_token_weights_say_what_the_loss_is_a_mean_over() -> None:
    assert token_weights([1, 3], loss_type="dapo", max_tokens=10) == [1 / 4, 1 / 4]
    assert token_weights([1, 3], loss_type="grpo", max_tokens=10) == [1 / 2, 1 / 6]
    assert token_weights([1, 3], loss_type="dr_grpo", max_tokens=10) == [1 / 20, 1 / 20]


def test_the_parts_of_an_episode_together_weigh_as_much_as_a_whole_one() -> None:
    # An episode of 90 tokens in three parts, and one of 90 in one.
    lengths, wholes = [30, 20, 40, 90], [90, 90, 90, 90]
    for loss_type in ("grpo", "dr_grpo"):
        weights = token_weights(lengths, episode_lengths=wholes, loss_type=loss_type, max_tokens=100)
        of_parts = [length * weight for length, weight in zip(lengths, weights, strict=True)]
        assert sum(of_parts[:3]) == pytest.approx(of_parts[3])
    assert sum(of_parts) == pytest.approx(180 / (2 * 100))


def test_the_clipped_loss_by_hand() -> None:
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    worth = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    # -min(r A, clip(r) A): -1, -1.2 (clipped), 1.5, -0.5, 0.8 (clipped)
    surrogate = surrogate_loss(
        ratios.log(), torch.zeros(5), worth, torch.full((5,), 0.2), epsilon=0.2, epsilon_high=0.2
    )
    assert surrogate.loss.item() == pytest.approx((-1 - 1.2 + 1.5 - 0.5 + 0.8) / 5)
    assert surrogate.num_clipped.item() == 2
    assert surrogate.sampler_kl.item() == pytest.approx(sum(r - math.log(r) - 1 for r in ratios.tolist()), abs=1e-6)
    assert surrogate.kl.item() == 0


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_the_policy_gradient() -> None:
    logprobs = torch.tensor([1.5, 1.0]).log().requires_grad_()
    surrogate = surrogate_loss(
        logprobs, torch.zeros(2), torch.tensor([1.0, 0.5]), torch.ones(2), epsilon=0.2, epsilon_high=0.28
    )
    surrogate.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5])


def test_the_dual_clip_bounds_what_a_bad_token_costs() -> None:
    logprobs = torch.tensor([5.0, 2.0, 5.0]).log().requires_grad_()
    worth = torch.tensor([-1.0, -1.0, 1.0])
    surrogate = surrogate_loss(logprobs, torch.zeros(3), worth, torch.ones(3), epsilon=0.2, epsilon_high=0.2, delta=3.0)
    assert surrogate.loss.item() == pytest.approx(3 + 2 - 1.2)
    assert surrogate.num_clipped.item() == 2
    surrogate.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize(("beta", "delta"), [(0.0, None), (0.04, None), (0.04, 1.4)])
def test_the_loss_is_that_of_trl(loss_type: Any, beta: float, delta: float | None) -> None:
    generator = torch.Generator().manual_seed(4)
    mask = torch.tensor([[1, 1, 1, 0, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    new, old, reference = (-torch.rand(3, 5, generator=generator) for _ in range(3))
    worth = torch.tensor([1.2, -0.7, 0.3])

    expected = _trl_loss(new, old, reference, worth, mask, loss_type=loss_type, beta=beta, delta=delta, most=7)

    lengths = mask.sum(1).tolist()
    weights = torch.tensor(token_weights(lengths, loss_type=loss_type, max_tokens=7))[:, None].expand(3, 5)
    bool_mask = mask.bool()
    surrogate = surrogate_loss(
        new[bool_mask],
        old[bool_mask],
        worth[:, None].expand(3, 5)[bool_mask],
        weights[bool_mask],
        epsilon=0.2,
        epsilon_high=0.28,
        delta=delta,
        reference=reference[bool_mask] if beta else None,
        beta=beta,
    )
    assert surrogate.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def _trl_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor,
    worth: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_type: str,
    beta: float,
    delta: float | None,
    most: int,
) -> torch.Tensor:
    """Return what TRL's own method makes of log-probabilities, with a trainer that has its settings
    and no model.
    """
    from collections import defaultdict

    from trl import GRPOTrainer

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=most,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
        ),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(3, 1, dtype=torch.long),
        "prompt_mask": torch.ones(3, 1, dtype=torch.long),
        "completion_ids": torch.zeros(3, 5, dtype=torch.long),
        "completion_mask": mask,
        "advantages": worth,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss
