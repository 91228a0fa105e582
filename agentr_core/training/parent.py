"""The model that a training starts from: a whole model, or one with an adapter whose training
continues.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, masking_utils
from transformers.utils.logging import disable_progress_bar

from agentr_core.errors import ConfigError, ModelDirectoryError, TrainingFault
from agentr_core.models.checkpoint_dir import ADAPTER_CONFIG, adapter_base, read_json
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.attention import use_training_attention
from agentr_core.training.checkpoints import ADAPTER, HISTORY, relative_to_cwd
from agentr_core.training.job import STEP, Job, TrainingStep
from agentr_core.training.process import read_deepspeed, splits_weights

_ADAPTER_INFIX: Final = re.compile(r"\.(?:base_layer|original_module)\.")
"""What PEFT inserts into the names of weights below an adapter, and of weights that are trained in
a copy.
"""
_MAX_ROUNDING: Final = 1e-3
"""The largest difference between logits, relative to the largest logit, that rounding in 32 bits
can explain; 1e-6 was observed.
"""
_NUM_PROBE_TOKENS: Final = 16


class Parent(NamedTuple):
    """A model ready to be trained, its tokenizer, and the dtype of its checkpoints.

    `lora` is PEFT's configuration of the adapters still to be added; None for full training, or if
    the model already has them.
    """

    model: Any
    tokenizer: Any
    dtype: torch.dtype
    lora: Any


def uses_gradient_checkpointing(config: TrainingConfig) -> bool:
    """Return whether activations are computed again in the backward pass (gradient checkpointing);
    by default, if there is a GPU.
    """
    setting = config.gradient_checkpointing
    return torch.cuda.is_available() if setting is None else setting


def text_config(model_dir: Path) -> Any:
    """Return the Transformers configuration of the language model in a directory; for an adapter,
    of its base model. Raises `ModelDirectoryError`.
    """
    with _load_errors(model_dir):
        return AutoConfig.from_pretrained(adapter_base(model_dir) or model_dir).get_text_config()


def load_parent(model_dir: Path, config: TrainingConfig, *, zero3: bool) -> Parent:
    """Return the model in a directory, prepared for training as the settings say.

    Weights are 32-bit numbers; under bfloat16, frozen weights below adapters keep the dtype in
    which they are stored.

    Args:
        zero3: whether DeepSpeed splits the weights among processes while they are read.

    Raises:
        ModelDirectoryError: the model cannot be loaded.
        ConfigError: the shape of the adapter in the directory differs from the settings, it changes
            one of several modules that share a weight, or all weights are to be trained from it
            under ZeRO-3.
        TrainingFault: the adapter in the directory cannot be merged.
    """
    base = adapter_base(model_dir)
    # The stages of a run show their own progress when loading and saving.
    disable_progress_bar()
    with _load_errors(model_dir):
        model, dtype = load_whole_model(base or model_dir, config, zero3=zero3)
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if base is None:
            return Parent(model, tokenizer, dtype, lora_config(config) if config.lora_r else None)
        if config.lora_r:
            if faults := shape_faults(model_dir, config):
                raise ConfigError("; ".join(faults))
        elif zero3:
            raise ConfigError(
                f"training all weights under ZeRO-3 cannot start from the adapter {model_dir}; publish merged "
                "checkpoints (training.publish), or use zero2"
            )
        # Training continues with this adapter and does not stack another: a checkpoint is a single
        # adapter on the first model.
        adapter = PeftConfig.from_pretrained(model_dir)
        if isinstance(adapter, LoraConfig):
            # It is no part of the adapter's shape, and the recipe decides on it.
            adapter.lora_dropout = config.lora_dropout
        model = PeftModel.from_pretrained(
            model, model_dir, is_trainable=bool(config.lora_r), config=adapter, autocast_adapter_dtype=not zero3
        )
    if faults := tied_faults(model, model_dir):
        raise ConfigError("; ".join(faults))
    # An adapter that is not loaded for training has frozen the weights below it.
    return Parent(model if config.lora_r else merge(model).requires_grad_(True), tokenizer, dtype, None)


# From a fresh copy: the weights in training may be split (ZeRO-3) or rounded (QLoRA).
def load_merged(base: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Return the model in `base`, on the CPU, with an adapter merged into its weights in 32 bits
    and then converted to `dtype`. Raises what `merge` raises.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return merge(PeftModel.from_pretrained(model, adapter)).to(dtype)


def merge(peft_model: Any) -> Any:
    """Return a model with its adapter merged into its weights.

    Raises `TrainingFault` if the merged model computes something else: not every adapter can be
    added to weights, and PEFT only warns.
    """
    expected_logits = _probe_logits(peft_model)
    model = peft_model.merge_and_unload()
    # The median over the tokens: in a mixture of experts, rounding may send one to another expert.
    difference = float((_probe_logits(model) - expected_logits).abs().amax(-1).median())
    # `not <=` rather than `>`, which would be False for NaN.
    if not difference <= _MAX_ROUNDING * max(1.0, float(expected_logits.abs().max())):
        raise TrainingFault(
            f"with the adapter merged into its weights, the model gives other scores than with the adapter apart (by "
            f"{difference:.2g}); set training.publish=adapter, or train other modules (training.lora_target_modules, "
            "training.lora_modules_to_save)"
        )
    return model


def tied_faults(peft_model: Any, model_dir: Path) -> list[str]:
    """Return a sentence, or none, on adapters that cannot be merged faithfully, because they change
    one of several modules that share a weight.

    Merging would change the other modules, too, or end the sharing.
    """
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in peft_model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    shared_names = [name for names in names_by_id.values() if len(names) > 1 for name in names]
    changed_names = [
        match[0].rpartition(".")[2] for name in shared_names if (match := _ADAPTER_INFIX.split(name, maxsplit=1))[1:]
    ]
    if not changed_names:
        return []
    return [
        f"training.lora_target_modules and training.lora_modules_to_save: {', '.join(dict.fromkeys(changed_names))} of "
        f"{model_dir} shares its weight with another module (tied embeddings), which an adapter on one of them would "
        "change, too, once it is merged; leave that module out, or train all weights (training.lora_r=0)"
    ]


@torch.no_grad()
def _probe_logits(model: Any) -> torch.Tensor:
    """Return the logits [`_NUM_PROBE_TOKENS`, vocabulary] of a few fixed token ids, computed in
    evaluation mode.
    """
    training = model.training
    model.eval()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[(7 * number + 1) % vocabulary for number in range(_NUM_PROBE_TOKENS)]], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    model.train(training)
    return logits


def load_whole_model(path: Path, config: TrainingConfig, *, zero3: bool) -> tuple[Any, torch.dtype]:
    """Return a whole model in the dtype in which the settings train it, and the dtype in which it
    is stored.
    """
    attention = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    # Weights that are not trained need no 32 bits, and LoRA is meant to save memory.
    keeps_dtype = bool(config.lora_r and config.bf16 and not config.lora_modules_to_save)
    if config.load_in_4bit or zero3:
        dtype = AutoConfig.from_pretrained(path).dtype or torch.float32
        options: dict[str, Any] = {"dtype": dtype if keeps_dtype else torch.float32, **attention}
        if config.load_in_4bit:
            options |= {
                "quantization_config": BitsAndBytesConfig(
                    load_in_4bit=True,
                    bnb_4bit_quant_type="nf4",
                    bnb_4bit_use_double_quant=True,
                    bnb_4bit_compute_dtype=torch.bfloat16,
                ),
                "device_map": {"": torch.cuda.current_device()},
            }
        return AutoModelForCausalLM.from_pretrained(path, **options), dtype
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **attention)
    if not config.attn_implementation and not torch.cuda.is_available():
        use_training_attention(model)
    dtype = model.dtype
    return (model if keeps_dtype else model.to(torch.float32)), dtype


def lora_config(config: TrainingConfig) -> Any:
    """Return PEFT's configuration of the adapters that the settings ask for."""
    targets = config.lora_target_modules
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(config.lora_modules_to_save) or None,
        use_dora=config.use_dora,
        task_type="CAUSAL_LM",
    )


