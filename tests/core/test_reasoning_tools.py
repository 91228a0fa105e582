"""The world with its real tools: the shipped encyclopaedia, and Python in its sandbox."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from agentr_core.environments.contract import check
from agentr_core.environments.reasoning.grammar import strict_fault
from agentr_core.environments.reasoning.world import Reasoning
from agentr_core.environments.registry import make
from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Reasoning:
    env = Reasoning(cache_dir=str(tmp_path_factory.mktemp("retrieval")))
    env.reach()
    return env


def test_it_keeps_the_contract(world: Reasoning, tmp_path: Path) -> None:
    assert check(lambda: Reasoning(cache_dir=str(tmp_path)), instances_per_split=2) == ()


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_expert_solves_what_comes_along(world: Reasoning, split: str) -> None:
    for instance in world.instances(split)[::50]:
        _, outcomes = play_replies(world, instance, world.expert(instance) or [])
        steps = [outcome.step for outcome in outcomes]
        assert steps[-1].success, instance.key
        assert strict_fault("".join(step.reply + step.observation for step in steps)) == ""
        assert {call.status for step in steps for call in step.tool_calls} == {"ok"}


def test_every_article_on_the_way_is_found(world: Reasoning) -> None:
    for split in world.splits():
        for instance in world.instances(split):
            moves = world.problem(instance).solution
            for move, after in pairwise(moves):
                if move.tool == "search":
                    fact = after.thought.partition(" I look up")[0]
                    assert fact in world._toolbox.call("search", move.query).output


def test_code_that_fails_is_answered(world: Reasoning) -> None:
    world.reset(world.instances("train")[0])
    transition = world.step("<python>1 / 0</python>")
    assert "ZeroDivisionError" in transition.observation
    assert transition.info["tool_calls"][0].status == "exception"
    assert "printed nothing" in world.step("<python>x = 1</python>").observation


def test_wrong_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no tool saw; there are search, python"):
        Reasoning(tools=["saw"])
    with pytest.raises(ConfigError, match="tools names a tool twice"):
        Reasoning(tools=["search", "search"])
    with pytest.raises(ConfigError, match="python_timeout_s is inf; give a number of seconds above 0"):
        Reasoning(python_timeout_s=float("inf"))
    with pytest.raises(ConfigError, match="document_chars is 0; it must be at least 1"):
        Reasoning(document_chars=0)
    with pytest.raises(ConfigError, match=r"environment\.options\.top_k: give a whole number"):
        make("reasoning", {"top_k": "3"})
    with pytest.raises(ConfigError, match="sandbox is 'steel'; the Python tool has strictest, none, limits"):
        Reasoning(tools=["python"], sandbox="steel")
