"""An experiment from beginning to end, and one that goes wrong: any change of a text or a score
shows here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentr_core.environments.sciworld.tasks import first_numbers
from agentr_core.environments.sciworld.world import SciWorld
from agentr_core.types import Instance


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["agentgym", "eto"])
def test_experiment(golden: Callable[[str, str], None], setting: str) -> None:
    env = SciWorld(setting=setting)  # type: ignore[arg-type]
    # Some animals of it wander, so that a simulator that is not repeatable shows, too.
    index = first_numbers(setting)["identify-life-stages-2"]  # type: ignore[arg-type]
    instance = Instance(environment="sciworld", split="train", index=index)
    lines = [instance.key, env.identity(instance), env.reset(instance)]
    actions = [env.parse(reply) for reply in env.expert(instance) or ()]
    for sequence in (["inventory", "dance", *actions], [*actions[:6], "focus on agent"]):
        lines += ["", "=" * 20, env.reset(instance)]
        for action in sequence:
            step = env.step(action)
            lines += [f"\n> {action}", step.observation, f"reward {step.reward:g}, {step[2:]}"]
            if step.terminated:
                break
    env.close()
    golden(f"sciworld-{setting}.txt", "\n".join(lines) + "\n")
