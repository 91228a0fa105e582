"""Real environments behind OpenEnv's own package, served at a port: korrel, reasoning-gym and
TextArena's GuessTheNumber.

The wrappers of the last two are not in the package but in OpenEnv's repository; without a checkout
of it, they are the few lines here, which take the same arguments and drop the same ones.
"""

import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Words(Action):
    message: str


class Messages(Observation):
    messages: list[dict[str, Any]] = Field(default_factory=list)


class Reply(Action):
    role: str = "assistant"
    content: str


class Question(Observation):
    question: str = ""


class Answer(Action):
    answer: str


class MinimalEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    @property
    def state(self) -> State:
        return State()


def korrel() -> Any:
    from korrel import Persona, Rubric, Scenario
    from korrel.exporters.openenv import build_environment_class

    class Customer(Persona):
        """Says the same whatever it hears, and asks no model."""

        def next_message(self, messages: Any) -> str:
            return "I still wait for my refund."

    def refunded(completion: Any, info: Any, **keywords: Any) -> float:
        return float(any(m.role == "assistant" and "49.99" in (m.content or "") for m in completion))

    scenario = Scenario(
        id="refund",
        system="You are a support agent.",
        persona=Customer(goal="Get a refund."),
        opening_message="My order arrived broken and I want a refund of $49.99.",
        max_turns=2,
        info={},
        rubric=Rubric(funcs=[refunded]),
    )
    return build_environment_class(scenario, Messages, Reply), Reply, Messages


def reasoning() -> Any:
    import reasoning_gym

    class Gym(MinimalEnvironment):
        def reset(
            self,
            dataset_name: str = "leg_counting",
            seed: int = 42,
            size: int = 100,
            episode_id: str | None = None,
        ) -> Question:
            self.data = reasoning_gym.create_dataset(dataset_name, seed=seed, size=size)
            self.entry = next(iter(self.data))
            return Question(question=self.entry["question"], reward=0.0)

        def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Question:
            score = self.data.score_answer(action.answer, entry=self.entry)
            return Question(question="", done=True, reward=score, metadata={"correct": self.entry["answer"]})

    return Gym, Answer, Question


def guess() -> Any:
    import textarena

    class Guess(MinimalEnvironment):
        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Messages:
            self.game = textarena.make("GuessTheNumber-v0")
            self.game.reset(num_players=1)
            return self.seen(False, 0.0)

        def seen(self, done: bool, reward: float) -> Messages:
            _, content = self.game.get_observation()
            content = [(0, content, "ALL")] if isinstance(content, str) else content
            messages = [{"sender_id": part[0], "content": str(part[1]), "category": str(part[2])} for part in content]
            return Messages(messages=messages, done=done, reward=reward)

        def step(self, action: Words, timeout_s: float | None = None, **kwargs: Any) -> Messages:
            done, _ = self.game.step(action.message)
            return self.seen(done, float((self.game.state.rewards or {}).get(0, 0.0)) if done else 0.0)

    return Guess, Words, Messages


def of_checkout(folder: str, name: str) -> Any:
    sys.path[:0] = [str(Path(folder, "envs"))]
    if name == "reasoning":
        from reasoning_gym_env.models import ReasoningGymAction, ReasoningGymObservation
        from reasoning_gym_env.server.reasoning_gym_environment import ReasoningGymEnvironment

        return ReasoningGymEnvironment, ReasoningGymAction, ReasoningGymObservation
    from textarena_env.models import TextArenaAction, TextArenaObservation
    from textarena_env.server.environment import TextArenaEnvironment

    def make() -> Any:
        return TextArenaEnvironment("GuessTheNumber-v0", download_nltk=False)

    return make, TextArenaAction, TextArenaObservation


if __name__ == "__main__":
    name, port, *folder = sys.argv[1:]
    parts = of_checkout(folder[0], name) if folder and name != "korrel" else globals()[name]()
    uvicorn.run(create_fastapi_app(*parts, max_concurrent_envs=8), port=int(port), log_level="warning")
