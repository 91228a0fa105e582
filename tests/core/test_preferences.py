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


def played(*actions: str, name: str = "", forced: int = 0) -> StoredTrajectory:
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
    kept, rejected = pairs_with_expert(played(*EXPERT), [played("right", "look", "stop")], Line(), PLAIN)

    made = only(kept)
    assert rejected == ()
    assert (made.case, made.chosen_reward, made.rejected_reward) == (PreferenceCase.LOSE, 1.0, 0.25)
    assert made.margin == 0.75
    assert replies(made.chosen) == EXPERT
    assert replies(made.rejected) == ["right", "look", "stop"]
    assert made.chosen.messages[:3] == made.rejected.messages[:3]
    assert not any(message.train for message in made.chosen.messages[:3])
    assert made.chosen.provenance.extra == {"trajectory": "-".join(EXPERT)}


def test_a_policy_that_wins_is_chosen_and_nothing_is_cut() -> None:
    weak = played("right", "stop", name="expert")
    long = played(*["look"] * 9, *EXPERT, name="policy")

    made = only(pairs_with_expert(weak, [long], Line(), PLAIN)[0])

    assert made.case is PreferenceCase.WIN
    assert len(replies(made.chosen)) == 13
    assert replies(made.rejected) == ["right", "stop"]
    assert made.dropped == 0


def test_a_tie_makes_nothing() -> None:
    kept, rejected = pairs_with_expert(played(*EXPERT), [played("look", *EXPERT)], Line(), PLAIN)

    assert kept == ()
    assert reasons(rejected) == ["tie"]
    assert rejected[0].subject == "look-right-right-right-right"


@pytest.mark.parametrize(("margin", "reason"), [(0.75, ["margin"]), (0.74, [])])
def test_the_margin_must_be_exceeded(margin: float, reason: list[str]) -> None:
    config = PreferencesConfig(margin=margin)
    _, rejected = pairs_with_expert(played(*EXPERT), [played("right", "stop")], Line(), config)
    assert reasons(rejected) == reason


@pytest.mark.parametrize(("extra", "kept_steps"), [(5, 9), (0, 4), (30, 20)])
def test_the_losing_side_is_cut_a_few_rounds_after_the_expert(extra: int, kept_steps: int) -> None:
    long = played(*["look"] * 20)
    made = only(pairs_with_expert(played(*EXPERT), [long], Line(), PreferencesConfig(extra_rounds=extra))[0])

    assert len(replies(made.rejected)) == kept_steps
    assert made.dropped == 20 - kept_steps
    # The published rule counts messages from that of the problem on: the expert's, and ten more.
    assert len(made.rejected.messages[2:]) <= len(made.chosen.messages[2:]) + 2 * extra


def test_without_expert_or_reply_there_is_a_reason() -> None:
    silent = played(*EXPERT)
    silent = StoredTrajectory("silent", replace(silent.trajectory, steps=(), reward=0.0))
    elsewhere = played("stop")
    elsewhere = StoredTrajectory("elsewhere", replace(elsewhere.trajectory, first_observation="The goal is elsewhere."))

    assert reasons(pairs_with_expert(None, [played("stop")], Line(), PLAIN)[1]) == ["no-expert"]
    kept, rejected = pairs_with_expert(played(*EXPERT), [silent, elsewhere], Line(), PLAIN)
    assert kept == ()
    assert [(r.subject, r.reason) for r in rejected] == [("silent", "no-agent-turn"), ("elsewhere", "other-beginning")]


def test_step_wise_compares_the_replies_at_the_fork() -> None:
    config = PreferencesConfig(level="step")
    forked = played("right", "right", "stop", forced=2)
    same = played("right", "right", "stop", name="same", forced=1)

    kept, rejected = pairs_with_expert(played(*EXPERT), [forked, same], Line(), config)

    made = only(kept)
    assert made.case is PreferenceCase.STEP
    assert replies(made.chosen) == ["right"]
    assert replies(made.rejected) == ["stop"]
    assert replies(made.chosen, trained=False) == replies(made.rejected, trained=False) == ["right", "right"]
    assert made.chosen.messages[:-1] == made.rejected.messages[:-1]
    assert [(r.subject, r.reason) for r in rejected] == [("same", "same-reply")]


