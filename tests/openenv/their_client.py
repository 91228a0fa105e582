"""OpenEnv's own client, its check of a server, and TRL on a world of ours: run by the Python of
`.venv-openenv`, with the address of a served TextCraft and what to do.
"""

import json
import sys
import time
from typing import Any

from openenv import GenericEnvClient


def play(url: str) -> None:
    """Play the episodes that come in as JSON, and print what is told."""
    episodes = []
    with GenericEnvClient(base_url=url).sync() as client:
        for split, index, replies in json.load(sys.stdin):
            result = client.reset(split=split, index=index)
            steps = [client.step({"reply": reply}) for reply in replies]
            answers = [(step.observation["text"], step.reward, step.done) for step in steps]
            episodes.append([result.observation["text"], *answers])
    print(json.dumps(episodes))  # noqa: T201


def speed(url: str, seconds: float = 5.0) -> None:
    """Print the steps of one client in a second, of the clock and of this process's time."""
    with GenericEnvClient(base_url=url).sync() as client:
        client.reset(split="train", index=0)
        steps, began, busy = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            if steps % 18 == 17:
                client.reset(split="train", index=steps % 300)
            client.step({"reply": "Thought: hm.\nAction: inventory"})
            steps += 1
        print(steps / (time.perf_counter() - began), steps / (time.process_time() - busy))  # noqa: T201


class Craft:
    """TRL's wrapper: made without arguments, reset with a row, its public method a tool."""

    url = ""
    acts = 0

    def __init__(self) -> None:
        self._client = GenericEnvClient(base_url=self.url).sync()
        self._client.connect()
        self.reward = 0.0
        self._over = False

    def reset(self, split: str, index: int, **columns: Any) -> str:
        """Return the first observation of a row's instance."""
        self.reward, self._over = 0.0, False
        observation = self._client.reset(split=split, index=index).observation
        return f"{observation['instruction']}\n\n{observation['text']}"

    def act(self, action: str) -> str:
        """Act in the world.

        Args:
            action: One action.

        Returns:
            What is observed after it.
        """
        if self._over:
            return "The episode is over."
        Craft.acts += 1
        result = self._client.step({"reply": action})
        self.reward += result.reward or 0.0
        self._over = result.done
        return str(result.observation["text"])


def trl(url: str, way: str, model: str, packages: str, folder: str) -> None:
    """Train for a step or two with TRL, in the given way; `packages` has torch and TRL."""
    sys.path.append(packages)
    from datasets import Dataset
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    if way == "factory":
        # The tiny model has no underscores, and TRL looks for these marks in what was decoded.
        marks = ("tool_call>", "tool_response>")
        words = [*(f"<{slash}{mark}" for mark in marks for slash in ("", "/")), "<|im_start|>", "<|im_end|>"]
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
        policy.resize_token_embeddings(len(tokenizer))
        # TRL wants a template that renders calls of tools, and knows how to read those of some.
        tokenizer.chat_template = qwen3_chat_template
    call = '<tool_call>\n{"name": "act", "arguments": {"action": "inventory"}}\n</tool_call>'

    class Caller(GRPOTrainer):
        """Has the tiny model, which knows no such calls, begin each rollout with one."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **keywords: Any) -> Any:
            completions, *rest = super()._generate_single_turn(prompt_ids, *args, **keywords)
            if not any("<tool_response>" in tokenizer.decode(ids) for ids in prompt_ids):
                ids = tokenizer(call, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
                completions = [ids for _ in completions]
            return (completions, *rest)

    rows = [{"prompt": [{"role": "user", "content": "Craft."}], "split": "train", "index": n} for n in range(4)]
    rewards: list[float] = []

    def factory_reward(environments: list[Craft], **columns: Any) -> list[float]:
        rewards.extend(env.reward for env in environments)
        return [env.reward + 0.01 * number for number, env in enumerate(environments)]

    def rollout_reward(reward: list[float], **columns: Any) -> list[float]:
        rewards.extend(reward)
        return [value + 0.01 * number for number, value in enumerate(reward)]

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        out: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "reward": []}
        for number, _ in enumerate(prompts):
            with GenericEnvClient(base_url=url).sync() as client:
                observation = client.reset(seed=number).observation
                text = f"{observation['instruction']}\n\n{observation['text']}"
                ids = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                )
                completion_ids = trainer.model.generate(
                    input_ids=trainer.model.get_input_embeddings().weight.new_tensor([ids]).long(),
                    max_new_tokens=24,
                    do_sample=True,
                )[0, len(ids) :].tolist()
                result = client.step({"reply": tokenizer.decode(completion_ids, skip_special_tokens=True)})
                out["prompt_ids"].append(ids)
                out["completion_ids"].append(completion_ids)
                out["logprobs"].append([0.0] * len(completion_ids))
                out["reward"].append(result.reward or 0.0)
        return out

    settings: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 160,
        "max_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }
    Craft.url = url
    rollout_options = {"environment_factory": Craft} if way == "factory" else {"rollout_func": rollout}
    trainer = (Caller if way == "factory" else GRPOTrainer)(
        policy,
        reward_funcs=factory_reward if way == "factory" else rollout_reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **rollout_options,
    )
    done = trainer.train()
    print(f"TRL by {way}: {done.global_step} steps, {len(rewards)} rewards {rewards}, loss {done.training_loss:.4f}")  # noqa: T201
    print(f"TRL by {way}: the tool was called {Craft.acts} times")  # noqa: T201
    assert len(rewards) >= 4
    assert Craft.acts or way == "rollout"


if __name__ == "__main__":
    what, url, *rest = sys.argv[1:]
    if what == "trl":
        trl(url, *rest)
    else:
        {"play": play, "speed": speed}[what](url)
