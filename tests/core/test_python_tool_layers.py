"""The layers of the Python tool's sandbox, each by itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentr_core.tools.python import confinement
from agentr_core.tools.python.confinement import Limits
from agentr_core.tools.python.tool import attempts

WITHOUT_LANDLOCK = """
import asyncio, ctypes
from agentr_core.tools.python import confinement
from agentr_core.tools.python.tool import PythonTool

confinement.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1)
refusal = confinement._return_if_equal(444, 0x00050000 | 38)
lines = [confinement._instruction(0x20, 0), *refusal, confinement._instruction(0x06, 0x7FFF0000)]
confinement._install_program(b"".join(lines))

async def level(asked):
    try:
        async with PythonTool(level=asked, packages=(), concurrency=1) as tool:
            print(tool.level)
    except Exception as error:
        print(error)

asyncio.run(level("landlock"))
asyncio.run(level("strictest"))
"""


@pytest.mark.slow
def test_a_kernel_without_landlock_is_told() -> None:
    """In a process whose kernel answers as one without Landlock does."""
    done = subprocess.run([sys.executable, "-P", "-c", WITHOUT_LANDLOCK], capture_output=True, text=True, timeout=600)
    refusal, fallback = done.stdout.splitlines()
    assert refusal == (
        "the Python tool at level landlock does not start: "
        "this kernel has no Landlock, or does not allow its use (Linux 5.13 is the first with it)"
    ), done.stderr
    assert fallback == "bubblewrap" or fallback.endswith(
        f"{refusal}; what holds is seccomp, where code can use your files; to run code there, name that level: "
        "environment.options.sandbox=seccomp"
    )


ALONE = """
import os, socket
from agentr_core.tools.python import confinement

server = socket.create_server(("127.0.0.1", 0))
named = socket.socket(socket.AF_UNIX)
named.bind(b"\\0agentr-" + os.urandom(8).hex().encode())
named.listen()
confinement.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1)
if restrict := {restrict}:
    confinement.restrict(confinement.create_ruleset([], ".", confinement.landlock_abi()))
for attempt in (
    lambda: socket.create_connection(server.getsockname()),
    lambda: socket.create_server(("127.0.0.1", 0)),
    lambda: os.kill(os.getppid(), 0),
    lambda: os.truncate({file!r}, 0),
    lambda: os.rename({file!r}, "moved"),
):
    try:
        attempt()
        print("passed")
    except OSError:
        print("refused")
"""


@pytest.mark.slow
@pytest.mark.skipif(confinement.landlock_abi() < 6, reason="this kernel's Landlock does not watch signals")
@pytest.mark.parametrize(("restrict", "said"), [(True, "refused"), (False, "passed")])
def test_landlock_stands_without_the_filter(restrict: bool, said: str, tmp_path: Path) -> None:
    """TCP, signals and files are shut twice; here the second lock alone."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "inside").mkdir()
    code = ALONE.format(restrict=restrict, file=str(tmp_path / "file"))
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "inside", capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [said] * 5, done.stderr


OLD = """
import os
from agentr_core.tools.python import confinement

confinement.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1)
confinement.restrict(confinement.create_ruleset(["/usr/lib", {readable!r}], ".", {version}))
if {filtered}:
    confinement.install_filter()
for attempt in (
    lambda: os.open("note", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    lambda: os.open({readable!r} + "/file", os.O_WRONLY),
    lambda: os.open({readable!r} + "/file", os.O_RDONLY | os.O_TRUNC),
):
    try:
        attempt()
        print("passed")
    except OSError:
        print("refused")
"""


@pytest.mark.slow
@pytest.mark.skipif(confinement.landlock_abi() < 3, reason="this kernel's Landlock is an old one itself")
@pytest.mark.parametrize(
    ("version", "filtered", "cut"),
    [(1, False, "passed"), (1, True, "refused"), (2, True, "refused"), (3, False, "refused")],
)
def test_old_landlock_lets_files_be_cut_and_the_filter_does_not(
    version: int, filtered: bool, cut: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "inside").mkdir()
    code = OLD.format(version=version, filtered=filtered, readable=str(tmp_path))
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "inside", capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["passed", "refused", cut], done.stderr


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_of_system_calls_are_the_kernels(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    matches = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    numbers = {name: int(number) for name, number in matches}
    if machine == "aarch64":
        numbers["newfstatat"] = numbers["fstatat"]
    for name, number in confinement.syscall_numbers(machine).items():
        assert numbers[name] == number, name


def test_a_machine_with_unknown_numbers_is_told() -> None:
    with pytest.raises(OSError, match="the numbers of system calls on riscv64 are not known"):
        confinement.syscall_numbers("riscv64")


def test_attempts_have_names_of_their_own() -> None:
    names = [attempt.name for attempt in attempts(Limits())]
    assert len(names) == len(set(names)) > 30
