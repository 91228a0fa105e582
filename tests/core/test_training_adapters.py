"""Checkpoints that are adapters: trained, published as PEFT directories, loaded without merging,
trained on.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from training_jobs import make_job, random_row
from transformers import AutoConfig, AutoModelForCausalLM

from agentr_core.errors import ConfigError, ModelDirectoryError, TrainingFault
from agentr_core.models.checkpoint_dir import (
    adapter_base,
    behaviour_files_sha256,
    check_model_directory,
    weights_sha256,
)
from agentr_core.models.local.loading import load_model
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.checkpoints import is_complete, read_manifest
from agentr_core.training.group.policy import Policy
from agentr_core.training.job import TrainingJob
from agentr_core.training.parent import adapter_faults, load_merged, load_parent, merge
from agentr_core.training.run import run

# peft reads an attribute that transformers renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ADAPTED: dict[str, Any] = {"lora_r": 4, "lora_alpha": 8.0, "learning_rate": 1e-2, "publish": "adapter"}


def train_job(model_dir: Path, folder: Path, **settings: Any) -> TrainingJob:
    job = make_job(model_dir, folder, epochs=1.0, **settings)
    job.work_folder.root.mkdir(parents=True)
    run(job, lambda step: None)
    return job


TIED: dict[str, Any] = {"lora_r": 4, "lora_alpha": 8.0, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A published adapter; DoRA, as its merging is the harder one."""
    return train_job(tiny_model_dir, tmp_path_factory.mktemp("adapted"), use_dora=True, **ADAPTED).output_dir


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([random_row(40, 1)[0]])).logits
    return scores


def test_an_adapter_is_a_peft_directory_that_names_its_model(adapted: Path, tiny_model_dir: Path) -> None:
    config = PeftConfig.from_pretrained(adapted)

    assert (config.r, config.lora_alpha, config.use_dora) == (4, 8, True)
    assert (adapter_base(adapted) or adapted).samefile(tiny_model_dir)
    assert not (adapted / "config.json").exists()
    assert not (adapted / "model.safetensors").exists()
    assert (adapted / "chat_template.jinja").read_bytes() == (tiny_model_dir / "chat_template.jinja").read_bytes()
    assert is_complete(adapted)
    assert read_manifest(adapted).weights_sha256 == weights_sha256(adapted) != weights_sha256(tiny_model_dir)


def test_the_adapter_gives_the_logits_of_the_merged_model(adapted: Path, tiny_model_dir: Path) -> None:
    assert check_model_directory(adapted) == (adapted / "adapter_model.safetensors",)
    apart = load_model(adapted, dtype="float32", device="cpu", context_length=0).model
    together = load_merged(tiny_model_dir, adapted, torch.float32)

    assert any("lora_A" in name for name, _ in apart.named_parameters())
    assert not any("lora_A" in name for name, _ in together.named_parameters())
    torch.testing.assert_close(logits(apart), logits(together), atol=1e-4, rtol=1e-4)
    start = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert float((logits(apart) - logits(start)).abs().max()) > 0.1


def test_what_an_adapter_says_does_not_depend_on_where_its_model_lies(
    adapted: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "moved")
    shutil.copytree(adapted, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "moved")}), encoding="utf-8")
    assert behaviour_files_sha256(tmp_path / "adapter") == behaviour_files_sha256(adapted)
    assert weights_sha256(tmp_path / "adapter") == weights_sha256(adapted)

    shutil.rmtree(tmp_path / "moved")
    with pytest.raises(ModelDirectoryError, match=r"belongs to the model '.*moved', which is not a directory here"):
        check_model_directory(tmp_path / "adapter")


