"""The correctness of an answer: by words in the domain `knowledge`, by value in mathematics; and a
judge's verdict.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from string import punctuation
from typing import Literal

from agentr_core.environments.reasoning.algebra import is_same_value
from agentr_core.environments.reasoning.formulas import normal_form
from agentr_core.environments.reasoning.grammar import Answers

# The verdict of a judge that was asked to say "Correct" or "Incorrect", but may say more.

_MARKS = re.compile(r"[*_`~#]+")
_QUOTED = re.compile(
    r"\"[^\"\n]{0,200}\"|\u201c[^\u201d\n]{0,200}\u201d|\u2018[^\u2019\n]{0,200}\u2019|(?<!\w)'[^'\n]{0,200}'(?!\w)"
)
_ENDS = string.punctuation + string.whitespace + "\u201d\u2019"
_WORD_ALONE = re.compile(r"\W*(?:in)?correct\W*", re.IGNORECASE)
_PREFIXED = re.compile(r"\b(?:in|non|un)[- ]?correct(?=\b|ly\b)")
_BOTH_NAMED = re.compile(r"\b(?:correct(?: or |/)incorrect|incorrect(?: or |/)correct)\b")
_INSERTED = re.compile(r"(\bnot|n't|\bnever),[^,.;\n]*,")
_IDIOMS = re.compile(
    r"\bno doubt\b|\bwithout (?:a |any )?doubt\b|\bno question\b|(?:\bnot|n't) (?:only|just|really )?"
    r"(?:matter|change|affect|alter)\b|\bno matter\b|\bnot (?:only|just)\b|"
    r"\bi(?:'d| would) (?:say|call|judge|consider)\b"
)
"""Phrases with a negation or a conditional that say nothing about the answer."""

_SUBJECT = (
    r"(?:(?:the|this|its|your|given|final|overall|model's|student's|predicted|provided|proposed) )*"
    r"(?:answer|response|prediction|verdict|judge?ment|conclusion|result|it|this|that)(?: is|'s|:)"
    r"(?:,? (?:therefore|thus|indeed|hence|also|clearly|still|considered))?:? ?"
)
_FINAL_VERDICT = re.compile(
    rf"(?:(?:^|[.!?;:\n]|\s[-\u2013\u2014]+\s)\s*(?:(?:so|thus|hence|therefore|overall),?\s*)?(?:{_SUBJECT})?"
    rf"|(?:,|\bbut|\band|\bso)\s+{_SUBJECT})(?P<verdict>incorrect|correct|wrong)$"
)
_LABELLED = re.compile(
    r"\b(?:verdict|judge?ment|conclusion|decision|grade)(?: is|\s*:)\s*(?P<verdict>incorrect|correct|wrong)\b(?! \w)"
)
_QUESTION_SENTENCE = re.compile(r"[^.!?;\n]*\?")
_SENTENCE = re.compile(r"(?<!\d)\.|\.(?!\d)|[!;\n]")
_CLAUSE = re.compile(
    r"[,:()\[\]]|\s[-\u2013\u2014]+\s|\b(?:but|so|although|though|however|yet|while|whereas|because|since|thus|"
    r"therefore|hence|even if)\b|\band (?=(?:\w+ ){0,4}(?:is|are|was)\b)"
)
_CONDITIONAL = re.compile(r"\b(?:if|unless|would|were|could|might)\b(?!.*\b(?:consider|count|accept|judg|grad))")

_DENIAL = (
    r"\b(?:not|cannot|never|neither|nor|no|nothing|none|without|hardly|scarcely|far from|fail(?:s|ed)? to|"
    r"rather than|instead of)\b|n't\b"
)
_CONTRAST = (
    r"\b(?:differ(?:s|ed|ent)?|mismatch(?:es)?|contradicts?|conflicts?|disagrees?|deviates?|unlike|other than|"
    r"misses|omits|lacks|opposite)\b"
)
_TOKEN = re.compile(
    rf"(?P<no>{_DENIAL})|(?P<contrast>{_CONTRAST})|\b(?P<wrong>incorrect(?:ly)?|wrong(?:ly)?)\b|\b(?P<right>correct(?:ly)?)\b"
)
_OF_A_NOUN = re.compile(
    r"\b(?:the|a|an|any|all|these|those|our)(?: (?:only|most|one|single|sole|exact|reference|listed))? $"
)
_NOUN = re.compile(
    r" (?:answer|one|value|result|solution|response|option|choice|name|number|date|year|form|spelling)s?\b"
)
_RELATION = re.compile(
    r"\b(?:match|equal|equivalent|same|identical|agree|correspond|consistent|gives?|contain|include|provide|state|"
    r"mean|refer)|\b(?:answer|response|prediction|it|this|that)(?: is|'s) "
)
_IN_PART = re.compile(
    r"\b(?:partial|partially|partly|in part|half|semi|mostly|largely|almost|nearly|somewhat|to some extent|roughly|"
    r"approximately)\b"
)
_WHOLLY = re.compile(r"\b(?:entirely|fully|completely|totally|wholly|quite|exactly|strictly|altogether) $")


def verdict(reply: str) -> bool | None:
    """Return whether a judge's reply finds an answer right; None if it says neither.

    A verdict at the end of the reply decides, else the last one with a label such as "Verdict:".
    Without either, the answer is right only if every clause with a verdict finds it wholly right. A
    negation counts only within its clause. Quotations, questions and conditions are ignored.
    """
    # In lower case, without Markdown marks and without quotations, except a quoted verdict.
    lines = "\n".join(" ".join(line.split()) for line in _MARKS.sub("", reply).splitlines() if line.strip())
    text = lines.replace("\u2019t", "'t")
    text = _QUOTED.sub(lambda match: match[0] if _WORD_ALONE.fullmatch(match[0]) else " it ", text).lower()
    plain = _INSERTED.sub(r"\1", _BOTH_NAMED.sub(" ", _PREFIXED.sub("incorrect", text)))
    if last := _FINAL_VERDICT.search(plain.rstrip(_ENDS)):
        return last["verdict"] == "correct"
    if labelled_verdicts := [match["verdict"] == "correct" for match in _LABELLED.finditer(plain)]:
        return labelled_verdicts[-1]
    verdicts: list[bool] = []
    for sentence in _SENTENCE.split(_QUESTION_SENTENCE.sub(" ", plain)):
        for clause in _CLAUSE.split(sentence):
            if not _CONDITIONAL.search(clause := _IDIOMS.sub(" ", clause)):
                verdicts += _verdicts(clause)
    return all(verdicts) if verdicts else None


def _verdicts(clause: str) -> Iterator[bool]:
    """Yield the verdicts of a clause: True for each that finds the answer right, False for
    wrong.
    """
    denials = contrasts = 0
    for token in _TOKEN.finditer(clause):
        before, after = clause[: token.start()], clause[token.end() :]
        if token["no"]:
            denials += 1
        elif token["contrast"]:
            contrasts += 1
        elif token["wrong"]:
            # "Not entirely wrong" is not right.
            yield denials % 2 == 1 and not _WHOLLY.search(before)
            denials = contrasts = 0
        elif _IN_PART.search(clause):
            yield False
        elif token["right"] == "correctly" or not (_OF_A_NOUN.search(before) or _NOUN.match(after)):
            yield denials % 2 == 0
            denials = contrasts = 0
        elif denials or contrasts or _RELATION.search(before):
            # "The correct answer" is compared with the given one, or else only mentioned.
            yield (denials + contrasts) % 2 == 0
            denials = contrasts = 0


# The words of an answer in a normal form, for the comparison of answers in the domain `knowledge`.
#
# Punctuation is dropped unless it changes the word: the point of 3.5, the minus of -5, the colon of
# 10:30, the marks of C#, C++ and A* are kept.

_ARTICLES = frozenset({"a", "an", "the"})
_LATIN = str.maketrans(
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE"}
    | {"\N{LATIN SMALL LETTER DOTLESS I}": "i"}
)
_PLAIN_SIGNS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-")
    | dict.fromkeys("\u2019\u2018\u02bc\u2032`", "'")
    | {"\N{EM DASH}": " - ", "\N{FRACTION SLASH}": "/", "♯": "#", "♭": "b"}
)
_LATEX_WORDS = r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal)?|mbox|math(?:rm|bf|it|sf)|emph|underline)\s*\{([^{}]*)\}"
# Models are asked for a box in LaTeX, and so write commands of LaTeX in words, too.
_LATEX = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^\s*(?:\$([^$]*)\$|\\\((.*)\\\))\s*$", r"\1\2"),
        (_LATEX_WORDS, r"\1"),
        # Once more for a command within another.
        (_LATEX_WORDS, r"\1"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"\^\s*\{?\s*(st|nd|rd|th)\b\s*\}?", r"\1"),
        (r"\\([&%$#_])", r"\1"),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|(?<=\S)~(?=\S)", " "),
    )
)
_SUPERSCRIPT = re.compile("(?<=\\d)[⁰¹²³⁴-⁹]+")
_VULGAR = re.compile("(?<=\\d)(?=[¼-¾⅐-⅞])")
_ACCENT = re.compile("(?<=[A-Za-z])[\u0300-\u036f]+")
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,3}|_{1,3})(\S(?:[^*_\n]*\S)?)\1(?!\w)")
_INITIALS = re.compile(r"\b[^\W\d_]\.(?:\s?[^\W\d_]\.)+")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_SIGN_NAMES = (
    (re.compile(r"%|\bper cent\b"), " percent "),
    (re.compile(r"°"), " degrees "),
    (re.compile(r"\$\s*(?=\.?\d)|(?<=\d)\s*\$"), " dollars "),
    (re.compile(r"€\s*(?=\.?\d)|(?<=\d)\s*€"), " euros "),
    (re.compile(r"£\s*(?=\.?\d)|(?<=\d)\s*£"), " pounds "),
    (re.compile(r"\s&\s"), " and "),
    (re.compile(r"[®™©]"), ""),
    (re.compile(r"(?<![\w.])\.(?=\d)"), "0."),
    (re.compile(r"(?<!\S)\+(?=\d)"), ""),
)
_MEANINGFUL = (
    r"(?<=\d)[.:/'-](?=\d)"  # 3.5, 10:30, 1/2, 2-1
    r"|(?<![\w)\].])-(?=\d)"  # -5
    r"|(?<=[^\W\d_])\#(?!\w)"  # C#
    r"|(?<=\w)\*(?![\w*])"  # A*
    r"|(?:(?<=\b[A-Z])|(?<=\bAB))-(?![\w-])"  # the grade A-, the blood group AB-
)
_SIGN = re.compile(rf"(?P<meant>{_MEANINGFUL})|(?P<dropped>'|\.(?!\d))|[^\w\s]|_")


def published_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without articles, Unicode punctuation and all ASCII
    signs. If nothing would be left, as of the answer `A`, what was removed last is kept.

    Source: SQuAD (arXiv 1606.05250), and the published code of ET-Agent.
    """
    plain = unicodedata.normalize("NFKC", text).lower()
    stripped_text = "".join(sign for sign in plain if sign not in punctuation and unicodedata.category(sign)[0] != "P")
    words = stripped_text.split() or plain.split()
    return [word for word in words if word not in _ARTICLES] or words


