"""Extract the part of a model's reply that counts: the action after its label, or the text after
its thoughts.

Each world's parser is one of these functions, sometimes with an additional rule of its own. A
recipe says how labels are read (`environment.action.labels`). Either way the last label counts, as
in AgentGym's clients of WebShop, ScienceWorld and ALFWorld (arXiv 2406.04151). Its clients of
TextCraft and BabyAI instead answer a reply that has several labels with an error message; here that
would be a step of which the world knows nothing.

`lenient` accepts all that AgentGym's client of a world accepts, and what chat models write besides,
but reads a reply with a plain label as the client does:

- Thoughts in tags are no part of the reply; nor is an end-of-turn mark, which some servers leave in
  the text. AgentGym's clients mean to remove `</s>`, but remove one character too many.
- A label may have a number, any case and Markdown around it. An action may be in a code block, in
  quotes or brackets, an entry of a list, or followed by a remark in parentheses.
- If an action is one line, the lines below it are removed: models go on with invented
  observations.

`published` is what Agent-R's code does in its searches (arXiv 2501.11425): it takes all text after
the last label, without a number at its beginning, or the last line of a reply without a label. The
world reads that text as it is, so `published` also suits a world whose actions have quotes or
brackets of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from agentr_core.texts import THOUGHT_END, THOUGHT_START, blank_thoughts
from agentr_core.types import Answer, Generation

LabelStyle = Literal["lenient", "published"]
"""How the label of an action is read."""
ActionChoice = Literal["first", "last"]
"""Whether a reply is ended after its first action, or goes on and its last action counts."""

LABEL = "Action:"

_END_MARK = re.compile(r"</s>|<eos>|<end_of_turn>|<[|\uff5c][\w\u2581]{1,30}[|\uff5c]>")
_FINAL_END_MARK = re.compile(rf"(?:{_END_MARK.pattern})\Z")
_MAX_END_MARK_LENGTH = 40

_COLON = r"[ \t*_`\"'#()\d]*[:\uff1a]"
_PLAIN_LABEL = re.compile(rf"Action{_COLON}")
"""The label, in a sentence, too."""
_LABEL_IN_ANY_CASE = re.compile(rf"^(?:[^\w\n]|\d)*action{_COLON}", re.IGNORECASE | re.MULTILINE)
"""The label in any case, at the start of a line."""
_QUALIFIED_LABEL = re.compile(
    rf"(?-i:ACTION){_COLON}|^(?:[^\w\n]|\d)*(?:\w+[ \t]+){{1,2}}action{_COLON}", re.IGNORECASE | re.MULTILINE
)
"""The label in capitals in a sentence, or after a word or two, such as "Next action:"."""

# A label within a line counts after the end of a sentence; elsewhere a thought may be about it.
_FIRST_LABEL = rf"(?:^(?:[^\w\n]|\d)*(?:\w+[ \t]+){{0,2}}(?i:action){_COLON}|(?<=[.!?])[ \t]+Action{_COLON})[ \t*_]*"
FIRST_LINE = rf"(?m){_FIRST_LABEL}(?:\n?[ \t]*```+[ \t]*\w*[ \t]*\n|[ \t]*\n)*+[^\n]*\w[^\n]*(?=\n)"
"""Matches up to the end of the first action of a reply, where actions are lines."""
FIRST_BLOCK = rf"(?m){_FIRST_LABEL}(?s:.+?)(?=\n[^\w\n]*(?i:observation|thought|action)\b[^\n:]{{0,8}}:)"
"""The same, where an action may have several lines and goes on until something else is labelled."""
OBSERVATION = "\nObservation:"
"""The stop string that ends a reply in which the model goes on to invent an observation."""

_CODE_FENCE = re.compile(r"```+[ \t]*\w*[ \t]*")
_LIST_MARKER = re.compile(r"(?:[-*•]|\d{1,3}[.)])[ \t]+(?=\S)")
_REMARK = re.compile(r"[ \t]\((?:I|[A-Za-z]{2,})(?:[ ,;'\u2019][^()]*)?\)\Z")
_CLOSING_BY_OPENING = {'"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "[": "]", "(": ")", "<": ">"}
_MAX_NESTED_MARKS = 4
"""How many nested pairs of marks around an action are removed."""

_PUBLISHED_NUMBERED_LABEL = re.compile(r"Action \d+:")
_PUBLISHED_LIST_NUMBER = re.compile(r"\d+\.\s*")
_SHOPPING_ACTION = re.compile(r".+\[.+\]")
_SIGNS_TO_REMOVE = re.compile(r"[^A-Za-z0-9, ]+")


def after_label(reply: str, labels: LabelStyle = "lenient", *, allow_unlabelled: bool = False) -> str:
    """Return the text after the last label of a reply, stripped; without a label, the empty string.

    With `allow_unlabelled`, a reply without a label is taken as a whole.
    """
    if labels == "published":
        # Without a label this is the last line, as in Agent-R's code.
        _, marker, text = _PUBLISHED_NUMBERED_LABEL.sub(LABEL, reply).rpartition(LABEL)
        if not marker:
            return reply.strip().rpartition("\n")[2].strip()
        text = text.strip()
        number = _PUBLISHED_LIST_NUMBER.match(text)
        return text[number.end() :] if number else text
    text = without_thought(reply)
    label = _last_label(text)
    if label is None:
        return text if allow_unlabelled else ""
    return text[label.end() :].strip()


def line_after_label(reply: str, labels: LabelStyle = "lenient", *, allow_unlabelled: bool = False) -> str:
    """Return the first line of the result of `after_label` that is not empty once the marks around
    it are removed, or else the empty string; with `published`, the whole result.
    """
    text = after_label(reply, labels, allow_unlabelled=allow_unlabelled)
    return text if labels == "published" else next(_bare_lines(text), "")


def block_after_label(reply: str, labels: LabelStyle = "lenient") -> str:
    """Return the result of `after_label`, an action of several lines, without the Markdown around
    it; with `published`, unchanged.
    """
    text = after_label(reply, labels)
    if labels == "published":
        return text
    fence = _CODE_FENCE.match(text)
    return text[fence.end() :].rpartition("```")[0].strip() if fence else text.lstrip("*_` \t").rstrip("*_")


def words_after_label(reply: str, labels: LabelStyle = "lenient") -> str:
    """Return the result of `line_after_label`, reduced to letters, digits, commas and single
    spaces.
    """
    return " ".join(_SIGNS_TO_REMOVE.sub("", line_after_label(reply, labels)).split())


def shopping_action(reply: str, labels: LabelStyle = "lenient") -> str:
    """Return the `search[...]` or `click[...]` after the last label of a reply.

    Without a label, the whole reply is searched; with `lenient`, a reply that also has neither
    `search[` nor `click[` gives the empty string. What follows an action on its line is dropped,
    and a text that is not an action is returned unchanged.
    """
    text = after_label(reply, labels, allow_unlabelled=True)
    if labels == "lenient":
        if _last_label(without_thought(reply)) is None and "search[" not in text and "click[" not in text:
            return ""
        line = next(_bare_lines(text), "")
        text = line if _SHOPPING_ACTION.match(line) else text
    action = _SHOPPING_ACTION.match(text)
    return action[0] if action else text


def without_thought(reply: str) -> str:
    """Return a reply without thoughts in tags, surrounding white space, and end-of-turn marks at
    its end. After an opening tag without a closing one, everything is removed.
    """
    text = blank_thoughts(reply).strip()
    while mark := _FINAL_END_MARK.search(text, max(0, len(text) - _MAX_END_MARK_LENGTH)):
        text = text[: mark.start()].rstrip()
    return text


def _last_label(text: str) -> re.Match[str] | None:
    """Return the match of the last label of a text, None without a label.

    A plain label within a line may be part of a thought, so a label of any case that begins a later
    line is preferred to it.
    """
    plain_label, any_case_label = _last_match(_PLAIN_LABEL, text), _last_match(_LABEL_IN_ANY_CASE, text)
    if plain_label is None:
        return any_case_label or _last_match(_QUALIFIED_LABEL, text)
    begins_a_line = not re.search(r"[^\W\d]", text[: plain_label.start()].rpartition("\n")[2])
    return (
        plain_label
        if begins_a_line or any_case_label is None or any_case_label.start() < plain_label.start()
        else any_case_label
    )


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return max(pattern.finditer(text), key=lambda match: match.start(), default=None)


def _bare_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text without the marks around them; lines with nothing else are left
    out.
    """
    for line in text.split("\n"):
        if _CODE_FENCE.fullmatch(line.strip()):
            continue
        # Remove Markdown, quotes, brackets, a full stop, a remark in parentheses and all that
        # follows an end-of-turn mark.
        content = _END_MARK.split(line, maxsplit=1)[0]
        for _ in range(_MAX_NESTED_MARKS):
            previous, content = content, content.strip().strip("*_`").strip()
            content = _REMARK.sub(
                "", _LIST_MARKER.sub("", content, count=1) if _LIST_MARKER.match(content) else content
            )
            content = _without_pair(content.rstrip(".\u3002;,"))
            if content == previous:
                break
        if content:
            yield content


