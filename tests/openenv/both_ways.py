"""OpenEnv's own package on both sides of ours.

`make test-openenv` installs openenv and three of its environments into `.venv-openenv` and runs

    python tests/openenv/both_ways.py .venv-openenv/bin/python [--checkout FOLDER] [PART ...]

Parts are `served` (its client, its `validate`), `trl`, `worlds` (four real environments) and
`stranger` (a world of 40 lines, trained on). FOLDER is a checkout of OpenEnv's repository, whose
wrappers are then played in place of those in `real_worlds.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "support")]

from servers import free_port, wait_for  # noqa: E402

from agentr_core.environments.contract import check  # noqa: E402
from agentr_core.environments.crafting.textcraft import TextCraft  # noqa: E402
from agentr_core.environments.openenv.client import OpenEnv  # noqa: E402
from agentr_core.errors import EnvironmentUnavailable  # noqa: E402
from flows.commands.environments import diagnose  # noqa: E402


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def run_server(command: Sequence[str], *after: str, cwd: Path = ROOT) -> Iterator[str]:
    """Run a server, whose command is given a port and the words after it; lend its address once it
    is well.
    """
    port = free_port()
    process = subprocess.Popen([*command, str(port), *after], cwd=cwd)
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def serve_textcraft() -> AbstractContextManager[str]:
    return run_server(
        [sys.executable, "-m", "flows.cli", "env", "serve", "textcraft", "--protocol", "openenv", "--port"]
    )


def by_their_client(python: str) -> None:
    """Play a hundred episodes of TextCraft with OpenEnv's client, and time it."""
    native = TextCraft()
    episodes, expected = [], list[Any]()
    for split in ("train", "test"):
        for position, instance in enumerate(native.instances(split)[:50]):
            replies = ["Action: inventory", *(native.expert(instance) or ())]
            episodes.append((split, position, replies))
            before, answers = 0.0, list[Any]([native.reset(instance)])
            for reply in replies:
                observation, reward, terminated, _, _ = native.step(native.parse(reply))
                answers.append([observation, reward - before, terminated])
                before = reward
            expected.append(answers)
    start, steps = time.process_time(), 0
    while time.process_time() - start < 2:
        if steps % 18 == 0:
            native.reset(native.instances("train")[steps % 300])
        native.step(native.parse("Thought: hm.\nAction: inventory"))
        steps += 1
    local_rate = steps / (time.process_time() - start)
    with serve_textcraft() as url:
        done = subprocess.run(
            [python, str(HERE / "their_client.py"), "play", url],
            input=json.dumps(episodes),
            text=True,
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout) == expected
        say(f"OpenEnv's client: {len(episodes)} episodes, {sum(map(len, expected))} answers, as in the process")
        process = subprocess.run(
            [python, str(HERE / "their_client.py"), "speed", url], text=True, capture_output=True, check=True
        )
        clock, processor = map(float, process.stdout.split())
        say(
            f"OpenEnv's client: {clock:,.0f} steps/s, {processor:,.0f} by its own processor time; in the process "
            f"{local_rate:,.0f} steps/s, {local_rate / clock:.1f} times as many"
        )
        subprocess.run([str(Path(python).with_name("openenv")), "validate", "--url", url], check=True)


def by_trl(python: str) -> None:
    """Train with TRL both ways."""
    model, packages = str(ROOT / "data/models/textcraft-tiny"), sysconfig.get_path("purelib")
    with serve_textcraft() as url, TemporaryDirectory() as folder:
        for way in ("factory", "rollout"):
            command = [python, str(HERE / "their_client.py"), "trl", url, way, model, packages, folder]
            subprocess.run(command, check=True)


