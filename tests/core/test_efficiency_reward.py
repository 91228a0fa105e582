"""The efficiency reward: the numbers of the method, and its edges."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from toolboxes import Bench

from agentr_core.environments import registry
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import ConfigError
from agentr_core.methods.et_agent.evaluate import attempt_of
from agentr_core.methods.et_agent.reward import EfficiencyReward, efficiency_rewards
from agentr_core.methods.et_agent.selection import check_counts
from agentr_core.methods.faults import load
from agentr_core.recipes.et_agent import CurriculumConfig
from agentr_core.training.group.advantages import group_advantages
from agentr_core.types import Instance, Step, StopReason, ToolCall, Trajectory

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
CORRECTNESS = [1, 1, 1, 0]
CALLS = [1, 2, 3, 2]
LENGTHS = [100, 200, 300, 200]
VALID = [True, True, True, False]


def rewards(sigma: float = 0.1, **changed: object) -> list[float]:
    arguments = {"correctness": CORRECTNESS, "calls": CALLS, "lengths": LENGTHS, "valid": VALID, **changed}
    return efficiency_rewards(**arguments, sigma_calls=sigma, sigma_length=sigma)  # type: ignore[arg-type]


def test_the_numbers_of_the_method() -> None:
    assert rewards() == pytest.approx([1.1241, 1.0, 0.8830, -1.0], abs=5e-5)
    assert group_advantages(rewards(), scale="group") == pytest.approx([0.6186, 0.4953, 0.3789, -1.4928], abs=2e-4)


def test_with_the_published_amplitude_a_right_answer_of_mean_cost_is_worth_a_quarter() -> None:
    assert rewards(amplitude=1.0) == pytest.approx([1.1241 / 4, 0.25, 0.8830 / 4, -1.0], abs=5e-5)


def test_without_sigma_the_reward_is_correctness_and_format() -> None:
    assert rewards(0.0, correctness=[1, 0.5, 0, 1]) == [1, 0.5, 0, 0]


def test_equal_lengths_count_nothing_and_huge_costs_do_not_overflow() -> None:
    assert rewards(lengths=[7] * 4)[1] == pytest.approx(1.0)
    extreme = rewards(1000.0, calls=[0, 10_000, 0, 0])
    assert all(map(math.isfinite, extreme))
    assert extreme[1] == 0
    assert efficiency_rewards([], [], [], [], sigma_calls=1, sigma_length=1) == []


def test_a_group_of_other_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="an episode has"):
        rewards(calls=[1])


def line(reward: float, *, actions: str) -> Trajectory:
    """Return an episode of one step a letter, in a world without tools; a blank is no action."""
    steps = tuple(
        Step(reply=letter, action=letter.strip(), observation="seen", reward=reward, token_ids=(1, 2))
        for letter in actions
    )
    door = Instance(environment="door", split="train", index=0)
    stop = StopReason.SUCCESS if reward else StopReason.FAILURE
    return Trajectory(
        instance=door, first_observation="A door.", steps=steps, reward=reward, success=reward == 1, stop=stop
    )


def test_an_objective_has_the_reward_of_its_stage_and_lets_it_decay() -> None:
    group = [line(1, actions="ab"), line(1, actions="abcd"), line(0, actions="abc"), line(1, actions="a c")]
    objective = EfficiencyReward(sigma_calls=0.5, sigma_length=0.0, counts="steps", decay=True)
    first, last = (objective.rewards(group, step=step, steps=3) for step in (1, 3))
    assert first[0] > 1 > first[1] > 0
    assert first[2] == 0
    assert first[3] == pytest.approx(0.0), "a reply without an action breaks the format"
    assert last == pytest.approx([1, 1, 0, 0])
    half = replace(objective, sigma_calls=0.25, decay=False)
    assert objective.rewards(group, step=2, steps=3) == half.rewards(group, step=1, steps=1)
    assert objective.rewards(group, step=1, steps=1) == first, "a stage of one step has its whole sigma"
    with pytest.raises(ValueError, match="step 4 must be from 1 to 3"):
        objective.rewards(group, step=4, steps=3)
    assert EfficiencyReward(sigma_calls=0.5, sigma_length=0.0, counts="steps").rewards(group, step=3, steps=3) == first


def test_a_dear_tool_costs_more_than_a_cheap_one() -> None:
    def call_episode(tool: str) -> Trajectory:
        episode = line(1, actions="a")
        step = replace(episode.steps[0], action="<answer>a</answer>", tool_calls=(ToolCall(tool=tool),))
        return replace(episode, steps=(step,))

    group = [call_episode("search"), call_episode("python")]
    even = EfficiencyReward(sigma_calls=0.5, sigma_length=0.0, format_penalty=0.0)
    assert even.rewards(group, step=1, steps=1) == [1, 1], "as published, where a call is a call"
    scores = replace(even, call_costs=(("search", 3.0),)).rewards(group, step=1, steps=1)
    assert scores[0] < 1 < scores[1]


QUESTIONS = (
    Problem(id="m", question="What is 6 times 7?", golds=("42",), source="made", domain="math"),
    Problem(id="k", question="Which river is it?", golds=("Red River",), source="made", domain="knowledge"),
)
WORLD = ReasoningWorld({"train": QUESTIONS}, Bench({}), Rules(search_calls=1, spare_replies=2, answers="published"))
ASKS = "<think>a</think>\n<search>q</search>"


def question_episode(*replies: str, index: int = 0) -> Trajectory:
    """Return the episode of some replies in a world where one search is left."""
    instance = Instance(environment="reasoning", split="train", index=index)
    observation, outcomes = play_replies(WORLD, instance, replies)
    steps = tuple(replace(outcome.step, token_ids=(1,)) for outcome in outcomes)
    return Trajectory(
        instance=instance,
        first_observation=observation,
        steps=steps,
        reward=steps[-1].reward,
        success=steps[-1].success,
        stop=StopReason.SUCCESS if steps[-1].success else StopReason.FAILURE,
    )


def test_a_call_that_was_refused_counts_if_the_recipe_says_so() -> None:
    answer = "<think>b</think>\n<answer>\\boxed{42}</answer>"
    group = [question_episode(ASKS, ASKS, ASKS, answer), question_episode(ASKS, answer)]
    objective = EfficiencyReward(sigma_calls=0.5, sigma_length=0.0)
    assert objective.rewards(group, step=1, steps=1) == [1, 1], "one search each"
    # 3 and 1 calls are 1 from their mean.
    expected = [2 / (1 + math.exp(0.5)), 2 / (1 + math.exp(-0.5))]
    refusal_objective = replace(objective, refused_calls=True)
    assert refusal_objective.rewards(group, step=1, steps=1) == pytest.approx(expected)
    dear = replace(refusal_objective, call_costs=(("search", 2.0),)).rewards(group, step=1, steps=1)
    assert dear == pytest.approx([2 / (1 + math.exp(1)), 2 / (1 + math.exp(-1))])
    assert [attempt_of(episode, source="s").num_calls for episode in group] == [1, 1]
    assert [attempt_of(episode, source="s", refused=True).num_calls for episode in group] == [3, 1]
    open_call = question_episode(ASKS, "<think>b</think>\n<search>q", answer)
    assert attempt_of(open_call, source="s", refused=True).num_calls == 1, "without its end it is no call"


@pytest.mark.parametrize(
    ("reply", "index", "plain", "published"),
    [
        ("<think>b</think><answer>It is \\boxed{42}.</answer>", 0, 1, 1),
        ("<think>b</think><answer>42</answer>", 0, 0, -1),
        ("<think>It is \\boxed{42}.</think><answer>42</answer>", 0, 0, 0),
        ("<think>It is \\boxed{42}.</think><answer>so it is</answer>", 0, -1, 0),
        ("<think>It is \\boxed{41}.</think><answer>42</answer>", 0, 0, -1),
        ("<think>It is \\boxed{42}.</think><answer>It is \\boxed{41}.</answer>", 0, 0, 0),
        ("<think>It is \\boxed{42}.</think>", 0, -1, -1),
        ("<think>b</think><answer>It is \\boxed{the river}.</answer>", 1, 2 / 3, 2 / 3),
        ("<think>b</think><answer>Red River</answer>", 1, 0, -1),
        ("<think>It is \\boxed{Red River}.</think><answer>Red River</answer>", 1, 0, -1),
    ],
)
def test_an_answer_without_a_box(reply: str, index: int, plain: float, published: float) -> None:
    objective, group = EfficiencyReward(sigma_calls=0.1, sigma_length=0.1), [question_episode(reply, index=index)]
    assert objective.rewards(group, step=1, steps=1, env=WORLD) == pytest.approx([plain])
    scores = replace(objective, boxed_only=True).rewards(group, step=1, steps=1, env=WORLD)
    assert scores == pytest.approx([published])


def test_published_recipes_have_the_rewards_of_the_authors_code() -> None:
    curriculum = load(RECIPES / "reasoning-et-agent-rl.yaml").et_agent.curriculum
    assert curriculum.refused_calls
    assert curriculum.boxed_only
    assert load(RECIPES / "reasoning-et-agent.yaml").et_agent.curriculum.refused_calls, "evaluations count calls"


@pytest.mark.parametrize("field", ["refused_calls", "boxed_only"])
def test_where_steps_are_counted_there_are_neither_refused_calls_nor_boxes(field: str) -> None:
    file = RECIPES / "reasoning-et-agent-tiny.yaml"
    with pytest.raises(ConfigError, match=rf"et_agent.curriculum.{field}: .*leave it out"):
        load(file, [f"et_agent.curriculum.{field}=true", "et_agent.curriculum.counts=steps"])
    recipe = load(file, ["et_agent.curriculum.boxed_only=true"])
    check_counts(recipe, WORLD, ())
    with pytest.raises(ConfigError, match="textcraft has no questions that are answered in a box"):
        check_counts(recipe, registry.make("textcraft", {}), ())
    with pytest.raises(ConfigError, match="has no use without an iteration rl"):
        load(file, ["et_agent.phases=[rft]", "et_agent.curriculum.boxed_only=true"])


def test_shipped_stages_train_efficiency() -> None:
    files = [file for file in RECIPES.glob("*.yaml") if "et-agent" in file.name]
    stages = [recipe for file in files if "rl" in (recipe := load(file)).et_agent.phases]
    assert stages
    for curriculum in (CurriculumConfig(), *(recipe.et_agent.curriculum for recipe in stages)):
        assert min(curriculum.sigma_calls) > 0
        assert min(curriculum.sigma_length) > 0


def test_with_calls_an_episode_of_another_form_loses_the_penalty() -> None:
    objective = EfficiencyReward(sigma_calls=0.1, sigma_length=0.1, format_penalty=0.25)
    assert objective.rewards([line(0, actions="a"), line(0, actions="b")], step=1, steps=1) == [-0.25, -0.25]