def _without_pair(text: str) -> str:
    """Return a text without a pair of quotes or brackets around it, or without one half of a pair
    at its end.
    """
    for opening, closing in _CLOSING_BY_OPENING.items():
        if text.startswith(opening) and text.endswith(closing) and _closes_at_end(text, opening, closing):
            return text[1:-1].strip()
        # The opening half may be before the label.
        if text.endswith(closing) and text.count(closing) == 1 and (opening == closing or opening not in text):
            return text[:-1].strip()
    return text


def _closes_at_end(text: str, opening: str, closing: str) -> bool:
    """Return whether the bracket or quote that opens a text is closed by its last character, and
    not before.
    """
    if opening == closing:
        return len(text) > 1 and text.count(opening) == 2
    depth = 0
    for position, character in enumerate(text):
        depth += (character == opening) - (character == closing)
        if depth == 0:
            return position == len(text) - 1
    return False


# The part of a helper's reply that counts: the text after its thoughts.

_THOUGHT_END = re.compile(THOUGHT_END, re.IGNORECASE)
# A tag within a sentence is quoted: it opens no thought.
_THOUGHT_START = re.compile(rf"(?:^|[.!?:])\s*(?:{THOUGHT_START})", re.MULTILINE | re.IGNORECASE)
_THOUGHT_TAG = re.compile(rf"(?P<opens>{THOUGHT_START})|{THOUGHT_END}", re.IGNORECASE)


