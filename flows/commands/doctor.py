"""What this machine can do, in lines for `agentr doctor`."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from agentr_core.runtime.machine import accelerator_lines, bfloat16_hardware, bfloat16_note
from agentr_core.tools.python.confinement import Level
from agentr_core.tools.python.tool import PythonTool, level_setting
from flows import interruption
from tasks.wiring import vllm_environment

_INFO = ".dist-info"
_MAKES_IT = "`agentr models install` makes it"


def sandbox(*, attempts: bool) -> list[str]:
    """Return, in lines, which sandbox level of the Python tool holds here, why no stricter one does
    and, on request, each attempt of its self-test.

    Raises `SandboxError` if no level holds.
    """
    return interruption.run(_sandbox(attempts))


def numbers() -> str:
    """Return, in a line, what the number formats `auto` of a recipe become here."""
    return f"number formats: auto means {'bfloat16' if bfloat16_hardware() else 'float32'}; {bfloat16_note()}"


def machine() -> list[str]:
    """Return, in lines, which Python, PyTorch, GPU and vLLM there are, and the room on the disk of
    the working directory.
    """
    server = vllm_environment()
    infos = sorted(server.glob("lib/python*/site-packages/vllm*-*.dist-info"))
    room = shutil.disk_usage(Path.cwd())
    return [
        f"python: {platform.python_version()} in {sys.prefix}",
        *accelerator_lines(),
        f"vllm: {f'{infos[0].name.removesuffix(_INFO)} in {server}' if infos else f'none in {server}; {_MAKES_IT}'}",
        f"disk: {room.free / 2**30:,.1f} GiB free of {room.total / 2**30:,.1f} GiB at {Path.cwd()}",
    ]


async def _sandbox(attempts: bool) -> list[str]:
    async with PythonTool(concurrency=1, allows_weaker=True) as tool:
        count = len(tool.findings)
        lines = [f"python tool: level {tool.level} holds, as {count} attempts show"]
        lines += [f"python tool: {reason}" for reason in tool.refusals]
        if not tool.level.includes(Level.LANDLOCK):
            lines.append(
                f"python tool: at {tool.level.describe()}; no run takes that level unless its recipe names it: "
                f"{level_setting(tool.level)}"
            )
        if attempts:
            lines += [f"  {finding.level}: {finding.attempt}: held" for finding in tool.findings]
        return lines
