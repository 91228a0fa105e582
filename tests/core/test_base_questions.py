"""What the tiny base model for questions is taught: right by default, wrong by asked habits, and
nothing that ships.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from statistics import fmean

import pytest
from base_settings import QuestionsConfig
from generators import encyclopaedia_problems, number_problems, universe
from question_samples import (
    DETOUR,
    EARLY,
    GUESS,
    MALFORMED,
    REPEAT,
    Questions,
    Shares,
    attempt,
    form_of,
    printed,
    shares_of,
)

from agentr_core.environments.reasoning.grammar import strict_fault
from agentr_core.environments.reasoning.problems import SHIPPED, load
from agentr_core.environments.reasoning.toolbox import ToolSettings, open_tools
from agentr_core.samples.record_files import records
from agentr_core.system import data_path
from agentr_core.types import Sample

HABITS = QuestionsConfig(
    guess_share=0.2, early_share=0.3, repeat_share=0.3, detour_share=0.25, malformed_share=0.1, questions=16
)


def samples(config: QuestionsConfig, number: int, *, seed: int = 0) -> list[Sample]:
    return list(islice(Questions(config, seed), number))


def text_of(sample: Sample) -> str:
    """Return the assistant's turn as a whole."""
    return "".join(part.text for part in sample.messages[-1].parts)


def habits_of(sample: Sample) -> tuple[str, ...]:
    habits: tuple[str, ...] = sample.provenance.extra["habits"]
    return habits


@pytest.mark.slow
def test_a_sample_depends_on_seed_and_number_alone() -> None:
    forward = [Questions(HABITS, 0).sample(i) for i in range(40)]
    questions = Questions(HABITS, 0)
    assert [questions.sample(i) for i in reversed(range(40))][::-1] == forward
    assert [Questions(HABITS, 1).sample(i) for i in range(40)] != forward


@pytest.mark.slow
def test_without_habits_every_episode_is_strictly_formed_and_right() -> None:
    episodes = samples(QuestionsConfig(questions=16), 200)
    assert {sample.provenance.extra["source"] for sample in episodes} == {"numbers", "encyclopaedia"}
    for sample in episodes:
        assert sample.provenance.good_reward == 1.0
        assert not strict_fault(text_of(sample))
        assert not habits_of(sample)


def test_replies_carry_loss_and_results_do_not() -> None:
    for sample in samples(HABITS, 60):
        system, question, turn = sample.messages
        assert not system.train
        assert not question.train
        for part in turn.parts:
            assert part.train == part.text.startswith("<think>")
            assert part.train or part.text.startswith("\n<result>\n")


def test_habits_have_the_asked_shares() -> None:
    shares = Shares(guess=0.25, early=0.4, repeat=0.3, detour=0.2)
    entities = universe(3, people=60, towns=12)
    problems = encyclopaedia_problems(entities, list(entities)[:70], hops=(2, 3), seed=3, prefix="q")
    rng = random.Random(0)
    attempts = [attempt(problem, entities, shares, rng) for problem in islice(problems, 600)]
    counts = Counter(habit for each in attempts for habit in set(each.habits))
    assert counts[GUESS] / 600 == pytest.approx(0.25, abs=0.06)
    num_careful = 600 - counts[GUESS]
    assert counts[EARLY] / num_careful == pytest.approx(0.4, abs=0.07)
    num_repeats = sum(each.habits.count(REPEAT) for each in attempts)
    num_detours = sum(each.habits.count(DETOUR) for each in attempts)
    num_calls = sum(move.tool != "" for each in attempts for move in each.moves) - num_repeats - num_detours
    # A call is made again with 0.3, and again with 0.3 of that.
    assert num_repeats / num_calls == pytest.approx(0.3 + 0.09, abs=0.06)
    # An article may name nothing else.
    assert 0.1 < num_detours / num_calls <= 0.25


def test_forms_differ_in_their_shares_and_keep_the_mean() -> None:
    config = QuestionsConfig(guess_share=0.3, repeat_share=0.4)
    shares = [shares_of(config, f"What is form {number}", 0) for number in range(400)]
    assert fmean(each.guess for each in shares) == pytest.approx(0.3, abs=0.03)
    assert fmean(each.repeat for each in shares) == pytest.approx(0.4, abs=0.04)
    assert max(each.guess for each in shares) > 0.5
    assert {each.early for each in shares} == {0.0}
    assert form_of("What is the teacher of Kruth Glim?") == "What is the teacher"
    assert form_of("Begin with 27. Halve a number") == "Begin with Halve a"


@pytest.mark.slow
def test_each_habit_does_what_its_name_says() -> None:
    counts: Counter[str] = Counter()
    for sample in samples(HABITS, 500):
        text, habits = text_of(sample), habits_of(sample)
        counts.update(set(habits))
        assert ("</search>" not in text and "</python>" not in text) == (GUESS in habits)
        assert bool(strict_fault(text)) == (MALFORMED in habits), text
        assert text.count(" again.</think>") == habits.count(REPEAT)
        if not habits or set(habits) <= {REPEAT, DETOUR}:
            assert sample.provenance.good_reward == 1.0
        if EARLY in habits and MALFORMED not in habits:
            assert sample.provenance.good_reward is not None
            assert sample.provenance.good_reward < 1.0
    assert min(counts[habit] for habit in (GUESS, EARLY, REPEAT, DETOUR, MALFORMED)) > 10


def test_the_beginning_is_plain() -> None:
    curriculum = Questions(QuestionsConfig(guess_share=0.5, repeat_share=0.5, plain=60, questions=16), 0)
    habits = [habits_of(sample) for index in range(120) if (sample := curriculum.sample(index)) is not None]
    assert not any(habits[:50])
    assert any(habits[60:])


@pytest.mark.slow
def test_nothing_that_ships_is_asked_or_looked_up() -> None:
    questions = {problem.question for problems in load(SHIPPED).values() for problem in problems}
    corpus = data_path("reasoning", "corpus.jsonl")
    names = {row["title"] for _, row in records(corpus, setting="corpus")}
    left_out = 0
    curriculum = Questions(QuestionsConfig(questions=16), 0)
    for index in range(600):
        sample = curriculum.sample(index)
        if sample is None:
            left_out += 1
            continue
        assert sample.messages[1].text not in questions
        looked_up = {part.text.partition("<search>")[2].partition("<")[0] for part in sample.messages[-1].parts}
        assert not looked_up & names
    assert left_out < 60


@pytest.mark.slow
def test_the_sandbox_prints_what_the_curriculum_says_that_code_prints() -> None:
    python = open_tools(ToolSettings(tools=("python",))).toolbox
    for problem in islice(number_problems(11, "n"), 20):
        assert python.call("python", problem.solution[0].query).output == printed(problem)
