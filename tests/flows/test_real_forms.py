"""Every method on models that have the form of real ones and know nothing: SmolLM2's tokenizer of
49,152 tokens, whose padding is its end of turn and whose template writes a system turn of its own;
and Gemma's, with line breaks as added tokens and a window in every layer.

Weights are random, but for a bias by which a reply ends now and then: one word in four opens the
door, so that each method finds something to train on.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from door import Door
from turning import turn
from wheel import LIGHT, write_recipe

from agentr_core.methods.grpo import train
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.store.database import Store
from agentr_core.system import data_path
from flows.compare import compare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("door_installed")]
SOURCE = Path(__file__).parents[2] / "data" / "models" / "smollm2-tokenizer"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
PLAIN = {"learning_rate": 1e-3, "bf16": False, "num_threads": 1}
AT_ONCE = PLAIN | {"per_device_train_batch_size": 64, "num_train_epochs": [1], "warmup_ratio": 0}
PLAYED = {"max_steps": 4, "max_new_tokens": 6}
EVALUATION = {"max_steps": 3, "max_new_tokens": 4, "revision_test": {"enabled": False}}
EXPLORED = {"samples": 4, **PLAYED}
DPO = {"learning_rate": [1e-3], "warmup_ratio": 0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
FAMILIES = {"fresh": 2, "rounds": 1, "correct": ["C0"], "incorrect": ["I3"], "max_steps": 3, "max_new_tokens": 6}
GROUPS = {"steps": 2, "groups": 3, "num_generations": 4, "resample": 1, "max_steps": 3, "max_new_tokens": 6,
          "minibatches": 2}  # fmt: skip
KNOWS = {"name": "door", "options": {"knows": True}}
METHODS: dict[str, dict[str, Any]] = {
    "eto": {"method": "eto", "training": AT_ONCE, "iterations": 3, "environment": KNOWS, "eto": {
        "phases": ["sft", "rft", "dpo"], "explore": EXPLORED, "preferences": {"against": "own"}, "dpo": DPO}},
    "et-agent": {"method": "et-agent", "training": AT_ONCE, "iterations": 2, "et_agent": {
        "phases": ["rft", "rl"], "flywheel": FAMILIES,
        "curriculum": {"rollouts": 4, "questions": 4, "counts": "steps", "sigma_calls": [0.5], "sigma_length": [0.5]},
        }, "grpo": GROUPS},
    "grpo": {"method": "grpo", "training": PLAIN, "iterations": 1, "grpo": GROUPS},
    "compare": {"method": "compare", "training": {**PLAIN, "max_tokens": 60}, "environment": KNOWS,
        "search": {"dives": 2, "width": 2, "depth": 4, "max_new_tokens": 6},
        "eto": {"explore": EXPLORED, "preferences": {"against": "own"}, "dpo": DPO},
        "compare": {"seeds": [0], "arms": {"cloning": ["data.use=expert"], "eto": ["data.use=preferences"]}},
        "data": {"use": "good"}},
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A model directory, and what its rows should begin and end with by the published template."""

    path: Path
    tokenizer: Any
    end: int
    """The token with which the template ends turns."""
    other_end: int | None = None
    """Another with which a reply may end."""
    template: str | None = None
    """Another library's copy of the published template; None: the directory has the published
    one.
    """

    def prompt(self, turns: Sequence[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            turns, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def save_model(config: Any, path: Path, end: int, logit: float) -> None:
    """Save a random model that ends a reply after each token with the same small chance: the first
    dimension of what its layers give is the same everywhere, and so is the bias of that token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.get_input_embeddings().weight[:, 0] = 4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0.0, 0.0
        model.get_output_embeddings().weight[:, 0] = 0.0
        model.get_output_embeddings().weight[end, 0] = logit
        model.save_pretrained(path)


def smollm2(path: Path) -> Form:
    from transformers import AutoConfig, AutoTokenizer

    path.mkdir()
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copyfile(SOURCE / name, path / name)
    (path / "tokenizer.json").write_bytes(gzip.decompress((SOURCE / "tokenizer.json.gz").read_bytes()))
    save_model(AutoConfig.from_pretrained(SOURCE, **SHAPE), path, end=2, logit=1.9)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (49152, 2, 2)
    return Form(path, tokenizer, end=2)


def gemma(path: Path) -> Form:
    """SentencePiece's way of writing spaces, byte tokens, `<bos>`, line breaks among the added
    tokens; embeddings are scaled, and every layer has a window.
    """
    from importlib.resources import files

    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import Gemma3TextConfig, GemmaTokenizer

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [
        Door.instruction,
        Door.acknowledgement,
        "Door 1 of the train house.",
        "Wrong 1.",
        "It opens.",
        *"0123456789",
    ]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
    merges = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    tokenizer = GemmaTokenizer(vocab=backend.get_vocab(), merges=merges)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n", "\n\n", "\t")])
    turns = ["<start_of_turn>", "<end_of_turn>"]
    tokenizer.add_special_tokens({"additional_special_tokens": turns})
    tokenizer.chat_template = data_path("chat_templates", "gemma.jinja").read_text(encoding="utf-8")
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    window = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2}
    ids = {"bos_token_id": 2, "eos_token_id": [1, end], "pad_token_id": 0}
    save_model(Gemma3TextConfig(vocab_size=len(tokenizer), **(SHAPE | window | ids)), path, end, logit=1.0)
    tokenizer.save_pretrained(path)
    template = files("trl").joinpath("chat_templates/gemma3.jinja").read_text(encoding="utf-8")
    return Form(path, tokenizer, end, other_end=1, template=template)


@pytest.fixture(scope="module")
def real_form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Path], Form]], Form]:
    """Return what makes a form once for all tests."""
    forms: dict[str, Form] = {}

    def make(kind: Callable[[Path], Form]) -> Form:
        if kind.__name__ not in forms:
            forms[kind.__name__] = kind(tmp_path_factory.mktemp("forms") / kind.__name__)
        return forms[kind.__name__]

    return make


def write(folder: Path, form: Form, method: str) -> Path:
    """Write the recipe of a method into a folder; its workspace lies there, too."""
    recipe = {
        "name": method,
        "workspace": str(folder / "runs"),
        "environment": {"name": "door"},
        "model": {"path": str(form.path), "device": "cpu", "dtype": "float32", "max_batch": 16, "workers": 1},
        "evaluation": EVALUATION,
    }
    file = folder / f"{method}.yaml"
    file.write_text(yaml.safe_dump(recipe | METHODS[method]), encoding="utf-8")
    return file


def trained_runs(row: dict[str, list[int]]) -> Iterator[tuple[list[int], int | None]]:
    """Yield the stretches of a row that carry loss, each with the token after it."""
    ids, place = row["input_ids"], 0
    for trained, labels in groupby(row["labels"], lambda label: label != IGNORE_INDEX):
        length = len(list(labels))
        if trained:
            assert row["labels"][place : place + length] == ids[place : place + length]
            yield ids[place : place + length], (ids[place + length] if place + length < len(ids) else None)
        place += length


def check_rows(form: Form, store: Store, rows: Sequence[dict[str, list[int]]]) -> Counter[str]:
    """Fail unless each row begins with a prompt of the published template, without loss, and trains
    replies on the tokens that were sampled, with the end of turn where it was sampled. Return how
    many stretches are of which kind.
    """
    finish_reasons = {tuple(ids): end for ids, end in store.rows("select token_ids, finish_reason from generation")}
    assert {*finish_reasons.values()} >= {"stop", "length"}, "both kinds of replies are there to be trained"
    opening = [("user", Door.instruction), ("assistant", Door.acknowledgement)]
    prompts = [
        form.prompt(
            [{"role": role, "content": text} for role, text in (*opening, ("user", f"Door {n} of the train house."))]
        )
        for n in range(6)
    ]
    kinds: Counter[str] = Counter()
    for row in rows:
        (prompt,) = [each for each in prompts if row["input_ids"][: len(each)] == each]
        assert {*row["labels"][: len(prompt)]} == {IGNORE_INDEX}
        for ids, after in trained_runs(row):
            finish = finish_reasons.get(tuple(ids), "written")
            if finish == "stop" and ids[-1] == form.other_end:
                finish = "other end"
            kinds[finish] += 1
            has_end = finish in ("stop", "written")
            assert (ids[-1] == form.end, ids.count(form.end)) == (has_end, has_end)
            # A cut reply is closed by the template, without loss.
            assert has_end or after == form.end
            if finish == "written":
                text = form.tokenizer.decode(ids[:-1])
                assert form.tokenizer(text, add_special_tokens=False)["input_ids"] == ids[:-1]
    return kinds


def rows_of(root: Path) -> list[dict[str, list[int]]]:
    """Return the rows of all datasets of a workspace; both sides of pairs."""
    rows = []
    for file in sorted((root / "datasets").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            sides = ("",) if "labels" in row else ("chosen_", "rejected_")
            rows += [{name: row[side + name] for name in ("input_ids", "labels")} for side in sides]
    return rows


def loss_by_hand(form: Form, rows: Sequence[dict[str, list[int]]]) -> float:
    """Return the mean loss over all trained tokens, row by row, so that nothing is padded."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(form.path, dtype=torch.float32, attn_implementation="eager")
    total, count = 0.0, 0
    with torch.inference_mode():
        for row in rows:
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:])
            total += float(
                torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
            )
            count += int((labels != IGNORE_INDEX).sum())
    return total / count


