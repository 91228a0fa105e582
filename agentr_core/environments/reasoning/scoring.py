"""The correctness of an answer: by words for knowledge, by value for mathematics."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from agentr_core.environments.reasoning.algebra import same_value
from agentr_core.environments.reasoning.latex import normal_form

Domain = Literal["math", "knowledge"]
_ARTICLES = frozenset({"a", "an", "the"})


def correctness(prediction: str, golds: Sequence[str], domain: Domain) -> float:
    """Return the correctness of a prediction in [0, 1]: 0 or 1 for mathematics, for knowledge the
    word F1 against the best of the gold answers. An empty prediction is wrong.
    """
    if not prediction.strip():
        return 0.0
    if domain == "math":
        return float(any(same_answer(prediction, gold) for gold in golds))
    return max((word_f1(prediction, gold) for gold in golds), default=0.0)


def same_answer(prediction: str, gold: str) -> bool:
    """Return whether two answers in LaTeX are the same: in their normal form, or in value."""
    one, other = normal_form(prediction), normal_form(gold)
    return bool(one) and (one == other or same_value(one, other))


def word_f1(prediction: str, gold: str) -> float:
    """Return the F1 of the words of a prediction and a gold answer, each counted as often as it
    occurs; 0 if either has no words.

    Words are lower case, without punctuation and articles. Source: SQuAD (arXiv 1606.05250).
    """
    said, wanted = words(prediction), words(gold)
    shared = (Counter(said) & Counter(wanted)).total()
    return 2 * shared / (len(said) + len(wanted)) if shared else 0.0


def exact_match(prediction: str, golds: Sequence[str]) -> bool:
    """Return whether a prediction has the words of a gold answer, in their order, and no others."""
    said = words(prediction)
    return bool(said) and any(said == words(gold) for gold in golds)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles. A text that has
    nothing else, such as the choice `A`, keeps them.
    """
    plain = unicodedata.normalize("NFKC", text).lower()
    bare = "".join(character for character in plain if not unicodedata.category(character).startswith("P"))
    found = bare.split() or plain.split()
    return [word for word in found if word not in _ARTICLES] or found
