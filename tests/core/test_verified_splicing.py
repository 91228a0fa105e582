"""Splices that are played: some survive the bad steps that were kept, some die of them."""

from __future__ import annotations

import pytest
from toy import Line
from toy_paths import ToyTree, critique, reply, sampled_ids

from agentr_core.errors import ReplayDiverged
from agentr_core.methods.agent_r.pairs import pair_id
from agentr_core.methods.agent_r.report import survival_of
from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.types import Instance, PathPair, Rejection, Sample, Transition


class Tiring(Line):
    """Cuts an episode after four steps."""

    _left = 4

    def reset(self, instance: Instance) -> str:
        self._left = 4
        return super().reset(instance)

    def step(self, action: str) -> Transition:
        self._left -= 1
        return super().step(action)._replace(truncated=self._left == 0)


class LoggingLine(Line):
    def __init__(self) -> None:
        super().__init__()
        self.actions: list[str] = []

    def step(self, action: str) -> Transition:
        self.actions.append(action)
        return super().step(action)


class Furthest(Line):
    """The reward is the part of the way that was covered so far, at any time."""

    _furthest = 0

    def reset(self, instance: Instance) -> str:
        self._furthest = 0
        return super().reset(instance)

    def step(self, action: str) -> Transition:
        transition = super().step(action)
        self._furthest = max(self._furthest, self._place)
        return transition._replace(reward=self._furthest / self._goal)


def splice_verified(
    pair: PathPair, error: int | None, *, env: Line | None = None, alpha: float = 1.0
) -> Sample | Rejection:
    path_critique = critique(error, len(pair.bad.nodes))
    return splice(pair, path_critique, env or Line(), SpliceConfig(mode="verified"), alpha=alpha, seed=0)


def survivor(made: Sample | Rejection) -> Sample:
    assert isinstance(made, Sample), made
    return made


def dead(made: Sample | Rejection) -> Rejection:
    assert isinstance(made, Rejection), made
    return made


def test_a_harmless_error_survives_and_the_dummy_action_is_played_too() -> None:
    env = LoggingLine()
    sample = survivor(splice_verified(ToyTree(0).pair(["right", "right"], ["look", "stop"]), 0, env=env))
    assert env.actions == ["look", "wait", "right", "right"]
    answer = Line()
    assert sample.instance is not None
    answer.reset(sample.instance)
    assert sample.messages[6].text == answer.step("wait").observation != "ok."
    assert [m.text for m in sample.messages if m.train][1:] == [reply("right")] * 2
    extra = sample.provenance.extra
    assert (extra["mode"], extra["live_reward"], extra["live_success"]) == ("verified", 1.0, True)
    assert (extra["changed_observations"], extra["dropped_good_steps"]) == (0, 0)


def test_live_observations_replace_the_recorded_ones_but_replies_stay_as_sampled() -> None:
    # The kept step is one to the right, so every later place is one further on than it was.
    pair = ToyTree(2).pair(["left", "right", *["right"] * 4], ["right", "look", "stop"])
    sample = survivor(splice_verified(pair, 0))
    observations = [m.text for m in sample.messages if m.role == "user"][4:]
    assert observations == [f"You are at {place}." for place in (0, 1, 2, 3)]
    assert sample.provenance.extra["changed_observations"] == 5
    assert all(m.token_ids == sampled_ids(m.text) for m in sample.messages if m.train and "wait" not in m.text)


def test_success_on_the_way_drops_the_trailing_good_steps() -> None:
    pair = ToyTree(1).pair(["look", "right", "right", "right"], ["right", "look", "stop"])
    sample = survivor(splice_verified(pair, 0))
    assert sample.provenance.extra["dropped_good_steps"] == 1
    assert sample.provenance.extra["live_success"]
    assert [m.text for m in sample.messages if m.train][1:] == [reply(a) for a in ("look", "right", "right")]
    assert sample.messages[-1].role == "assistant"