def without_latex(text: str) -> str:
    """Return a text with commands of LaTeX that stand for words or signs replaced by these, such as
    `30 \\text{ years}` and `AT\\&T`; others stay.
    """
    for pattern, replacement in _LATEX if re.search(r"[\\$~^]", text) else ():
        text = pattern.sub(replacement, text)
    return text


def words(text: str) -> list[list[str]]:
    """Return the words of a text in two forms: with the parts of a hyphenated word as several
    words, and as one word.

    Words are casefolded, without accents on Latin letters, without articles, except at the end
    (hepatitis A), without commands of LaTeX, and without punctuation that has no meaning. A text of
    nothing else keeps it.
    """
    text = without_latex(text)
    # One character for each meaning, and words for signs such as % and $.
    plain = _SUPERSCRIPT.sub(lambda match: f"^{match[0]}", _VULGAR.sub(" ", text)).translate(_PLAIN_SIGNS)
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", plain)).translate(_PLAIN_SIGNS)
    plain = unicodedata.normalize("NFC", _ACCENT.sub("", plain)).translate(_LATIN)
    plain = _EMPHASIS.sub(r"\2", plain)
    plain = _INITIALS.sub(lambda match: re.sub(r"[.\s]", "", match[0]) + " ", plain)
    plain = _GROUPED.sub(lambda match: match[0].replace(",", ""), plain)
    for sign, name in _SIGN_NAMES:
        plain = sign.sub(name, plain)
    forms = [_without_signs(plain, between).casefold().split() or text.casefold().split() for between in (" ", "")]
    return [
        [word for index, word in enumerate(form) if word not in _ARTICLES or index == len(form) - 1]
        if any(word not in _ARTICLES for word in form)
        else form
        for form in forms
    ]


