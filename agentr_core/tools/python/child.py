"""Runs code in the confined process, as in a notebook, with an exit status for each way to end."""

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
from importlib.machinery import ModuleSpec

EXCEPTION, MEMORY = 1, 101
"""Exit statuses. Code can fake them, but gains nothing by it."""
_NAME = "<python>"
_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*(?:python3?|py)?[ \t]*$", re.MULTILINE)
_FENCED = re.compile(r"^[ \t]*((`|~)\2{2,})[^\n`]*\n(.*?)(?:^[ \t]*\1\2*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ONE_LINE = re.compile(r"\s*(`+)(?:(?:python3?|py)\b)?([^\n`]+)\1\s*")
_PACKAGE = __name__.partition(".")[0]


def prepare(packages: Sequence[str], dependencies: frozenset[str]) -> None:
    """Prepare this interpreter so that its children can `run` code. This is done once, since every
    page of memory that a child writes to must be copied for it.

    Args:
        packages: those that code may import besides the standard library, as a user listed them.
        dependencies: the packages that these import themselves.
    """
    for module in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[module]
    sys.argv = [""]
    sys.meta_path.insert(0, _AllowList(packages, dependencies))
    # Address space is limited, and the default of eight MiB for each thread would use it up.
    threading.stack_size(1 << 20)


def run(code: str) -> int:
    """Run any text as `__main__`, and return the exit status for its process.

    As in a notebook, the value of a last expression is printed, unless it is None. The code gets
    the same numbers from `random` and `numpy.random` each time. Of a text that is no code as it
    stands, the code in its Markdown fences is run.
    """
    sys.stdin = io.TextIOWrapper(io.FileIO(0))
    sys.stdout, sys.stderr = _printer(1), _printer(2)
    # Only after the fork, at which `random` reseeds itself.
    random.seed(0)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(0)
    status = _run(code)
    # As at the end of any program: what its threads still print counts.
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _printer(descriptor: int) -> io.TextIOWrapper:
    """Return a stream that writes by lines, so that nothing is lost when the process is killed."""
    return io.TextIOWrapper(io.FileIO(descriptor, "w"), "utf-8", "backslashreplace", line_buffering=True)


def _run(code: str) -> int:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        code = _without_fences(code)
        linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
        tree = ast.parse(code, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec"), main.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _NAME, "eval"), main.__dict__)
            if value is not None:
                print(value)  # noqa: T201
    except MemoryError:
        main.__dict__.clear()
        return MEMORY
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201
        return EXCEPTION
    except BaseException as error:
        # The traceback begins in the code, without the frames of this module.
        report = traceback.TracebackException.from_exception(error)
        names = [frame.filename for frame in report.stack]
        first = names.index(_NAME) if _NAME in names else len(names)
        frames = [frame for frame in report.stack[first:] if frame.filename != __file__]
        report.stack = traceback.StackSummary.from_list(frames)
        sys.stderr.writelines(report.format())
        return EXCEPTION
    return 0


def _without_fences(code: str) -> str:
    """Return the code in the Markdown fences of a text, and any other text as it is. Code with a
    fence in one of its strings is code as it stands, so only what does not parse is looked at.
    """
    if "`" not in code and "~~~" not in code:
        return code
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        if one_line := _ONE_LINE.fullmatch(code):
            return one_line[2].strip()
        code = code.replace("\r\n", "\n")
        blocks = "\n".join(textwrap.dedent(match[3]) for match in _FENCED.finditer(code))
        # A fence that is closed but was not opened, as where the tag was taken for one.
        return blocks if blocks.strip() else _FENCE.sub("", code)
    return code


class _AllowList:
    """A finder that refuses modules that are neither in the standard library nor on the list.

    It only gives a clear message: from level `landlock` on, other packages cannot be read anyway.
    """

    def __init__(self, packages: Sequence[str], dependencies: frozenset[str]) -> None:
        self._allowed_text = ", ".join(("the standard library", *packages))
        self._allowed = dependencies | set(packages) | sys.stdlib_module_names

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """Return None to let other finders look. Raises `ModuleNotFoundError`."""
        if name.partition(".")[0] in self._allowed:
            return None
        raise ModuleNotFoundError(
            f"{name!r} is not one of the modules that this tool may import: {self._allowed_text}", name=name
        )
