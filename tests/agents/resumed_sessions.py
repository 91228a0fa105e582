"""Coding agents go on with exported sessions: `resumed_sessions.py PYTHON NODE_MODULES`, the Python
and the folder of packages that `make test-agents` makes.

Each is given a session of a call with two results, where it looks for its own, and one more
question on a gateway, which is answered here. Prints what it told the model of the session, and
fails unless that is every turn.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from agentr_core.episodes.transcript import call_text, turn_texts
from agentr_core.exchange.formats import export
from agentr_core.exchange.training_set import SampleRow, TrainingSet
from agentr_core.types import Instance, Message, Sample, SampleKind
from tests.agents.harnesses import CODEX, ROOT, on_gateway

PARTS = ("Look for the cup.", "I look in two rooms.", "a cup of jade", "a bowl of tin", "The kitchen has it.")


def training_set(tool: str, argument: str) -> TrainingSet:
    """Return the set of one conversation in which both rooms are looked at."""
    question, text, *results, last = PARTS
    reply = text
    for room in ("kitchen", "hall"):
        reply = call_text(tool, json.dumps({argument: f"ls {room}"}), before=reply)
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    definition = {"type": "function", "function": {"name": tool, "description": "A shell.", "parameters": parameters}}
    messages = (
        Message(role="tools", text=json.dumps([definition])),
        Message(role="system", text="You are an agent."),
        Message(role="user", text=question),
        Message(role="assistant", text=reply, train=True),
        *(Message(role="tool", text=result) for result in results),
        Message(role="assistant", text=last, train=True),
    )
    sample = Sample(
        kind=SampleKind.GOOD, messages=messages, instance=Instance(environment="gateway", split="train", index=0)
    )
    return TrainingSet(name="rooms-1", facts={}, samples=[SampleRow(id="s", sample=sample, origin={})])


def commands(python: Path, modules: Path, sessions: Path) -> dict[str, tuple[tuple[str, str], str]]:
    """Return for each format the shell that the program offers with its argument, and the shell
    script that lays the session into the program's folder and goes on with it.
    """
    (claude,) = python.parent.parent.glob("lib/python*/site-packages/claude_agent_sdk/_bundled/claude")
    settings = " ".join(f"-c '{value}'" for value in CODEX)
    pi = (ROOT / "deployments" / "agents" / "pi.sh").read_text("utf-8")
    return {
        "claude-code": (
            ("Bash", "command"),
            f"""folder="$CLAUDE_CONFIG_DIR/projects/$(pwd | tr -c 'A-Za-z0-9\n' -)"
            mkdir -p "$folder"
            cp {sessions}/claude-code/sessions/*.jsonl "$folder"
            exec {claude} -p --resume "$(basename "$folder"/*.jsonl .jsonl)" "$1" \
                --tools Bash --system-prompt "You are an agent." --setting-sources "" """,
        ),
        "codex": (
            ("exec_command", "cmd"),
            f"""mkdir -p "$CODEX_HOME/sessions"
            cp {sessions}/codex/sessions/*.jsonl "$CODEX_HOME/sessions"
            exec {modules}/.bin/codex exec {settings} --skip-git-repo-check resume \
                "$(basename "$CODEX_HOME"/sessions/*.jsonl .jsonl | tail -c 37)" "$1" """,
        ),
        "pi": (("bash", "command"), pi.replace("--no-session", f"--session {sessions}/pi/sessions/*.jsonl")),
    }


def main(python: Path, modules: Path) -> int:
    """Try each program; return 1 if one lost something."""
    failures = []
    os.environ["PATH"] = f"{modules.absolute() / '.bin'}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for form, (shell, script) in commands(python.absolute(), modules.absolute(), folder).items():
            export(training_set(*shell), folder / form, form)
            trajectory = on_gateway(["sh", "-c", script, "sh", "Where is the cup?"], lambda *_: "Kitchen.", folder)
            turns = turn_texts(trajectory.first_observation)
            sys.stdout.write(f"{form}: reward {trajectory.reward:g}\n")
            sys.stdout.write("".join(f"  {turn.strip()[-100:]!r}\n" for turn in turns))
            whole = all(any(part in turn for turn in turns) for part in (*PARTS, "Where is the cup?"))
            failures += [] if whole and trajectory.success else [form]
    sys.stdout.write(f"lost something: {', '.join(failures)}\n" if failures else "nothing was lost\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
