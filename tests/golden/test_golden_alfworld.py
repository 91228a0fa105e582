"""An episode of ALFWorld, step by step: any change of a text, a name or a reward shows here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from houses import GAMES, maker, needs_engine

from agentr_core.environments.alfworld.world import AlfWorld

pytestmark = [pytest.mark.slow, needs_engine]


def test_episode(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    maker().make(tmp_path, GAMES)
    env = AlfWorld(data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    lines = [env.instruction]
    # One game in which something is heated, and one with the lamp.
    for kind in (4, 2):
        instance = next(each for each in env.instances("train") if env.depth(each) == kind)
        actions = [env.parse(reply) for reply in env.expert(instance) or ()]
        index = next(place for place, action in enumerate(actions) if action.startswith("take"))
        thing = " ".join(actions[index].split()[1:3])
        detour = ["inventory", f"examine {thing}", "look", "dance"]
        lines += ["", instance.key, env.reset(instance)]
        for action in ["look", *actions[: index + 1], *detour, *actions[index + 1 :]]:
            step = env.step(action)
            lines += [f"\n> {action}", step.observation, f"reward {step.reward}, done {step.terminated}, {step.info}"]
    env.close()
    golden("alfworld.txt", "\n".join(lines) + "\n")