def test_a_damaged_adapter_is_told(adapted: Path, tmp_path: Path) -> None:
    shutil.copytree(adapted, tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    del tensors[min(tensors)]
    save_file(tensors, weights)
    with (
        pytest.warns(UserWarning, match="missing adapter keys"),
        pytest.raises(ModelDirectoryError, match="adapter and model do not fit"),
    ):
        load_model(tmp_path / "adapter", dtype="float32", device="cpu", context_length=0)

    weights.unlink()
    with pytest.raises(ModelDirectoryError, match=r"has no adapter_model\.safetensors"):
        check_model_directory(tmp_path / "adapter")


def test_training_goes_on_with_the_same_adapter(adapted: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    job = train_job(adapted, tmp_path, use_dora=True, **ADAPTED)
    before, after = (load_file(path / "adapter_model.safetensors") for path in (adapted, job.output_dir))

    assert (adapter_base(job.output_dir) or adapted).samefile(tiny_model_dir)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    # The first step of the second training starts where the first training ended.
    start = load_parent(adapted, job.config, zero3=False).model
    together = load_merged(tiny_model_dir, adapted, torch.float32)
    torch.testing.assert_close(logits(start.eval()), logits(together), atol=1e-4, rtol=1e-4)


def test_an_adapter_of_another_shape_is_not_trained_on(adapted: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.lora_r is 8, but .* it is 4; keep it, or set .*start_from=base"):
        train_job(adapted, tmp_path, **{**ADAPTED, "use_dora": True, "lora_r": 8})


def test_an_adapter_of_another_type_is_told(tiny_model_dir: Path, tmp_path: Path) -> None:
    IA3Config(
        base_model_name_or_path=str(tiny_model_dir),
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ).save_pretrained(tmp_path)
    (fault,) = adapter_faults(tmp_path, TrainingConfig(lora_r=8))
    assert fault.startswith(f"training.lora_r: the adapter in {tmp_path} is of type IA3, ")
    assert adapter_faults(tmp_path, TrainingConfig()) == []


def test_a_pattern_of_modules_is_compared_with_that_of_the_adapter(tiny_model_dir: Path, tmp_path: Path) -> None:
    def faults(**settings: Any) -> list[str]:
        return adapter_faults(path, TrainingConfig(lora_r=4, lora_alpha=8.0, **settings))

    path = tmp_path / "adapter"
    for targets, change in ((["q_proj", "v_proj"], r".*\.q_proj"), (r".*\.[qv]_proj", ("q_proj", "v_proj"))):
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), config).save_pretrained(path)
        assert faults(lora_target_modules=targets if isinstance(targets, str) else tuple(targets)) == []
        assert faults() == []
        (fault,) = faults(lora_target_modules=change)
        assert fault.startswith(f"training.lora_target_modules is {change if isinstance(change, str) else set(change)}")


def test_the_recipe_decides_on_the_dropout_of_an_adapter_that_is_trained_on(adapted: Path) -> None:
    for dropout in (0.0, 0.3):
        config = TrainingConfig(lora_r=4, lora_alpha=8.0, use_dora=True, bf16=False, lora_dropout=dropout)
        model = load_parent(adapted, config, zero3=False).model
        rates = {layer.p for layer in model.modules() if isinstance(layer, torch.nn.Dropout)}
        assert rates == ({dropout} if dropout else set())
        assert model.peft_config["default"].lora_dropout == dropout


def test_all_weights_can_be_trained_from_an_adapter(adapted: Path, tmp_path: Path) -> None:
    job = train_job(adapted, tmp_path)
    assert adapter_base(job.output_dir) is None
    assert check_model_directory(job.output_dir) == (job.output_dir / "model.safetensors",)


def test_modules_are_trained_whole_beside_adapters_on_named_ones(tiny_model_dir: Path, tmp_path: Path) -> None:
    job = train_job(
        tiny_model_dir,
        tmp_path,
        **{**ADAPTED, "lora_target_modules": ("q_proj",), "lora_modules_to_save": ("norm",), "lora_dropout": 0.1},
    )
    names = load_file(job.output_dir / "adapter_model.safetensors").keys()
    assert {name.rsplit(".", 3)[-3] for name in names if "lora_" in name} == {"q_proj"}
    assert any("lora_" not in name and "norm" in name for name in names)
    apart = load_model(job.output_dir, dtype="float32", device="cpu", context_length=0).model
    together = load_merged(tiny_model_dir, job.output_dir, torch.float32)
    torch.testing.assert_close(logits(apart), logits(together), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A model whose input embedding is its output layer."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(tiny_model_dir, folder)
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_target_modules": ("q_proj", "embed_tokens")},
        {"lora_target_modules": ("lm_head", "q_proj")},
        {"lora_target_modules": r".*(q_proj|embed_tokens)"},
        {"lora_target_modules": ("embed_tokens",), "use_dora": True},
        {"lora_modules_to_save": ("embed_tokens",)},
        {"lora_modules_to_save": ("lm_head",)},
        {"lora_modules_to_save": ("embed_tokens", "lm_head"), "publish": "adapter"},
    ],
    ids=str,
)
def test_tied_embeddings_are_not_trained_on_one_side(tied: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    job = make_job(tied, tmp_path, epochs=1.0, **TIED, **settings)
    (fault,) = adapter_faults(tied, job.config)
    assert re.match(r"training\.lora_target_modules and .* shares its weight with another module", fault)
    with pytest.raises(ConfigError, match="shares its weight with another module"):
        run(job, lambda step: None)
    with pytest.raises(ConfigError, match="shares its weight with another module"):
        Policy(tied, job.config, GrpoConfig())


def test_an_adapter_on_tied_embeddings_from_elsewhere_is_not_trained_on(tied: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tied),
            LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
        )
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    for file in tied.glob("*token*"):
        shutil.copyfile(file, tmp_path / "adapter" / file.name)
    for settings in ({}, TIED | {"lora_target_modules": ("embed_tokens",)}):
        job = make_job(tmp_path / "adapter", tmp_path, **settings)
        assert any("shares its weight" in fault for fault in adapter_faults(tmp_path / "adapter", job.config))


