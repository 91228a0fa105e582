"""The engine on a GPU with a model of real size: generation, collection, training; tokens a second
and how well used.

    python tests/bench/gpu.py [--size 0.6b] [--device cuda] [--output gpu.jsonl] [--quick]
    [--peak-tflops 989] [--only training ...]

The model has the shape of Qwen3 and random weights, in bfloat16, so nothing is downloaded. Its
replies are noise of full length: speed is all that this measures. On a CPU (`--device cpu --size
tiny --quick`) it shows that it runs.

Generation and training need torch, transformers, trl, peft and pydantic alone. Collection needs all
that agentr is installed with; where a part of it is missing, that is said and the rest is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import continuous
import torch
import training_speed
from measures import Measure, table
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling

TOKENIZER = Path("data/models/textcraft-tiny")
WORDS = ("craft", "oak", "planks", "using", "log", "get", "stick", "table", "wooden", "Observation", "Could", "not")
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Size:
    """A shape of Qwen3; `vocabulary` is that of the model, of which the tokenizer uses the first
    ids.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int = 151_936


SIZES = {
    "tiny": Size(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=2048),
    "0.1b": Size(hidden=512, layers=12, heads=8, kv_heads=4, head_dim=64, intermediate=1536),
    "0.6b": Size(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072),
    "1b": Size(hidden=1536, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=4096),
}


def main() -> None:
    """Run the benchmarks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="sizes that show that it works, and nothing more")
    parser.add_argument("--peak-tflops", type=float, help="the device's bfloat16 peak; by default its data sheet's")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; all by default")
    parser.add_argument("--output", type=Path, default=Path("gpu.jsonl"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --size tiny --quick shows that the benchmark runs")
    measures: list[Measure] = []
    with (
        options.output.open("w", encoding="utf-8") as lines,
        tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder,
    ):
        model = make_model(Path(folder) / "model", SIZES[options.size])
        for part in options.only:
            for measure in PARTS[part](options, model, Path(folder)):
                measures.append(measure)
                lines.write(measure.line() + "\n")
            lines.flush()
    sys.stdout.write(table(measures))


def make_model(path: Path, size: Size) -> Path:
    """Save a model with random weights in bfloat16, and the tiny model's tokenizer beside it."""
    config = Qwen3Config(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _generation(options: argparse.Namespace, path: Path, folder: Path) -> list[Measure]:
    batch, prompt_words, new_tokens = (4, 20, 8) if options.quick else (256, 100, 64)
    ours = TransformersModel.load(path, dtype="bfloat16", device=options.device, max_batch=batch, prefix_cache_bytes=0)
    generator = random.Random(0)
    words = [generator.choices(WORDS, k=prompt_words) for _ in range(batch)]
    sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens)
    requests = [
        Request(messages=(Message(role="user", text=" ".join(prompt)),), sampling=sampling, seed=seed)
        for seed, prompt in enumerate(words)
    ]

    def reply() -> int:
        return sum(g.completion_tokens for (g,) in asyncio.run(ours.generate(requests)))

    ours_rate = _rate(reply, options.device)
    rows = [list(ours.renderer.render_prompt(request.messages)) for request in requests]
    asyncio.run(ours.close())
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(options.device).eval()
    length = min(map(len, rows))
    ids = torch.tensor([row[-length:] for row in rows], device=options.device)

    def generate() -> int:
        with torch.inference_mode():
            theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
            )
        return new_tokens * batch

    their_rate = _rate(generate, options.device)
    prompts = [row[-length:] for row in rows]
    rates = _continuous(theirs, prompts, new_tokens, options.device)
    return [
        Measure(
            name="generation_tokens_per_second",
            value=ours_rate,
            unit="tokens/s",
            note=f"{batch} replies to {batch} prompts of about {length} tokens, prefill included",
        ),
        Measure(
            name="generation_against_generate",
            value=ours_rate / their_rate,
            unit="x",
            note=f"Transformers' generate on the same prompts: {their_rate:,.0f} tokens/s",
        ),
        *(
            Measure(
                name="generation_against_continuous_batching",
                value=ours_rate / rate,
                unit="x",
                note=f"Transformers' generate_batch on the same prompts: {rate:,.0f} tokens/s",
            )
            for rate in rates
        ),
    ]


def _continuous(model: Any, rows: list[list[int]], new_tokens: int, device: str) -> list[float]:
    """Return the tokens a second of Transformers' continuous batching, or nothing where it does not
    run.
    """
    try:
        return [_rate(lambda: continuous.generate_batch(model, rows, new_tokens=new_tokens), device)]
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        # It may want an attention kernel that is neither installed nor to be had from here.
        sys.stderr.write(f"continuous batching is left out, since it does not run here: {error}\n")
        return []
    finally:
        continuous.forget(model)


def _rate(run: training_speed.Run, device: str) -> float:
    """Return tokens a second of the second time."""
    run()
    start = _now(device)
    tokens = run()
    return tokens / (_now(device) - start)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _collection(options: argparse.Namespace, path: Path, folder: Path) -> list[Measure]:
    changes = [f"model.path={path}", f"model.device={options.device}", f"model.context_length={CONTEXT}"]
    if options.quick:
        changes += ["search.dives=1", "search.depth=2", "search.max_new_tokens=8"]
    trees = 2 if options.quick else 120
    try:
        # The store, the environments' registry and a client of HTTP come with it.
        import collecting

        from agentr_core.system import DISTRIBUTION

        version(DISTRIBUTION)
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"collection is left out: {error.name} is not installed here, and it needs all of agentr; "
            "`pip install -c constraints.txt -e .` installs it\n"
        )
        return []
    return collecting.measure(folder, trees=trees, slow_trees=1, search=changes, clock=time.perf_counter)


def _training(options: argparse.Namespace, path: Path, folder: Path) -> list[Measure]:
    peak, of = training_speed.peak_flops(options.device, options.peak_tflops)
    measures = []
    for name, settings in (("full", {}), ("lora", {"lora_r": 16})):
        speed = training_speed.measure(path, folder, quick=options.quick, **settings)
        measures += [
            Measure(
                name=f"training_{name}_tokens_per_second",
                value=speed.tokens_per_second,
                unit="tokens/s",
                note=f"{speed.tokens_per_step:,.0f} tokens a step in rows of {speed.mean_length:,.0f}",
            ),
            Measure(
                name=f"training_{name}_mfu",
                value=100 * speed.flops_per_second / peak,
                unit="%",
                note=f"model FLOPs, {speed.flops_per_second / 1e12:,.3g} TFLOP/s, of {peak / 1e12:,.3g} ({of})",
            ),
        ]
    return measures


PARTS = {"generation": _generation, "collection": _collection, "training": _training}

if __name__ == "__main__":
    main()