def test_a_splice_that_ends_with_too_little_names_the_step_that_went_wrong() -> None:
    pair = ToyTree(0).pair(["look", "right", "right"], ["left", "stop"])
    rejection = dead(splice_verified(pair, 0))
    assert (rejection.stage, rejection.subject) == ("splice", pair_id(pair))
    assert rejection.reason == "verify-reward-below-alpha"
    assert "step 2 ('look') gave 'You are at -1.', recorded was 'You are at 0.'" in rejection.detail
    assert "live reward 0, alpha 1" in rejection.detail


def test_partial_rewards_are_held_against_alpha() -> None:
    pair = ToyTree(2).pair(["right", "right", "right", "stop"], ["left", "stop"])
    assert pair.good.trajectory.reward == 0.75
    assert survivor(splice_verified(pair, 0, alpha=0.5)).provenance.extra["live_reward"] == 0.5
    assert dead(splice_verified(pair, 0, alpha=0.7)).reason == "verify-reward-below-alpha"


def test_a_splice_whose_good_steps_gain_nothing_is_rejected() -> None:
    # At the revision turn, the episode has the reward already that clears alpha.
    pair = ToyTree(2).pair(["left", "look", "look"], ["right", "right", "look", "left"])
    rejection = dead(splice_verified(pair, 2, env=Furthest(), alpha=0.5))
    # The funnel counts what begins with "verify-" as spliced and lost when played.
    assert (rejection.reason, rejection.detail) == ("verify-no-gain", "0.5 at the revision turn, too")
    gaining = ToyTree(2).pair(["look", "right"], ["right", "right", "left"])
    assert survivor(splice_verified(gaining, 1, env=Furthest(), alpha=0.5)).provenance.extra["live_reward"] == 0.75


@pytest.mark.parametrize(("bad", "error"), [(["left", "look", "left"], 2), (["left", "look", "look", "left"], 3)])
def test_an_episode_that_ends_before_the_good_steps_do(bad: list[str], error: int) -> None:
    pair = ToyTree(0).pair(["right", "right"], bad)
    rejection = dead(splice_verified(pair, error, env=Tiring()))
    assert rejection.reason == "verify-ended-early"
    assert "step_limit" in rejection.detail


def test_a_disaster_never_survives() -> None:
    pair = ToyTree(0).pair(["right", "right"], ["look", "stop"])

    class Pit(Line):
        def step(self, action: str) -> Transition:
            transition = super().step(action)
            return Transition("You fell.", -1.0, True, False, transition.info) if action == "right" else transition

    rejection = dead(splice_verified(pair, 0, env=Pit(), alpha=0.0))
    assert rejection.reason == "verify-ended-early"
    assert "disaster at step 2 of 4" in rejection.detail
    assert "'You fell.'" in rejection.detail


def test_an_invalid_action_is_named_before_a_mere_difference() -> None:
    class Strict(Line):
        def step(self, action: str) -> Transition:
            transition = super().step(action)
            if action == "look" and self._place < 0:
                return Transition("You cannot look from here.", 0.0, False, False, {"success": False, "valid": False})
            return transition

    pair = ToyTree(0, env=Strict()).pair(["right", "left", "look", "right", "right"], ["left", "stop"])
    rejection = dead(splice_verified(pair, 0, env=Strict()))
    assert "step 4 ('look') gave 'You cannot look from here.'" in rejection.detail


def test_a_replay_that_differs_in_the_kept_part_is_a_fault() -> None:
    pair = ToyTree(0).pair(["right", "right"], ["look", "stop"])
    with pytest.raises(ReplayDiverged, match=r"after 1 steps the recording has 'You are at 0\."):
        splice_verified(pair, 0, env=Line(drift=True))


def test_every_splice_that_was_played_counts_in_the_survival() -> None:
    num_by_reason = {
        "no-gain": 1,
        "verify-no-gain": 1,
        "verify-ended-early": 1,
        "no-good-suffix": 5,
        "ended-at-revision-turn": 1,
        "not-judged": 4,
    }
    record = survival_of(4, num_by_reason)
    assert (record.num_played, record.num_survived) == (8, 4)
    assert record.num_rejected_by_reason == {
        "no-gain": 1,
        "verify-no-gain": 1,
        "verify-ended-early": 1,
        "ended-at-revision-turn": 1,
    }
