"""What the training section of a recipe may say, and what is told when the machine cannot do it."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from training_jobs import make_job
from transformers import TrainingArguments

from agentr_core.errors import ConfigError
from agentr_core.methods.faults import load, parse
from agentr_core.methods.table import plans_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import UNREAD_FIELDS, LaunchConfig, TrainingConfig
from agentr_core.training.parent import load_whole_model
from agentr_core.training.process import deepspeed_names, launch_command, launch_environment, read_deepspeed
from agentr_core.training.requirements import check_requirements
from agentr_core.training.trainers import common_arguments

ROOT = Path(__file__).parents[2]
BIG = ROOT / "deployments" / "recipes" / "textcraft-lora-zero3.yaml"


def recipe(**training: Any) -> Recipe:
    return parse({"name": "t", "model": {"path": "m"}, "training": training})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_dora": True}, r"training\.use_dora: only with LoRA, so set training\.lora_r"),
        ({"publish": "adapter"}, r"training\.publish: only with LoRA"),
        ({"launch": {"num_processes": 3, "num_machines": 2}}, "3 processes cannot be divided evenly among 2 machines"),
        ({"launch": {"num_processes": 2, "num_machines": 2}}, "need main_process_ip and main_process_port"),
        ({"lora_r": 8, "load_in_4bit": True, "launch": {"deepspeed": "zero3-offload"}}, "cannot be split by ZeRO-3"),
        ({"fp16": True}, r"training\.fp16: training\.bf16 is another mixed precision"),
        ({"launch": {"fsdp": True}}, r"training\.launch\.fsdp: one process has nothing to split"),
        ({"launch": {"num_processes": 2, "fsdp": True, "deepspeed": "zero2"}}, "splits the training already"),
        ({"launch": {"num_processes": 2, "fsdp_config": {"cpu_offload": True}}}, "no use without training.launch.fsdp"),
        ({"lora_r": 8, "load_in_4bit": True, "launch": {"num_processes": 2, "fsdp": True}}, "are not split by FSDP"),
        ({"launch": {"processes": 2}}, r"training\.launch\.processes: unknown field"),
    ],
)
def test_settings_that_do_not_fit_together_are_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        recipe(**settings)


def test_an_address_is_no_part_of_what_a_training_is() -> None:
    launch = {"num_processes": 2, "num_machines": 2, "main_process_port": 29400}
    first = recipe(launch={**launch, "main_process_ip": "10.0.0.1"}).training
    second = recipe(launch={**launch, "main_process_ip": "10.0.0.2", "main_process_port": 29401}).training

    assert first != second
    assert first.without_addresses() == second.without_addresses()
    assert (
        first.without_addresses()
        != recipe(launch={**launch, "num_processes": 4, "main_process_ip": "a"}).training.without_addresses()
    )
    assert TrainingConfig().without_addresses() == TrainingConfig()


def test_the_recipe_for_several_gpus_has_lora_and_zero3() -> None:
    training = load(BIG).training

    assert training.launch is not None
    assert (training.launch.deepspeed, training.publish) == ("zero3", "adapter")
    assert training.num_processes == 8
    assert training.lora_r > 0
    assert read_deepspeed(training.launch.deepspeed)["zero_optimization"]["stage"] == 3


def test_the_command_is_one_of_accelerate(tmp_path: Path) -> None:
    launch = LaunchConfig(num_processes=8, num_machines=2, main_process_ip="10.0.0.1", main_process_port=29400)
    job = make_job(tmp_path, tmp_path, launch=launch, bf16=True)
    words = launch_command(job, job_file=tmp_path / "job", events_file=tmp_path / "events", machine_rank=1)
    options = dict(pairwise(words))

    assert words[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    expected = {"--num_processes": "8", "--num_machines": "2", "--machine_rank": "1", "--mixed_precision": "bf16"}
    assert expected.items() <= options.items()
    assert (options["--main_process_ip"], options["--main_process_port"]) == ("10.0.0.1", "29400")
    assert "--multi_gpu" in words
    assert words[-4:] == ["--module", "agentr_core.training.rank", str(tmp_path / "job"), str(tmp_path / "events")]


def test_an_outer_launcher_does_not_reach_the_processes(tmp_path: Path) -> None:
    outer = {"RANK": "5", "MASTER_ADDR": "far", "PATH": "p"}
    plain = make_job(tmp_path, tmp_path, launch=LaunchConfig(num_processes=2))
    alone = make_job(tmp_path, tmp_path, launch=LaunchConfig(deepspeed="zero2"))

    assert launch_environment(plain, outer, has_gpus=True) == {"PATH": "p"}
    assert launch_environment(plain, outer, has_gpus=False) == {"PATH": "p", "ACCELERATE_USE_CPU": "true"}
    environment = launch_environment(alone, outer, has_gpus=True)
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def test_the_settings_of_fsdp_reach_the_trainer_and_what_it_gives_accelerate(tmp_path: Path) -> None:
    launch = LaunchConfig(num_processes=2, fsdp=True, fsdp_config={"cpu_offload": True, "reshard_after_forward": False})
    options = common_arguments(make_job(tmp_path, tmp_path, launch=launch), steps=1)
    assert (options["fsdp"], options["deepspeed"]) == (True, None)
    arguments = TrainingArguments(
        **{name: options[name] for name in ("fsdp", "fsdp_config", "output_dir", "bf16", "use_cpu")}
    )
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    assert plugin.cpu_offload
    assert common_arguments(make_job(tmp_path, tmp_path), steps=1)["fsdp"] is None


def test_an_unknown_deepspeed_configuration_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file zero9; name one, or choose zero2, zero3, zero3-offload"):
        read_deepspeed("zero9")
    broken = tmp_path / "own.json"
    broken.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_deepspeed(str(broken))
    broken.write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    assert read_deepspeed(str(broken)) == {"zero_optimization": {"stage": 1}}


def autos(content: Any, path: str = "") -> set[str]:
    """Return the paths of the fields that the Trainer fills in."""
    if isinstance(content, dict):
        return {field for key, value in content.items() for field in autos(value, f"{path}.{key}" if path else key)}
    return {path} if content == "auto" else set()


SIZES = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
}
BUCKETS = {"reduce_bucket_size"}
PARTS = BUCKETS | {"stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}
ADAM = {f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")}


@pytest.mark.parametrize(
    ("name", "stage", "offloaded", "buckets", "filled_in"),
    [
        ("zero2", 2, set(), BUCKETS, SIZES),
        ("zero3", 3, set(), PARTS, SIZES),
        # The optimizer runs on the processor, so it is DeepSpeed's own and no longer the Trainer's.
        ("zero3-offload", 3, {"offload_optimizer", "offload_param"}, PARTS, SIZES | ADAM),
    ],
)
def test_each_configuration_that_comes_along_says_what_its_name_does(
    name: str, stage: int, offloaded: set[str], buckets: set[str], filled_in: set[str]
) -> None:
    content = read_deepspeed(name)
    zero = content["zero_optimization"]

    assert zero["stage"] == stage
    assert {key for key in zero if key.startswith("offload")} == offloaded
    assert all(zero[key]["device"] == "cpu" for key in offloaded)
    # Else a checkpoint of ZeRO-3 holds shards, and no ordinary model directory can be published.
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is (stage == 3)
    assert content.get("zero_allow_untested_optimizer", False) is ("optimizer" not in content)
    assert autos(content) == filled_in | {f"zero_optimization.{key}" for key in buckets}


def test_there_are_three_configurations() -> None:
    assert deepspeed_names() == ["zero2", "zero3", "zero3-offload"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", deepspeed_names())
def test_deepspeed_itself_reads_each_configuration_once_filled_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = TrainingArguments(per_device_train_batch_size=1, learning_rate=1e-4, bf16=True, use_cpu=True)
    hf_config = HfTrainerDeepSpeedConfig(read_deepspeed(name))
    hf_config.trainer_config_process(arguments)

    class Model:
        class config:
            hidden_size = 64

    hf_config.trainer_config_finalize(arguments, Model, 10)
    assert "auto" not in json.dumps(hf_config.config)
    ds_config = DeepSpeedConfig(hf_config.config)
    assert ds_config.zero_optimization_stage == (2 if name == "zero2" else 3)
    assert (ds_config.zero_config.offload_optimizer is not None) is ("offload" in name)
    assert ds_config.bfloat16_config.enabled


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"report_to": ("tensorbord",)}, r"training\.report_to: 'tensorbord' is unknown; choose among .*tensorboard"),
        ({"lr_scheduler_type": "cosin"}, r"training\.lr_scheduler_type 'cosin' is unknown; choose one of .*cosine"),
    ],
)
def test_unknown_names_are_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_requirements(TrainingConfig(**settings))
    check_requirements(TrainingConfig())


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_that_is_not_installed_is_told() -> None:
    with pytest.raises(ConfigError, match=r"training\.report_to: wandb is not installed"):
        check_requirements(TrainingConfig(report_to=("wandb",)))


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_a_missing_deepspeed_is_told() -> None:
    with pytest.raises(ConfigError, match=r"pip install .*'\.\[deepspeed\]'"):
        check_requirements(TrainingConfig(launch=LaunchConfig(deepspeed="zero2")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_four_bits_without_a_gpu_are_told() -> None:
    config = dataclasses.replace(TrainingConfig(), lora_r=4, load_in_4bit=True)
    with pytest.raises(ConfigError, match=r"training\.load_in_4bit \(QLoRA\) needs a CUDA device"):
        check_requirements(config)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optim": "adamw"}, r"training\.optim: 'adamw' is unknown; choose among .*adafactor"),
        ({"optim": "lomo"}, "takes its steps inside the backward pass"),
        ({"optim": "galore_adamw"}, "needs the package galore_torch"),
        ({"lr_scheduler_kwargs": {"speed": 2}}, r"give them in training\.lr_scheduler_kwargs"),
        ({"attn_implementation": "fast"}, "choose among eager, sdpa, flash_attention_2"),
        ({"attn_implementation": "flash_attention_2"}, "its package of flash-attn; install it, or choose sdpa"),
        ({"attn_implementation": "flash_attention_3"}, "flash_attention_3 needs a CUDA device and its package"),
        ({"attn_implementation": "flash_attention_2"}, "flash_attention_2 computes in 16 bits only; set training.bf16"),
        ({"fp16": True, "bf16": False}, r"training\.fp16 needs a CUDA device"),
        ({"use_liger_kernel": True}, "the package liger-kernel"),
        ({"launch": LaunchConfig(num_processes=2, fsdp=True)}, r"training\.launch\.fsdp needs CUDA devices"),
        (
            {"launch": LaunchConfig(num_processes=2, fsdp=True, fsdp_config={"version": 1})},
            r"fsdp_config: version is unknown here; choose among auto_wrap_policy, cpu_offload",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA lacks")
def test_what_a_trainer_cannot_do_here_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_requirements(TrainingConfig(**({"bf16": False} | settings)))


def test_settings_under_the_trainers_names_reach_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "optim": "adafactor",
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "attn_implementation": "eager",
        "bf16": False,
    }
    config = recipe(**settings, save_steps=7).training
    check_requirements(config)
    options = common_arguments(make_job(tmp_path, tmp_path, **settings, checkpoint_every=config.save_steps), steps=10)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert (options["optim"], options["lr_scheduler_kwargs"], options["save_steps"]) == (
        "adafactor",
        {"num_cycles": 2},
        7,
    )
    assert TrainingConfig().without_addresses() == TrainingConfig(optim=str(arguments.optim.value))


def test_number_format_and_kernels_reach_the_trainer(tmp_path: Path) -> None:
    """They need a GPU, on which nobody has run them here."""
    job = make_job(tmp_path, tmp_path, fp16=True, use_liger_kernel=True, launch=LaunchConfig())
    options = common_arguments(job, steps=1)
    assert (options["fp16"], options["bf16"], options["use_liger_kernel"]) == (True, False, True)
    words = dict(pairwise(launch_command(job, job_file=tmp_path / "job", events_file=tmp_path / "events")))
    assert words["--mixed_precision"] == "fp16"


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_the_way_of_attention_reaches_the_model(name: str, tiny_model_dir: Path) -> None:
    model, _ = load_whole_model(tiny_model_dir, TrainingConfig(attn_implementation=name), zero3=False)
    assert model.config._attn_implementation == name


OTHERS: dict[str, Any] = {
    "start_from": "base",
    "num_train_epochs": [2.5],
    "max_tokens": 77,
    "max_seconds": 9.5,
    "learning_rate": 3e-4,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "warmup_ratio": 0.25,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 5,
    "step_tokens": 4096,
    "packing": False,
    "bf16": False,
    "fp16": True,
    "attn_implementation": "eager",
    "use_liger_kernel": True,
    "save_steps": 7,
    "save_total_limit": 3,
    "gradient_checkpointing": True,
    "report_to": ("tensorboard",),
    "lora_r": 8,
    "lora_alpha": 32.0,
    "lora_dropout": 0.1,
    "lora_target_modules": ("q_proj",),
    "lora_modules_to_save": ("lm_head",),
    "use_dora": True,
    "load_in_4bit": True,
    "publish": "adapter",
    "launch": LaunchConfig(num_processes=2),
    "num_threads": 2,
}
"""A value other than the default for each field."""
OF_ADAPTERS = {name for name in OTHERS if name.startswith("lora_")} | {"use_dora", "load_in_4bit", "publish"}
PHASES: dict[str, dict[str, Any]] = {
    "agent-r": {},
    "agent-r in groups": {"method": "agent-r", "agent_r": {"phases": ["rl"]}},
    "cloning": {"method": "eto", "eto": {"phases": ["sft"]}},
    "own successes": {"method": "eto", "eto": {"phases": ["rft"], "rft": "with_expert"}},
    "preferences": {"method": "eto", "eto": {"phases": ["dpo"]}},
    "groups": {"method": "grpo"},
    "groups with a schedule": {
        "method": "grpo",
        "grpo": {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "warmup_ratio": 0.0},
    },
    "flywheel": {"method": "et-agent", "et_agent": {"phases": ["rft"]}},
    "curriculum": {"method": "et-agent", "et_agent": {"phases": ["rl"]}},
}
REFUSED = {
    "agent-r": set(),
    "own successes": set(),
    "preferences": {
        *("learning_rate", "warmup_ratio", "max_tokens", "packing", "start_from", "num_train_epochs"),
        "lora_dropout",
    },
    "groups": {"num_train_epochs", "max_tokens", "max_seconds", "optim", "fp16", "save_steps", "lora_dropout"},
    "groups with a schedule": {"learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio"},
    "curriculum": {"learning_rate", "lr_scheduler_type", "warmup_ratio", "start_from", "step_tokens"},
}
"""Some fields that a phase does not read."""


def outcome(phase: str, name: str) -> str:
    """Return what becomes of a value of a field in a recipe of one phase: `refused`, `read`,
    `ignored`, or an error about something else.
    """
    value = OTHERS[name]
    beside = {"bf16": False} if name == "fp16" else {"lora_r": 8} if name in OF_ADAPTERS else {}
    settings = beside | {name: dataclasses.asdict(value) if name == "launch" else value}
    try:
        phase_recipe = parse(
            {"name": "t", "model": {"path": "m"}, "iterations": 1, **PHASES[phase], "training": settings}
        )
    except ConfigError as error:
        return "refused" if f"training.{name}: " in str(error) else str(error)
    (training,) = [plan.training for plan in plans_of(phase_recipe) if plan.training is not None]
    if name == "start_from":
        return "read" if training.from_base else "ignored"
    if name == "num_train_epochs":
        return "read" if training.num_train_epochs == value[0] else "ignored"
    reaches = getattr(training.config, name) == value and name not in UNREAD_FIELDS.get(training.objective.kind, {})
    return "read" if reaches else "ignored"


def test_each_field_has_another_value_here() -> None:
    plain = TrainingConfig()
    assert set(OTHERS) == {field.name for field in dataclasses.fields(TrainingConfig)}
    assert [name for name, value in OTHERS.items() if getattr(plain, name) == value] == []


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_setting_is_read_or_refused(phase: str) -> None:
    outcomes = {name: outcome(phase, name) for name in OTHERS}
    assert set(outcomes.values()) <= {"read", "refused"}, outcomes
    assert REFUSED.get(phase, set()) <= {name for name, result in outcomes.items() if result == "refused"}
    if REFUSED.get(phase) == set():
        assert set(outcomes.values()) == {"read"}


def test_a_setting_that_one_of_several_phases_reads_stays() -> None:
    base = {"name": "t", "model": {"path": "m"}, "method": "eto", "iterations": 2}
    training = {"num_train_epochs": [2.5], "learning_rate": 1e-4, "packing": False, "start_from": "base"}
    assert parse({**base, "training": training}).training.packing is False
    with pytest.raises(
        ConfigError, match=r"training.num_train_epochs: its last number is for iteration 2 and later ones"
    ):
        parse({**base, "training": {"num_train_epochs": [3, 2]}})
    with pytest.raises(ConfigError, match=r"eto.dpo.beta: it has more numbers than eto.phases has iterations dpo"):
        parse({**base, "eto": {"phases": ["dpo", "sft"], "dpo": {"beta": [0.1, 0.2]}}})
    for values, fits in (([0.1, 0.2], False), ([0.1], True)):
        options = {"phases": ["rl", "rft"], "curriculum": {"sigma_calls": values}}
        with (
            nullcontext() if fits else pytest.raises(ConfigError, match=r"et_agent.curriculum.sigma_calls: it has more")
        ):
            parse({**base, "method": "et-agent", "et_agent": options})
    back = {"eto": {"phases": ["sft", "dpo", "sft"]}, "iterations": 3}
    assert parse({**base, **back, "training": {"num_train_epochs": [3, 1, 2]}}).num_train_epochs(3) == 2
    assert parse({**base, "iterations": 1, "training": {"num_train_epochs": [3, 2]}}).iterations == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_alpha": 32.0}, "training.lora_alpha: only with LoRA, so set training.lora_r"),
        ({"lora_dropout": 0.1}, "training.lora_dropout: only with LoRA"),
        ({"lora_target_modules": "q_proj"}, "training.lora_target_modules: only with LoRA"),
        ({"max_tokens": 9, "num_train_epochs": [2]}, "training.num_train_epochs: training.max_tokens says how long"),
    ],
)
def test_a_setting_that_another_one_makes_useless_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        recipe(**settings)
