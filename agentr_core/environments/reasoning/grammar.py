"""The tags of a reasoning episode, which is one growing text:

    text   := (think call result)* think answer
    think  := <think> ... </think>
    call   := <search> query </search> | <python> code </python>
    result := <result> what the tool answered </result>
    answer := <answer> ... \boxed{final} ... </answer>

Source: ET-Agent (arXiv 2601.06860), task and format of trajectories.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from agentr_core.types import Trajectory

Answers = Literal["plain", "published"]
"""How answers are read and compared: `plain` compares what they mean; `published` follows the
public code of ET-Agent, which takes the last box and drops all punctuation of words.
"""

SEARCH, PYTHON = "search", "python"
CALLS = (SEARCH, PYTHON)
RESULT_OPENS = "<result>"
STOPS = ("</search>", "</python>", "</answer>", RESULT_OPENS)
"""The stop strings of a reply. A model that opens a result itself is stopped, since results come
from tools only.
"""

_TAG = re.compile(r"<(/?)(think|search|python|result|answer)>")
_RAW_TAGS = (*CALLS, "result")
"""Tags in whose content no tags are looked for: code and documents may contain any."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|emph|mathrm|mathbf|mbox)\s*\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*([-+]?\d+(?:[.,]\d+)*|\\?[A-Za-z]+)")
_BOX_SEPARATOR = re.compile(
    r"(?:\s|[,;$]|\band\b|\\[()\[\]]|\\[,;:! ]|\\q?quad\b|\\text\s*\{[\s,]*and\s*\}|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)
"""What may stand between the boxes of one answer, such as `, y = `."""
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,3}|`+)(?=\S)([^*_`]+)(?<=\S)\1(\.?)")


class Tag(NamedTuple):
    """A tag, whether it opens, and its start and end position in the text."""

    name: str
    opens: bool
    start: int
    end: int


class Call(NamedTuple):
    """A tool call, or the answer: the name of its tag and its content, stripped of white space."""

    name: str
    content: str


def tags(text: str) -> Iterator[Tag]:
    """Yield the tags of a text in order, except those inside calls and results."""
    position = 0
    while match := _TAG.search(text, position):
        tag = Tag(match[2], not match[1], *match.span())
        yield tag
        position = tag.end
        closing = f"</{tag.name}>"
        if tag.opens and tag.name in _RAW_TAGS and (close := text.find(closing, position)) >= 0:
            position = close + len(closing)
            yield Tag(tag.name, False, close, position)


def call_in(reply: str) -> Call | None:
    """Return the first call or answer in a reply that is opened and closed there; None if there is
    none.
    """
    opening: Tag | None = None
    for tag in tags(reply):
        if tag.opens and tag.name in (*CALLS, "answer"):
            opening = tag
        elif opening is not None and not tag.opens and tag.name == opening.name:
            return Call(tag.name, reply[opening.end : tag.start].strip())
    return None


def steps(text: str) -> list[str]:
    """Return the steps of a text: it is cut after every result, and the rest is the last step.
    Blank steps are left out.
    """
    ends = [tag.end for tag in tags(text) if tag.name == "result" and not tag.opens]
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [step for step in pieces if step.strip()]


