"""The recipe of two worlds, cut short and with a random model: to its report, and beside a run of
each world alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from turning import turn

from agentr_core.methods.faults import load
from agentr_core.recipes.recipe import resolved
from flows.cli import cli
from flows.commands.plan import describe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "two-worlds-quick.yaml"

pytestmark = pytest.mark.slow
SMALL = [
    "environments.textcraft.instances.train_limit=3",
    "environments.textcraft.instances.test_limit=2",
    "environments.textcraft.evaluation.max_steps=3",
    "environments.webshop.instances.train_limit=4",
    "environments.webshop.instances.test_limit=2",
    "evaluation.max_steps=2",
    "evaluation.max_new_tokens=8",
    "training.bf16=false",
    "training.num_train_epochs=[1]",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for the prompts of both worlds."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    shape, path = ROOT / "data" / "models" / "webshop-tiny", tmp_path_factory.mktemp("models") / "worlds"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = AutoConfig.from_pretrained(shape, max_position_embeddings=8192, hidden_size=32, intermediate_size=64)
        LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(shape).save_pretrained(path)
    return path


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_worlds_run_to_their_report_and_stand_beside_one_each(
    tmp_path: Path, model: Path, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    places = [
        f"workspace={tmp_path / 'runs'}",
        f"environments.webshop.options.cache_dir={tmp_path / 'cache'}",
        f"model.path={model}",
        "data.max_length=8192",
    ]
    done = asyncio.run(turn(RECIPE, *SMALL, *places))
    store = done.store

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    rows = store.query(
        "select i.environment, count(*) n from dataset_row join sample using (sample_id) "
        "join instance i using (instance_id) group by 1 order by 1"
    )
    assert rows.to_dict("records") == [{"environment": "textcraft", "n": 3}, {"environment": "webshop", "n": 3}]
    assert store.query("select reason, count(*) n from rejection group by 1").to_dict("records") == [
        {"reason": "world-share", "n": 1}
    ]
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [4, 4]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty
    page = done.report.with_suffix(".md").read_text(encoding="utf-8")
    assert "textcraft, webshop" in page
    assert "mean of worlds" in done.table
    if not beside:
        return

    runs = [done.run_id]
    worlds = resolved(load(RECIPE, [*SMALL, *places]))["environments"]
    for name, world in worlds.items():
        alone = f"environments={json.dumps({name: world | {'share': 0}})}"
        changes = [change for change in [*SMALL, *places] if not change.startswith("environments.")]
        runs.append(asyncio.run(turn(RECIPE, *changes, alone)).run_id)
    words = ["report", runs[0], "--beside", ",".join(runs[1:]), "-w", str(tmp_path / "runs")]
    output = CliRunner().invoke(cli, words, catch_exceptions=False).output
    reward, success = output.split("\n\n")
    assert reward.startswith("Mean reward")
    assert success.startswith("Success %")
    assert [line.split()[0] for line in success.splitlines()[1:]] == ["Model", "base", "base", "iteration", "iteration"]
    assert "also differs" not in output
    assert store.query("select count(*) n from run where status = 'finished'")["n"].tolist() == [3]


def test_a_plan_counts_every_world(model: Path) -> None:
    plan = describe(RECIPE, [*SMALL, f"model.path={model}"])

    assert "textcraft: 3 training instances, 2 held-out episodes, 50% of the training samples" in plan
    assert "webshop: 4 training instances, 2 held-out episodes" in plan
    assert re.search(r"^  textcraft, evaluate +6 +48 ", plan, re.M)
    assert re.search(r"^  webshop, evaluate +4 +32 ", plan, re.M)
    assert "\n  environments.webshop.instances: " in plan


def test_an_unknown_world_is_one_sentence(refusal: Callable[..., str], model: Path) -> None:
    message = refusal("plan", RECIPE, "-o", "environments={atlantis: {}}", "-o", f"model.path={model}")
    assert message.startswith("there is no environment 'atlantis'; installed are ")


def test_one_world_and_several_are_one_sentence(refusal: Callable[..., str], model: Path) -> None:
    message = refusal("run", RECIPE, "-o", "environment.name=textcraft", "-o", f"model.path={model}")
    assert message.endswith(
        "environment: does not go with environments, each of which has its own; leave one of them out"
    )
