"""A stranger's world on OpenEnv's own package: planks and buttons of eight kinds of wood."""

import itertools
import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

WOODS = ("oak", "birch", "spruce", "jungle", "acacia", "mangrove", "cherry", "bamboo")
ORDERS = list(itertools.permutations(WOODS, 3))


class Command(Action):
    command: str


class Shop(Observation):
    text: str = ""


class Carpentry(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Shop:
        woods = ORDERS[(seed or 0) % len(ORDERS)]
        self.wood, self.logs, self.planks = woods[0], 0, 0
        self._state = State(episode_id=episode_id, step_count=0)
        lines = [f"craft 4 {wood} planks using 1 {wood} logs" for wood in woods]
        lines += [f"craft 1 {wood} button using 1 {wood} planks" for wood in woods]
        random.Random(seed).shuffle(lines)
        return Shop(text="\n".join(["Crafting commands:", *lines, "", f"Goal: craft {self.wood} button."]))

    def step(self, action: Command, timeout_s: float | None = None, **kwargs: Any) -> Shop:
        self._state.step_count += 1
        if action.command == f"get 1 {self.wood} logs":
            self.logs += 1
            return Shop(text=f"Got 1 {self.wood} logs")
        if action.command == f"craft 4 {self.wood} planks using 1 {self.wood} logs" and self.logs:
            self.logs, self.planks = self.logs - 1, self.planks + 4
            return Shop(text=f"Crafted 4 minecraft:{self.wood}_planks", reward=0.25 * (self.planks == 4))
        if action.command == f"craft 1 {self.wood} button using 1 {self.wood} planks" and self.planks:
            return Shop(text=f"Crafted 1 minecraft:{self.wood}_button", reward=0.75, done=True)
        return Shop(text=f"Could not execute {action.command}")

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Carpentry, Command, Shop, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
