"""Texts from outside: what cannot be stored, what cannot be seen, and how they are quoted."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

# Characters that have no width, change the reading direction, move a terminal's cursor, or cannot
# be encoded. Tabs and line feeds are left alone; so are format characters that are drawn, such as
# Arabic number signs.
_UNSEEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad"
    "\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    "]"
)

_OWN_CODE = re.compile(
    rf"{re.escape(str(Path(__file__).parents[1]))}/(agentr_core|flows|tasks)/|<frozen |.*/importlib/"
)
"""Files whose lines are never the cause: these packages, and what imports modules."""
MOST_FAULTS = 20
"""The most faults that a message lists; it counts the others."""
_GOAL = re.compile(
    r"\b(?:(?:goal|task|instruction|question)(?: is)?(?: to)?:|your (?:goal|task) is to\b)\s*(?:\[SEP\]\s*)?"
    r"(?P<goal>\S[^\n]*)",
    re.IGNORECASE,
)
_MOST_OF_A_GOAL = 160
_GZIP = b"\x1f\x8b"
_LENIENT_JSON = json.JSONDecoder(strict=False)
_THOUGHT_MARK = re.compile(
    r"(?P<opens><think(?:ing)?>|\[THINK\])|(?P<closes></think(?:ing)?>|\[/THINK\])|<tool_call>\s*", re.IGNORECASE
)


def visible(text: str) -> str:
    r"""Return a text with its invisible characters written out as marks such as \u202e.

    These are control characters, including those of terminal escapes, characters that have no width
    or change the reading direction, and halves of surrogate pairs. Tabs and line feeds stay;
    carriage returns are shown, because a tokenizer saw them.
    """
    return _UNSEEN.sub(_mark, text)


def goal(opening: str) -> str:
    """Return what an episode is to reach, from the text it begins with: what follows the label of a
    goal, task, instruction or question in its line or in the next one, else the first line; at most
    160 characters. Of a list of turns, as an outside agent sends, the user's count.
    """
    if opening.startswith('[{"role": '):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            turns = [turn.get("content") or "" for turn in json.loads(opening) if turn["role"] == "user"]
            opening = "\n".join(turns) or opening
    match = _GOAL.search(opening)
    line = match["goal"] if match else next((line for line in opening.splitlines() if line.strip()), "")
    words = " ".join(visible(line.partition(" [SEP]")[0]).split())
    return words if len(words) <= _MOST_OF_A_GOAL else words[: _MOST_OF_A_GOAL - 1] + "…"


def lone_surrogate(text: str) -> int | None:
    """Return the position of the first lone surrogate in a text, which UTF-8 cannot encode, or
    None.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def outside_thoughts(reply: str) -> str:
    """Return a reply with spaces in place of its thoughts, so that all positions stay.

    A thought is between `<think>` and `</think>`, or `<thinking>`, or `[THINK]`, and their ends;
    before an end without its beginning, which some chat templates write into the prompt; and after
    a beginning without its end. Marks in the JSON of a `<tool_call>` are part of its arguments.
    """
    thoughts: list[tuple[int, int]] = []
    thought_start: int | None = None
    position = 0
    while mark := _THOUGHT_MARK.search(reply, position):
        position = mark.end()
        if mark["opens"]:
            thought_start = mark.start() if thought_start is None else thought_start
        elif mark["closes"]:
            thoughts.append((thought_start or 0, position))
            thought_start = None
        else:
            position = json_end(reply, position)
    if thought_start is not None:
        thoughts.append((thought_start, len(reply)))
    for start, end in thoughts:
        reply = f"{reply[:start]}{' ' * (end - start)}{reply[end:]}"
    return reply


def json_end(text: str, start: int) -> int:
    """Return where the JSON value that begins at a position ends, or that position if none does.
    Line breaks and other control characters may stand in its strings.
    """
    try:
        return _LENIENT_JSON.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return start


def _mark(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(text: str, limit: int) -> str:
    """Return a text as error messages quote it: one line of at most `limit` characters, not
    counting escapes, in quotation marks.
    """
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return why a text file cannot be read, as a part of a sentence."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if error.object.startswith(_GZIP):
        return "it is compressed; unpack it with gunzip"
    return f"it is no text in UTF-8, from byte {error.start} on"


def cause(error: BaseException) -> str:
    """Return an exception of somebody else's code as one line: its class, what it says, and the
    line of theirs that led to it, if there is one.
    """
    message = " ".join(str(error).split())
    foreign_frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not _OWN_CODE.match(frame.filename)
    ]
    # The first file is the one that we called; what it called in turn may be anybody's.
    nearest = [frame for frame in foreign_frames if frame.filename == foreign_frames[0].filename][-1:]
    where = "".join(f", {Path(frame.filename).name} line {frame.lineno}" for frame in nearest)
    return f"{type(error).__name__}{f': {message}' if message else ''}{where}"


def fault_list(faults: Sequence[str], where: str = "") -> str:
    """Return faults as one message, after the name of what has them: several stand on a line each,
    at most `MOST_FAULTS` of them.
    """
    rest = [f"and {len(faults) - MOST_FAULTS:,} more"] if len(faults) > MOST_FAULTS else []
    lines = [f"{len(faults):,} faults", *faults[:MOST_FAULTS], *rest]
    message = faults[0] if len(faults) == 1 else "\n  ".join(lines)
    return f"{where}: {message}" if where else message


def closest(name: str, names: Iterable[str]) -> str:
    """Return the known name that is closest to a wrong one, as a question in brackets; nothing
    where none is close.
    """
    close = get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def placed(path: Path) -> str:
    """Return a path for a message that it cannot be found or written: a relative one with the
    folder that it begins in.
    """
    return str(path) if path.is_absolute() else f"{path} in {Path.cwd()}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 record` or `1,200 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def abbreviate(value: Any, limit: int = 120) -> str:
    """Return a value as text, cut to a length that fits into an error message."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to write out an integer of thousands of digits.
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"