def answer_text(answer: Answer | Generation, *, keep_later_thoughts: bool = False) -> str | None:
    """Return the part of a helper's reply that counts, the text after its thoughts; None if the
    reply ends within a thought.

    Set `keep_later_thoughts` if that text may itself have thoughts in tags, as a step that an
    editor writes: then only the helper's own thought, at the beginning, is left out.
    """
    return (
        None if is_cut_within_thought(answer) else after_thoughts(answer.text, keep_later_thoughts=keep_later_thoughts)
    )


def is_cut_within_thought(answer: Answer | Generation) -> bool:
    """Return whether a helper's reply was cut at its token limit within a thought.

    That is so if the reply opens a thought after its last closing tag, or if it has no closing tag
    and its model `thinks`. Any other reply that was cut is readable as far as it goes.
    """
    if answer.finish_reason != "length":
        return False
    thought_end = _last_match(_THOUGHT_END, answer.text)
    text_after_thought = answer.text[thought_end.end() :] if thought_end else answer.text
    return (answer.thinks and thought_end is None) or _THOUGHT_START.search(text_after_thought) is not None


def after_thoughts(reply: str, *, keep_later_thoughts: bool = False) -> str | None:
    """Return the text of a reply after its last thought; None if it ends within a thought.

    The tags are those of `texts.blank_thoughts`. `keep_later_thoughts` is as in `answer_text`.
    """
    if not keep_later_thoughts:
        last_end = _last_match(_THOUGHT_END, reply)
        text_after_thought = reply[last_end.end() :] if last_end else reply
        return None if _THOUGHT_START.search(text_after_thought) else text_after_thought
    # The thought that a reply begins with ends where the fewest tags are open for the first time:
    # pairs in it are quotes, and pairs after it belong to the reply.
    depth = lowest_depth = thought_end = 0
    starts_with_thought = begins_with_thought(reply)
    for tag in _THOUGHT_TAG.finditer(reply):
        is_closing = tag["opens"] is None
        depth += -1 if is_closing else 1
        if is_closing and (not thought_end or depth < lowest_depth):
            lowest_depth, thought_end = depth, tag.end()
    if starts_with_thought and not thought_end:
        return None
    # Where the prompt opened the thought, more tags are closed than opened.
    return reply[thought_end:] if starts_with_thought or lowest_depth < 0 else reply


def begins_with_thought(reply: str) -> bool:
    """Return whether the first thing in a reply is a tag that opens a thought."""
    tag = _THOUGHT_TAG.match(reply.lstrip())
    return tag is not None and tag["opens"] is not None
