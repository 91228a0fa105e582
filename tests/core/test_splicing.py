"""Blind splices: which turns they have, which tokens carry loss, and what is turned away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy import Line
from toy_paths import ToyTree, critique, good_sample, renderer, reply, sampled_ids, tokenizer

from agentr_core.methods.agent_r.pairs import pair_id
from agentr_core.methods.agent_r.splice import ACKNOWLEDGEMENT, ACTION, REFLECTIONS, good_suffix, splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.samples.dataset import token_row, trained_stretches
from agentr_core.types import Critique, Instance, PathPair, Rejection, Sample, SampleKind, StopReason, Transition

GOOD = ["look", "right", "right"]
BAD = ["look", "left", "left", "stop"]


def pair() -> PathPair:
    return ToyTree(0).pair(GOOD, BAD)


def splice_pair(
    pair: PathPair, found: Critique | None, *, seed: int = 0, mode: str = "blind", no_error: str = "keep"
) -> Sample | Rejection:
    return splice(pair, found, Line(), SpliceConfig(mode=mode, no_error=no_error), alpha=1.0, seed=seed)  # type: ignore[arg-type]


def sample(found: Critique | None, *, seed: int = 0, mode: str = "blind") -> Sample:
    result = splice_pair(pair(), found, seed=seed, mode=mode)
    assert isinstance(result, Sample)
    return result


def test_the_turns_of_a_splice() -> None:
    result = sample(critique(1))
    texts = [(m.role, m.text, m.train) for m in result.messages]
    assert texts[:7] == [
        ("user", "Walk right to the goal.", False),
        ("assistant", "Ok.", False),
        ("user", "The goal is 2 to the right.", False),
        ("assistant", reply("look"), False),
        ("user", "You are at 0.", False),
        ("assistant", reply("left"), False),
        ("user", "You are at -1.", False),
    ]
    assert texts[8:] == [
        ("user", ACKNOWLEDGEMENT, False),
        ("assistant", reply("right"), True),
        ("user", "You are at 1.", False),
        ("assistant", reply("right"), True),
    ]
    role, text, train = texts[7]
    thought, action = text.splitlines()
    assert (role, train) == ("assistant", True)
    assert thought.removeprefix("Thought: ") in REFLECTIONS
    assert action == f"Action: {ACTION}"


def test_the_loss_falls_on_the_revision_turn_and_the_good_suffix_token_by_token() -> None:
    result = sample(critique(2))
    row = token_row(result, renderer())
    revision, *suffix = trained_stretches(row.labels)
    assert tokenizer().decode(revision) == result.messages[9].text + "<|end|>"
    # The very tokens that were sampled, which differ from those that encoding the text would give.
    assert suffix == [sampled_ids(reply("right"))] * 2
    assert suffix[0][:-1] != tuple(tokenizer()(reply("right"))["input_ids"])
    assert row.trained_tokens == {
        "revision_turn": len(revision),
        "good_suffix": 2 * len(sampled_ids(reply("right"))),
    }
    context_ids = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label == -100]
    text = tokenizer().decode(context_ids)
    assert text.count("Action: left") == 2
    assert text.count("You are at") == 4
    assert "Action: right" not in text


def test_the_provenance_leads_back_to_the_tree() -> None:
    result = sample(critique(1))
    origin = result.provenance
    assert (result.kind, result.instance) == (SampleKind.REVISION, pair().bad.trajectory.instance)
    assert (origin.tree_id, origin.good_leaf, origin.bad_leaf) == ("t", pair().good.leaf, pair().bad.leaf)
    assert (origin.split, origin.cut, origin.good_reward, origin.bad_reward) == (1, 2, 1.0, 0.0)
    assert origin.extra == {"mode": "blind", "first_error": 1, "bad_stop": "failure"}


def test_the_reflection_is_drawn_for_each_record() -> None:
    assert sample(critique(1)) == sample(critique(1))
    reflections = {sample(critique(1), seed=seed).messages[7].text for seed in range(200)}
    assert len(reflections) == len(REFLECTIONS)


def test_direct_mode_keeps_the_whole_bad_path() -> None:
    path_pair = ToyTree(0).pair(GOOD, BAD[:3])
    result = splice_pair(path_pair, None, mode="direct")
    assert isinstance(result, Sample)
    assert result.provenance.cut == 3
    assert result.provenance.extra == {"mode": "direct", "first_error": None, "bad_stop": "step_limit"}
    assert splice_pair(path_pair, critique(1), mode="direct") == result


def test_no_error_keeps_the_whole_bad_path_or_rejects_the_pair() -> None:
    path_pair = ToyTree(0).pair(GOOD, BAD[:3])
    result = splice_pair(path_pair, critique(None, 2))
    assert isinstance(result, Sample)
    assert (result.provenance.cut, result.provenance.extra["first_error"]) == (3, None)
    rejection = splice_pair(path_pair, critique(None, 2), no_error="reject")
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "no-error-found"


@pytest.mark.parametrize(
    ("good", "bad", "error", "reason"),
    [
        (GOOD, BAD, 0, "cut-in-shared-prefix"),
        (GOOD, BAD, 3, "kept-part-ends-the-episode"),
        (GOOD, ["left", "jump"], 1, "kept-part-ends-in-disaster"),
        (["look"], ["look", "left"], 1, "no-good-suffix"),
    ],
)
def test_impossible_splices_are_rejected(good: list[str], bad: list[str], error: int, reason: str) -> None:
    case = ToyTree(0).pair(good, bad)
    rejection = splice_pair(case, critique(error))
    assert isinstance(rejection, Rejection)
    assert (rejection.stage, rejection.reason) == ("splice", reason)
    assert rejection.subject == pair_id(case)
    assert rejection.detail


def test_no_revision_follows_a_path_that_filled_the_context() -> None:
    case = ToyTree(0).pair(GOOD, BAD[:3])
    full = replace(case, bad=replace(case.bad, trajectory=replace(case.bad.trajectory, stop=StopReason.CONTEXT_LIMIT)))
    rejection = splice_pair(full, None, mode="direct")
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "kept-part-fills-the-context"
    assert isinstance(splice_pair(full, critique(1)), Sample), "what is cut off leaves room"


class Brief(Line):
    """A line whose episodes the world itself cuts after three steps."""

    def reset(self, instance: Instance) -> str:
        self._left = 3
        return super().reset(instance)

    def step(self, action: str) -> Transition:
        self._left -= 1
        transition = super().step(action)
        return transition._replace(truncated=not self._left and not transition.terminated)


@pytest.mark.parametrize("mode", ["blind", "direct"])
def test_no_revision_follows_a_path_that_the_world_cut(mode: str) -> None:
    case = ToyTree(0, env=Brief()).pair(GOOD, BAD)
    assert (case.bad.trajectory.stop, len(case.bad.trajectory.steps)) == (StopReason.STEP_LIMIT, 3)
    rejection = splice_pair(case, critique(None, 2), mode=mode)
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "kept-part-ends-the-episode"
    assert isinstance(splice_pair(case, critique(1)), Sample)


@pytest.mark.parametrize(
    ("bad", "error", "kept"),
    [(BAD, 3, BAD), (["look", "jump"], 1, ["look", "jump"])],
)
def test_impossible_splices_are_kept_as_published_if_a_recipe_says_so(
    bad: list[str], error: int, kept: list[str]
) -> None:
    config = SpliceConfig(mode="blind", impossible="keep")
    case = ToyTree(0).pair(GOOD, bad)
    result = splice(case, critique(error), Line(), config, alpha=1.0, seed=0)
    assert isinstance(result, Sample)
    replies = [m for m in result.messages[3:] if m.role == "assistant"]
    texts = [*map(reply, kept), replies[len(kept)].text, *map(reply, ["right", "right"])]
    assert [m.text for m in replies] == texts
    assert [m.train for m in replies] == [False] * len(kept) + [True] * 3
    assert (result.provenance.split, result.provenance.cut) == (1, len(kept))
    assert set(token_row(result, renderer()).trained_tokens) == {"revision_turn", "good_suffix"}


LONG = ["look", "right", "look", "right"]
"""A good path that shares two steps with `["look", "right", "left", "stop"]`."""


@pytest.mark.parametrize(("error", "rest"), [(0, ["right", "look", "right"]), (1, ["look", "right"])])
@pytest.mark.parametrize("mode", ["blind", "verified"])
def test_after_a_cut_in_the_shared_steps_the_good_path_leaves_no_step_out(
    error: int, rest: list[str], mode: str
) -> None:
    """At 29f26ac it went on from the split: of the first case, `right` was missing."""
    case = ToyTree(0).pair(LONG, ["look", "right", "left", "stop"])
    assert case.split == 2
    config = SpliceConfig(mode=mode, shared_cut="keep")  # type: ignore[arg-type]
    result = splice(case, critique(error), Line(), config, alpha=1.0, seed=0)
    assert isinstance(result, Sample), result
    replies = [m for m in result.messages[3:] if m.role == "assistant"]
    prefix = LONG[: error + 1]
    assert [m.text for m in replies] == [*map(reply, prefix), replies[len(prefix)].text, *map(reply, rest)]
    assert [m.train for m in replies] == [False] * len(prefix) + [True] * (1 + len(rest))
    assert (result.provenance.split, result.provenance.cut) == (2, len(prefix))
    assert set(token_row(result, renderer()).trained_tokens) == {"revision_turn", "good_suffix"}
    # The fields do not stand in for each other.
    rejection = splice(case, critique(error), Line(), SpliceConfig(mode="blind", impossible="keep"), alpha=1.0, seed=0)
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "cut-in-shared-prefix"


def test_a_disaster_needs_its_own_field_also_where_shared_cuts_are_kept() -> None:
    case = ToyTree(0).pair(GOOD, ["look", "jump"])
    result = splice(case, critique(1), Line(), SpliceConfig(shared_cut="keep"), alpha=1.0, seed=0)
    assert isinstance(result, Rejection)
    assert result.reason == "kept-part-ends-in-disaster"


def test_the_rest_of_the_good_path_begins_where_its_replies_leave_the_kept_ones() -> None:
    """In a world that does not repeat itself, two episodes may answer a reply differently."""
    case = pair()
    steps = case.bad.trajectory.steps
    steps_apart = (replace(steps[0], observation="You are somewhere."), *steps[1:])
    apart = replace(case, split=0, bad=replace(case.bad, trajectory=replace(case.bad.trajectory, steps=steps_apart)))
    assert [step.reply for step in good_suffix(apart, 2)] == [reply("right"), reply("right")]


def test_modes_that_play_keep_no_impossible_splice() -> None:
    for mode in ("verified", "continued"):
        (fault,) = SpliceConfig(mode=mode, impossible="keep").faults()
        assert fault.startswith(f"splice.impossible: mode {mode} plays its splices")


def test_a_missing_critique_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="has no critique"):
        splice_pair(pair(), None)


def test_a_good_path_trains_every_reply() -> None:
    result = good_sample(pair().good, Line())
    assert [(m.role, m.train) for m in result.messages] == [
        ("user", False),
        ("assistant", False),
        ("user", False),
        *[("assistant", True), ("user", False)] * 2,
        ("assistant", True),
    ]
    row = token_row(result, renderer())
    assert list(trained_stretches(row.labels)) == [sampled_ids(reply(action)) for action in GOOD]
    assert (result.kind, result.provenance.good_leaf, result.provenance.good_reward) == (SampleKind.GOOD, 3, 1.0)
