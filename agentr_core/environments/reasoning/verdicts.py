"""The verdict of a judge that was asked for "Correct" or "Incorrect", and may say more."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

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
"""Negations that deny nothing of an answer, and conditions that are none."""

_SUBJECT = (
    r"(?:(?:the|this|its|your|given|final|overall|model's|student's|predicted|provided|proposed) )*"
    r"(?:answer|response|prediction|verdict|judge?ment|conclusion|result|it|this|that)(?: is|'s|:)"
    r"(?:,? (?:therefore|thus|indeed|hence|also|clearly|still|considered))?:? ?"
)
_LAST = re.compile(
    rf"(?:(?:^|[.!?;:\n]|\s[-\u2013\u2014]+\s)\s*(?:(?:so|thus|hence|therefore|overall),?\s*)?(?:{_SUBJECT})?"
    rf"|(?:,|\bbut|\band|\bso)\s+{_SUBJECT})(?P<verdict>incorrect|correct|wrong)$"
)
_LABELLED = re.compile(
    r"\b(?:verdict|judge?ment|conclusion|decision|grade)(?: is|\s*:)\s*(?P<verdict>incorrect|correct|wrong)\b(?! \w)"
)
_QUESTION = re.compile(r"[^.!?;\n]*\?")
_SENTENCE = re.compile(r"(?<!\d)\.|\.(?!\d)|[!;\n]")
_CLAUSE = re.compile(
    r"[,:()\[\]]|\s[-\u2013\u2014]+\s|\b(?:but|so|although|though|however|yet|while|whereas|because|since|thus|"
    r"therefore|hence|even if)\b|\band (?=(?:\w+ ){0,4}(?:is|are|was)\b)"
)
_POSSIBLE = re.compile(r"\b(?:if|unless|would|were|could|might)\b(?!.*\b(?:consider|count|accept|judg|grad))")

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
    """Return whether a reply finds an answer right; None if it says neither.

    A verdict that ends the reply, or is labelled as one, counts. Otherwise one clause that finds
    the answer wrong does, or right only in part, whatever else is said: what a denial denies is
    looked for in its clause. Titles in quotation marks say nothing, nor do questions or conditions.
    """
    plain = _plain(reply)
    if last := _LAST.search(plain.rstrip(_ENDS)):
        return last["verdict"] == "correct"
    if labelled := [found["verdict"] == "correct" for found in _LABELLED.finditer(plain)]:
        return labelled[-1]
    verdicts = [said for clause in _clauses(plain) for said in _verdicts(clause)]
    return all(verdicts) if verdicts else None


def _plain(reply: str) -> str:
    """Return a reply in lower case, without marks of Markdown and what it quotes."""
    lines = "\n".join(" ".join(line.split()) for line in _MARKS.sub("", reply).splitlines() if line.strip())
    text = lines.replace("\u2019t", "'t")
    text = _QUOTED.sub(lambda found: found[0] if _WORD_ALONE.fullmatch(found[0]) else " it ", text).lower()
    return _INSERTED.sub(r"\1", _BOTH_NAMED.sub(" ", _PREFIXED.sub("incorrect", text)))


def _clauses(plain: str) -> Iterator[str]:
    for sentence in _SENTENCE.split(_QUESTION.sub(" ", plain)):
        for clause in _CLAUSE.split(sentence):
            if not _POSSIBLE.search(clause := _IDIOMS.sub(" ", clause)):
                yield clause


def _verdicts(clause: str) -> Iterator[bool]:
    """Yield the verdicts of a clause: whether each finds the answer right."""
    denials = contrasts = 0
    for token in _TOKEN.finditer(clause):
        before, after = clause[: token.start()], clause[token.end() :]
        if token["no"]:
            denials += 1
        elif token["contrast"]:
            contrasts += 1
        elif token["wrong"]:
            # What is "not entirely wrong" is not right.
            yield denials % 2 == 1 and not _WHOLLY.search(before)
            denials = contrasts = 0
        elif _IN_PART.search(clause):
            yield False
        elif token["right"] == "correctly" or not (_OF_A_NOUN.search(before) or _NOUN.match(after)):
            yield denials % 2 == 0
            denials = contrasts = 0
        elif denials or contrasts or _RELATION.search(before):
            # The correct answer: it is compared with the given one, or it is only named.
            yield (denials + contrasts) % 2 == 0
            denials = contrasts = 0
