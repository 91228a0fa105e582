"""Environments from Gymnasium, environments for TRL, and the template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from combination_lock import CombinationLock
from gymnasium.spaces import Discrete, Text
from toy import Line
from toy import instance as line_instance
from transformers.utils import get_json_schema

from agentr_core.environments import registry
from agentr_core.environments.agentgym.worlds import Wordle
from agentr_core.environments.contract import check
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.graders import NumericAnswer, Rubric
from agentr_core.environments.gymnasium_text import GymnasiumText, environment_factory, rows
from agentr_core.episodes.rollout import act
from agentr_core.errors import ConfigError, DataFault, EnvironmentFault, IllTypedAnswer
from agentr_core.methods.faults import parse
from agentr_core.runtime.instances import check_no_overlap
from agentr_core.stages.demonstrate import expert_of
from agentr_core.types import Transition


class Stairs(gymnasium.Env[str, str]):
    """Climb as many steps as the seed says; each is worth 5, the last one ends it. `jump` ends it
    at once.
    """

    observation_space = Text(200)
    action_space = Text(200)

    def __init__(self, numbers: bool = False, tells: bool = False) -> None:
        self._tells = tells
        if numbers:
            self.action_space = Discrete(3)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 2
        return f"Stairs number {seed}, {self._left} steps.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_climb = action == "climb"
        self._left -= is_climb
        over = self._left == 0 or action == "jump"
        info = {"success": False} if self._tells else {}
        return f"{self._left} left.", 5.0 * is_climb, over, False, info


@pytest.fixture(autouse=True)
def stairs() -> Iterator[None]:
    gymnasium.register("Stairs-v0", lambda **options: Stairs(**options))
    yield
    del gymnasium.registry["Stairs-v0"]


def climb(**options: Any) -> GymnasiumText:
    plain: dict[str, Any] = {"id": "Stairs-v0", "reward_high": 10.0}
    return GymnasiumText(**(plain | options))


def test_a_gymnasium_environment_keeps_the_contract() -> None:
    assert check(climb) == ()


def test_the_reward_is_the_scaled_return() -> None:
    env = climb()
    assert env.reset(env.instances("test")[7]) == "Stairs number 1007, 2 steps."
    assert env.step(env.parse("Thought: up\nAction: climb")) == ("1 left.", 0.5, False, False, {"success": False})
    assert env.step("climb") == ("0 left.", 1.0, True, False, {"success": True})
    env.reset(env.instances("train")[0])
    assert env.step("jump") == ("2 left.", 0.0, True, False, {"success": False})
    env.close()


def test_success_is_the_environments_own_where_it_tells() -> None:
    env = climb(make_options={"tells": True})
    env.reset(env.instances("train")[0])
    env.step("climb")
    assert env.step("climb") == ("0 left.", 1.0, True, False, {"success": False})


def test_seeds_that_begin_alike_are_other_problems_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stairs, "reset", lambda self, seed, options=None: ("Stairs.", {}))
    env = climb()
    train, test = (tuple(env.instances(split)[:2]) for split in ("train", "test"))
    with pytest.raises(DataFault, match="is held-out instance"):
        check_no_overlap(env, train, test)
    check_no_overlap(climb(seeds_differ=True), train, test)
    with pytest.raises(DataFault, match="is held-out instance"):
        check_no_overlap(climb(seeds_differ=True), train, train)


def test_seeds_of_wordle_are_told_apart_though_all_begin_alike() -> None:
    env = Wordle(url="http://127.0.0.1:9", train="0-1", test="2-3")
    check_no_overlap(env, tuple(env.instances("train")), tuple(env.instances("test")))


@pytest.mark.parametrize("reward", [float("inf"), float("nan"), "5", None])
def test_a_reward_that_is_no_finite_number_is_refused(reward: Any) -> None:
    """An infinite one was a success before: the scale ends at 1."""
    env = climb()
    env.reset(env.instances("train")[0])
    env._env.unwrapped.step = lambda action: ("up", reward, True, False, {})  # type: ignore[method-assign]
    with pytest.raises(IllTypedAnswer, match="the reward of 'climb' is"):
        act(env, "Action: climb")


@pytest.mark.parametrize("success", ["False", 1, None])
def test_a_success_that_is_no_flag_is_refused(success: Any) -> None:
    env = climb()
    env.reset(env.instances("train")[0])
    env._env.unwrapped.step = lambda action: ("up", 10.0, True, False, {"success": success})  # type: ignore[method-assign]
    with pytest.raises(IllTypedAnswer, match="success"):
        act(env, "Action: climb")


def test_an_expert_file_is_played_in_a_world_of_gymnasium(tmp_path: Path) -> None:
    """The keys of a file's instances had the recipe's name, and those of the world its own: none
    ever matched.
    """
    turns = ["Climb.", "Ok.", "Stairs.", "Action: climb", "1 left.", "Action: climb"]
    lines = [
        json.dumps(
            {"id": key, "conversations": [{"from": ("human", "gpt")[i % 2], "value": t} for i, t in enumerate(turns)]}
        )
        for key in (0, "gymnasium/train/1", "gymnasium-Stairs-v0/train/2")
    ]
    (tmp_path / "expert.jsonl").write_text("\n".join(lines))
    recipe = parse(
        {
            "name": "stairs",
            "method": "eto",
            "model": {"path": "m"},
            "environment": {"name": "gymnasium", "options": {"id": "Stairs-v0", "reward_high": 10.0}},
            "eto": {"phases": ["sft"], "expert": {"file": str(tmp_path / "expert.jsonl")}},
        }
    )
    env = climb()
    play_expert = expert_of(recipe, env)
    results = [play_expert(env, instance) for instance in env.instances("train")[:4]]
    assert [getattr(result, "success", None) for (result,) in results] == [True, True, True, None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": ""}, "needs the option id"),
        ({"id": "Nowhere-v0"}, "Gymnasium cannot make 'Nowhere-v0'"),
        (
            {"id": "no_such_package:Stairs-v0"},
            "environment gymnasium needs the Python package no_such_package, which is not",
        ),
        ({"make_options": {"numbers": True}}, "a text environment is needed, but one of its spaces is Discrete"),
        ({"make_options": {"nonsense": 1}}, "Gymnasium cannot make 'Stairs-v0'.*nonsense"),
        ({"train": [5, 2]}, "train must be the first and the last seed"),
        ({"train": [0, 9], "test": [9, 12]}, "the seeds of train and test overlap"),
        ({"reward_low": 10}, "reward_low 10 is not below reward_high 10"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        climb(**options)


def test_misuse_of_a_gymnasium_environment() -> None:
    env = registry.make("gymnasium", {"id": "Stairs-v0"})
    with pytest.raises(ConfigError, match="has no split 'dev'; it has train, test"):
        env.instances("dev")
    with pytest.raises(EnvironmentFault, match="has no instance line/train/0"):
        env.reset(line_instance(0))
    with pytest.raises(EnvironmentFault, match="has no snapshots"):
        env.snapshot()
    env.close()


def test_trl_finds_one_tool_with_a_schema() -> None:
    episode = environment_factory(TextCraft)()
    members = {name for name, _ in inspect.getmembers(type(episode), predicate=inspect.isfunction)}

    assert {name for name in members if not name.startswith("_")} == {"reset", "act", "get_reward"}
    tool = get_json_schema(episode.act)["function"]
    assert (tool["name"], tool["parameters"]["required"]) == ("act", ["action"])


def test_an_episode_by_tool_calls_is_an_episode() -> None:
    env = TextCraft()
    instance = env.instances("train")[3]
    (row,) = rows(env, [instance])
    episode = environment_factory(TextCraft)()

    assert row["prompt"][0]["content"].startswith(env.instruction)
    # TRL hands the whole row to `reset`.
    assert episode.reset(**row) == env.reset(instance)
    for reply in env.expert(instance) or ():
        assert episode.get_reward() == 0.0
        assert episode.act(env.parse(reply)) == env.step(env.parse(reply)).observation
    assert episode.get_reward() == 1.0
    assert episode.act("inventory") == "The episode is over."
    assert episode.get_reward() == 1.0
    episode.reset(**row)
    assert episode.get_reward() == 0.0


def test_an_episode_by_tool_calls_ends_at_a_disaster_and_at_the_step_limit() -> None:
    episode = environment_factory(Line)()
    row: dict[str, Any] = {"environment_name": "line", "split": "train", "index": 1}
    episode.reset(**row)
    assert (episode.act("jump"), episode.act("right"), episode.get_reward()) == ("You fell.", "The episode is over.", 0)
    episode.reset(**row)
    observations = [episode.act("look") for _ in range(Line.step_limit + 1)]
    assert observations[-2:] == ["You are at 0.", "The episode is over."]


def test_a_fault_is_no_reward_in_trl() -> None:
    class Broken(Line):
        def step(self, action: str) -> Transition:
            raise EnvironmentFault("the line snapped")

    episode = environment_factory(Broken)()
    episode.reset(environment_name="line", split="train", index=0)
    assert episode.act("right") == "The environment broke."
    with pytest.raises(EnvironmentFault, match="snapped"):
        episode.get_reward()


def test_a_graded_world_has_the_reward_of_its_grader_in_trl() -> None:
    class Graded(Line):
        grader = NumericAnswer(lambda instance: ["42"])

    class Judged(Line):
        grader = Rubric("It looks twice.")

    episode = environment_factory(Graded)()
    row: dict[str, Any] = {"environment_name": "line", "split": "train", "index": 1}
    for action, reward in (("say 42", 1.0), ("say 41", 0.0), ("jump", 0.0)):
        episode.reset(**row)
        episode.act(action)
        assert episode.get_reward() == reward
    judge_episode = environment_factory(Judged)()
    judge_episode.reset(**row)
    judge_episode.act("look")
    with pytest.raises(ConfigError, match="the grader of line asks a model of role judge, but none can be asked here"):
        judge_episode.get_reward()


def test_the_template_keeps_the_contract() -> None:
    assert check(CombinationLock, instances_per_split=20) == ()


def test_the_template_jams_after_eight_tries() -> None:
    env = CombinationLock()
    env.reset(env.instances("train")[1])
    transitions = [env.step("try 0 0 0") for _ in range(8)]
    assert [transition.terminated for transition in transitions] == [False] * 7 + [True]
    assert transitions[0].observation == "too low, too low, too low."
    assert not transitions[-1].info["success"]
    with pytest.raises(ConfigError, match="has no split 'dev'"):
        env.instances("dev")
    with pytest.raises(EnvironmentFault, match="has no instance line/train/0"):
        env.reset(line_instance(0))
