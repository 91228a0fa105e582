"""What holds of every splice of every pair of paths."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from toy import Line
from toy_paths import ToyTree, critique, renderer, sampled_ids

from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.samples.dataset import token_row, trained_stretches
from agentr_core.types import PathPair, Sample

moves = st.lists(st.sampled_from(["right", "left", "look"]), max_size=3)


@st.composite
def splice_cases(draw: st.DrawFn, modes: tuple[str, ...] = ("blind", "verified", "direct")) -> tuple[PathPair, Sample]:
    prefix, tail = draw(moves), ["left", *draw(moves)]
    mode = draw(st.sampled_from(modes))
    ending = draw(st.sampled_from([[], ["stop"], ["jump"]])) if mode != "direct" else []
    errors = st.integers(len(prefix), len(prefix) + len(tail) - 1)
    error = draw(errors if ending else st.none() | errors)
    # A verified splice must gain reward.
    ends = [["right"] * 6 + ["stop"], ["right"] * 12] if mode == "verified" else [[], ["stop"], ["right"] * 9]
    good = [*prefix, "look", *draw(moves), *draw(st.sampled_from(ends))]
    pair = ToyTree(draw(st.integers(3, 4))).pair(good, [*prefix, *tail, *ending])
    config = SpliceConfig(mode=mode)  # type: ignore[arg-type]
    error_critique = critique(error, len(pair.bad.nodes))
    sample = splice(
        pair, error_critique, Line(), config, alpha=draw(st.sampled_from([0.0, 0.1])), seed=draw(st.integers(0, 9))
    )
    assume(isinstance(sample, Sample))
    assert isinstance(sample, Sample)
    return pair, sample


@given(splice_cases())
def test_a_splice_is_the_bad_path_up_to_the_cut_and_then_good_replies(case: tuple[PathPair, Sample]) -> None:
    pair, sample = case
    cut, split = sample.provenance.cut, pair.split
    assert cut is not None
    assert cut > split
    replies = [m for m in sample.messages if m.role == "assistant"]
    bad = [step.reply for step in pair.bad.trajectory.steps]
    good = [step.reply for step in pair.good.trajectory.steps]
    assert [m.text for m in replies[1 : cut + 1]] == bad[:cut]
    # What both paths share is there once, and the good path goes on where they part.
    assert [m.text for m in replies[1 : split + 1]] == good[:split]
    suffix = [m.text for m in replies[cut + 2 :]]
    assert suffix == good[split : split + len(suffix)]
    assert suffix
    assert not any(step.terminated for step in pair.bad.trajectory.steps[:cut])


@given(splice_cases())
def test_no_bad_step_and_no_observation_is_ever_trained(case: tuple[PathPair, Sample]) -> None:
    _, sample = case
    cut = sample.provenance.cut
    assert cut is not None
    flags = [m.train for m in sample.messages if m.role == "assistant"]
    assert flags == [False] * (cut + 1) + [True] * (len(flags) - cut - 1)
    assert not any(m.train for m in sample.messages if m.role != "assistant")
    row = token_row(sample, renderer())
    _, *suffix = trained_stretches(row.labels)
    assert suffix == [sampled_ids(m.text) for m in sample.messages if m.train][1:]


@given(splice_cases(modes=("verified",)))
def test_the_observations_of_a_verified_splice_are_those_of_the_world(case: tuple[PathPair, Sample]) -> None:
    pair, sample = case
    cut = sample.provenance.cut
    assert cut is not None
    env = Line()
    observations = [env.reset(pair.bad.trajectory.instance)]
    replies = [m.text for m in sample.messages if m.role == "assistant"]
    replay = [*replies[1 : cut + 1], *replies[cut + 2 :]]
    reward = 0.0
    for reply in replay:
        observation, reward, *_ = env.step(env.parse(reply))
        observations.append(observation)
    # The turn after the revision turn is an acknowledgement, and nothing follows the last reply.
    user_texts = [m.text for m in sample.messages if m.role == "user"]
    assert [*user_texts[1 : cut + 2], *user_texts[cut + 3 :]] == observations[:-1]
    assert reward == sample.provenance.extra["live_reward"]
