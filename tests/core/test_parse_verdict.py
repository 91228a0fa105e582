"""Reading a judge's reply, and counting votes."""

from __future__ import annotations

import pytest

from agentr_core.methods.agent_r.critique import majority_verdict, parse_published_verdict, parse_verdict
from agentr_core.types import Verdict

GOOD, BAD, UNCERTAIN, UNPARSABLE = Verdict.GOOD, Verdict.BAD, Verdict.UNCERTAIN, Verdict.UNPARSABLE


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Reason: it helps.\nJudgement: Good", GOOD),
        ("judgment: BAD", BAD),
        ("JUDGEMENT: uncertain.", UNCERTAIN),
        ("**Judgement:** *Good*", GOOD),
        ("## Judgement:\n_Bad_", BAD),
        ("It fetches the wood. Judgement: <Good>", GOOD),
        ("Judgement: Bad, since the recipe lacks sticks", BAD),
        ("Judgement: Good, or so I thought.\nJudgement: Bad\nThat is all.", BAD),
        ("Judgement: Good, if it were done at once", GOOD),
        ("Judgement: Bad. It is not good.", BAD),
        ("__Judgement:__ Bad", BAD),
        ('"Judgement": "Bad"', BAD),
        ("", UNPARSABLE),
        ("This is a good action", UNPARSABLE),
        ("Judgement Good", UNPARSABLE),
        ("Judgement: not bad", UNPARSABLE),
        ("Judgement: Goodness me", UNPARSABLE),
        ("Judgement: Good/Bad/Uncertain", UNPARSABLE),
        ("Judgement: Good rather than bad", UNPARSABLE),
        ("Judgement: Good\nJudgement: hm", UNPARSABLE),
        ("My judgements: Good", UNPARSABLE),
    ],
)
def test_the_word_after_the_last_label_counts(reply: str, verdict: Verdict) -> None:
    assert parse_verdict(reply) is verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It helps.\nJudgement: Good", GOOD),
        ("Judgement: not GOOD", GOOD),
        ("Judgement: Uncertain.", UNCERTAIN),
        ("Judgement: Good/Bad/Uncertain", GOOD),
        ("Judgement: Good\nJudgement: hm", BAD),
        ("Judgement: Good\nJudgement: Bad", BAD),
        ("This is a good action", GOOD),
        ("judgment: bad, not good", GOOD),
        ("I cannot tell.", BAD),
        ("", BAD),
    ],
)
def test_the_published_code_looks_for_two_words_and_takes_all_else_for_bad(reply: str, verdict: Verdict) -> None:
    assert parse_published_verdict(reply) is verdict


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        ([BAD, GOOD, BAD], BAD),
        ([BAD, GOOD], UNCERTAIN),
        ([GOOD, BAD, UNCERTAIN], UNCERTAIN),
        ([UNPARSABLE, UNPARSABLE, BAD], BAD),
        ([UNPARSABLE], UNPARSABLE),
        ([], UNPARSABLE),
    ],
)
def test_the_majority_counts_and_ties_are_uncertain(votes: list[Verdict], verdict: Verdict) -> None:
    assert majority_verdict(votes) is verdict
