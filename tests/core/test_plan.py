"""What `agentr plan` shows of a recipe's fields and stages, and what it advises."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from finished import finish

from agentr_core import estimates
from agentr_core.errors import UserError
from agentr_core.estimates import GIB
from agentr_core.methods.faults import load, parse
from agentr_core.methods.table import method_of, plans_of
from agentr_core.recipes.models import ModelConfig
from agentr_core.recipes.recipe import Recipe, field_values
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime import machine
from agentr_core.store.codec.ledger import timing_rows
from flows.commands import plan
from flows.commands.needs import sampling_advice, training_advice
from flows.preflight.checks import check
from tasks.wiring import load_recipe

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
FULL, LORA = TrainingConfig(), TrainingConfig(lora_r=8)


def plan_names(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the names of the fields and of the stages that a plan of Agent-R shows."""
    stages = plan._sections_by_stage(recipe, [stage for each in plans_of(recipe) for stage in each.stages])
    return [field.name for field in plan._fields_read(recipe, method_of(recipe), stages)], list(stages)


def test_every_field_that_a_run_reads_is_there_once_and_no_stage_that_it_does_not_have() -> None:
    fields, stages = plan_names(load(RECIPES / "textcraft-agent-r.yaml"))
    assert len(set(fields)) == len(fields)
    assert {"seed", "promote", "agent_r.phases", "model.workers", "models.judge", "search.dives"} <= set(fields)
    prefixes = (
        "grpo.",
        "eto.",
        "base.",
        "compare.",
        "model.vllm",
        "model.server",
        "models.editor",
        "splice.continuation",
    )
    assert not [name for name in fields if name.startswith(prefixes)]
    assert stages == ["collect", "critique", "splice", "dataset", "train", "evaluate"]

    fields, stages = plan_names(parse({"name": "r", "model": {"path": "m"}, "agent_r": {"phases": ["rl"]}}))
    assert "grpo.steps" in fields
    assert not [name for name in fields if name.startswith(("search.", "splice."))]
    assert stages == ["reinforce", "evaluate"]


@pytest.mark.parametrize(
    ("changes", "read", "unread"),
    [
        (["model.backend=vllm"], ["model.vllm.gpus", "model.dtype"], ["model.workers", "model.server.model"]),
        (["models.judge={backend: openai, server: {model: m}}"], ["models.judge.server.model"], ["models.judge.dtype"]),
        (["splice.mode=continued"], ["splice.continuation.samples"], []),
        ([], ["evaluation.revision_test.cuts"], ["training.lora_alpha", "data.general.file", "teacher_iterations"]),
        (["training.lora_r=4"], ["training.lora_alpha"], []),
        (["data.general={file: f, share: 0.1}"], ["data.general.file"], []),
        (["models.teacher={path: t}"], ["teacher_iterations", "models.teacher.path"], ["models.summariser"]),
        (
            ["evaluation.revision_test.enabled=false"],
            ["evaluation.revision_test.enabled"],
            ["evaluation.revision_test.cuts"],
        ),
        (["environment.name=reasoning"], ["models.summariser"], ["models.editor"]),
        (
            ["method=eto"],
            ["eto.expert.thoughts.enabled"],
            ["eto.expert.thoughts.tries", "models.editor", "models.judge"],
        ),
    ],
)
def test_a_plan_has_no_field_that_another_one_switches_off(
    changes: list[str], read: list[str], unread: list[str]
) -> None:
    fields, _ = plan_names(parse({"name": "r", "model": {"path": "m"}}, changes))
    assert set(read) <= set(fields)
    assert not set(unread) & set(fields)


@pytest.mark.slow
def test_a_changed_field_that_is_not_read_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    changes = ["evaluation.revision_test={enabled: false, cuts: 3}", f"workspace={tmp_path}"]
    text = plan.describe(RECIPES / "textcraft-tiny.yaml", changes)
    assert (
        "fields that differ from their defaults and that this run does not read\n  evaluation.revision_test.cuts = 3\n"
    ) in text


def test_what_was_changed_has_a_line_of_its_own_and_the_rest_share_lines_by_section() -> None:
    recipe = parse({"name": "r", "model": {"path": "m"}, "models": {"judge": {"path": "j"}}}, ["search.dives=3"])
    fields = field_values(recipe)
    assert [(field.name, field.value) for field in fields if not field.is_default] == [
        ("name", "r"),
        ("model.path", "m"),
        ("models.judge.path", "j"),
        ("search.dives", 3),
    ]
    lines = plan._field_lines(fields)
    assert lines[1:5] == ['  name = "r"', '  model.path = "m"', '  models.judge.path = "j"', "  search.dives = 3"]
    assert "  model.prices: prompt=0.0, completion=0.0" in lines
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_a_program_reads_the_same_plan_in_one_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    # What is free changes from one plan to the next.
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(total=8 * GIB, free=4 * GIB))
    file, changes = RECIPES / "textcraft-qwen3-4b.yaml", ["search.dives=5"]
    description = json.loads(plan.describe(file, changes, form="json"))
    assert description["recipe"]["search"]["dives"] == 5
    assert description["stages"]["splice"] == ["environment", "splice"]
    assert plan.describe(file, changes).startswith("\n".join(description["summary"]))


