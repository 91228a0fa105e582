"""An agent without packages that does what its words say, one after the other: `ask`, `say:TEXT`,
`complain:TEXT`, `reward:0.5`, `fail`, `exit:3`, `kill`, `sleep:SECONDS`, `stubborn`, `child:FILE`,
`flood`, `variables`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

HISTORY: list[dict[str, str]] = []
ORPHAN = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask() -> None:
    HISTORY.append({"role": "user", "content": f"Question {len(HISTORY)} {os.environ.get('AGENTR_TASK', '')[:80]}"})
    body = {"model": os.environ["OPENAI_MODEL"], "messages": HISTORY}
    answer = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)
    HISTORY.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def act(name: str, value: str) -> None:
    if name == "ask":
        ask()
    elif name == "say":
        sys.stdout.write(f"{value}\n")
    elif name == "complain":
        sys.stderr.write(f"{value}\n")
    elif name == "reward":
        post(f"{os.environ['AGENTR_EPISODE_URL']}/reward", {"reward": float(value)})
    elif name == "fail":
        post(f"{os.environ['AGENTR_EPISODE_URL']}/failed", {"reason": "it gave up"})
    elif name == "exit":
        sys.exit(int(value))
    elif name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "sleep":
        time.sleep(float(value))
    elif name == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "child":
        # In a session of its own, as coding agents start what a model asks for.
        subprocess.Popen([sys.executable, "-c", ORPHAN, value], start_new_session=True)
        while not Path(value).exists() or not Path(value).read_text():
            time.sleep(0.01)
    elif name == "flood":
        while True:
            sys.stdout.write("x" * 9999 + "\n")
    elif name == "variables":
        file = os.environ["AGENTR_TASK_FILE"]
        report = {"cwd": str(Path.cwd()), "words": sys.argv[1:], "task": len(Path(file).read_text()) if file else 0}
        sys.stdout.write(json.dumps(report | os.environ) + "\n")
    else:
        sys.exit(f"no such word: {name}")


if __name__ == "__main__":
    for word in sys.argv[1:]:
        act(*word.partition(":")[::2])
        sys.stdout.flush()
