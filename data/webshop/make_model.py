"""Makes the tiny model of the quick recipe: random weights, and a tokenizer that knows the words of
the shop.

Run in the root of the checkout:

    python data/webshop/make_model.py data/models/webshop-tiny

The weights are drawn with a fixed seed and know nothing; the recipe trains them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentr_core.environments.webshop.world import WebShop

SEED = 20261121
VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, CONTEXT = 1024, 64, 192, 2, 4, 4096
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def texts(cache: str) -> Iterator[str]:
    """Yield what is read and said in the shop: the instruction, and the expert's visits for a part
    of the goals.
    """
    env = WebShop(cache_dir=cache)
    yield env.instruction
    for instance in env.instances("train")[::4]:
        yield env.reset(instance)
        for reply in env.expert(instance) or ():
            yield reply
            yield env.step(env.parse(reply)).observation


def tokenizer(lines: Iterator[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on lines."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(word, normalized=False, special=False) for word in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    return made


def weights() -> dict[str, Any]:
    """Return random weights of a Llama model by name."""
    rng = np.random.default_rng(SEED)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.02, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def main(folder: Path) -> None:
    """Write the model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        tokenizer(texts(cache)).save(str(folder / "tokenizer.json"))
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|end|>"),
        "pad_token_id": SPECIAL.index("<|pad|>"),
    }
    own = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
    }
    for name, content in (("config.json", config), ("tokenizer_config.json", own)):
        folder.joinpath(name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    folder.joinpath("chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
