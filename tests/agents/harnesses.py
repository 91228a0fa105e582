"""Harnesses of others, unchanged, on episodes of a gateway: `harnesses.py PYTHON NODE_MODULES`, the
Python and the folder of packages that `make test-agents` makes.

Each is started by `agentr gateway run` with a task for its shell, and answered by replies that are
written here. Prints what of them is stored, and fails unless it is one conversation in which both
replies are trained, apart from calls for titles.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from agentr_core.environments.gateway.conversations import OutsideTurns
from agentr_core.environments.gateway.world import Gateway
from agentr_core.episodes.rollout import EnvironmentPool, roll_out_episode
from agentr_core.episodes.transcript import call_text, turn_texts
from agentr_core.models.scripted import ScriptedModel
from agentr_core.texts import count_text
from agentr_core.types import Generation, Instance, Message, Request, Sampling, Trajectory

ROOT = Path(__file__).parents[2]
INSTANCE = Instance(environment="gateway", split="train", index=0)
TASK = {"prompt": "Run `echo hello` in the shell and say what it prints."}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CODEX = (
    'model_providers.g={name="g",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}',
    'model_provider="g"',
    'model="policy"',
)


class Harness(NamedTuple):
    """A harness: its command, and the shell that it offers as a tool with one argument. One that
    wants its last words in the shell is given `submit`.
    """

    name: str
    command: tuple[str, ...]
    tool: str
    argument: str
    submit: bool = False


def harnesses(python: Path, modules: Path) -> list[Harness]:
    """Return the harnesses that are tried."""
    (claude,) = python.parent.parent.glob("lib/python*/site-packages/claude_agent_sdk/_bundled/claude")
    settings = [word for value in CODEX for word in ("-c", value)]
    codex = (str(modules / ".bin" / "codex"), "exec", "--ephemeral", "--skip-git-repo-check", *settings)
    few = ("--allowedTools", "Bash", "--tools", "Bash", "--system-prompt", "You are an agent.", "--setting-sources", "")
    pi = str(ROOT / "deployments" / "agents" / "pi.sh")
    opencode = ("sh", str(ROOT / "deployments" / "agents" / "opencode.sh"), "{task.prompt}")
    mini = (str(python.parent / "mini"), "-m", "openai/policy", "-y", "--exit-immediately", "-o", "out.json", "-t")
    return [
        Harness("codex (Responses)", (*codex, "{task.prompt}"), "exec_command", "cmd"),
        Harness("Claude Code (Messages)", (str(claude), "-p", "{task.prompt}", *few), "Bash", "command"),
        Harness("mini-swe-agent (chat)", (*mini, "{task.prompt}"), "bash", "command", submit=True),
        Harness("opencode (chat)", opencode, "bash", "command"),
        *(
            Harness(f"pi ({api})", ("env", f"PI_API={api}", "sh", pi, "{task.prompt}"), "bash", "command")
            for api in ("openai-completions", "openai-responses", "anthropic-messages")
        ),
    ]


Reply = Callable[[tuple[Message, ...], int, int], str]
"""A reply to the turns of a request, as `ScriptedModel` asks for it."""


def reply_of(harness: Harness) -> Reply:
    """Return the replies: a call of the shell, and what follows on its result; to a call without
    tools, a title.
    """

    def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
        if messages[0].role != "tools":
            return "A greeting"
        if messages[-1].role != "tool":
            call = {harness.argument: "echo hello"}
            return call_text(harness.tool, json.dumps(call), before="I run it.")
        return call_text(harness.tool, json.dumps({harness.argument: SUBMIT})) if harness.submit else "It says hello."

    return reply


async def play_episode(url: str, reply: Reply, tasks: Path) -> Trajectory:
    """Return the episode that a harness plays."""
    model = ScriptedModel(reply, context_length=1_000_000)

    async def sample(request: Request) -> list[Generation]:
        (replies,) = await model.generate([request])
        return replies

    pool = EnvironmentPool(lambda _: Gateway(url=url, splits={"train": str(tasks), "test": 1}, patience_s=120))
    async with pool.lend(INSTANCE) as env:
        return await roll_out_episode(INSTANCE, env, sample, max_steps=12, sampling=Sampling(), seed=1)


def on_gateway(command: Sequence[str], reply: Reply, folder: Path) -> Trajectory:
    """Return the episode that a command plays on a gateway of its own."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps(TASK) + "\n", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = [sys.executable, "-c", "from flows.cli import main; main()", "gateway", "run", "--port", str(port)]
    options = ["--copies", "1", "--reward", "exit", "--time-limit", "120", "--logs", str(folder / "logs")]
    with subprocess.Popen([*launch, *options, "--", *command], stdout=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stdout is not None
            gateway.stdout.readline()
            return asyncio.run(play_episode(f"http://127.0.0.1:{port}", reply, tasks))
        finally:
            gateway.terminate()


def try_harness(harness: Harness, folder: Path) -> bool:
    """Print what is stored of the episode of a harness, and return whether nothing was lost."""
    episode = on_gateway(harness.command, reply_of(harness), folder)
    parts = OutsideTurns().parts(episode.first_observation, episode.steps)
    # A title is asked for beside the task, and is not trained.
    task = [part for part in parts if not part.side]
    is_whole = len(task) == 1 and len(task[0].positions) == 2 and episode.success
    side_note = f" and {len(parts) - len(task)} beside" if len(parts) > len(task) else ""
    steps, conversations = count_text(len(episode.steps), "step"), count_text(len(task), "conversation")
    summary = f"{steps}, {conversations}{side_note}, reward {episode.reward:g}"
    sys.stdout.write(f"{harness.name}: {summary}\n")
    for step in episode.steps[:-1]:
        sys.stdout.write("".join(f"  {turn.strip()[-60:]!r}\n" for turn in turn_texts(step.observation)))
    return is_whole


def main(python: Path, modules: Path) -> int:
    """Try each harness; return 1 if one lost something."""
    failures = []
    os.environ["PATH"] = f"{modules.absolute() / '.bin'}{os.pathsep}{os.environ['PATH']}"
    for harness in harnesses(python.absolute(), modules.absolute()):
        with tempfile.TemporaryDirectory() as folder:
            failures += [] if try_harness(harness, Path(folder)) else [harness.name]
    sys.stdout.write(f"lost something: {', '.join(failures)}\n" if failures else "nothing was lost\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
