"""What a judge of answers says, read from its words."""

from __future__ import annotations

from time import process_time

import pytest

from agentr_core.environments.reasoning.scoring import verdict

RIGHT = """
Correct
correct.
**Correct**
_Correct_
"Correct"
Answer: Correct
Answer: Correct (not Incorrect)
Verdict: Correct. Nothing is wrong with it.
**Verdict:** Correct\\nThe reference is wrong about the year in its second sentence.
Correct, not Incorrect.
Correct rather than incorrect
Correct or Incorrect? Correct
The answer is "Correct".
The given answer is correct.
The phrasing differs, but it is not incorrect. The answer is correct.
There is nothing wrong with the given answer. Correct
There is nothing wrong with the given answer.
I cannot find anything incorrect in it.
The film is 'The Wrong Trousers'; both name it. Correct
Both name “The Wrong Box”, so the answer is correct.
Both name "Wrong Turn": correct
The wording does not matter here and the answer is Correct.
The wording doesn't matter here and the given answer is correct.
It does not matter that the unit is missing, it is correct.
Not incorrect: it is the same number.
It isn't incorrect.
It is not wrong.
This is no wrong answer.
The answer is neither incorrect nor misleading.
There is no doubt that it is correct.
It is not only correct but also exact.
It's not written in the same form, but it is correct.
The given answer matches the correct answer.
The given answer does not differ from the correct answer.
It is equivalent to one of the correct answers.
This is the correct answer.
That would be considered correct.
If the order mattered it would be wrong, but it does not. Correct.
The question is whether this is incorrect. It is correct.
The date is written in another order, which does not change that it is correct.
The answer correctly names the town.
I would say it is correct.
Yes - correct
"""
WRONG = """
Incorrect
**Incorrect**
_wrong_
In-correct
Not correct
Not at all correct
It is not correct
It isn't correct.
The answer isn\u2019t quite correct.
It is not, strictly speaking, correct.
Partially correct
Answer: partially correct
Correct in part
This is only half correct.
The answer is mostly correct.
It is almost correct
Nearly correct, but the year is missing.
It is not entirely correct.
It is not fully incorrect.
The answer is not completely wrong.
The given answer fails to match the correct answer.
The given answer does not match the correct answer.
It does not mean the same as the correct answer.
It differs from the correct answer, which is 21.
It is not the **correct** one.
20 is not the correct answer.
Incorrect. The correct answer is 21.
Incorrect, not Correct
Correct or Incorrect? Incorrect
Wrong; 21 would be correct.
The right one is correct. So: Incorrect
The given answer is incorrect, although its unit is correct.
The film is 'Correct Me'; the answer names another. Incorrect
It is neither correct nor complete.
It cannot be correct.
It is never correct.
It is far from correct.
The year is correct but the town is wrong.
The answer incorrectly names the town.
Verdict: Incorrect. The unit is correct.
It has nothing to do with the correct answer.
"""
NEITHER = """
Perhaps.

The correct answer is 21.
21 would be correct.
Is it correct?
Say Correct or Incorrect.
The film is "The Wrong Trousers".
"""


def lines(text: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in text.strip("\n").splitlines()]


@pytest.mark.parametrize("reply", lines(RIGHT))
def test_right(reply: str) -> None:
    assert verdict(reply) is True


@pytest.mark.parametrize("reply", lines(WRONG))
def test_wrong(reply: str) -> None:
    assert verdict(reply) is False


@pytest.mark.parametrize("reply", lines(NEITHER))
def test_neither(reply: str) -> None:
    assert verdict(reply) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["not ", "'", "the ", "and is ", "correct or ", "not, ", "it is: ", "( ", "\n", ".", "! ", "`", "\u201c"]
)
def test_no_reply_takes_long(part: str) -> None:
    start = process_time()
    verdict(part * 20_000 + "?")
    assert process_time() - start < 2
