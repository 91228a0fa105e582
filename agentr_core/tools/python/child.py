"""Runs code in the confined process, as a notebook does. The exit status says how it ended."""

from __future__ import annotations

import ast
import io
import linecache
import random
import re
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec

EXCEPTION_STATUS, MEMORY_STATUS = 1, 101
"""Exit statuses: an exception, and `MemoryError`. Code can fake them, but gains nothing by it."""
_FILE_NAME = "<python>"
_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*(?:python3?|py)?[ \t]*$", re.MULTILINE)
_FENCED_BLOCK = re.compile(r"^[ \t]*((`|~)\2{2,})[^\n`]*\n(.*?)(?:^[ \t]*\1\2*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ONE_LINE_CODE = re.compile(r"\s*(`+)(?:(?:python3?|py)\b)?([^\n`]+)\1\s*")
_PACKAGE = __name__.partition(".")[0]


def prepare(packages: Sequence[str], dependencies: frozenset[str]) -> None:
    """Prepare this interpreter so that its children can `run` code. This is done once, before they
    are forked, since each memory page to which a child writes must be copied.

    Args:
        packages: the packages that code may import besides the standard library, as the user listed
            them.
        dependencies: the top-level modules that these have imported.
    """
    for module in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[module]
    sys.argv = [""]
    sys.meta_path.insert(0, _AllowList(packages, dependencies))
    # Address space is limited, and the default stacks of 8 MiB would let few threads start.
    threading.stack_size(1 << 20)


def run(code: str) -> int:
    """Run code as `__main__`, wait for its threads, and return the exit status for the process.

    As in a notebook, the value of a last expression is printed, unless it is None, and an
    indentation of the whole code is removed. `random` and `numpy.random` are seeded with 0. If the
    text does not parse, the code in its Markdown fences is run instead.
    """
    sys.stdin = io.TextIOWrapper(io.FileIO(0))
    sys.stdout, sys.stderr = _output_stream(1), _output_stream(2)
    # Seeded here, after the fork, since `random` reseeds itself at a fork.
    random.seed(0)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(0)
    status = _execute(code)
    # As at the end of any program, what the threads still print is part of the output.
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _output_stream(descriptor: int) -> io.TextIOWrapper:
    """Return a line-buffered stream, so that no whole line is lost when the process is killed."""
    return io.TextIOWrapper(io.FileIO(descriptor, "w"), "utf-8", "backslashreplace", line_buffering=True)


def _execute(code: str) -> int:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        code = _without_indentation(_without_fences(code))
        linecache.cache[_FILE_NAME] = (len(code), None, code.splitlines(keepends=True), _FILE_NAME)
        tree = ast.parse(code, _FILE_NAME)
        last_expression = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _FILE_NAME, "exec"), main.__dict__)
        if isinstance(last_expression, ast.Expr):
            value = eval(compile(ast.Expression(last_expression.value), _FILE_NAME, "eval"), main.__dict__)
            if value is not None:
                print(value)  # noqa: T201
    except MemoryError:
        main.__dict__.clear()
        return MEMORY_STATUS
    except SystemExit as system_exit:
        if system_exit.code is None or isinstance(system_exit.code, int):
            return (system_exit.code or 0) & 0xFF
        print(system_exit.code, file=sys.stderr)  # noqa: T201
        return EXCEPTION_STATUS
    except BaseException as error:
        # The traceback shows the code alone, without the frames of this module.
        report = traceback.TracebackException.from_exception(error)
        file_names = [frame.filename for frame in report.stack]
        first_index = file_names.index(_FILE_NAME) if _FILE_NAME in file_names else len(file_names)
        frames = [frame for frame in report.stack[first_index:] if frame.filename != __file__]
        report.stack = traceback.StackSummary.from_list(frames)
        sys.stderr.writelines(report.format())
        return EXCEPTION_STATUS
    return 0


def _without_fences(code: str) -> str:
    """Return the code in the Markdown fences of a text; a text without fences, or one that parses
    as Python, is returned as it is: a fence in it is within a string.
    """
    if "`" not in code and "~~~" not in code:
        return code
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        if one_line := _ONE_LINE_CODE.fullmatch(code):
            return one_line[2].strip()
        code = code.replace("\r\n", "\n")
        blocks = "\n".join(textwrap.dedent(match[3]) for match in _FENCED_BLOCK.finditer(code))
        # A closing fence without an opening one, as if a tag around the code had opened it.
        return blocks if blocks.strip() else _FENCE.sub("", code)
    return code


def _without_indentation(code: str) -> str:
    """Return code without an indentation of all its lines, which a notebook removes, too; the first
    line may have lost its own with the white space around the code. Code that parses, or would not
    parse then either, is returned as it is.
    """
    try:
        ast.parse(code)
    except IndentationError:
        first, _, rest = code.strip().partition("\n")
        for candidate in (textwrap.dedent(code), f"{first}\n{textwrap.dedent(rest)}"):
            with suppress(SyntaxError, ValueError):
                ast.parse(candidate)
                return candidate
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        # `_execute` reports it.
        pass
    return code


class _AllowList:
    """An import finder that refuses modules that are neither in the standard library nor allowed.

    It only serves a clear error message: from level `landlock` on, the files of other packages
    cannot be read anyway.
    """

    def __init__(self, packages: Sequence[str], dependencies: frozenset[str]) -> None:
        self._allowed_text = ", ".join(("the standard library", *packages))
        self._allowed_modules = dependencies | set(packages) | sys.stdlib_module_names

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """Return None for an allowed module, so that the other finders look for it. Raises
        `ModuleNotFoundError` for any other.
        """
        if name.partition(".")[0] in self._allowed_modules:
            return None
        raise ModuleNotFoundError(
            f"{name!r} is not one of the modules that this tool may import: {self._allowed_text}", name=name
        )