def _without_signs(text: str, separator: str) -> str:
    """Return a text without punctuation that has no meaning; `separator` replaces punctuation that
    may join words. Between digits a space is put instead: 1,2 is not 12.
    """

    def replacement_of(match: re.Match[str]) -> str:
        if match["meant"] or not unicodedata.category(match[0]).startswith("P"):
            return match[0]
        if match["dropped"]:
            return ""
        start, end = match.span()
        digits = text[start - 1 : start].isdigit() and text[end : end + 1].isdigit()
        return " " if digits else separator

    return _SIGN.sub(replacement_of, text)


Domain = Literal["math", "knowledge"]
_LETTERED = re.compile(
    r"(?:(?:the\s+|my\s+)?(?:(?:final|correct|right|best)\s+)?(?:answer|option|choice)\s*(?:is\b)?\s*:?\s*)?"
    r"(?:option\s+)?[(\[{]?([A-Za-z])(?:[)\]}.:]+|(?=\s*$))\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
"""The letter of an option, and the text that follows it, such as the option's own."""

# By words alone, "yes and no" would earn two thirds where "yes" is right.
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Answers that are right or wrong as a whole: an answer that only contains one is another
answer.
"""


def correctness(prediction: str, golds: Sequence[str], domain: Domain, answers: Answers = "plain") -> float:
    """Return the correctness of a prediction in [0, 1]: 0 or 1 in mathematics, otherwise the best
    word F1 with any of the gold answers. An empty prediction gets 0.
    """
    if not prediction.strip():
        return 0.0
    if domain == "math":
        return float(any(same_answer(prediction, gold, answers) for gold in golds))
    return max((word_f1(prediction, gold, answers) for gold in golds), default=0.0)


def choice(prediction: str, options: Sequence[str], right: int) -> float:
    """Return 1.0 if an answer names the option at index `right`, by its letter, its text or both,
    and no other option; else 0.0. Options with equal text count as the same.
    """
    prediction = prediction.strip()
    index_by_letter = {chr(ord("A") + index): index for index in range(len(options))}
    same_options = {index for index, option in enumerate(options) if option.strip() == prediction}
    if prediction not in index_by_letter and same_options:
        choices = same_options
    else:
        match = _LETTERED.fullmatch(without_latex(unicodedata.normalize("NFKC", prediction)).strip())
        letter = index_by_letter.get(match[1].upper()) if match else None
        rest = match[2] if match else ""
        choices = {letter} if letter is not None and not rest else _options_with_text(prediction, options)
        if letter is not None and rest:
            texts = _options_with_text(rest, options)
            # As a word, the letter A is an article, so that "A. Paris" has the words of "Paris".
            if not choices or choices == texts:
                choices = {letter} if letter in texts or not texts else set()
    return float(bool(choices) and all(options[index] == options[right] for index in choices))


def same_answer(prediction: str, gold: str, answers: Answers = "plain") -> bool:
    """Return whether two answers in mathematics are the same: in value or, if `answers` is
    `published`, also if their published normal forms are equal.
    """
    if answers == "published" and normal_form(prediction) and normal_form(prediction) == normal_form(gold):
        return True
    return is_same_value(prediction, gold)


def word_f1(prediction: str, gold: str, answers: Answers = "plain") -> float:
    """Return the F1 of the words of a prediction and a gold answer as multisets, in [0, 1]; 0 if
    they share none. Of the two forms of hyphenated words, the better one counts.

    If either answer is just yes, no or "noanswer", the result is 1 if both are the same, else 0.

    Sources: SQuAD (arXiv 1606.05250); for yes and no, HotpotQA (arXiv 1809.09600), as in the
    published code of ET-Agent.
    """
    texts = (prediction, gold) if answers == "published" else map(without_latex, (prediction, gold))
    forms = {"".join(published_words(text)) for text in texts}
    if forms & _WHOLE_ANSWERS:
        return float(len(forms) == 1)
    best = 0.0
    for prediction_words, gold_words in product(_word_forms(prediction, answers), _word_forms(gold, answers)):
        overlap = (Counter(prediction_words) & Counter(gold_words)).total()
        best = max(best, 2 * overlap / (len(prediction_words) + len(gold_words)) if overlap else 0.0)
    return best


def exact_match(prediction: str, golds: Sequence[str], answers: Answers = "plain") -> bool:
    """Return whether a prediction has the same words as one of the gold answers, in the same
    order.
    """
    forms = [form for form in _word_forms(prediction, answers) if form]
    return any(form in _word_forms(gold, answers) for form in forms for gold in golds)


def _options_with_text(text: str, options: Sequence[str]) -> set[int]:
    """Return the indices of the options whose text equals `text` in words, else those equal in
    value.
    """
    same = {index for index, option in enumerate(options) if exact_match(text, [option])}
    return same or {index for index, option in enumerate(options) if is_same_value(text, option)}


def _word_forms(text: str, answers: Answers) -> list[list[str]]:
    return [published_words(text)] if answers == "published" else words(text)
