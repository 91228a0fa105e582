"""Pruning keeps what the reward needs, and nothing but playing decides what that is."""

from __future__ import annotations

import pytest
from toy import Line
from toy_paths import ToyTree, critique, good_sample, reply

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import ConfigError
from agentr_core.methods.agent_r.pruning import needed_positions
from agentr_core.methods.agent_r.splice import pruned_sample, splice
from agentr_core.methods.faults import parse
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.types import Instance, Sample, Transition


def kept_actions(*actions: str, index: int = 0, start: int = 0) -> list[str]:
    env = Line()
    replies = [reply(action) for action in actions]
    positions = needed_positions(env, ToyTree(index).instance, replies, start=start)
    return [actions[position] for position in positions]


def test_idle_and_refused_steps_go() -> None:
    assert kept_actions("look", "right", "nonsense", "look", "right") == ["right", "right"]


class Hand(Line):
    """A hand for one thing; what is delivered ends the episode."""

    def reset(self, instance: Instance) -> str:
        self._held = ""
        return super().reset(instance)

    def step(self, action: str) -> Transition:
        word, _, thing = action.partition(" ")
        if word == "take" and not self._held:
            self._held = thing
        elif word == "put" and self._held == thing:
            self._held = ""
        elif word == "deliver" and self._held == thing == "y":
            return Transition("Delivered.", 1.0, True, False, {"success": True})
        else:
            return Transition("Nothing happens.", 0.0, False, False, {"success": False})
        return Transition("Done.", 0.0, False, False, {"success": False})


def test_what_only_served_a_step_that_went_goes_too() -> None:
    env, actions = Hand(), ["take x", "put x", "take y", "deliver y"]
    positions = needed_positions(env, ToyTree(0).instance, [reply(action) for action in actions])
    assert [actions[position] for position in positions] == ["take y", "deliver y"]


def test_steps_before_the_start_stay() -> None:
    assert kept_actions("look", "look", "right", "look", "right", start=1) == ["look", "right", "right"]


def test_what_comes_after_the_end_goes() -> None:
    assert kept_actions("right", "right", "look", "left") == ["right", "right"]


def test_a_shorter_path_with_less_reward_is_not_taken() -> None:
    assert kept_actions("right", "look", "stop", index=1) == ["right", "stop"]


def test_a_path_that_ends_in_disaster_stays_as_it_is() -> None:
    assert kept_actions("look", "right", "jump") == ["look", "right", "jump"]


def test_a_good_sample_has_live_observations_and_the_tokens_that_were_sampled() -> None:
    path = ToyTree(1).path("look", "right", "look", "right", "right")
    sample = pruned_sample(path, Line())
    assert [m.text for m in sample.messages if m.train] == [reply("right")] * 3
    assert [m.text for m in sample.messages if m.role == "user"][2:] == ["You are at 1.", "You are at 2."]
    assert all(m.token_ids for m in sample.messages if m.train)
    assert sample.provenance.extra["pruned_steps"] == 2


class MovedGoal(Line):
    """The same walk, whose goal has since been moved out of reach."""

    def reset(self, instance: Instance) -> str:
        first_observation = super().reset(instance)
        self._goal = 9
        return first_observation


def test_a_path_that_no_longer_plays_as_recorded_stays_whole() -> None:
    path = ToyTree(1).path("look", "right", "right", "right")
    sample = pruned_sample(path, MovedGoal())
    assert sample.messages == good_sample(path, Line()).messages
    assert sample.provenance.extra["pruned_steps"] == 0


def test_a_revision_keeps_its_bad_part_and_prunes_the_suffix() -> None:
    pair = ToyTree(0).pair(["right", "look", "right"], ["left", "right", "look", "stop"])
    sample = splice(pair, critique(1, 4), Line(), SpliceConfig(mode="verified", prune=True), alpha=1.0, seed=0)
    assert isinstance(sample, Sample)
    assert sample.provenance.cut == 2
    assert [m.text for m in sample.messages if m.role == "assistant"][1:3] == [reply("left"), reply("right")]
    assert [m.text for m in sample.messages if m.train][1:] == [reply("right")] * 2
    assert sample.provenance.extra["dropped_good_steps"] == 1


def test_an_expert_of_textcraft_has_little_to_prune_and_a_clumsy_path_is_pruned_to_as_much() -> None:
    env = TextCraft(expert="lazy")
    for instance in env.instances("train")[:25]:
        expert = list(env.expert(instance) or [])
        clumsy = [reply("inventory"), *(line for step in expert for line in (step, reply("get 1 nothing")))]
        positions = needed_positions(env, instance, clumsy)
        _, outcomes = play_replies(env, instance, [clumsy[position] for position in positions])
        assert outcomes[-1].step.success
        assert len(positions) <= len(expert)
        assert all(outcome.step.valid for outcome in outcomes)


def test_pruning_without_playing_is_refused() -> None:
    recipe = {"name": "x", "environment": {"name": "textcraft"}, "model": {"path": "m"}, "splice": {"prune": True}}
    with pytest.raises(ConfigError, match=r"splice\.prune: works only in splice\.mode verified, not blind"):
        parse(recipe)
