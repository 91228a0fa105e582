"""Which trajectories become preferences: lose, win and tie; cuts; steps; own samples; forks of a
tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from toy import Line
from toy_paths import ToyTree

from agentr_core.methods.eto.preferences import (
    StoredTrajectory,
    capped_preferences,
    distinct_preferences,
    pair_of_own,
    pairs_in_tree,
    pairs_with_expert,
    preference_id,
)
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.samples.dataset import check_flags, prompt_of
from agentr_core.types import Preference, PreferenceCase, Rejection, Sample, SampleKind

INDEX = 2
"""The goal of this instance is four steps away."""
EXPERT = ["right"] * 4
PLAIN = PreferencesConfig()


def trajectory(*actions: str, name: str = "", forced: int = 0) -> StoredTrajectory:
    return StoredTrajectory(name or "-".join(actions), ToyTree(INDEX).path(*actions).trajectory, forced)


def replies(sample: Sample, *, trained: bool = True) -> list[str]:
    return [m.text.rpartition(": ")[2] for m in sample.messages[3:] if m.role == "assistant" and m.train is trained]


def reasons(rejections: Iterable[Rejection]) -> list[str]:
    return [rejection.reason for rejection in rejections]


def only(kept: tuple[Preference, ...]) -> Preference:
    (preference,) = kept
    for sample in (preference.chosen, preference.rejected):
        check_flags(sample)
        assert sample.messages[-1].role == "assistant"
        assert sample.messages[-1].train
    assert preference.chosen.kind is SampleKind.CHOSEN
    assert preference.rejected.kind is SampleKind.REJECTED
    return preference


def test_a_policy_that_loses_is_rejected() -> None:
    preferences, rejected = pairs_with_expert(trajectory(*EXPERT), [trajectory("right", "look", "stop")], Line(), PLAIN)

    preference = only(preferences)
    assert rejected == ()
    assert (preference.case, preference.chosen_reward, preference.rejected_reward) == (PreferenceCase.LOSE, 1.0, 0.25)
    assert preference.margin == 0.75
    assert replies(preference.chosen) == EXPERT
    assert replies(preference.rejected) == ["right", "look", "stop"]
    assert preference.chosen.messages[:3] == preference.rejected.messages[:3]
    assert not any(message.train for message in preference.chosen.messages[:3])
    assert preference.chosen.provenance.extra == {"trajectory": "-".join(EXPERT)}


def test_a_policy_that_wins_is_chosen_and_nothing_is_cut() -> None:
    weak = trajectory("right", "stop", name="expert")
    long = trajectory(*["look"] * 9, *EXPERT, name="policy")

    preference = only(pairs_with_expert(weak, [long], Line(), PLAIN)[0])

    assert preference.case is PreferenceCase.WIN
    assert len(replies(preference.chosen)) == 13
    assert replies(preference.rejected) == ["right", "stop"]
    assert preference.dropped == 0


def test_a_tie_makes_nothing() -> None:
    preferences, rejected = pairs_with_expert(trajectory(*EXPERT), [trajectory("look", *EXPERT)], Line(), PLAIN)

    assert preferences == ()
    assert reasons(rejected) == ["tie"]
    assert rejected[0].subject == "look-right-right-right-right"


@pytest.mark.parametrize(("margin", "reason"), [(0.75, ["margin"]), (0.74, [])])
def test_the_margin_must_be_exceeded(margin: float, reason: list[str]) -> None:
    config = PreferencesConfig(margin=margin)
    _, rejected = pairs_with_expert(trajectory(*EXPERT), [trajectory("right", "stop")], Line(), config)
    assert reasons(rejected) == reason


@pytest.mark.parametrize(("extra", "kept_steps"), [(5, 9), (0, 4), (30, 20)])
def test_the_losing_side_is_cut_a_few_rounds_after_the_expert(extra: int, kept_steps: int) -> None:
    long = trajectory(*["look"] * 20)
    preference = only(pairs_with_expert(trajectory(*EXPERT), [long], Line(), PreferencesConfig(extra_rounds=extra))[0])

    assert len(replies(preference.rejected)) == kept_steps
    assert preference.dropped == 20 - kept_steps
    # The published rule counts messages from that of the problem on: the expert's, and ten more.
    assert len(preference.rejected.messages[2:]) <= len(preference.chosen.messages[2:]) + 2 * extra


def test_without_expert_or_reply_there_is_a_reason() -> None:
    silent = trajectory(*EXPERT)
    silent = StoredTrajectory("silent", replace(silent.trajectory, steps=(), reward=0.0))
    elsewhere = trajectory("stop")
    elsewhere = StoredTrajectory("elsewhere", replace(elsewhere.trajectory, first_observation="The goal is elsewhere."))

    assert reasons(pairs_with_expert(None, [trajectory("stop")], Line(), PLAIN)[1]) == ["no-expert"]
    preferences, rejected = pairs_with_expert(trajectory(*EXPERT), [silent, elsewhere], Line(), PLAIN)
    assert preferences == ()
    assert [(r.subject, r.reason) for r in rejected] == [("silent", "no-agent-turn"), ("elsewhere", "other-beginning")]


def test_step_wise_compares_the_replies_at_the_fork() -> None:
    config = PreferencesConfig(level="step")
    fork = trajectory("right", "right", "stop", forced=2)
    same = trajectory("right", "right", "stop", name="same", forced=1)

    preferences, rejected = pairs_with_expert(trajectory(*EXPERT), [fork, same], Line(), config)

    preference = only(preferences)
    assert preference.case is PreferenceCase.STEP
    assert replies(preference.chosen) == ["right"]
    assert replies(preference.rejected) == ["stop"]
    assert (
        replies(preference.chosen, trained=False) == replies(preference.rejected, trained=False) == ["right", "right"]
    )
    assert preference.chosen.messages[:-1] == preference.rejected.messages[:-1]
    assert [(r.subject, r.reason) for r in rejected] == [("same", "same-reply")]


def test_step_wise_the_winner_is_chosen() -> None:
    weak = trajectory("stop", name="expert")
    preference = only(pairs_with_expert(weak, [trajectory(*EXPERT)], Line(), PreferencesConfig(level="step"))[0])
    assert replies(preference.chosen) == ["right"]
    assert replies(preference.rejected) == ["stop"]


def test_a_mixture_has_both_kinds() -> None:
    config = PreferencesConfig(level="mixture")
    whole, fork = trajectory("stop", name="whole"), trajectory("right", "stop", forced=1)

    preferences, _ = pairs_with_expert(trajectory(*EXPERT), [whole, fork], Line(), config)

    assert [preference.case for preference in preferences] == [
        PreferenceCase.LOSE,
        PreferenceCase.STEP,
        PreferenceCase.STEP,
    ]


def test_without_an_expert_the_best_meets_the_worst() -> None:
    episodes = [
        trajectory("right", "stop"),
        trajectory("look", *EXPERT),
        trajectory(*EXPERT),
        trajectory("jump"),
        trajectory("left"),
    ]
    preference = only(pair_of_own(episodes, Line(), PLAIN)[0])

    assert preference.case is PreferenceCase.OWN
    assert replies(preference.chosen) == EXPERT, "the shorter of two equally good ones"
    assert replies(preference.rejected) == ["jump"]


def test_own_episodes_that_are_all_equal_make_nothing() -> None:
    preferences, rejected = pair_of_own([trajectory("left", name="a"), trajectory("jump", name="b")], Line(), PLAIN)
    assert preferences == ()
    assert reasons(rejected) == ["tie"]
    assert reasons(pair_of_own([trajectory("left")], Line(), PLAIN)[1]) == ["single-episode"]


def test_own_episodes_are_compared_only_with_those_that_begin_like_them() -> None:
    def with_beginning(episode: StoredTrajectory, beginning: str) -> StoredTrajectory:
        return episode._replace(trajectory=replace(episode.trajectory, first_observation=beginning))

    alone, *rest = (
        with_beginning(trajectory(*EXPERT), "c"),
        with_beginning(trajectory("stop"), "a"),
        with_beginning(trajectory("right", "stop"), "a"),
    )
    wider = [with_beginning(trajectory("left"), "b"), with_beginning(trajectory("look", *EXPERT), "b")]
    preferences, rejected = pair_of_own([alone, *rest, *wider], Line(), PLAIN)

    preference = only(preferences)
    assert prompt_of(preference.chosen) == prompt_of(preference.rejected)
    assert (replies(preference.chosen), replies(preference.rejected)) == (["look", *EXPERT], ["left"])
    assert [(r.subject, r.reason) for r in rejected] == [(alone.id, "other-beginning")]
    preferences, rejected = pair_of_own([alone, rest[0]], Line(), PLAIN)
    assert (preferences, reasons(rejected)) == ((), ["other-beginning"] * 2)


def test_a_fork_of_a_tree_prefers_the_branch_that_gets_more() -> None:
    tree = ToyTree(INDEX)
    paths = [
        tree.path("right", *EXPERT[1:]),
        tree.path("right", "stop"),
        tree.path("left", "stop"),
        tree.path("left", *["look"] * 20),
    ]
    preferences, rejected = pairs_in_tree(paths, Line(), PLAIN, "t")

    by_split = {preference.chosen.provenance.split: preference for preference in preferences}
    assert by_split.keys() == {0, 1}
    root, deeper = by_split[0], by_split[1]
    assert replies(root.chosen) == EXPERT
    assert replies(root.rejected) == ["left", "stop"]
    assert replies(deeper.chosen) == EXPERT[1:]
    assert replies(deeper.chosen, trained=False) == replies(deeper.rejected, trained=False) == ["right"]
    assert replies(deeper.rejected) == ["stop"]
    assert deeper.chosen.provenance.good_leaf == paths[0].leaf
    assert deeper.rejected.provenance.bad_leaf == paths[1].leaf
    # Under "left" nothing is ever reached.
    assert [(r.subject, r.reason) for r in rejected] == [(f"t:{paths[2].nodes[0]}", "tie")]


def test_a_tree_without_forks_says_so() -> None:
    assert reasons(pairs_in_tree([ToyTree(INDEX).path("stop")], Line(), PLAIN, "t")[1]) == ["no-fork"]


def test_what_reads_the_same_is_kept_once() -> None:
    expert = trajectory(*EXPERT)
    twice = [trajectory("stop", name="a"), trajectory("stop", name="b")]
    preferences, _ = pairs_with_expert(expert, twice, Line(), PLAIN)

    unique, rejected = distinct_preferences(preferences)

    assert unique == preferences[:1]
    assert [(r.subject, r.reason) for r in rejected] == [(preference_id(preferences[1]), "duplicate")]
    assert distinct_preferences(unique) == (unique, ())


def test_the_cap_keeps_the_widest_margins() -> None:
    episodes = [trajectory("right", "stop"), trajectory("stop"), trajectory("right", "right", "stop")]
    preferences, _ = pairs_with_expert(trajectory(*EXPERT), episodes, Line(), PLAIN)

    best, rejected = capped_preferences(preferences, 2)

    assert [preference.margin for preference in best] == [0.75, 1.0]
    assert reasons(rejected) == ["per-instance-cap"]
    assert capped_preferences(preferences, 0) == (preferences, ())