@pytest.mark.slow
def test_the_time_of_a_run_is_that_of_an_earlier_one_or_of_its_sampling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    file, changes = RECIPES / "textcraft-tiny.yaml", ["name=toy-agent-r", "iterations=1", f"workspace={tmp_path}"]

    def time() -> str:
        return next(line for line in plan.describe(file, changes).splitlines() if line.startswith("  time: "))

    assert time() == "  time: not known before a run of this recipe or model in this workspace"
    model = {"path": load_recipe(file, changes).model.path}
    finish(tmp_path, "a", [set()], episodes=0, method="eto", iterations=1, model=model)
    assert re.fullmatch(r"  time: \d+ h \d\d min to sample at this model's 1 tokens/s here, and training", time())
    finish(tmp_path, "b", [set(), set()], episodes=0, iterations=1, model=model)
    # Two collections of 95 seconds.
    assert time() == "  time: 3 min 10 s, as run b of this recipe took"
    # Of runs that ended at one moment the first by its id counts.
    later = finish(tmp_path, "aa", [set(), set()], episodes=0, iterations=1, model=model)
    later.store.write(timing_rows(later.iteration_id(1), "train", {"other": 0.1}))
    assert time().endswith(" tokens/s here, and training"), "run aa took its training over from another"


def general(folder: Path, **fields: Any) -> list[str]:
    """Return the changes to a recipe that mix in a conversation, whose record has these fields."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": turns, **fields}), encoding="utf-8")
    return [f"data.general.file={folder / 'chat.jsonl'}", "data.general.share=0.1", f"workspace={folder}"]


@pytest.mark.slow
def test_fields_of_general_data_that_are_left_out_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    file, changes = RECIPES / "textcraft-tiny.yaml", general(tmp_path, score=3)
    note = f"data.general.file: {tmp_path / 'chat.jsonl'}: fields left out, and of how many records: score (1)"
    assert note in plan.describe(file, changes).splitlines()
    assert list(check(load_recipe(file, changes))) == [note]
    assert list(check(load_recipe(file, general(tmp_path)))) == []


@pytest.mark.slow
def test_general_data_with_tools_needs_a_template_that_takes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(UserError, match=r"does not tell the model of its tools \(look\)"):
        check(load_recipe(RECIPES / "textcraft-tiny.yaml", general(tmp_path, tools=[tool])))


def test_worlds_have_their_own_fields() -> None:
    recipe = parse(
        {"name": "r", "model": {"path": "m"}, "environments": {"webshop": {"instances": {"train_limit": 3}}}}
    )
    assert [field.name for field in field_values(recipe) if not field.is_default][1] == (
        "environments.webshop.instances.train_limit"
    )


@pytest.mark.parametrize(
    ("config", "online", "gib", "said"),
    [
        (
            FULL,
            False,
            5,
            "that is too much; set training.lora_r, or set training.launch.deepspeed=zero3-offload, or lowe",
        ),
        (
            FULL,
            False,
            2,
            "even without activations, 4 GiB; set training.lora_r, or set training.launch.deepspeed=zero3-",
        ),
        (
            LORA,
            False,
            5,
            "that is too much; set training.load_in_4bit=true, or set training.launch.deepspeed=zero3-off",
        ),
        (
            replace(LORA, per_device_train_batch_size=1),
            True,
            5,
            "set training.launch.deepspeed=zero3-offload, or lower grpo.micro_batch_tokens and model.context_length",
        ),
        (
            replace(LORA, load_in_4bit=True),
            False,
            5,
            "that is too much; lower training.per_device_train_batch_size, or",
        ),
        (
            replace(LORA, load_in_4bit=True),
            False,
            2,
            "that is too much even without activations, 4 GiB; it needs a larg",
        ),
    ],
)
def test_only_what_helps_a_training_is_named(config: TrainingConfig, online: bool, gib: int, said: str) -> None:
    fixed_bytes = 4 * GIB - 1 * GIB
    need = estimates.TrainingMemory(
        trained=1, weights=fixed_bytes // 3, states=2 * fixed_bytes // 3, activations=4 * GIB, host_bytes=0
    )
    assert said in training_advice(config, need, gib * GIB, online=online)


@pytest.mark.parametrize(
    ("backend", "weights", "said"),
    [
        ("vllm", 1, "beside the weights; lower model.context_length, or raise model.vllm.tensor_parallel_size"),
        ("vllm", 3, "the weights alone exceed the 2 GiB that it may take; raise model.vllm.tensor_parallel_size"),
        ("transformers", 1, "no sequence has room beside the weights; lower model.context_length"),
        ("transformers", 3, "the weights alone exceed the 2 GiB that it may take; it needs a larger GPU"),
    ],
)
def test_only_what_helps_a_sampler_is_named(backend: Literal["vllm", "transformers"], weights: int, said: str) -> None:
    need = estimates.SamplingMemory(weights=weights * GIB, token=1)
    assert sampling_advice(ModelConfig(backend=backend, path="m"), need, 2 * GIB).endswith(said)
