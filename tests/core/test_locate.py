"""Judging bad paths: what is asked, what is shared, and where the first error is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from toy import generation
from toy_paths import ToyTree

from agentr_core.errors import ModelFault, PromptTooLong
from agentr_core.methods.agent_r.critique import critique_of, first_error, judge_paths, judge_questions, scans_of
from agentr_core.recipes.agent_r import CritiqueConfig
from agentr_core.types import Generation, Request, StepVerdict, Verdict

CONFIG = CritiqueConfig(max_new_tokens=10)
BUDGET: dict[str, Any] = {"count_tokens": lambda request: 1, "context_length": 10_000}


class Judge:
    """Answers by the judged action; `requests` is the log of what it was asked."""

    def __init__(self, word: Callable[[str, int], str]) -> None:
        self.word = word
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> list[Generation]:
        self.requests.append(request)
        action = request.messages[0].text.rpartition("Action: ")[2].partition("\n")[0]
        return [generation(f"Judgement: {self.word(action, number)}") for number in range(request.n)]


def by_action(**words: str) -> Judge:
    return Judge(lambda action, _: words.get(action, "Good"))


async def test_the_scan_starts_at_the_split_or_at_the_root() -> None:
    pair = ToyTree(2).pair(["left", "right", "right", "stop"], ["left", "look", "jump"])
    assert pair.split == 1
    cases: tuple[tuple[Literal["split", "root"], int, int], ...] = (("split", 2, 1), ("root", 3, 0))
    for start, length, error in cases:
        config = CritiqueConfig(scan_from=start)
        judge = by_action(left="Bad", look="Bad")
        judgements = await judge_paths(scans_of([pair], config), judge, config, seed=0, **BUDGET)
        critique = critique_of(pair, judgements, config)
        assert len(judge.requests) == len(critique.verdicts) == length
        assert critique.first_error == error
        assert critique.verdicts[-1].position == 2
        assert critique.verdicts[-1].reply == "Judgement: Good"


async def test_what_paths_share_is_judged_once() -> None:
    tree = ToyTree(2)
    good = ["right", "right", "right", "right"]
    pairs = [
        tree.pair(good, ["left", "left", "stop"]),
        tree.pair(good, ["left", "look", "stop"]),
        tree.pair(["left", *good, "right"], ["left", "look", "stop"]),
    ]
    scans = scans_of(pairs, CONFIG)
    assert [(scan.path.leaf, scan.start) for scan in scans] == [(pairs[0].bad.leaf, 0), (pairs[1].bad.leaf, 0)]
    judge = by_action(left="Bad", look="Bad")
    judgements = await judge_paths(scans, judge, CONFIG, seed=0, **BUDGET)
    assert len(judge.requests) == 5
    assert [critique_of(pair, judgements, CONFIG).first_error for pair in pairs] == [0, 0, 1]

    second_judge = by_action()
    assert await judge_paths(scans, second_judge, CONFIG, seed=0, judgements=judgements, **BUDGET) == judgements
    assert second_judge.requests == []


async def test_the_seed_of_a_question_is_its_nodes_own() -> None:
    pair = ToyTree(2).pair(["right"], ["left", "look", "left"])
    (scan,) = scans_of([pair], CONFIG)
    questions = judge_questions(scan, CONFIG, seed=0, **BUDGET)
    assert len({q.request.seed for q in questions}) == 3
    assert judge_questions(scan._replace(start=2), CONFIG, seed=0, **BUDGET) == questions[2:]
    assert {q.request.seed for q in judge_questions(scan, CONFIG, seed=1, **BUDGET)}.isdisjoint(
        q.request.seed for q in questions
    )


def test_the_log_has_no_thoughts_and_loses_whole_steps_from_its_old_end() -> None:
    path = ToyTree(4).path("look", "left", "left", "right", thought="SECRET")
    (scan,) = scans_of([ToyTree(4).pair(["right"], ["look"])], CONFIG)
    scan = scan._replace(path=path)

    def text(context_length: int, position: int = 3) -> tuple[str, int]:
        question = judge_questions(
            scan,
            CONFIG,
            seed=0,
            count_tokens=lambda r: r.messages[0].text.count("Action: "),
            context_length=context_length,
        )[position]
        return question.request.messages[0].text, question.dropped_steps

    whole, num_dropped = text(14)
    assert num_dropped == 0
    assert "SECRET" not in whole
    assert whole.count("Action: ") == 4
    shorter, num_dropped = text(12)
    assert num_dropped == 2
    assert [line for line in shorter.splitlines() if line.startswith("Action: ")] == ["Action: left", "Action: right"]
    assert "You are at -2." in shorter
    shortest, num_dropped = text(5)
    assert num_dropped == 3
    assert shortest.count("Action: ") == 1
    assert "The goal is 6" in shortest


async def test_a_log_that_the_judge_counts_as_too_long_is_shortened() -> None:
    """Before, what an estimate let through and the server refused was stored as an unparsable
    verdict.
    """
    num_steps: list[int] = []

    async def strict(request: Request) -> list[Generation]:
        steps = request.messages[0].text.count("Action: ")
        num_steps.append(steps)
        if steps > 2:
            raise PromptTooLong("no room")
        return [generation("Judgement: Good")]

    path = ToyTree(4).path("look", "left", "left", "right", "left")
    scan = scans_of([ToyTree(4).pair(["right"], ["look"])], CONFIG)[0]._replace(path=path, start=4)
    judgements = await judge_paths([scan], strict, CONFIG, seed=0, **BUDGET)
    (judgement,) = judgements.values()
    assert judgement.verdict is Verdict.GOOD
    assert judgement.dropped_steps == 3
    assert num_steps == [5, 3, 2]


async def test_a_step_that_does_not_fit_at_all_is_unparsable() -> None:
    async def full(request: Request) -> list[Generation]:
        raise PromptTooLong("no room")

    pair = ToyTree(0).pair(["right", "right"], ["left"])
    judgements = await judge_paths(scans_of([pair], CONFIG), full, CONFIG, seed=0, **BUDGET)
    assert critique_of(pair, judgements, CONFIG).verdicts == (
        StepVerdict(position=0, verdict=Verdict.UNPARSABLE, reply=""),
    )
    strict_config = CritiqueConfig(unparsable="bad")
    assert critique_of(pair, judgements, strict_config).first_error is None, "a judge without room found no error"


@pytest.mark.parametrize(("unparsable", "error"), [("skip", 1), ("bad", 0)])
async def test_the_recipe_says_what_an_unparsable_judgement_means(unparsable: str, error: int) -> None:
    config = CritiqueConfig(unparsable=unparsable)  # type: ignore[arg-type]
    pair = ToyTree(2).pair(["right"], ["look", "left"])
    judge = by_action(look="so so", left="Bad")
    judgements = await judge_paths(scans_of([pair], config), judge, config, seed=0, **BUDGET)
    critique = critique_of(pair, judgements, config)
    assert critique.verdicts[0].verdict is Verdict.UNPARSABLE
    assert critique.first_error == error


async def test_verdicts_are_read_as_the_authors_read_them_if_a_recipe_says_so() -> None:
    config = CritiqueConfig(unparsable="published")
    pair = ToyTree(2).pair(["right"], ["look", "left"])
    judge = by_action(look="not good at all", left="hm")
    judgements = await judge_paths(scans_of([pair], config), judge, config, seed=0, **BUDGET)
    critique = critique_of(pair, judgements, config)
    assert [verdict.verdict for verdict in critique.verdicts] == [Verdict.GOOD, Verdict.BAD]
    assert critique.first_error == 1


async def test_the_majority_of_the_votes_counts_and_speaks() -> None:
    config = CritiqueConfig(votes=3, temperature=1.0)
    judge = Judge(lambda action, number: ("Good", "Bad, it fell", "Bad, it broke")[number])
    pair = ToyTree(0).pair(["right"], ["jump"])
    judgements = await judge_paths(scans_of([pair], config), judge, config, seed=0, **BUDGET)
    (judgement,) = judgements.values()
    assert judge.requests[0].n == 3
    assert judgement.votes == (Verdict.GOOD, Verdict.BAD, Verdict.BAD)
    assert critique_of(pair, judgements, config).verdicts == (
        StepVerdict(position=0, verdict=Verdict.BAD, reply="Judgement: Bad, it fell"),
    )


async def test_a_missing_reply_is_a_fault_of_the_model() -> None:
    async def mute(request: Request) -> list[Generation]:
        return []

    pair = ToyTree(0).pair(["right"], ["jump"])
    with pytest.raises(ModelFault, match=r"judging node 2 .* 1 replies were asked for, 0 came"):
        await judge_paths(scans_of([pair], CONFIG), mute, CONFIG, seed=0, **BUDGET)


def test_first_error_is_pure_and_bounded_by_the_scan() -> None:
    verdicts = [StepVerdict(position=i, verdict=v, reply="") for i, v in enumerate([Verdict.BAD, Verdict.GOOD] * 2)]
    assert first_error(verdicts, 1, CritiqueConfig()) == 2
    assert first_error(reversed(verdicts), 1, CritiqueConfig()) == 2
    assert first_error(verdicts, 1, CritiqueConfig(scan_from="root")) == 0
    assert first_error(verdicts, 3, CritiqueConfig()) is None