def test_the_other_modules_of_a_tied_model_are_trained_and_merged(tied: Path, tmp_path: Path) -> None:
    job = train_job(tied, tmp_path, lora_modules_to_save=("norm",), **TIED)
    check_merged(tied, job.output_dir)
    assert AutoConfig.from_pretrained(job.output_dir).tie_word_embeddings


# PEFT keeps a copy of the model's embedding beside an adapter on it.
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_adapters_on_embeddings_that_are_not_tied_are_merged(tiny_model_dir: Path, tmp_path: Path) -> None:
    settings = {"lora_target_modules": ("q_proj", "embed_tokens"), "lora_modules_to_save": ("lm_head",)}
    check_merged(tiny_model_dir, train_job(tiny_model_dir, tmp_path, **TIED, **settings).output_dir)


def check_merged(base: Path, published: Path) -> None:
    apart = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), published / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(published)
    torch.testing.assert_close(logits(apart), logits(whole), atol=1e-4, rtol=1e-4)


def test_a_merge_that_changes_the_model_is_refused(tied: Path) -> None:
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens"], init_lora_weights=False)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tied), adapter)
    with (
        pytest.warns(UserWarning, match="tie_word_embeddings"),
        pytest.raises(TrainingFault, match=r"gives other scores than with the adapter apart .*publish=adapter"),
    ):
        merge(model)


def test_group_training_takes_plain_adapters_only(adapted: Path) -> None:
    config = make_job(adapted, adapted.parent, **ADAPTED | {"use_dora": True}).config
    with pytest.raises(ConfigError, match=r"plain LoRA adapters on whole modules, and .*lora_magnitude_vector"):
        Policy(adapted, config, GrpoConfig())


def test_gradient_checkpointing_changes_nothing_but_memory(tiny_model_dir: Path, tmp_path: Path) -> None:
    plain_job, checkpointing_job = (
        train_job(tiny_model_dir, tmp_path, name=name, lora_r=4, gradient_checkpointing=name == "spared")
        for name in ("plain", "spared")
    )
    expected, result = (load_file(job.output_dir / "model.safetensors") for job in (plain_job, checkpointing_job))
    for name, weights in expected.items():
        torch.testing.assert_close(weights, result[name], atol=1e-5, rtol=0)
