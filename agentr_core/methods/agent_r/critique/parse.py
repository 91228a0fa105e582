"""The verdict in a judge's reply. Source: Agent-R section 3.2."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from agentr_core.types import Verdict

_LABEL = re.compile(r"(?<![^\W_])judge?ment[\s*_\"']*:", re.IGNORECASE)
_WORD = re.compile(r"[\W_]*(good|bad|uncertain)(?![^\W_])((?:(?![.;!]\s)[^\n])*)", re.IGNORECASE)
_ANY = re.compile(r"(?<![^\W_])(?:good|bad|uncertain)(?![^\W_])", re.IGNORECASE)


def parse_verdict(reply: str) -> Verdict:
    """Return the verdict after the last "Judgement:" (or "Judgment:") of a reply, else
    `UNPARSABLE`.

    One of the three words must come directly after the label, in any case and with any punctuation
    around it, and the rest of its sentence must not name another: a judge that copies
    "Good/Bad/Uncertain" has not judged.
    """
    labels = list(_LABEL.finditer(reply))
    found = _WORD.match(reply, labels[-1].end()) if labels else None
    if found is None:
        return Verdict.UNPARSABLE
    verdict = Verdict(found[1].lower())
    if any(word.lower() != verdict for word in _ANY.findall(found[2])):
        return Verdict.UNPARSABLE
    return verdict


def published_verdict(reply: str) -> Verdict:
    """Return the verdict that the authors' code reads in a reply: good or uncertain if the text
    after the last "Judgement:" has that word in it, in any case, else bad.
    """
    said = reply.rpartition("Judgement:")[2].lower()
    return next((verdict for verdict in (Verdict.GOOD, Verdict.UNCERTAIN) if verdict in said), Verdict.BAD)


def majority(votes: Iterable[Verdict]) -> Verdict:
    """Return the verdict with the most votes; a tie is uncertain.

    Unparsable votes do not count unless there are no others: then the result is unparsable, as it
    is without any votes.
    """
    counts = Counter(vote for vote in votes if vote is not Verdict.UNPARSABLE).most_common()
    if not counts:
        return Verdict.UNPARSABLE
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return Verdict.UNCERTAIN
    return counts[0][0]
