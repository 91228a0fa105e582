"""A recipe of method et-agent whose iterations are stages of the curriculum, on the reasoning
world, and a model that knows nothing but says whole phrases of its format now and then.

In this process, or in one that is killed: `python -m curricula RECIPE [STEP]`, which kills itself
once the groups of that step are stored.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import groups
import yaml

from agentr_core.methods.et_agent.selection import rollout, select_questions
from agentr_core.methods.grpo.train import reinforce

ANSWERS = ("1", "2")
PHRASES = (
    "<think>I look it up.</think>\n<search>Ostra</search>",
    "<think>I look again.</think>\n<search>Ostra river</search>",
    *(f"<think>It is {answer}.</think>\n<answer>\\boxed{{{answer}}}</answer>" for answer in ANSWERS),
    "<answer>\\boxed{1}</answer>",
)
RECIPE = """\
name: curricula
method: et-agent
workspace: {folder}/runs
iterations: 2
environment:
  name: reasoning
  options:
    questions: ["{folder}/questions.jsonl"]
    domains: {{rivers-0: knowledge, rivers-1: knowledge}}
    corpus: "{folder}/corpus.jsonl"
    cache_dir: "{folder}/cache"
    tools: [search]
    search_calls: 2
    search_chars: 60
model: {{path: {model}, device: cpu, dtype: float32, max_batch: 32, workers: 1}}
et_agent:
  phases: [rl]
  curriculum: {{rollouts: 4, questions: 4, learning_rate: 1.0e-3, sigma_calls: [0.5, 0.2], sigma_length: [0.5, 0.2]}}
grpo: {{steps: 3, groups: 2, num_generations: 4, max_steps: 4, max_new_tokens: 4, minibatches: 2, save_steps: 2}}
training: {{bf16: false, num_threads: 1}}
evaluation: {{temperature: 1.0, max_steps: 4, max_new_tokens: 4, revision_test: {{enabled: false}}}}
"""


def write(folder: Path, model: Path, **more: Any) -> Path:
    """Write the recipe with its questions and its corpus into a folder, and return its file.

    Args:
        more: fields that are added to those of its sections.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load(RECIPE.format(folder=folder, model=model))
    for section, fields in more.items():
        recipe[section] = {**recipe.get(section, {}), **fields} if isinstance(fields, dict) else fields
    questions = [
        {
            "id": f"{split}-{number}",
            "question": f"How many mouths has river {number} of {split}?",
            "answer": ANSWERS[number % len(ANSWERS)],
            "source": f"rivers-{number % 3 % 2}",
            "split": split,
        }
        for split, count in (("train", 8), ("test", 6))
        for number in range(count)
    ]
    passages = [
        {"id": "1", "contents": "Ostra\nOstra lies on the Red River."},
        {"id": "2", "contents": "Red River\nIt is long."},
    ]
    for name, rows in (("questions", questions), ("corpus", passages)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    file = folder / "curricula.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def save_model(path: Path, save_tiny_model: Callable[..., Path]) -> Path:
    """Save a random model that says `PHRASES`, each as one token, about as often as anything else
    together: the first dimension of what its last layer gives is the same everywhere, and so is a
    bias of each token.
    """
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_tiny_model(path, context=2048, hidden_size=32, intermediate_size=64, tie_word_embeddings=False)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.model.embed_tokens.weight[:, 0] = 4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0.0, 0.0
        model.lm_head.weight[:, 0] = 0.0
        for number, phrase in enumerate(PHRASES):
            model.lm_head.weight[number - len(PHRASES), 0] = 2.2 if "search" in phrase else 1.5
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


async def stage(file: Path) -> None:
    """Do the first stage of the curriculum, but for its evaluation."""
    ctx = await groups.begun(file)
    for work in (rollout, select_questions, reinforce):
        await work(ctx, 1)


async def main() -> None:
    """Do the first stage of the curriculum."""
    file, *step = sys.argv[1:]
    if step:
        groups.die_before_training_on(int(step[0]))
    await stage(Path(file))


if __name__ == "__main__":
    asyncio.run(main())