def format_fault(text: str) -> str:
    """Return what breaks the format for reinforcement learning in a text: the first broken rule, in
    words; empty if none is broken.

    The rules: thoughts are balanced, and there is at least one; there is exactly one answer, and it
    contains a box; each call is followed by a result before the next call, and each result follows
    a call.
    """
    all_tags = list(tags(text))
    thoughts = [tag.opens for tag in all_tags if tag.name == "think"]
    if not thoughts or thoughts != [True, False] * (len(thoughts) // 2):
        return "thoughts are not balanced" if thoughts else "there is no thought"
    if [tag.opens for tag in all_tags if tag.name == "answer"] != [True, False]:
        return "there is not exactly one answer"
    raw_tags = [(tag.name, tag.opens) for tag in all_tags if tag.name in _RAW_TAGS]
    for start in range(0, len(raw_tags), 4):
        name = raw_tags[start][0]
        if name == "result":
            return "a result follows no call"
        if raw_tags[start : start + 4] != [(name, True), (name, False), ("result", True), ("result", False)]:
            return "a call is not closed or has no result"
    if last_box(_answer_content(all_tags, text)) is None:
        return "the answer has no box"
    return ""


def strict_fault(text: str) -> str:
    """Return what breaks the format for supervised data in a text: the first broken rule, in words;
    empty if none is broken.

    In addition to the rules of `format_fault`, the text begins with a thought and ends with the
    answer, and the answer has exactly one box and no other tag.
    """
    if fault := format_fault(text):
        return fault
    body = text.strip()
    if not body.startswith("<think>"):
        return "it does not begin with a thought"
    if not body.endswith("</answer>"):
        return "it does not end with the answer"
    answer = _answer_content(list(tags(text)), text)
    if len(_BOX.findall(answer)) != 1:
        return "the answer has several boxes"
    return "the answer has other tags inside" if _TAG.search(answer) else ""


def final_answer(text: str, answers: Answers = "plain") -> str:
    r"""Return the answer that a text gives: the last box in its last answer tag, or all of that
    tag's content if it has no box; without an answer tag, the last box anywhere, else the empty
    string.

    Final boxes with only a comma or "and" between them are one answer. Commands such as
    `\text{...}` and bold type around the whole answer are removed. If `answers` is `published`, the
    last box alone is the answer, and only `\text{...}` is removed.
    """
    head, closing, _ = text.rpartition("</answer>")
    _, opening, inside = head.rpartition("<answer>")
    searched_text = inside if closing and opening else text
    box = last_box(searched_text) if answers == "published" else boxed(searched_text)
    if box is None:
        box = inside if closing and opening else ""
    if answers == "published":
        return _unwrapped(box, _TEXT)
    while True:
        emphasis = _EMPHASIS.fullmatch(box.strip())
        content = _unwrapped(emphasis[2] + emphasis[3] if emphasis else box, _TEXT_COMMAND)
        if content == box:
            return box
        box = content


def boxed(text: str) -> str | None:
    r"""Return the content of the last box of a text, which may lack braces, as in `\boxed 5`; None
    if it has no box. If only a comma, a semicolon or "and" separates the last box from boxes before
    it, return the contents of all of these, joined by commas.
    """
    closing_braces = _closing_braces(text)
    boxes = [
        (match.start(), closing_braces[match.end()] + 1, text[match.end() : closing_braces[match.end()]])
        for match in _BOX.finditer(text)
        if match.end() in closing_braces
    ]
    boxes += [(*match.span(), match[1]) for match in _BARE_BOX.finditer(text)]
    joined_boxes: list[tuple[int, int, str]] = []
    for start, end, content in sorted(boxes, reverse=True):
        between = text[end : joined_boxes[0][0]] if joined_boxes else ""
        if joined_boxes and not (
            ("," in between or "and" in between or ";" in between) and _BOX_SEPARATOR.fullmatch(between)
        ):
            break
        joined_boxes.insert(0, (start, end, content))
    return ", ".join(content.strip() for *_, content in joined_boxes) if joined_boxes else None


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}` whose braces balance, or
    None.
    """
    closing_braces = _closing_braces(text)
    boxes = [
        text[match.end() : closing_braces[match.end()]]
        for match in _BOX.finditer(text)
        if match.end() in closing_braces
    ]
    return boxes[-1] if boxes else None


def shown_result(output: str, limit: int) -> str:
    """Return the text that is appended to the growing message for a tool's output, which is cut to
    `limit` characters.

    Tags in the output get a space after `<`, so that no document can end the result or give an
    answer.
    """
    text = output if len(output) <= limit else f"{output[:limit]}..."
    return f"\n{RESULT_OPENS}\n{_TAG.sub(lambda tag: f'< {tag[0][1:]}', text.strip())}\n</result>\n"


def _answer_content(all_tags: list[Tag], text: str) -> str:
    """Return the content of the one answer of a text."""
    start, end = (tag for tag in all_tags if tag.name == "answer")
    return text[start.end : end.start]


def _unwrapped(answer: str, command: re.Pattern[str]) -> str:
    """Return an answer stripped of white space, and of a command around all of it."""
    answer = answer.strip()
    wrapper = command.match(answer)
    if wrapper is None or _closing_braces(answer).get(wrapper.end()) != len(answer) - 1:
        return answer
    return answer[wrapper.end() : -1].strip()


def _closing_braces(text: str) -> dict[int, int]:
    """Return, keyed by the position after each opening brace, the position of its closing brace.
    Escaped and unmatched braces do not count.
    """
    stack: list[int] = []
    result: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            stack.append(match.end())
        elif match[0] == "}" and stack:
            result[stack.pop()] = match.start()
    return result


# The text, the answer and the number of tokens of a finished reasoning episode.


def text_of(trajectory: Trajectory) -> str:
    """Return the assistant's whole message: the replies, each followed by its result."""
    return "".join(step.reply + step.observation for step in trajectory.steps)


def is_answered(trajectory: Trajectory) -> bool:
    """Return whether the last action of an episode is an answer tag."""
    return bool(trajectory.steps) and trajectory.steps[-1].action.startswith("<answer>")


def prediction_of(trajectory: Trajectory, answers: Answers = "plain") -> str:
    """Return the final answer of an episode: that of its answer tag, or without one the last box
    that the model wrote; the empty string if it has neither.
    """
    steps = trajectory.steps
    text = steps[-1].action if is_answered(trajectory) else "".join(step.reply for step in steps)
    return final_answer(text, answers)


def reasoning_tokens(trajectory: Trajectory) -> int | None:
    """Return the number of tokens that the model generated, results excluded; None if a reply has
    no token ids.
    """
    counts = [len(step.token_ids) for step in trajectory.steps if step.reply]
    return sum(counts) if all(counts) else None
