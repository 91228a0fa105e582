"""A visit to the shipped shop, page by page: any change of a text, a rank, a price or a reward
shows here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentr_core.environments.webshop.world import WebShop


def test_visit(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    env = WebShop(cache_dir=str(tmp_path))
    instance = next(i for i in env.instances("test") if len(env.goal(i).options) == 2)
    lines = [instance.key, env.reset(instance)]
    detour = ["click[buy now]", "search[coffee]", "click[next >]", "click[< prev]", "click[back to search]"]
    replies = env.expert(instance) or ()
    look = [
        "click[features]",
        "click[< prev]",
        "click[description]",
        "click[< prev]",
        "click[reviews]",
        "click[< prev]",
    ]
    for action in [*detour, *map(env.parse, replies[:2]), *look, *map(env.parse, replies[2:])]:
        step = env.step(action)
        lines += [f"\n> {action}", step.observation, f"reward {step.reward}, done {step.terminated}, {step.info}"]
    golden("webshop.txt", "\n".join(lines) + "\n")