@pytest.mark.parametrize("kind", [smollm2, pytest.param(gemma, marks=pytest.mark.long)])
def test_agent_r_trains_what_was_sampled_ends_of_turn_included(
    kind: Callable[[Path], Form], real_form: Callable[..., Form], tmp_path: Path
) -> None:
    form = real_form(kind)
    at_once = ["training.per_device_train_batch_size=64", "training.warmup_ratio=0", "model.dtype=float32"]
    done = asyncio.run(turn(write_recipe(tmp_path, form.path), *LIGHT, *at_once))

    rows = rows_of(tmp_path / "runs")
    kinds = check_rows(form, done.store, rows)
    assert min(kinds[name] for name in ("stop", "length", "written")) > 0
    assert done.store.query("select kind from sample where kind = 'revision'").size > 0
    # One step takes all rows. A trainer that took ends of turn for padding would have another loss.
    ((loss, trained),) = done.store.rows("select loss, trained_tokens from training_step")
    assert loss == pytest.approx(loss_by_hand(form, rows), rel=1e-4)
    assert trained == sum(label != IGNORE_INDEX for row in rows for label in row["labels"])
    assert done.store.query("select distinct weights_sha256 from checkpoint").size == 2
    assert done.store.query("select * from v_orphans").empty
    replies = done.store.rows("select reply from generation where finish_reason = 'stop'")
    assert not any("<|im_end|>" in text or "<end_of_turn>" in text for (text,) in replies)


