"""What a plan says a recipe needs, held against real models, a real optimizer and the tensors that
autograd keeps.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentr_core import estimates
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.errors import ConfigError, ModelDirectoryError, UserError
from agentr_core.methods.faults import load
from agentr_core.methods.table import method_of
from agentr_core.recipes.models import ModelConfig, VllmConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import LaunchConfig, TrainingConfig
from agentr_core.runtime import machine
from agentr_core.runtime.instances import max_revision_episodes
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import OutputCounts
from agentr_core.system import data_path
from agentr_core.training.parent import load_whole_model, lora_config
from flows.cli import cli
from flows.commands.needs import WorldCounts
from flows.commands.plan import describe, longest_row
from flows.preflight.requirements import trainer_memory_faults
from tasks.workspaces import STORE_FILE

# PEFT asks for an attribute that Transformers has renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "deployments" / "recipes"
LORA = TrainingConfig(lora_r=16, lora_alpha=32)
"""The widths of these adapters are the same in all tests."""


@pytest.fixture(scope="module")
def wide(save_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers weigh more than its vocabulary."""
    options = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_key_value_heads": 2}
    path: Path = save_tiny_model(tmp_path_factory.mktemp("wide"), **options)
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that normalizes its queries and keys."""
    path = tmp_path_factory.mktemp("qwen")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=300, **sizes, **heads)).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def halved(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with weights of 16 bits."""
    path = tmp_path_factory.mktemp("halved")
    shutil.copytree(wide, path, dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("name", "parameters", "adapter", "kept"),
    [
        # Layers, and heads of 128 that are kept of each.
        ("Qwen3-4B", 4_022_468_096, 33_030_144, 36 * 8),
        ("Qwen3-8B", 8_190_735_360, 43_646_976, 36 * 8),
        ("Qwen2.5-7B-Instruct", 7_615_616_512, 40_370_176, 28 * 4),
        ("Qwen2.5-72B-Instruct", 72_706_203_648, 210_534_400, 80 * 8),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(
    name: str, parameters: int, adapter: int, kept: int
) -> None:
    shape = estimates.read_shape(Path("models") / name)
    assert shape.parameters == parameters
    assert estimates.training_memory(shape, LORA, 1).trained == adapter
    # Keys and values, 2 bytes.
    assert estimates.sampling_memory(shape, ModelConfig(path=name, dtype="bfloat16")).token == kept * 128 * 2 * 2


def parent(path: Path, config: TrainingConfig) -> Any:
    """Return the model of a directory as a training has it; it needs no tokenizer."""
    model, _ = load_whole_model(path, config, zero3=False)
    return get_peft_model(model, lora_config(config)) if config.lora_r else model


def memory_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, gradients and optimizer states."""
    tensors: list[torch.Tensor] = [parameter for parameter in model.parameters()]
    tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("config", [TrainingConfig(), LORA, replace(LORA, bf16=False)], ids=["all", "lora", "lora32"])
@pytest.mark.parametrize("stored", ["wide", "halved"])
def test_weights_and_states_are_those_of_a_real_optimizer(
    stored: str, config: TrainingConfig, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(stored)
    model = parent(path, config)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16 is True):
        model(input_ids=torch.arange(32)[None], labels=torch.arange(32)[None]).loss.backward()
    optimizer.step()

    need = estimates.training_memory(estimates.read_shape(path), config, 1)
    assert need.weights + need.states == pytest.approx(memory_bytes(model, optimizer), rel=0.01)


def saved_bytes(model: Any, row: int) -> int:
    """Return the bytes that a forward pass through the layers keeps for the backward pass, weights
    apart.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    inner = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Kept until counted, so that no address is taken twice.
        result = inner(input_ids=torch.arange(row)[None] % 300, use_cache=False).last_hidden_state
    total = sum(storage.nbytes() for storage in storages.values())
    del result
    return total


@pytest.mark.parametrize(
    ("stored", "config"),
    [
        ("wide", TrainingConfig(bf16=False)),
        ("wide", replace(LORA, bf16=False)),
        ("halved", LORA),
        ("halved", replace(LORA, lora_dropout=0.1)),
        ("qwen", LORA),
    ],
    ids=["all", "lora32", "lora", "dropout", "qwen3"],
)
def test_activations_are_about_those_that_autograd_keeps(
    stored: str, config: TrainingConfig, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(stored)
    model = parent(path, config)
    model.train()
    need = estimates.training_memory(
        estimates.read_shape(path), replace(config, gradient_checkpointing=False, per_device_train_batch_size=1), 256
    )
    assert need.activations / saved_bytes(model, 256) == pytest.approx(1.0, abs=0.3)


def test_checkpointing_keeps_inputs_of_layers_and_one_layer(wide: Path) -> None:
    shape = estimates.read_shape(wide)
    plain = replace(LORA, per_device_train_batch_size=1)
    without = estimates.training_memory(shape, replace(plain, gradient_checkpointing=False), 100).activations
    assert estimates.training_memory(shape, plain, 100).activations == without // 3 + 100 * 3 * 128 * 2


def test_zero_spreads_what_it_spreads(wide: Path) -> None:
    def need(zero: str) -> estimates.TrainingMemory:
        config = replace(TrainingConfig(), launch=LaunchConfig(num_processes=4, deepspeed=zero))
        return estimates.training_memory(shape, config, 1)

    shape = estimates.read_shape(wide)
    count = shape.parameters
    assert (need("zero2").weights, need("zero2").states) == (2 * count, 14 * count // 4)
    assert (need("zero3").weights, need("zero3").states) == (2 * count // 4, 14 * count // 4)
    memory = need("zero3-offload")
    assert (memory.weights, memory.states) == (0, 0)
    assert memory.host_bytes == pytest.approx(16 * count, rel=1e-6)


def test_a_model_over_several_gpus_leaves_more_room() -> None:
    shape = estimates.read_shape(Path("models/Qwen3-8B"))
    one_gpu, two_gpus = (
        estimates.sampling_memory(
            shape, ModelConfig(backend="vllm", path="q", dtype="bfloat16", vllm=VllmConfig(tensor_parallel_size=n))
        )
        for n in (1, 2)
    )
    assert (two_gpus.weights, two_gpus.token) == (one_gpu.weights // 2, one_gpu.token // 2)
    assert one_gpu.sequences(24 * estimates.GIB, 8192) == 7
    assert one_gpu.sequences(one_gpu.weights - 1, 8192) == 0


@pytest.mark.parametrize("name", ["textcraft-qwen3-4b", "textcraft-grpo-qwen3-4b", "textcraft-qwen3-8b-8gpu"])
def test_the_recipes_for_qwen3_fit_the_cards_they_name(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = describe(RECIPES / f"{name}.yaml", [], gpu_gib=80)
    assert "still missing: the weights of models/Qwen3-" in text
    assert "already done" not in text
    assert "that is too much" not in text
    assert "lower model.context_length" not in text


def test_group_rl_wants_servers_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTR_VLLM", "http://127.0.0.1:8100")
    with pytest.raises(UserError, match="AGENTR_VLLM: group RL replaces the weights after each step"):
        describe(RECIPES / "textcraft-grpo-qwen3-4b.yaml", [])
    describe(RECIPES / "textcraft-qwen3-4b.yaml", [])


@pytest.mark.parametrize(
    ("gpus", "share", "gib", "told"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 0.9, 80, ""),
        ([0, 1, 2, 3, 4, 5, 6], 0.9, 80, "group RL trains on GPU 0 and needs at least 1"),
        ([], 0.9, 80, "of its 80 GiB, and servers take 0.9 of them; give these other GPUs, lower"),
        ([], 0.5, 80, ""),
        ([], 0.6, 24, "of its 24 GiB, and servers take 0.6 of them"),
    ],
)
def test_servers_leave_the_trainer_of_group_rl_room_on_its_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], share: float, gib: int, told: str
) -> None:
    changes = (f"model.vllm.gpus={gpus}", f"model.vllm.gpu_memory_utilization={share}", "training.bf16=true")
    recipe = load(RECIPES / "textcraft-grpo-qwen3-4b.yaml", changes)
    assert trainer_memory_faults(recipe) == [], "a machine without a GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gib * estimates.GIB)
    )
    faults = trainer_memory_faults(recipe)
    assert len(faults) == bool(told)
    assert all(told in fault for fault in faults)
    assert trainer_memory_faults(load(RECIPES / "textcraft-qwen3-4b.yaml")) == [], "its servers stop before it trains"


def test_a_server_that_sleeps_leaves_the_trainer_all_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = SimpleNamespace(total_memory=80 * estimates.GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    # The server of the actor is on GPUs 0 to 6; with 4 processes the trainer is on the first four.
    on_all = ["model.vllm.gpus=[0, 1, 2, 3, 4, 5, 6]", "training.bf16=true"]
    split = ["training.launch={num_processes: 4, fsdp: true}", "model.vllm.gpus=[1, 2, 3, 4, 5, 6, 7]"]
    asleep = "model.vllm.sleep=true"
    assert trainer_memory_faults(load(RECIPES / "textcraft-grpo-qwen3-4b.yaml", on_all))
    assert trainer_memory_faults(load(RECIPES / "textcraft-grpo-qwen3-4b.yaml", [*on_all, asleep])) == []
    (fault,) = trainer_memory_faults(
        load(RECIPES / "textcraft-grpo-qwen3-4b.yaml", [*on_all, *split, "training.lora_r=0", "training.lora_alpha=16"])
    )
    assert "group RL trains on GPU 1 and needs at least" in fault
    assert trainer_memory_faults(load(RECIPES / "textcraft-grpo-qwen3-4b.yaml", [*on_all, *split, asleep])) == []


def test_a_plan_tells_the_memory_of_group_rl_on_each_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    file, whole = (
        RECIPES / "textcraft-grpo-qwen3-4b.yaml",
        ["training.lora_r=0", "training.lora_alpha=16", "training.bf16=true"],
    )
    changes = [*whole, "training.launch={num_processes: 8, fsdp: true}", "model.vllm.gpus=[0, 1, 2, 3, 4, 5, 6]"]
    count = 4_022_468_096
    weights, states = f"{4 * count / 8 / estimates.GIB:.3g} GiB", f"{12 * count / 8 / estimates.GIB:.3g} GiB"
    text = describe(file, changes, gpu_gib=80)
    assert f"group RL, all weights, 8 processes under fsdp: weights {weights}, gradients and optimizer {states}" in text
    match = re.search(
        r"GPU 0, 1, 2, 3, 4, 5, 6: trainer and sampler together, ([\d.]+) GiB\n    that is too much; set", text
    )
    assert match is not None
    assert float(match[1]) > 72
    text = describe(file, [*changes, "model.vllm.sleep=true"], gpu_gib=80)
    assert re.search(r"GPU 0, 1, 2, 3, 4, 5, 6: trainer and sampler take turns, [\d.]+ GiB and 72 GiB; ", text)
    assert f"{16 * count / 8 / estimates.GIB:.3g} GiB of each process wait in main memory while vLLM samples" in text
    assert "too much" not in text
    for zero in ("zero2", "zero3"):
        launch = f"training.launch={{num_processes: 8, deepspeed: {zero}}}"
        with pytest.raises(UserError, match=r"model\.vllm\.sleep: DeepSpeed leaves the GPU to nobody unless"):
            describe(file, [*whole, launch, "model.vllm.sleep=true"])
    launch = "training.launch={num_processes: 8, deepspeed: zero3-offload}"
    asleep = [*whole, launch, "model.vllm.sleep=true", changes[-1]]
    assert "trainer and sampler take turns" in describe(file, asleep, gpu_gib=80)


def test_the_reference_of_group_rl_is_split_as_its_policy(wide: Path) -> None:
    def need(beta: float, **launch: Any) -> estimates.TrainingMemory:
        grpo_recipe = load(RECIPES / "textcraft-grpo-tiny.yaml", [f"grpo.beta={beta}", "training.launch={}"])
        training = replace(grpo_recipe.training, bf16=False, launch=LaunchConfig(num_processes=4, **launch))
        return estimates.group_rl_memory(shape, replace(grpo_recipe, training=training), 64)

    shape = estimates.read_shape(wide)
    for launch, reference in (
        ({}, 4 * shape.parameters),
        ({"deepspeed": "zero2"}, 4 * shape.parameters),
        ({"deepspeed": "zero3"}, shape.parameters),
        ({"fsdp": True}, shape.parameters),
    ):
        assert need(0.1, **launch).weights - need(0.0, **launch).weights == reference
    offload = {"fsdp": True, "fsdp_config": {"cpu_offload": True}}
    assert need(0.1, **offload).host_bytes - need(0.0, **offload).host_bytes == 4 * shape.parameters


def test_a_row_of_group_rl_is_as_long_as_an_episode_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    file = RECIPES / "textcraft-grpo-qwen3-4b.yaml"
    assert "activations of 1 x 4,096 tokens" in describe(file, [], gpu_gib=80)


def test_what_does_not_fit_is_said_with_a_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    output = CliRunner().invoke(cli, ["plan", str(RECIPES / "textcraft-qwen3-4b.yaml"), "--gpu-gib", "1"]).output
    assert (
        "room for 0 sequences of 8,192 tokens\n    the weights alone exceed the 922 MiB that it may take; raise"
        in output
    )
    assert (
        "in all\n    that is too much even without activations, 9.48 GiB; set training.load_in_4bit=true, or" in output
    )


def test_a_configuration_alone_is_enough_and_an_unknown_name_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES / "textcraft-tiny.yaml"
    shutil.copytree(
        data_path("models", "textcraft-tiny"), tmp_path / "mine", ignore=shutil.ignore_patterns("*.safetensors")
    )
    changes = ["models={}", f"model.path={tmp_path / 'mine'}", f"workspace={tmp_path}"]
    assert f"still missing: the weights of {tmp_path / 'mine'}; counted by {tmp_path / 'mine'}" in describe(
        recipe, changes
    )
    with pytest.raises(ModelDirectoryError, match=r"nowhere in .* does not exist; give a Hugging Face"):
        describe(recipe, ["models={}", "model.path=nowhere"])


def recipe(name: str, *changes: str) -> Recipe:
    return load(RECIPES / f"{name}.yaml", list(changes))


def tokens(recipe: Recipe, train: int, test: int, states: int = 0) -> list[estimates.TokenEstimate]:
    return estimates.token_estimates(recipe, method_of(recipe).demands(recipe, train, test), test, states)


def test_only_iterations_that_search_sample_in_a_search() -> None:
    sections = ("training", "data", "search", "critique", "pairs", "splice", "grpo")
    changes = ["context=stop", *(f"{section}={{}}" for section in sections)]
    only_rl = recipe("textcraft-agent-r", *changes, "agent_r.phases=[rl]")
    assert [estimate.stage for estimate in tokens(only_rl, 10, 5)] == ["groups", "evaluate"]
    (line,) = method_of(only_rl).describe(only_rl, 10, 5)
    assert line.startswith("each iteration: 100 steps of 32 groups")
    short = recipe("textcraft-agent-r", *changes, "agent_r.phases=[sft, rl]", "iterations=1")
    assert [estimate.stage for estimate in tokens(short, 10, 5)] == ["search", "critique", "evaluate"]
    flywheel = recipe("reasoning-et-agent-tiny", "et_agent.phases=[rft, rl]", "iterations=1")
    assert [estimate.stage for estimate in tokens(flywheel, 10, 5)] == ["flywheel", "evaluate"]
    eto_recipe = recipe("textcraft-eto-tiny", "eto.phases=[sft, dpo]", "iterations=1", "data.replay=true")
    assert not any("dpo" in line for line in method_of(eto_recipe).describe(eto_recipe, 10, 5))


def test_training_on_variants_of_what_is_tested_is_told_before_anything_is_sampled() -> None:
    with pytest.raises(ConfigError, match=r"textcraft/renamed-test/\d+ is held-out instance textcraft/test/\d+, or a"):
        describe(RECIPES / "textcraft-tiny.yaml", ["instances.train=renamed-test", "evaluation.sets={}"])


def test_states_of_the_revision_test_are_counted_as_if_the_base_model_failed_everywhere() -> None:
    def counted(*changes: str) -> int:
        return max_revision_episodes(recipe("textcraft-tiny", *changes), TextCraft())

    assert counted() == 80
    assert counted("evaluation.revision_test.limit=0") == 2 * 100
    assert counted("evaluation.revision_test.limit=999", "instances.test_limit=7") == 2 * 7
    assert counted("evaluation.revision_test.enabled=false") == 0


def test_tokens_are_those_of_the_stages_that_run() -> None:
    tiny = tokens(recipe("textcraft-tiny"), 120, 100, 80)
    assert [(estimate.stage, estimate.replies, estimate.tokens) for estimate in tiny] == [
        ("search", 120 * 3 * 4 * 15, 120 * 3 * 4 * 15 * 72),
        ("critique", 120 * 6 * 15, 120 * 6 * 15 * 120),
        ("evaluate", 100 * 20 + 80 * 12, (100 * 20 + 80 * 12) * 72),
    ]
    for changes in (["data.use=good"], ["splice.mode=direct", "splice.prune=false"]):
        assert [estimate.stage for estimate in tokens(recipe("textcraft-tiny", *changes), 5, 5)] == [
            "search",
            "evaluate",
        ]
    assert [estimate.stage for estimate in tokens(recipe("textcraft-eto-tiny", "eto.phases=[sft]"), 5, 7)] == [
        "evaluate"
    ]
    assert [estimate.stage for estimate in tokens(recipe("webshop-quick"), 5, 5)] == ["evaluate"]
    eto = tokens(recipe("textcraft-eto-tiny", "eto.explore.samples=3"), 5, 7)
    assert [estimate.stage for estimate in eto] == ["explore", "evaluate"]
    assert eto[0].replies == 5 * 4 * recipe("textcraft-eto-tiny").eto.explore.max_steps
    with pytest.raises(ConfigError):
        recipe("textcraft-tiny", "search.dives=0")


def test_helpers_are_counted_with_limits_of_their_own() -> None:
    changes = ["et_agent.flywheel.correct=[C0, C1, C2]", "et_agent.flywheel.incorrect=[I1, I4]"]
    changes += ["models.judge={path: m}", "et_agent.behaviour={votes: 10, nudge: true}"]
    agent_recipe = recipe("reasoning-et-agent-quick", *changes)
    assert (
        agent_recipe.et_agent.flywheel.editor.max_new_tokens,
        agent_recipe.et_agent.flywheel.reflector.max_new_tokens,
    ) == (120, 120)
    by_stage = {
        estimate.stage: (estimate.role, estimate.replies, estimate.tokens) for estimate in tokens(agent_recipe, 30, 20)
    }
    # Two rounds, each of one trajectory of a question.
    assert by_stage["edit"] == ("editor", 30 * 2 * 2, 30 * 2 * 2 * 120)
    assert by_stage["reflect"] == ("reflector", 30 * 2 * 3, 30 * 2 * 3 * 120)
    assert by_stage["votes"] == ("judge", 20 * 10, 20 * 10 * 128)
    assert by_stage["nudge"] == ("actor", 20 * 8, 20 * 8 * 120)
    thoughts = recipe("textcraft-eto-tiny", "eto.phases=[sft]", "eto.expert.thoughts.enabled=true")
    assert tokens(thoughts, 5, 7)[0] == estimates.TokenEstimate(
        stage="think", role="editor", replies=5 * 20 * 3, tokens=5 * 20 * 3 * 256
    )
    splice_recipe = recipe("textcraft-tiny", "splice={mode: continued}", "pairs.per_tree=2")
    assert {estimate.stage: estimate.replies for estimate in tokens(splice_recipe, 3, 5)}["continue"] == 3 * 2 * 4 * 20


def test_the_limits_of_helpers_are_the_flywheels_unless_they_are_given() -> None:
    editor_recipe = recipe("reasoning-et-agent-quick", "et_agent.flywheel.editor.max_new_tokens=4096")
    assert editor_recipe.et_agent.flywheel.editor.max_new_tokens == 4096
    assert editor_recipe.et_agent.flywheel.reflector.max_new_tokens == 120
    plain = recipe("reasoning-et-agent-quick", "et_agent.flywheel={}")
    assert plain.et_agent.flywheel.editor.max_new_tokens == plain.et_agent.flywheel.max_new_tokens == 4096


def test_the_limit_of_an_episode_bounds_its_tokens() -> None:
    agent_recipe = recipe(
        "reasoning-et-agent-quick", "et_agent.flywheel.max_episode_tokens=500", "evaluation.max_episode_tokens=300"
    )
    by_stage = {estimate.stage: estimate.tokens for estimate in tokens(agent_recipe, 10, 7)}
    assert by_stage == {"flywheel": 10 * 6 * 500, "evaluate": 7 * 300}


@pytest.mark.parametrize(
    ("changes", "tokens_of_row"),
    [
        (["data.use=expert", "data.general.share=0", "data.max_length=0"], 300),
        (["data.use=expert", "data.general.share=0", "data.max_length=200"], 200),
        (["data.use=expert", "data.general.share=0", "data.max_length=8192"], 300),
        (["data.max_length=8192"], 8192),
        (["data.max_length=0"], 4096),
    ],
)
def test_a_row_is_as_long_as_the_expert_s_episodes_where_nothing_else_is_trained(
    changes: list[str], tokens_of_row: int, tmp_path: Path
) -> None:
    lengths = estimates.EpisodeLengths(replies=5.0, tokens=20.0, source="s", longest=300)
    counts = {"": WorldCounts(train=3, test=1, states=0, lengths=lengths)}
    assert longest_row(recipe("textcraft-tiny", f"workspace={tmp_path}", *changes), counts) == tokens_of_row


def test_a_row_of_a_model_whose_weights_are_missing_is_estimated_beside_a_store_of_other_runs(tmp_path: Path) -> None:
    grpo_recipe = recipe("textcraft-grpo-qwen3-4b", f"workspace={tmp_path}")
    Store(tmp_path / STORE_FILE).write({})
    assert longest_row(grpo_recipe, {}) == (grpo_recipe.data.max_length or 4096)


@pytest.mark.parametrize(
    ("known", "likely"),
    [
        # As stored: replies of an episode, and tokens of a reply.
        (
            estimates.EpisodeLengths(replies=5.0, tokens=20.0, source="s"),
            {"explore": 7 * 5 * 5 * 20, "evaluate": 3 * 5 * 20},
        ),
        # Nothing is likelier than what may be at most.
        (
            estimates.EpisodeLengths(replies=99.0, tokens=999.0, source="s"),
            {"explore": 7 * 5 * 20 * 72, "evaluate": 3 * 20 * 72},
        ),
        # Between the expert's 1.25 replies and the 20 that there may be: 2.5.
        (
            estimates.EpisodeLengths(replies=1.25, tokens=20.0, source="s", longest=300),
            {"explore": 7 * 5 * 50, "evaluate": 3 * 50},
        ),
    ],
)
def test_what_is_likely_is_never_above_what_is_possible(
    known: estimates.EpisodeLengths, likely: dict[str, int]
) -> None:
    eto_recipe = recipe("textcraft-eto-tiny")
    token_estimates = estimates.token_estimates(
        eto_recipe, method_of(eto_recipe).demands(eto_recipe, 7, 3), 3, 0, lengths=known
    )
    assert {estimate.stage: estimate.likely for estimate in token_estimates} == likely
    assert all(estimate.likely <= estimate.tokens for estimate in token_estimates)


def test_a_search_is_likely_to_be_as_the_stored_ones() -> None:
    trees, verdicts = OutputCounts(units=10, replies=1000, tokens=20_000), OutputCounts(units=4, replies=50, tokens=500)
    lengths = estimates.EpisodeLengths(replies=5.0, tokens=20.0, source="s", tree_counts=trees, verdict_counts=verdicts)
    tiny_recipe = recipe("textcraft-tiny")
    token_estimates = estimates.token_estimates(
        tiny_recipe, method_of(tiny_recipe).demands(tiny_recipe, 24, 3), 3, 0, lengths=lengths
    )
    assert {estimate.stage: estimate.likely for estimate in token_estimates} == {
        "search": 48_000,
        "critique": 1200,
        "evaluate": 300,
    }


@pytest.mark.parametrize(("free", "said"), [(64, "  fits: "), (1, "  does not fit: ")])
def test_a_plan_compares_with_what_is_free_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, said: str
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(total=64 * estimates.GIB, free=free * estimates.GIB))
    monkeypatch.chdir(ROOT)
    changes = [f"workspace={tmp_path}", "training.launch={num_processes: 1}", "model.workers=1"]
    text = describe(RECIPES / "textcraft-tiny.yaml", changes)
    assert f"memory, estimated; here are 64 GiB without a GPU, {free} GiB free now" in text
    assert said in text
    lines = text[text.index("each iteration samples") : text.index("\nfields that differ")].splitlines()
    assert max(map(len, lines)) <= 80
    assert "  likely: " in text
    assert "GPU of 80 GiB" not in text


def test_a_plan_on_a_gpu_tells_what_is_free_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = machine.Memory(total=80 * estimates.GIB, free=9 * estimates.GIB, gpu="NVIDIA H100")
    monkeypatch.setattr(machine, "memory", lambda: memory)
    monkeypatch.chdir(tmp_path)
    text = describe(RECIPES / "textcraft-qwen3-4b.yaml", [])
    assert "memory, estimated, of NVIDIA H100, 80 GiB, 9 GiB free now (another: --gpu-gib)" in text
    assert "that is too much" in text


def test_a_container_has_the_memory_of_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory().total > 300 << 20
    (tmp_path / "memory.max").write_text(f"{300 << 20}\n", encoding="utf-8")
    (tmp_path / "memory.current").write_text(f"{100 << 20}\n", encoding="utf-8")
    assert machine.memory() == machine.Memory(total=300 << 20, free=200 << 20)
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    assert machine.memory().total > 300 << 20
