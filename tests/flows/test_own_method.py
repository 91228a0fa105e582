"""A method of a third party, with a stage of its own, is planned, run to its report, and
deployed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from door import Door, register

from agentr_core.errors import ConfigError
from agentr_core.methods.faults import load
from agentr_core.store.database import Store
from flows import stages
from flows.commands.plan import describe
from flows.flywheel import flywheel
from flows.preflight.checks import check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
POINTS = "[agentr.methods]\nreply-recital = reply_recital:METHOD\n"
OPENING = next(word for word in map(str, range(99)) if Door().parse(word) == "open")
RECIPE = """\
name: by-heart
method: reply-recital
workspace: {workspace}
iterations: 1
environment: {{name: door}}
model: {{path: {model}, device: cpu, max_batch: 16}}
options: {{reply: "{reply}"}}
training: {{learning_rate: 1.0e-3, bf16: false, num_threads: 1}}
evaluation: {{max_steps: 4, max_new_tokens: 6, revision_test: {{enabled: false}}}}
"""


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(register(tmp_path_factory.mktemp("packages"), "recital", POINTS)))
        yield


@pytest.fixture
def recipe(tmp_path: Path, door_model: Path) -> Path:
    file = tmp_path / "by-heart.yaml"
    file.write_text(RECIPE.format(workspace=tmp_path / "runs", model=door_model, reply=OPENING), encoding="utf-8")
    return file


def test_a_recipe_runs_from_its_plan_to_its_report(recipe: Path, tmp_path: Path) -> None:
    plan = describe(recipe, [])
    assert plan.startswith("recipe by-heart: Reply recital, 1 iteration, run ")
    assert "each iteration: one reply to 6 instances" in plan
    order = ("evaluate base", "recite", "dataset", "train", "evaluate")
    section = plan.split("stages, and what each reads\n")[1].split("\n\n")[0]
    assert [line.strip().split("  ")[0] for line in section.splitlines()] == list(order)

    check(load(recipe))
    done = asyncio.run(flywheel(str(recipe)))

    store = Store(tmp_path / "runs" / "store.duckdb")
    assert store.query("select kind, count(*) as n from sample group by kind")["n"].tolist() == [6]
    assert store.query("select status from run")["status"].tolist() == ["finished"]
    assert store.query("select max(iteration) as last from iteration where status = 'finished'")["last"].tolist() == [1]
    page = Path(done["report"]).read_text(encoding="utf-8")
    assert "expert episodes" in page
    assert '<a href="#reply-recital">What was recited</a>' in page
    assert f"<p>{OPENING}, 6 times</p>" in page
    assert page.index('id="funnel"') < page.index('id="reply-recital"') < page.index('id="time"')
    assert 'id="judge"' not in page
    assert done["table"]


def test_its_stage_has_a_flow_that_prefect_finds_by_name() -> None:
    assert "recite" in [flow.fn.__name__ for flow in stages.all_stage_flows()]
    assert (stages.recite.name, stages.recite.fn.__name__) == ("stage", "recite")
    with pytest.raises(AttributeError, match="has no flow sing"):
        _ = stages.sing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("options={}", "options: give reply, and nothing else"),
        ("eto.phases=[dpo]", "eto: belongs to another method than reply-recital; leave it out"),
        (
            "method=reply-recitals",
            "method: there is no method 'reply-recitals' (did you mean reply-recital?); installed are agent-r, eto, "
            "grpo, et-agent, compare, compare-runs, reply-recital",
        ),
        ("method=agent-r", "options: belongs to another method than agent-r; leave it out"),
    ],
)
def test_a_wrong_recipe_is_told(recipe: Path, change: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(recipe, [change])
    assert said in str(caught.value)