def shape_faults(path: Path, config: TrainingConfig) -> list[str]:
    """Return the differences between the adapter in a directory and the one that the settings ask
    for, one sentence each.

    Training continues with the existing adapter; a second one on top of it could not be published
    alone.
    """
    adapter = PeftConfig.from_pretrained(path)
    if not isinstance(adapter, LoraConfig):
        return [
            f"training.lora_r: the adapter in {path} is of type {adapter.peft_type.value}, and training goes on with "
            "adapters of type LORA; merge it into its model first, or train all weights (training.lora_r=0)"
        ]
    pairs = {
        "lora_r": (adapter.r, config.lora_r),
        "lora_alpha": (adapter.lora_alpha, config.lora_alpha),
        "use_dora": (adapter.use_dora, config.use_dora),
        "lora_modules_to_save": (set(adapter.modules_to_save or ()), set(config.lora_modules_to_save)),
    }
    # PEFT stores the names of the modules in place of `all-linear`, but patterns as they are.
    old_targets, new_targets = (
        names if isinstance(names, str) else set(names)
        for names in (adapter.target_modules, config.lora_target_modules)
    )
    if not (isinstance(new_targets, str) and new_targets.lower() == "all-linear"):
        pairs["lora_target_modules"] = (old_targets, new_targets)
    return [
        f"training.{name} is {new}, but training goes on with the adapter in {path}, where it is {old}; keep it, or "
        "set training.start_from=base"
        for name, (old, new) in pairs.items()
        if old != new
    ]


