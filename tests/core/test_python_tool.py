"""The Python tool: how calls end, and what code cannot do, however it tries.

All attacks are bounded in number and time; each has its twin that succeeds where the barrier is
missing.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentr_core.errors import ConfigError, SandboxError
from agentr_core.tools.python import confinement
from agentr_core.tools.python.confinement import CANDIDATE_LEVELS, Level, Limits, Outcome, Status
from agentr_core.tools.python.tool import ForkServerProcess, PythonTool, run_attempts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(confinement.landlock_abi() == 0, reason="this kernel has no Landlock"),
    pytest.mark.asyncio(loop_scope="module"),
]

LIMITS = Limits(timeout_s=60, cpu_s=20, memory_mb=128, tasks=16, disk_mb=4, files=32, output_bytes=1000)
SHUT_IN = "landlock"
"""The strictest level without a program that must be installed."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool() -> AsyncIterator[PythonTool]:
    async with PythonTool(LIMITS, SHUT_IN, concurrency=2) as tool:
        yield tool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited() -> AsyncIterator[PythonTool]:
    """Without seccomp and Landlock: what code starts must be found and killed."""
    async with PythonTool(LIMITS, "limits", concurrency=1, packages=()) as tool:
        yield tool


def keepers(tool: PythonTool) -> list[int]:
    return [keeper._process.pid for keeper in tool._idle_servers]


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize(
    ("code", "status", "stdout"),
    [
        ("1 + 1", "ok", "2\n"),
        ("print('a')\n'b'", "ok", "a\nb\n"),
        ("x = 1\nprint(x)", "ok", "1\n"),
        ("print('once')\nNone", "ok", "once\n"),
        ("for i in range(2): i", "empty", ""),
        ("", "empty", ""),
        ("import sympy\nx = sympy.Symbol('x')\nsympy.integrate(x**2, x)", "ok", "x**3/3\n"),
        ("import numpy as np\nnp.arange(3).sum()", "ok", "3\n"),
        ("print('before')\n1 / 0", "exception", "before\n"),
        ("def f(:", "exception", ""),
        ("\udc80 = 1", "exception", ""),
        ("import sys\nsys.exit()", "empty", ""),
        ("import sys\nsys.exit('no')", "exception", ""),
        ("print('\\udc80 é')", "ok", "\\udc80 é\n"),
        ("input()", "exception", ""),
        ("if __name__ == '__main__': print(__name__)", "ok", "__main__\n"),
        ("import os\nprint('seen', flush=True)\nos._exit(0)", "ok", "seen\n"),
        ("import os\nos._exit(7)", "exception", ""),
        ("import ctypes\nctypes.string_at(0)", "killed", ""),
        ("x = [0]\nwhile True: x += x", "memory", ""),
        ("import numpy as np\nnp.ones(10**9)", "memory", ""),
    ],
)
async def test_a_call_ends_in_one_of_six_ways(tool: PythonTool, code: str, status: str, stdout: str) -> None:
    outcome = await tool.run(code)
    assert (outcome.status, outcome.stdout) == (status, stdout), outcome


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(6 * 7)\n```",
        "```\n6 * 7\n```",
        "```Python3\r\nprint(6 * 7)\r\n```\r\n",
        "~~~py\nprint(6 * 7)\n~~~",
        "````python\nprint(len('''\n```\n''') + 37)\n````",
        "  ```python\n  for x in [6]:\n      print(7 * x)\n  ```",
        "```python print(6 * 7)```",
        "`print(6 * 7)`",
        "```python\nprint(6 * 7)",
        "print(6 * 7)\n```",
        "First six:\n```python\nx = 6\n```\nThen times seven:\n```python\nprint(7 * x)\n```\nDone.",
        "print(len('''```python\n0\n```''') + 27)",
    ],
)
async def test_code_in_fences_runs(tool: PythonTool, text: str) -> None:
    outcome = await tool.run(text)
    assert (outcome.status, outcome.stdout) == ("ok", "42\n"), outcome


@pytest.mark.parametrize(
    "code",
    [
        "    x = 6\n    print(7 * x)",
        "x = 6\n    print(7 * x)",
        "for x in (6,):\n        print(7 * x)\n    x = 0",
        "\tx = 6\n\tif x:\n\t\tprint(7 * x)\n",
    ],
)
async def test_code_that_is_indented_as_a_whole_runs(tool: PythonTool, code: str) -> None:
    outcome = await tool.run(code)
    assert (outcome.status, outcome.stdout) == ("ok", "42\n"), outcome


async def test_a_wrong_indentation_stays_an_error(tool: PythonTool) -> None:
    for code in ("def f():\nreturn 1", "if True:\n    x = 1\n  y = 2\n z = 3"):
        assert "IndentationError" in (await tool.run(code)).stderr


async def test_an_error_in_fenced_code_shows_its_line(tool: PythonTool) -> None:
    outcome = await tool.run("```python\nx = 0\n1 / x\n```")
    assert outcome.stderr.splitlines()[1:3] == ['  File "<python>", line 2, in <module>', "    1 / x"]
    assert "SyntaxError" in (await tool.run("```python\ndef f(:\n```")).stderr


async def test_a_traceback_shows_the_code_alone(tool: PythonTool) -> None:
    outcome = await tool.run("def half(x):\n    return x / 0\n\nhalf(1)")
    assert outcome.stderr.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "<python>", line 4, in <module>',
        "    half(1)",
    ]
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "child.py" not in (await tool.run("import requests")).stderr


async def test_time_is_up_by_the_clock_and_by_the_processor(tool: PythonTool) -> None:
    sleeping = await tool.run("print('so far')\nimport time\ntime.sleep(60)", timeout_s=1)
    assert (sleeping.status, sleeping.stdout, sleeping.cause) == (Status.TIMEOUT, "so far\n", "more than 1 s")
    stubborn = await tool.run(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pause()", timeout_s=1
    )
    assert stubborn.status is Status.TIMEOUT
    async with PythonTool(Limits(timeout_s=100, cpu_s=1), SHUT_IN, packages=(), concurrency=1) as short:
        burning = await short.run("while True: pass")
    assert (burning.status, burning.cause) == (Status.TIMEOUT, "more than 1 s of processor time")


async def test_nothing_lasts_from_one_call_to_the_next(tool: PythonTool) -> None:
    first = await tool.run("import builtins, random\nbuiltins.left = 1\nopen('left', 'w').close()\nrandom.random()")
    second = await tool.run("import os, random\nprint('left' in globals() or os.listdir())\nrandom.random()")
    assert second.stdout == "[]\n" + first.stdout
    assert "NameError" in (await tool.run("left")).stderr


async def test_only_listed_packages_are_imported(tool: PythonTool) -> None:
    for name in ("agentr_core", "duckdb", "pip"):
        outcome = await tool.run(f"import {name}")
        assert (
            f"'{name}' is not one of the modules that this tool may import: the standard library, numpy, sympy"
            in outcome.stderr
        )
    # The list in words can be got round from Python; then the files cannot be read.
    access = await tool.run(f"import os\nprint(os.access({duckdb_file()!r}, 0))\nopen({duckdb_file()!r}).read()")
    assert access.stdout == "True\n"
    assert "PermissionError" in access.stderr


def duckdb_file() -> str:
    import duckdb

    assert duckdb.__file__
    return str(duckdb.__file__)


@pytest.mark.parametrize("level", [Level.NONE, Level.LIMITS, Level.SECCOMP, Level.LANDLOCK])
async def test_each_barrier_is_what_holds_the_attempts_on_it(level: Level) -> None:
    """What is held at a level is its own barriers' work: one level below, the same code gets
    through.
    """
    async with PythonTool(LIMITS, level, packages=(), concurrency=1) as tool:
        findings = await run_attempts(tool.run, level, LIMITS, all_levels=True)
    open_ones = {finding.attempt for finding in findings if not finding.barrier_held}
    beyond = {finding.attempt for finding in findings if not level.includes(finding.level)}
    if os.getuid():
        beyond.discard("another user")
    # Kernels may keep these from everybody without capabilities.
    assert beyond - open_ones <= {"bpf", "io_uring", "keyctl"}
    assert open_ones <= beyond


async def test_the_default_is_the_strictest_level_that_holds() -> None:
    assert CANDIDATE_LEVELS[0] is Level.BUBBLEWRAP
    assert Level.NONE not in CANDIDATE_LEVELS
    async with PythonTool(LIMITS, packages=()) as tool:
        assert tool.level in (Level.BUBBLEWRAP, Level.LANDLOCK)
        assert all(finding.barrier_held for finding in tool.findings)
        assert len(tool.refusals) == CANDIDATE_LEVELS.index(tool.level)


async def test_a_level_that_leaves_files_open_must_be_named(open_files: None) -> None:
    with pytest.raises(SandboxError) as caught:
        await PythonTool(LIMITS, packages=(), concurrency=1).__aenter__()
    assert str(caught.value) == (
        "level bubblewrap is not here; level landlock is not here; what holds is seccomp, where code can use your "
        "files; to run code there, name that level: environment.options.sandbox=seccomp"
    )
    async with PythonTool(LIMITS, "seccomp", packages=(), concurrency=1) as tool:
        assert (await tool.run("6 * 7")).stdout == "42\n"
    async with PythonTool(LIMITS, packages=(), concurrency=1, allows_weaker=True) as tool:
        assert tool.level is Level.SECCOMP


async def test_a_fork_bomb_is_refused_and_without_the_filter_killed(tool: PythonTool, limited: PythonTool) -> None:
    bomb = "import os, time\nfor _ in range(6): os.fork()\ntime.sleep(50)"
    outcome = await tool.run(bomb)
    assert (outcome.status, outcome.stderr.splitlines()[-1]) == (
        Status.EXCEPTION,
        "PermissionError: [Errno 1] Operation not permitted",
    )
    limited_outcome = await limited.run(bomb)
    assert (limited_outcome.status, limited_outcome.cause) == (Status.KILLED, "more than 16 threads and processes")
    assert [children(keeper) for keeper in keepers(limited)] == [[]]


async def test_no_child_is_left_over(limited: PythonTool) -> None:
    """A grandchild in a session of its own, whose parents are gone, is killed all the same."""
    leave = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(50)
        os._exit(0)
    os.wait()
    time.sleep({seconds})
    """
    for seconds, status in ((0.5, Status.OK), (50, Status.TIMEOUT)):
        outcome = await limited.run(
            textwrap.dedent(leave.format(seconds=seconds)), timeout_s=5 if seconds == 50 else 60
        )
        assert outcome.status is status
        assert not Path(f"/proc/{int(outcome.stdout)}").exists()


async def test_threads_are_allowed_within_the_limit(tool: PythonTool) -> None:
    some = (
        "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=[{}]).start()\n'started'"
    )
    assert (await tool.run(some.format(8, 0.1))).stdout == "started\n"
    many = await tool.run(some.format(30, 50) + "\ntime.sleep(50)")
    assert (many.status, many.cause) == (Status.KILLED, "more than 16 threads and processes")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (
            "for i in range(9): open(f'{i}', 'wb').write(bytes(10**6))\nimport time\ntime.sleep(50)",
            "more than 4 MiB in files",
        ),
        ("for i in range(10**6): open(f'{i}', 'wb').close()", "more than 32 files"),
        ("while True: print('x' * 10**5)", "more than 4 MiB printed"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10**5)", "more than 4 MiB printed"),
    ],
)
async def test_what_fills_a_disk_or_the_log_is_killed(tool: PythonTool, code: str, cause: str) -> None:
    outcome = await tool.run(code)
    assert (outcome.status, outcome.cause) == (Status.KILLED, cause)
    assert len(outcome.stdout) <= LIMITS.output_bytes


async def test_one_file_ends_at_its_limit(tool: PythonTool) -> None:
    outcome = await tool.run("open('big', 'wb').write(bytes(5 << 20))")
    assert outcome.stderr.endswith("OSError: [Errno 27] File too large\n")


async def test_long_output_is_cut_and_says_so(tool: PythonTool) -> None:
    outcome = await tool.run("print('x' * 2000)")
    assert (outcome.status, outcome.stdout, outcome.truncated) == (Status.OK, "x" * 1000, True)
    assert not (await tool.run("print('x' * 999)")).truncated


async def test_threads_are_waited_for_as_at_the_end_of_any_program(tool: PythonTool) -> None:
    late = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('late')){}).start()"
    assert (await tool.run(late.format(""))).stdout == "late\n"
    assert (await tool.run(late.format(", daemon=True"))).status is Status.EMPTY


async def test_a_long_traceback_keeps_its_end(tool: PythonTool) -> None:
    outcome = await tool.run("def f(n): g(n)\ndef g(n): f(n)\nf(1)")
    assert outcome.truncated
    assert outcome.stderr.splitlines()[-1].startswith("RecursionError: ")


async def test_the_environment_of_the_program_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTR_SECRET", "do not tell")
    code = (
        "import os\nprint('AGENTR_SECRET' in os.environ)\nprint(b'SECRET' in open('/proc/self/environ', 'rb').read())"
    )
    program_code = f"len(open('/proc/{os.getpid()}/environ', 'rb').read()) > 0"
    async with PythonTool(LIMITS, "none", packages=(), concurrency=1) as bare:
        assert (await bare.run(code)).stdout == "False\nFalse\n"
        assert (await bare.run(program_code)).stdout == "True\n"
    async with PythonTool(LIMITS, SHUT_IN, packages=(), concurrency=1) as tool:
        assert (await tool.run(code)).stdout == "False\n"
        assert "PermissionError" in (await tool.run(program_code)).stderr


@pytest.mark.parametrize(
    "path",
    ["/etc/hosts", "../../../etc/hosts", "/proc/self/root/etc/hosts", "/proc/self/mem", "/dev/mem", "/dev/tty", "link"],
)
async def test_no_way_of_writing_a_path_leads_out(tool: PythonTool, path: str, tmp_path: Path) -> None:
    if path == "link":
        (tmp_path / "link").symlink_to("/etc/hosts")
        path = str(tmp_path / "link")
    outcome = await tool.run(f"open({path!r}).read()")
    assert re.search(r"PermissionError|FileNotFoundError", outcome.stderr), outcome


async def test_raw_system_calls_meet_the_same_filter(tool: PythonTool) -> None:
    number = confinement.syscall_numbers(os.uname().machine)["clone3"]
    raw = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall({}, 0, 0), ctypes.get_errno())"
    assert (await tool.run(raw.format(number))).stdout == "-1 38\n"
    assert (await tool.run(raw.format(10_000))).stdout == "-1 1\n"
    assert (await tool.run(raw.format(0x40000000 + 39))).stdout == "-1 1\n"


FOREIGN = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
"""Asks for the own process id as a program of 32 bits does: `mov eax, 20; int 0x80; ret`."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86")
async def test_the_numbers_of_another_architecture_are_of_no_use(tool: PythonTool, limited: PythonTool) -> None:
    assert (await tool.run(FOREIGN)).status is Status.KILLED
    assert (await limited.run(FOREIGN)).status in (Status.OK, Status.KILLED)


async def test_code_cannot_take_its_barriers_down(tool: PythonTool) -> None:
    for code in (
        "import resource as r\nr.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))",
        "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
        "import ctypes\nassert ctypes.CDLL(None).prctl(22, 0, 0, 0, 0) == 0",
    ):
        assert (await tool.run(code)).status is Status.EXCEPTION, code


async def test_as_many_calls_run_at_once_as_there_are_interpreters(tool: PythonTool) -> None:
    outcomes = await asyncio.gather(*(tool.run(f"{i} * 2") for i in range(6)))
    assert [outcome.stdout for outcome in outcomes] == [f"{2 * i}\n" for i in range(6)]
    assert len(keepers(tool)) == 2


async def test_a_lost_interpreter_costs_no_call() -> None:
    async with PythonTool(LIMITS, SHUT_IN, packages=(), concurrency=2) as tool:
        await asyncio.gather(tool.run("1"), tool.run("1"))
        victim, survivor = keepers(tool)
        calls = [asyncio.create_task(tool.run(f"import time\ntime.sleep(2)\n{i}")) for i in range(2)]
        await until(lambda: children(victim))
        os.kill(victim, signal.SIGKILL)
        assert [outcome.stdout for outcome in await asyncio.gather(*calls)] == ["0\n", "1\n"]
        assert survivor in keepers(tool)
        assert victim not in keepers(tool)


async def test_code_that_ends_its_interpreter_is_given_up(limited: PythonTool) -> None:
    outcome = await limited.run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    assert (outcome.status, outcome.cause) == (Status.KILLED, "the interpreter that ran it was lost 2 times")
    assert (await limited.run("1")).stdout == "1\n"


async def test_a_cancelled_call_leaves_nothing_behind(limited: PythonTool) -> None:
    await limited.run("1")
    (keeper,) = keepers(limited)
    call = asyncio.create_task(limited.run("import time\ntime.sleep(50)"))
    await until(lambda: children(keeper))
    (child,) = children(keeper)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not Path(f"/proc/{child}").exists()
    assert not Path(f"/proc/{keeper}").exists()


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_it_refuses_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="has no level 'off'; it has strictest, none, limits"):
        PythonTool(level="off")
    with pytest.raises(ConfigError, match="limit memory_mb of the Python tool must be above 0"):
        Limits(memory_mb=0)
    with pytest.raises(SandboxError, match="No module named 'not_there'"):
        await PythonTool(level="limits", packages=("not_there",)).__aenter__()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="level bubblewrap does not hold: the program `bwrap` is not installed"):
        await PythonTool(level="bubblewrap").__aenter__()


async def test_it_refuses_when_a_barrier_is_not_there_though_nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ForkServerProcess.start

    async def weaker(level: Level, limits: Limits, packages: tuple[str, ...]) -> ForkServerProcess:
        return await start(Level.LIMITS, limits, packages)

    monkeypatch.setattr(ForkServerProcess, "start", weaker)
    with pytest.raises(SandboxError, match=r"level seccomp does not hold: code gets through at fork, another program"):
        await PythonTool(LIMITS, "seccomp", packages=()).__aenter__()


async def test_milliseconds_are_those_of_the_call(tool: PythonTool) -> None:
    began = time.monotonic()
    outcome: Outcome = await tool.run("import time\ntime.sleep(0.2)")
    assert 200 <= outcome.ms <= 1000 * (time.monotonic() - began)