GUESSES = [f"[{number}]" for number in (10, 5, 15, 3, 7, 13, 17, 1, 2, 4, 6, 8)]
PLAYS: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "echo": (
        {
            "train": "0-3",
            "test": "4-5",
            "success": "reward >= 1",
            "rewards": "last",
            "observation": "{echoed_message}",
            "instances_differ": True,
            "step_limit": 3,
        },
        ["hi", "hello", "hello world"],
    ),
    "korrel": (
        {
            "train": "0-3",
            "test": "4-5",
            "success": "reward > 0",
            "instances_differ": True,
            "observation": "{messages}",
            "action": "content",
        },
        ["What is wrong?", "I send you $49.99."],
    ),
    "reasoning": (
        {
            "train": "0-9",
            "test": "10-19",
            "success": "reward >= 1",
            "observation": "{question}",
            "reset_arguments": {"dataset_name": "leg_counting", "seed": "{index}", "size": 1},
        },
        ["4"],
    ),
    "guess": (
        {
            "train": "0-3",
            "test": "4-5",
            "success": "reward >= 1",
            "observation": "{messages}",
            "repeatability": "never",
            "instances_differ": True,
            "reward_low": -1,
        },
        GUESSES,
    ),
}


def real(python: str, checkout: Path | None) -> None:
    """Play four real environments, and say what is said of each as it stands."""
    with TemporaryDirectory() as folder:
        subprocess.run(
            [str(Path(python).with_name("openenv")), "init", "playground"], cwd=folder, check=True, capture_output=True
        )
        for name, (options, actions) in PLAYS.items():
            command, cwd = [python, str(HERE / "real_worlds.py"), name], ROOT
            if name == "echo":
                command, cwd = [python, "-m", "uvicorn", "server.app:app", "--port"], Path(folder, "playground")
            tail = [str(checkout)] if checkout and name in ("reasoning", "guess") else []
            with run_server(command, *tail, cwd=cwd) as url:
                _play(name, url, options, actions)


def _play(name: str, url: str, options: Mapping[str, Any], actions: Sequence[str]) -> None:
    plain = {"url": url, "train": "0-3", "test": "4-5", "success": "reward >= 1", "patience_s": 5}
    (diagnosis,) = diagnose("openenv", plain)
    say(f"{name}, with no option that it needs: {diagnosis['status']}: {diagnosis['detail'][:400]}")
    env = OpenEnv(url=url, **options)
    env.reach()
    instance = env.instances("train")[1]
    say(f"{name}: {' '.join(env.reset(instance).split())[-160:]}")
    for action in actions:
        transition = env.step(action)
        words = " ".join(transition.observation.split())[-100:]
        say(f"  {action!r}: reward {transition.reward:g}, success {transition.info['success']}: {words}")
        if transition.terminated or transition.truncated:
            break
    env.close()
    try:
        violations = check(lambda: OpenEnv(url=url, patience_s=5, **options))
        summary = "; ".join(violation.detail for violation in violations) or "keeps the contract"
    except EnvironmentUnavailable as fault:
        summary = str(fault)
    say(f"{name}, with its options: {summary[:400]}")


def train_stranger(python: str) -> None:
    """Train in a stranger's world with one recipe."""
    with run_server([python, str(HERE / "stranger.py")]) as url, TemporaryDirectory() as folder:
        env = {**os.environ, "AGENTR_OPENENV": url}
        words = ["run", str(HERE / "stranger.yaml"), "-o", f"workspace={folder}/runs"]
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "flows.cli", *words], env=env, cwd=ROOT, check=True)
        say(f"a stranger's world: trained and scored in {time.monotonic() - start:.0f} s")


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("python")
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("parts", nargs="*", default=["served", "trl", "worlds", "stranger"])
    arguments = parser.parse_intermixed_args()
    parts = {
        "served": lambda: by_their_client(arguments.python),
        "trl": lambda: by_trl(arguments.python),
        "worlds": lambda: real(arguments.python, arguments.checkout and arguments.checkout.absolute()),
        "stranger": lambda: train_stranger(arguments.python),
    }
    for part in arguments.parts:
        parts[part]()


if __name__ == "__main__":
    main()
