"""The correctness of an answer: by words for knowledge, by value for mathematics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Literal

from agentr_core.environments.reasoning.algebra import same_value
from agentr_core.environments.reasoning.grammar import Answers
from agentr_core.environments.reasoning.latex import normal_form
from agentr_core.environments.reasoning.words import published_words, words

Domain = Literal["math", "knowledge"]
_LETTERED = re.compile(
    r"(?:(?:the\s+)?(?:answer|option|choice)\s*(?:is\b)?\s*:?\s*)?[(\[]?([A-Za-z])(?:[)\].:]+|(?=\s*$))\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
"""The letter of an option, and what follows it, such as its text."""

_WHOLE = frozenset({"yes", "no", "noanswer"})
"""Answers that are right or wrong as a whole: part of one is another answer."""


def correctness(prediction: str, golds: Sequence[str], domain: Domain, answers: Answers = "plain") -> float:
    """Return the correctness of a prediction in [0, 1]: 0 or 1 for mathematics, for knowledge the
    word F1 against the best of the gold answers. An empty prediction is wrong.
    """
    if not prediction.strip():
        return 0.0
    if domain == "math":
        return float(any(same_answer(prediction, gold, answers) for gold in golds))
    return max((word_f1(prediction, gold, answers) for gold in golds), default=0.0)


def choice(prediction: str, options: Sequence[str], right: int) -> float:
    """Return 1 if an answer names the right one of several options, by its letter, its text or
    both, and no other one; otherwise 0.
    """
    named = _named_options(prediction.strip(), options)
    return float(right in named and all(options[each] == options[right] for each in named))


def same_answer(prediction: str, gold: str, answers: Answers = "plain") -> bool:
    """Return whether two answers of mathematics are the same: in value, or, if `answers` is
    published, in the published normal form.
    """
    if answers == "published" and normal_form(prediction) and normal_form(prediction) == normal_form(gold):
        return True
    return same_value(prediction, gold)


def word_f1(prediction: str, gold: str, answers: Answers = "plain") -> float:
    """Return the F1 of the words of a prediction and a gold answer, each counted as often as it
    occurs; 0 if either has no words. Where a hyphen may join or part words, the better counts.

    If either is yes, no or "noanswer" and no more, it is 1 where both are the same, otherwise 0.

    Sources: SQuAD (arXiv 1606.05250); for yes and no, HotpotQA (arXiv 1809.09600), as in the
    published code of ET-Agent.
    """
    forms = {"".join(published_words(text)) for text in (prediction, gold)}
    if forms & _WHOLE:
        return float(len(forms) == 1)
    return max(_f1(said, wanted) for said, wanted in product(_words(prediction, answers), _words(gold, answers)))


def exact_match(prediction: str, golds: Sequence[str], answers: Answers = "plain") -> bool:
    """Return whether a prediction has the words of a gold answer, in their order, and no others."""
    said = [each for each in _words(prediction, answers) if each]
    return any(each in _words(gold, answers) for each in said for gold in golds)


def _named_options(prediction: str, options: Sequence[str]) -> set[int]:
    letters = {chr(ord("A") + place): place for place in range(len(options))}
    if prediction not in letters and (same := _where(prediction, options)):
        return same
    found = _LETTERED.fullmatch(prediction)
    letter = letters.get(found[1].upper()) if found else None
    rest = found[2] if found else ""
    if letter is not None and not rest:
        return {letter}
    if named := _with_text(prediction, options):
        return named
    if letter is None:
        return set()
    named = _with_text(rest, options)
    return {letter} if letter in named or not named else set()


def _with_text(text: str, options: Sequence[str]) -> set[int]:
    """Return the options that have a text, to the word or else in value."""
    same = {place for place, option in enumerate(options) if exact_match(text, [option])}
    return same or {place for place, option in enumerate(options) if same_value(text, option)}


def _where(text: str, options: Sequence[str]) -> set[int]:
    return {place for place, option in enumerate(options) if option.strip() == text}


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    shared = (Counter(said) & Counter(wanted)).total()
    return 2 * shared / (len(said) + len(wanted)) if shared else 0.0


def _words(text: str, answers: Answers) -> list[list[str]]:
    return [published_words(text)] if answers == "published" else words(text)
