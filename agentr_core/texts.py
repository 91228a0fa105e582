"""Texts from outside: characters that cannot be stored or seen, thoughts in replies, and how texts
are shown in messages.
"""

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
_INVISIBLE = re.compile(
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
"""Files to skip when looking for the line that caused an error: these packages, and Python's import
machinery.
"""
MAX_FAULTS_LISTED = 20
"""The maximum number of faults that a message lists; of the others it gives the number."""
_GOAL = re.compile(
    r"\b(?:(?:goal|task|instruction|question)(?: is)?(?: to)?:|your (?:goal|task) is to\b)\s*(?:\[SEP\]\s*)?"
    r"(?P<goal>\S[^\n]*)",
    re.IGNORECASE,
)
_MAX_GOAL_LENGTH = 160
_GZIP = b"\x1f\x8b"
_LENIENT_JSON = json.JSONDecoder(strict=False)
THOUGHT_START = r"<think(?:ing)?>|\[THINK\]"
"""Matches, in any case, a tag that opens a thought, as models and servers write it."""
THOUGHT_END = r"</think(?:ing)?>|\[/THINK\]"
"""Matches, in any case, a tag that closes a thought."""
_THOUGHT_MARK = re.compile(rf"(?P<opens>{THOUGHT_START})|(?P<closes>{THOUGHT_END})|<tool_call>\s*", re.IGNORECASE)


def escape_invisible(text: str) -> str:
    r"""Return a text with its invisible characters written out as marks such as \u202e.

    These are control characters, including those of terminal escapes, characters that have no width
    or change the reading direction, and halves of surrogate pairs. Tabs and line feeds stay;
    carriage returns are shown, because a tokenizer saw them.
    """
    return _INVISIBLE.sub(_escape, text)


def goal_in(opening: str) -> str:
    """Return the goal of an episode, read from its opening text, in at most 160 characters: what
    follows a label such as `Goal:`, `Task:`, `Instruction:` or `Question:` on the same line or the
    next one with text; without a label, the first line. If the opening is a JSON list of messages,
    as an outside agent sends, only the user's are read.
    """
    if opening.startswith('[{"role": '):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            turns = [turn.get("content") or "" for turn in json.loads(opening) if turn["role"] == "user"]
            opening = "\n".join(turns) or opening
    match = _GOAL.search(opening)
    line = match["goal"] if match else next((line for line in opening.splitlines() if line.strip()), "")
    words = " ".join(escape_invisible(line.partition(" [SEP]")[0]).split())
    return words if len(words) <= _MAX_GOAL_LENGTH else words[: _MAX_GOAL_LENGTH - 1] + "…"


def lone_surrogate(text: str) -> int | None:
    """Return the position of the first lone surrogate in a text, which UTF-8 cannot encode, or
    None.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def blank_thoughts(reply: str) -> str:
    """Return a reply with spaces in place of its thoughts, so that all positions stay the same.

    A thought is what lies between an opening tag (`<think>`, `<thinking>` or `[THINK]`) and the
    next closing one. A closing tag without an opening one ends a thought that began with the reply,
    since some chat templates write the opening tag into the prompt; an opening tag without a
    closing one begins a thought up to the end. Tags in the JSON of a `<tool_call>` do not count.
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
    """Return the end position of the JSON value that begins at `start`, or `start` if none begins
    there. Its strings may contain line breaks and other control characters.
    """
    try:
        return _LENIENT_JSON.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return start


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(text: str, limit: int) -> str:
    """Return a text as error messages quote it: in quotation marks, escaped to one line, and cut to
    `limit` characters, counted before escaping.
    """
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def unreadable_reason(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a text file cannot be read, to follow a colon in a message."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if error.object.startswith(_GZIP):
        return "it is compressed; unpack it with gunzip"
    return f"it is no text in UTF-8, from byte {error.start} on"


def error_summary(error: BaseException) -> str:
    """Return an exception that code outside this program raised as one line: its class, its message
    and, if the traceback has one, the file and line of that code.
    """
    message = " ".join(str(error).split())
    foreign_frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not _OWN_CODE.match(frame.filename)
    ]
    # The first foreign file is the one that we called; report its innermost line, not those of
    # libraries that it called in turn.
    nearest = [frame for frame in foreign_frames if frame.filename == foreign_frames[0].filename][-1:]
    where = "".join(f", {Path(frame.filename).name} line {frame.lineno}" for frame in nearest)
    return f"{type(error).__name__}{f': {message}' if message else ''}{where}"


def faults_message(faults: Sequence[str], where: str = "") -> str:
    """Return one or more faults as one message that begins with `where`, the name of what has them.
    Several are counted and listed on a line each, at most `MAX_FAULTS_LISTED` of them.
    """
    rest = [f"and {len(faults) - MAX_FAULTS_LISTED:,} more"] if len(faults) > MAX_FAULTS_LISTED else []
    lines = [f"{len(faults):,} faults", *faults[:MAX_FAULTS_LISTED], *rest]
    message = faults[0] if len(faults) == 1 else "\n  ".join(lines)
    return f"{where}: {message}" if where else message


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` with the known name that is closest to a wrong one; the empty
    string if none is close.
    """
    close = get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def path_for_message(path: Path) -> str:
    """Return a path as shown in a message that it cannot be found or written: if it is relative,
    the current folder is added.
    """
    return str(path) if path.is_absolute() else f"{path} in {Path.cwd()}"


def count_text(number: int, noun: str) -> str:
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
