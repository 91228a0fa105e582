"""What methods say about their iterations: which stages are settled, and how a policy acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentr_core.methods.faults import load, parse
from agentr_core.methods.table import method_of, plan_of, plans_of
from agentr_core.recipes.training import LaunchConfig
from agentr_core.runtime.context import Product
from agentr_core.training.job import GroupRelative

RECIPES = Path("deployments/recipes")


@pytest.mark.parametrize(
    ("made", "settled"),
    [
        ((), []),
        (("dataset",), ["collect", "critique", "splice"]),
        (("dataset", "checkpoint"), ["collect", "critique", "splice", "dataset"]),
    ],
)
def test_what_comes_before_a_product_is_settled_once_it_is_there(made: tuple[Product, ...], settled: list[str]) -> None:
    plan = plan_of(load(RECIPES / "textcraft-tiny.yaml"), 1)
    assert [stage.name for stage in plan.settled_stages(made)] == settled


def test_rollouts_that_training_was_chosen_from_are_settled_with_its_checkpoint() -> None:
    plan = plan_of(load(RECIPES / "reasoning-et-agent-tiny.yaml"), 2)
    assert [stage.name for stage in plan.settled_stages({"checkpoint"})] == ["rollout", "select"]
    assert plan.settled_stages(()) == ()


@pytest.mark.parametrize("method", [{"method": "grpo"}, {"method": "agent-r", "agent_r": {"phases": ["rl"]}}])
def test_group_rl_acts_within_its_own_limits(method: dict[str, Any]) -> None:
    grpo = {"max_steps": 16, "max_new_tokens": 48, "repeats": 3}
    recipe = parse({"name": "r", "model": {"path": "m"}, "grpo": grpo, **method})
    acting = method_of(recipe).rollout_config(recipe)
    assert (acting.max_steps, acting.sampling.max_new_tokens, acting.repeats) == (16, 48, 3)


def test_a_method_that_searches_first_acts_as_in_its_trees() -> None:
    recipe = load(RECIPES / "textcraft-agent-r-rl-tiny.yaml")
    acting = method_of(recipe).rollout_config(recipe)
    assert (acting.max_steps, acting.repeats) == (recipe.search.depth + 1, 0)


def test_a_plan_names_the_settings_that_group_rl_does_not_read() -> None:
    machines = "{num_processes: 8, num_machines: 2, main_process_ip: a, main_process_port: 9, deepspeed: zero3}"
    further = ["agent_r.phases=[sft, rl]", "training.optim=adafactor", f"training.launch={machines}"]
    recipe = load(RECIPES / "textcraft-tiny.yaml", further)
    lines = method_of(recipe).describe(recipe, 4, 4)
    unread = "training.optim, training.launch.num_machines (it trains on one machine, with its share of the processes)"
    assert f"an iteration rl does not read {unread}" in lines
    trainings = [plan.training for plan in plans_of(recipe) if plan.training]
    launches = [training.config.launch for training in trainings if isinstance(training.objective, GroupRelative)]
    assert launches
    assert all(launch == LaunchConfig(num_processes=4, deepspeed="zero3") for launch in launches)
    plain = load(RECIPES / "textcraft-tiny.yaml", further[:1])
    assert not any("does not read" in line for line in method_of(plain).describe(plain, 4, 4))


def test_the_curriculum_of_et_agent_trains_on_one_machine_as_its_plan_says() -> None:
    launch: dict[str, Any] = {"num_processes": 8, "num_machines": 2, "main_process_ip": "a", "main_process_port": 9}
    recipe = parse(
        {
            "name": "t",
            "model": {"path": "m"},
            "method": "et-agent",
            "iterations": 2,
            "et_agent": {"phases": ["rft", "rl"]},
            "training": {"launch": launch},
        }
    )
    assert any("training.launch.num_machines" in line for line in method_of(recipe).describe(recipe, 4, 4))
    sft_launch, rl_launch = (plan.training.config.launch for plan in plans_of(recipe) if plan.training)
    assert sft_launch == LaunchConfig(**launch)
    assert rl_launch == LaunchConfig(num_processes=4)


def test_a_plan_tells_how_many_instances_each_kind_of_iteration_has() -> None:
    further = ["agent_r.phases=[clone, sft]", "instances.from_iteration={2: {train_limit: 30}}"]
    recipe = load(RECIPES / "textcraft-tiny.yaml", further)
    method = method_of(recipe)
    assert method.describe(recipe, 250, 100)[:3] == [
        "iterations: clone, sft; each ends with 100 held-out episodes",
        "an iteration clone has the expert's episodes of 250 instances",
        "an iteration sft has 30 trees",
    ]
    search = recipe.search
    assert method.demands(recipe, 250, 100)["search"].replies == 30 * search.dives * search.width * (search.depth + 1)


def test_a_plan_names_the_settings_that_preference_training_does_not_read() -> None:
    further = ["data.replay=true", "training.step_tokens=4096", "training.lora_r=8", "training.lora_dropout=0.1"]
    recipe = load(RECIPES / "textcraft-eto-tiny.yaml", further)
    (line,) = [line for line in method_of(recipe).describe(recipe, 4, 4) if "does not read" in line]
    assert line.startswith("an iteration dpo does not read ")
    assert line.endswith("data.replay, training.step_tokens, training.lora_dropout")
    # Preferences that read the same are one in any case.
    further = ["data.duplicates=keep", "data.good_per_tree=1", "eto.phases=[rft, dpo]"]
    recipe = load(RECIPES / "textcraft-eto-tiny.yaml", further)
    (line,) = [line for line in method_of(recipe).describe(recipe, 4, 4) if "does not read" in line]
    assert "data.duplicates, data.good_per_tree" in line
