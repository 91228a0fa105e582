"""Tools in a process that was forked after its parent had called them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
PROGRAM = """
import os, sys, threading
from agentr_core.environments.reasoning.toolbox import ToolSettings, open_tools

tools = open_tools(ToolSettings(cache_dir=sys.argv[1])).toolbox
def call():
    return tools.call("python", "print(6 * 7)").output, tools.call("search", "river").status
assert call() == ("42", "ok"), call()
for leave in (os._exit, sys.exit):
    child = os.fork()
    if child == 0:
        threading.Timer(120, os._exit, [7]).start() if leave is os._exit else None
        assert call() == ("42", "ok")
        leave(0)
    assert os.waitpid(child, 0)[1] == 0
assert call() == ("42", "ok"), "the parent's interpreters outlive the child"
print("done")
"""


def test_a_forked_process_opens_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("retrieval")
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