@pytest.mark.long
@pytest.mark.parametrize("kind", [smollm2, gemma])
@pytest.mark.parametrize("method", ["eto", "et-agent", "grpo"])
def test_every_method_trains_what_was_sampled(
    method: str,
    kind: Callable[[Path], Form],
    real_form: Callable[..., Form],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of Agent-R has the main of it."""
    form, rl_rows = real_form(kind), []
    update = train._update

    def watched(learner: Any, rows: Any, job: Any, step: int) -> Any:
        rl_rows.extend(rows)
        return update(learner, rows, job, step)

    monkeypatch.setattr(train, "_update", watched)
    done = asyncio.run(turn(write(tmp_path, form, method)))

    rows = rows_of(tmp_path / "runs")
    for row in rl_rows:
        places = {*row.positions}
        labels = [token if place in places else IGNORE_INDEX for place, token in enumerate(row.input_ids)]
        rows.append({"input_ids": list(row.input_ids), "labels": labels})
    assert bool(rl_rows) == (method != "eto")
    kinds = check_rows(form, done.store, rows)
    assert min(kinds["stop"], kinds["length"]) > 0
    assert (kinds["written"] > 0) == (method == "eto"), "the expert's replies are written"
    assert set(done.store.query("select status from iteration")["status"]) == {"finished"}
    assert done.store.query("select * from v_orphans").empty
    hashes = done.store.query("select weights_sha256 from checkpoint")["weights_sha256"]
    assert hashes.nunique() == METHODS[method]["iterations"] + 1


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_comparison_trains_what_was_sampled(real_form: Callable[..., Form], tmp_path: Path) -> None:
    """The test of Agent-R has the main of it."""
    form = real_form(smollm2)
    asyncio.run(compare(str(write(tmp_path, form, "compare"))))
    store = Store(tmp_path / "runs" / "store.duckdb")
    kinds = check_rows(form, store, rows_of(tmp_path / "runs"))
    assert min(kinds["stop"], kinds["length"], kinds["written"]) > 0
    assert store.query("select * from v_orphans").empty