def test_step_wise_the_winner_is_chosen() -> None:
    weak = played("stop", name="expert")
    made = only(pairs_with_expert(weak, [played(*EXPERT)], Line(), PreferencesConfig(level="step"))[0])
    assert replies(made.chosen) == ["right"]
    assert replies(made.rejected) == ["stop"]


def test_a_mixture_has_both_kinds() -> None:
    config = PreferencesConfig(level="mixture")
    whole, forked = played("stop", name="whole"), played("right", "stop", forced=1)

    kept, _ = pairs_with_expert(played(*EXPERT), [whole, forked], Line(), config)

    assert [made.case for made in kept] == [PreferenceCase.LOSE, PreferenceCase.STEP, PreferenceCase.STEP]


def test_without_an_expert_the_best_meets_the_worst() -> None:
    episodes = [played("right", "stop"), played("look", *EXPERT), played(*EXPERT), played("jump"), played("left")]
    made = only(pair_of_own(episodes, Line(), PLAIN)[0])

    assert made.case is PreferenceCase.OWN
    assert replies(made.chosen) == EXPERT, "the shorter of two equally good ones"
    assert replies(made.rejected) == ["jump"]


def test_own_episodes_that_are_all_equal_make_nothing() -> None:
    kept, rejected = pair_of_own([played("left", name="a"), played("jump", name="b")], Line(), PLAIN)
    assert kept == ()
    assert reasons(rejected) == ["tie"]
    assert reasons(pair_of_own([played("left")], Line(), PLAIN)[1]) == ["single-episode"]


def test_own_episodes_are_compared_only_with_those_that_begin_like_them() -> None:
    def begun(episode: StoredTrajectory, beginning: str) -> StoredTrajectory:
        return episode._replace(trajectory=replace(episode.trajectory, first_observation=beginning))

    alone, *rest = begun(played(*EXPERT), "c"), begun(played("stop"), "a"), begun(played("right", "stop"), "a")
    wider = [begun(played("left"), "b"), begun(played("look", *EXPERT), "b")]
    kept, rejected = pair_of_own([alone, *rest, *wider], Line(), PLAIN)

    made = only(kept)
    assert prompt_of(made.chosen) == prompt_of(made.rejected)
    assert (replies(made.chosen), replies(made.rejected)) == (["look", *EXPERT], ["left"])
    assert [(r.subject, r.reason) for r in rejected] == [(alone.id, "other-beginning")]
    kept, rejected = pair_of_own([alone, rest[0]], Line(), PLAIN)
    assert (kept, reasons(rejected)) == ((), ["other-beginning"] * 2)


def test_a_fork_of_a_tree_prefers_the_branch_that_gets_more() -> None:
    tree = ToyTree(INDEX)
    paths = [
        tree.path("right", *EXPERT[1:]),
        tree.path("right", "stop"),
        tree.path("left", "stop"),
        tree.path("left", *["look"] * 20),
    ]
    kept, rejected = pairs_in_tree(paths, Line(), PLAIN, "t")

    by_split = {made.chosen.provenance.split: made for made in kept}
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
    expert = played(*EXPERT)
    twice = [played("stop", name="a"), played("stop", name="b")]
    kept, _ = pairs_with_expert(expert, twice, Line(), PLAIN)

    first, rejected = distinct_preferences(kept)

    assert first == kept[:1]
    assert [(r.subject, r.reason) for r in rejected] == [(preference_id(kept[1]), "duplicate")]
    assert distinct_preferences(first) == (first, ())


def test_the_cap_keeps_the_widest_margins() -> None:
    episodes = [played("right", "stop"), played("stop"), played("right", "right", "stop")]
    kept, _ = pairs_with_expert(played(*EXPERT), episodes, Line(), PLAIN)

    best, rejected = capped_preferences(kept, 2)

    assert [made.margin for made in best] == [0.75, 1.0]
    assert reasons(rejected) == ["per-instance-cap"]
    assert capped_preferences(kept, 0) == (kept, ())