@contextmanager
def _load_errors(model_dir: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelDirectoryError(f"model {model_dir} cannot be loaded: {str(error).splitlines()[0]}") from error


# Checks whether adapters fit a model, on the model's shape alone: no weight is read.


def meta_model(model_dir: Path) -> Any:
    """Return the model of a directory on the meta device: its weights take no memory. Raises
    `ModelDirectoryError` if the directory does not describe a model.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True).get_text_config()
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    # A foreign configuration may make a library raise anything.
    except Exception as error:
        raise ModelDirectoryError(f"{model_dir} describes no model: {str(error).splitlines()[0]}") from error


def add_adapters(model: Any, config: TrainingConfig) -> Any:
    """Return a model with the adapters of the settings added. Raises what PEFT raises if they do
    not fit (`ValueError`, `TypeError`, `re.error`).
    """
    return _add_adapter(model, lora_config(config))


def non_lora_faults(model: Any) -> list[str]:
    """Return a sentence, or none, on why group RL cannot train a model's adapters: `whole_weights`
    merges only plain LoRA, and an existing adapter may have more than its two matrices, or adapt
    bare parameters.
    """
    unsupported_names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not re.search(r"\.lora_(?:[AB]\.\w+\.weight|embedding_[AB]\.\w+)$", name)
    ]
    unsupported_names += [name for name, module in model.named_modules() if isinstance(module, ParamWrapper)]
    if not unsupported_names:
        return []
    return [
        f"group RL trains plain LoRA adapters on whole modules, and this one also trains {unsupported_names[0]}; merge "
        "it into its model, and set training.lora_r for a new one"
    ]


def whole_weights(
    model: Any,
    dtype: torch.dtype,
    *,
    gather_context: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = lambda parameters: nullcontext(),
    collect: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the weights of a model, each once, on the CPU in `dtype`, by their names in the model
    without adapters. Plain LoRA adapters are added to them in 32 bits, as a merge adds them.

    Args:
        gather_context: returns a context in which the given parameters are whole, for processes
            that hold parts of them other than as DTensors.
        collect: whether this process wants the weights; if not, it returns an empty dict, and only
            helps the processes that hold other parts.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapters = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    weights: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            owner, _, field = name.rpartition(".base_layer.")
            is_adapted = owner in adapters and field == "weight"
            if not owner and any(name.startswith(f"{adapter_name}.lora_") for adapter_name in adapters):
                continue
            with gather_context(list(adapters[owner].parameters()) if is_adapted else [parameter]):
                weight = gathered_tensor(parameter)
                if is_adapted:
                    weight = weight.float() + gathered_tensor(adapters[owner].get_delta_weight("default")).float()
                if collect:
                    plain_name = name.replace(".base_layer.", ".")
                    weights[plain_name] = weight.detach().to("cpu", dtype, copy=True).contiguous()
    return weights


def gathered_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor; a DTensor, of which each process holds a part, is gathered first."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapter_faults(model_dir: Path, config: TrainingConfig) -> list[str]:
    """Return why the adapters that the settings ask for do not fit a model, one sentence each.

    If the model directory is itself an adapter, training continues with that adapter. Raises
    `ModelDirectoryError` if the directory does not describe a model.
    """
    base = adapter_base(model_dir)
    if base is not None:
        faults = shape_faults(model_dir, config) if config.lora_r else []
        if not config.lora_r and _uses_zero3(config):
            faults.append(
                f"training all weights under ZeRO-3 cannot start from the adapter {model_dir}; begin with a merged "
                "model, or use zero2"
            )
        return faults or tied_faults(_add_adapter(meta_model(base), PeftConfig.from_pretrained(model_dir)), model_dir)
    if not config.lora_r:
        return []
    model = meta_model(model_dir)
    targets = config.lora_target_modules
    faults = [
        *(_unmatched_faults("lora_target_modules", targets, model) if not isinstance(targets, str) else []),
        *_unmatched_faults("lora_modules_to_save", config.lora_modules_to_save, model),
    ]
    if faults:
        return faults
    field = "training.lora_target_modules"
    try:
        with_adapters = add_adapters(model, config)
    except (ValueError, TypeError, re.error) as error:
        return [f"{field}: {str(error).splitlines()[0]} (model {model_dir})"]
    if faults := tied_faults(with_adapters, model_dir):
        return faults
    if isinstance(with_adapters.get_output_embeddings(), BaseTunerLayer):
        return [f"{field}: an adapter on the output layer of {model_dir} is never trained; leave that module out"]
    return []


def _add_adapter(model: Any, adapter: PeftConfig) -> Any:
    with warnings.catch_warnings():
        # PEFT asks for an attribute that Transformers has renamed, and tells of shared weights,
        # which `tied_faults` refuses.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", ".*tie_word_embeddings=True", UserWarning)
        # Adapters of a model on the meta device stay there: initialising their weights would take
        # most of the time of planning a run.
        return get_peft_model(model, adapter, low_cpu_mem_usage=next(model.parameters()).is_meta)


def _unmatched_faults(field: str, names: Sequence[str], model: Any) -> list[str]:
    """Return a sentence, or none, on names that match no module; PEFT only requires one match, and
    ignores the other names.

    As in PEFT, a name matches a module whose full name is the name, or ends with a dot and the
    name.
    """
    paths = [path for path, _ in model.named_modules() if path]
    missing = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in paths)]
    if not missing:
        return []
    suffixes = ", ".join(
        dict.fromkeys(path.rpartition(".")[2] for path in paths if not path.rpartition(".")[2].isdigit())
    )
    return [f"training.{field}: the model has no module {', '.join(missing)}; it has {suffixes}"]


def _uses_zero3(config: TrainingConfig) -> bool:
    name = config.launch.deepspeed if config.launch else ""
    try:
        return bool(name) and splits_weights(read_deepspeed(name))
    except ConfigError:
        # Reported by `requirements`.
        return False


# Writes the result of a training: a model or PEFT directory, the parent's tokenizer, and the
# history of its steps.

_REWRITTEN_FILES = ("config.json", "generation_config.json", "manifest.json", "README.md", ADAPTER_CONFIG, HISTORY)


def write_result(
    job: Job,
    model: Any,
    history: Sequence[TrainingStep],
    dtype: torch.dtype,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the result of a training to its staging folder, without a manifest; only the main
    process calls this.

    Args:
        model: the trained model, without the wrappers of trainers.
        dtype: the dtype of the published weights.
        weights: the weights by name; needed if `model` holds only this process's part of them
            (ZeRO-3, FSDP), or if a training of all weights goes on afterwards. Without them and
            without LoRA, `model` itself is converted to `dtype`.
    """
    staging = job.work_folder.staging
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir()
    if job.config.lora_r:
        base = adapter_base(job.model_dir) or job.model_dir
        adapter_only = job.config.publish == "adapter"
        folder = staging if adapter_only else staging / ADAPTER
        for config in model.peft_config.values():
            config.base_model_name_or_path = str(relative_to_cwd(base.resolve()))
        # Preference training may hold a second adapter, its reference.
        model.save_pretrained(folder, state_dict=weights, selected_adapters=["default"])
        if not adapter_only and weights is not None:
            # The model is read again to be merged, by this process alone and therefore completely.
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()
        if not adapter_only:
            load_merged(base, folder, dtype).save_pretrained(staging)
    elif weights is None:
        model.to(dtype).save_pretrained(staging)
    else:
        # Each tensor is converted once, so that names that share a tensor still share it.
        cast_tensors = {id(tensor): tensor.detach().to("cpu", dtype) for tensor in weights.values()}
        model.save_pretrained(staging, state_dict={name: cast_tensors[id(tensor)] for name, tensor in weights.items()})
        # `save_pretrained` wrote the dtype of the model, which is not that of these weights.
        file = staging / "config.json"
        config_values = {**read_json(file), "dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(config_values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # The tokenizer and chat template are copied byte for byte: the model's input must not change
    # with its weights.
    for file in sorted(job.model_dir.iterdir()):
        if (
            file.is_file()
            and file.name not in _REWRITTEN_FILES
            and not (file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json"))
        ):
            shutil.copyfile(file, staging / file.name)
    (staging / HISTORY).write_bytes(b"".join(STEP.dump_json(step) + b"\n" for step in history))


# Whether the model that is trained keeps the samples of a row apart.
#
# Transformers makes a block-diagonal mask of position ids that restart, but only if a model's code
# passes them on to the function that makes its masks. Where it does not, as with gpt-oss, OPT and
# Falcon, a sample sees those before it, and nothing fails.


class _MaskRequested(Exception):
    """Ends a forward pass as soon as it makes its mask from positions."""


def mixing_faults(model_dir: Path, config: TrainingConfig) -> list[str]:
    """Return why samples of the model in a directory cannot share rows, one sentence each. Raises
    `ModelDirectoryError` if the directory does not describe a model.
    """
    if faults := packing_faults(text_config(model_dir), config):
        return faults
    # FlashAttention needs no mask: it is given the positions themselves.
    if not config.packing or config.attn_implementation.startswith("flash_attention"):
        return []
    model = meta_model(adapter_base(model_dir) or model_dir)
    if separates_samples(model):
        return []
    return [
        f"training.packing: the attention of a model of type {model.config.model_type} is not told where the samples "
        "of a row begin, so that each would see those before it; set it to false, which gives each sample a row of "
        "its own"
    ]


def separates_samples(model: Any) -> bool:
    """Return whether a model makes its attention masks from the positions of its tokens. It may be
    on the meta device.
    """
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _raise_mask_requested
    try:
        with torch.no_grad():
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except _MaskRequested:
        return True
    # Masks are made before the first layer; layers without weights may then raise anything.
    except Exception:
        return False
    finally:
        masking_utils.find_packed_sequence_indices = original
    return False


def _raise_mask_requested(*_: Any) -> NoReturn:
    raise _MaskRequested


_SEPARATED_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose mask separates the samples of a row."""


def packing_faults(model_config: Any, config: TrainingConfig) -> list[str]:
    """Return why samples cannot share rows in a model with this text configuration, one sentence
    each.
    """
    unsupported_kinds = sorted(set(getattr(model_config, "layer_types", None) or ()) - _SEPARATED_KINDS)
    if not config.packing or not unsupported_kinds:
        return []
    return [
        f"training.packing: layers of kind {', '.join(unsupported_kinds)} would mix the samples of a row; set it to "
        "false, which gives each sample a row of its own"
    ]
