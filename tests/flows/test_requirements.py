"""What a later stage would only then find missing is told by `agentr plan` and `agentr run`, before
the first reply.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from agentr_core.errors import ConfigError, SandboxError
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import start_run
from agentr_core.stages.report import build_report
from flows.commands.plan import describe
from flows.flywheel import flywheel
from tasks.wiring import load_recipe, quiet_context, run_reference

Answer = Callable[..., str]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
ZERO = "training.launch={deepspeed: %s}"
LORA = "training.lora_r=4"


def without(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is not None, reason=f"{package} is installed")


FAULTS = [
    (["training.lr_scheduler_type=cosin"], "training.lr_scheduler_type 'cosin' is unknown; choose one of linear, "),
    (["training.lr_scheduler_type=warmup_stable_decay"], "warmup_stable_decay takes other arguments"),
    (["training.lr_scheduler_type=cosine_with_min_lr"], "cosine_with_min_lr takes other arguments"),
    (["training.lr_scheduler_type=reduce_lr_on_plateau"], "reduce_lr_on_plateau follows the losses of evaluations"),
    (["training.lr_scheduler_type=greedy"], "greedy follows the losses of evaluations"),
    (["training.report_to=[tensorbord]"], "training.report_to: 'tensorbord' is unknown; choose among "),
    pytest.param(["training.report_to=[wandb]"], "training.report_to: wandb is not installed", marks=without("wandb")),
    ([ZERO % "zero9"], "training.launch.deepspeed: there is no file zero9; name one, or choose zero2"),
    ([ZERO % "{folder}/broken.json"], "broken.json is not readable JSON"),
    pytest.param([ZERO % "zero2"], "training.launch.deepspeed needs the package", marks=without("deepspeed")),
    ([LORA, "training.load_in_4bit=true", ZERO % "{folder}/own.json"], "cannot be split by ZeRO-3, as "),
    pytest.param([LORA, "training.load_in_4bit=true"], "training.load_in_4bit (QLoRA) needs a CUDA", marks=NO_GPU),
    pytest.param([LORA, "training.load_in_4bit=true"], "needs bitsandbytes", marks=without("bitsandbytes")),
    ([LORA, "training.lora_target_modules=[q_proj, v_porj]"], "the model has no module v_porj; it has model, "),
    ([LORA, "training.lora_target_modules=.*_porj"], "training.lora_target_modules: "),
    ([LORA, "training.lora_target_modules=[norm]"], "training.lora_target_modules: "),
    ([LORA, "training.lora_target_modules=[lm_head]"], "an adapter on the output layer of"),
    ([LORA, "training.lora_modules_to_save=[lm_haed]"], "training.lora_modules_to_save: the model has no module"),
    (["model.device=gpu"], "model.device 'gpu' is not a device; use auto, cpu or cuda"),
    (["model.device=meta"], "model.device is 'meta', which this backend does not run on"),
    pytest.param(["model.device=cuda:7"], "model.device is 'cuda:7', but torch sees", marks=NO_GPU),
    pytest.param(["models.judge.device=cuda:7"], "models.judge.device is 'cuda:7', but torch sees", marks=NO_GPU),
    (["models.judge.context_length=999999"], "model.context_length is 999999, but the model of"),
    (["model.context_length=4"], "a context of 4 tokens has no room for a reply, since what the model reads before"),
    (["data.general={share: 0.5, file: nowhere.jsonl}"], "nowhere.jsonl"),
    (["data.general={share: 0.5, file: {folder}/chat.jsonl}"], "chat.jsonl has no conversation to train on, and 1 "),
    (["evaluation.revision_test.states=abc"], "there is no store at "),
    (["method=eto", "eto.phases=[dpo]", "eto.preferences.against=own", "eto.explore.samples=2", "training={}",
      "eto.dpo.lr_scheduler_type=cosin"],
     "eto.dpo.lr_scheduler_type 'cosin' is unknown"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, door_model: Path, recipe: Path) -> Path:
    """A folder with files that a recipe may name; its judge is a model of its own."""
    shutil.copytree(door_model, tmp_path / "judge")
    with recipe.open("a", encoding="utf-8") as file:
        file.write(f"models: {{judge: {{path: {tmp_path / 'judge'}, device: cpu}}}}\n")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}), encoding="utf-8")
    silent = {"messages": [{"role": "user", "content": "?"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(silent) + "\n", encoding="utf-8")
    return tmp_path


def changes(overrides: list[str], folder: Path) -> list[str]:
    return [word for override in overrides for word in ("-o", override.replace("{folder}", str(folder)))]


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(("overrides", "said"), FAULTS)
def test_a_fault_of_a_later_stage_is_told_before_the_first_reply(
    refusal: Answer, recipe: Path, folder: Path, command: str, overrides: list[str], said: str
) -> None:
    if "method=eto" in overrides:
        plain = recipe.read_text(encoding="utf-8").splitlines()
        foreign = ("search:", "critique:", "pairs:", "splice:")
        recipe.write_text("\n".join(line for line in plain if not line.startswith(foreign)), encoding="utf-8")
    assert said in refusal(command, recipe, *changes(overrides, folder))
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize("recipe_file", ["reasoning-et-agent-tiny", "reasoning-grpo-tiny"])
def test_no_policy_judges_its_own_answers(refusal: Answer, tmp_path: Path, recipe_file: str) -> None:
    options = ["-o", f"workspace={tmp_path / 'runs'}", "-o", "environment.options.judged=math"]
    message = refusal("plan", Path("deployments/recipes") / f"{recipe_file}.yaml", *options)
    assert "models.judge: environment reasoning asks it whether answers are right" in message


@pytest.mark.parametrize("command", ["plan", "run", "collect", "eval", "headroom"])
def test_a_sandbox_that_leaves_files_open_must_be_named(
    refusal: Answer, open_files: None, tmp_path: Path, command: str
) -> None:
    recipe = Path("deployments/recipes/reasoning-grpo-tiny.yaml")
    message = refusal(command, recipe, "-o", f"workspace={tmp_path / 'runs'}")
    assert "what holds is seccomp, where code can use your files; to run code there, name that level" in message
    assert not (tmp_path / "runs" / "store.duckdb").exists()


def test_a_plan_says_how_far_code_is_confined(open_files: None, tmp_path: Path) -> None:
    recipe, workspace = Path("deployments/recipes/reasoning-grpo-tiny.yaml"), f"workspace={tmp_path / 'runs'}"
    plan = describe(recipe, [workspace, "environment.options.sandbox=seccomp"])
    assert "\nreasoning: code of the model runs at sandbox level seccomp, where code can use your files\n" in plan
    assert "sandbox level" not in describe(recipe, [workspace, "environment.options.tools=[search]"])


def test_a_report_says_how_far_code_was_confined(open_files: None, tmp_path: Path) -> None:
    def begun(*changes: str) -> RunContext:
        recipe = load_recipe(
            Path("deployments/recipes/reasoning-grpo-tiny.yaml"), [f"workspace={tmp_path / 'runs'}", *changes]
        )
        ctx = quiet_context(run_reference(recipe), recipe)
        asyncio.run(start_run(ctx))
        return ctx

    weak = begun("environment.options.sandbox=seccomp")
    versions = build_report(weak, 0).versions
    assert versions["sandbox of reasoning"] == "seccomp, where code can use your files"
    with pytest.raises(SandboxError, match="what holds is seccomp"):
        begun()


@pytest.mark.parametrize("command", ["plan", "run"])
def test_all_faults_are_told_together_and_each_once(
    refusal: Answer, recipe: Path, folder: Path, door_model: Path, command: str
) -> None:
    shutil.copytree(door_model, folder / "mute")
    (folder / "mute" / "chat_template.jinja").write_text("{{ raise_exception('no') }}", encoding="utf-8")
    message = refusal(
        command,
        recipe,
        *changes(
            [
                f"model.path={folder / 'mute'}",
                "models.judge.device=gpu",
                "training.lr_scheduler_type=cosin",
                "training.report_to=[tensorbord]",
                "instances.train=attic",
            ],
            folder,
        ),
    )
    for fault in ("'gpu' is not a device", "'cosin' is unknown", "'tensorbord' is unknown", "no split 'attic'"):
        assert message.count(fault) == 1
    assert str(folder / "mute") in message


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_deployment_tells_them_too(prefect_server: None, recipe: Path, folder: Path) -> None:
    wrong = ["training.lr_scheduler_type=cosin", "training.report_to=[tensorbord]"]
    with pytest.raises(ConfigError, match=r"'cosin' is unknown.*\n  training\.report_to: 'tensorbord' is unknown"):
        asyncio.run(flywheel(str(recipe), wrong))
    assert not (recipe.parent / "runs").exists()
