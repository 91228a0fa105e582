"""The page of a whole run and the comparison of runs, from rows alone: for each method, at a large
size, and in colours that can be read.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from finished import finish, revise

from agentr_core.errors import ConfigError
from agentr_core.methods.agent_r.report import auc_of_drops, audit_section, run_audit_section
from agentr_core.methods.faults import parse
from agentr_core.recipes.environments import TEST
from agentr_core.reports.document import IterationReport
from agentr_core.reports.html import render_html
from agentr_core.reports.markdown import table_markdown
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.means import seed_groups
from agentr_core.store.codec.ledger import metric_rows
from agentr_core.store.codec.samples import dataset_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import evaluated_stop_counts
from agentr_core.store.queries.listings import LISTINGS, read_list
from agentr_core.store.queries.trees import JudgedStep, PathAudit
from agentr_core.store.tables import merge
from agentr_core.types import Verdict
from agentr_core.viewer.server import app
from tasks.reporting import compare_runs, score_table, write_reports
from tasks.wiring import RunRef
from tasks.workspaces import STORE_FILE

DASHES = str.maketrans({"\N{EN DASH}": "-", "\N{MINUS SIGN}": "-"})
FIRST, SECOND = "aaaa000000000001", "bbbb000000000001"
CSS = Path(render_html.__code__.co_filename).with_name("templates") / "page.css"


@pytest.mark.slow
def test_a_run_has_a_page_that_leads_to_its_iterations_and_to_the_viewer(tmp_path: Path) -> None:
    finish(tmp_path, FIRST, [set(range(5)), set(range(10)), set(range(12))])
    *pages, index = write_reports(tmp_path, FIRST, viewer="http://127.0.0.1:1")
    html, text = index.read_text(), index.with_suffix(".md").read_text().translate(DASHES)
    assert [page.name for page in (*pages, index)] == ["iteration-01.html", "iteration-02.html", "index.html"]
    links = re.findall(r'href="([^"#]+)"', html)
    assert {f"http://127.0.0.1:1/run/{FIRST}", "iteration-01.html", "iteration-02.html"} <= set(links)
    assert f"http://127.0.0.1:1/trajectories?run={FIRST}&amp;iteration=2" in links
    # The one curve of one set stands in the headline.
    assert "Success by iteration" not in text
    for row in ("base | 25.0 | 11.2-46.9", "iteration 1 | 50.0 | 29.9-70.1", "**iteration 2** | 60.0 | 38.7-78.1"):
        assert f"| {row} |" in text
    assert "| iteration 1 | 1 min 35 s | 1 min 30 s | 5.0 s |" in text
    assert "| **total** | 3 min 10 s |" in text
    assert f"http://127.0.0.1:1/run/{FIRST}" in pages[0].read_text()


@pytest.mark.slow
def test_trained_tokens_are_those_of_all_passes(tmp_path: Path) -> None:
    ctx = finish(tmp_path, FIRST, [set(), {1}])
    finish(tmp_path, SECOND, [set(), {1}], seed=1)
    key, counts = ctx.iteration_id(1), {"trained_tokens": {"good": 300, "revision": 700}}
    rows = dataset_rows("d", [], iteration_id=key, content_hash="feed", counts=counts)
    ctx.store.write(merge([rows, metric_rows("iteration", key, "trained_tokens", 2500.0)]))
    page, index = (path.with_suffix(".md").read_text() for path in write_reports(tmp_path, FIRST))
    assert "| **with loss, in one pass** | 1,000 | 100.0 |" in page
    assert "| \N{MIDDLE DOT} revision | 700 | 70.0 |" in page
    assert "| **trained (with loss)** | 2,500 |  |" in page
    assert "| iteration 1 | 0 | 0 | 2,500 |" in index
    beside = compare_runs(tmp_path, [FIRST, SECOND])[1].with_suffix(".md").read_text()
    assert "| 0 | 0 | 2,500 |" in beside


@pytest.mark.slow
async def test_runs_that_differ_in_the_seed_only_have_their_means_over_seeds(tmp_path: Path) -> None:
    ids = [f"{digit}aaa000000000001" for digit in range(4)]
    finish(tmp_path, ids[0], [set(), set(range(4))], seed=0)
    finish(tmp_path, ids[1], [set(), set(range(6))], seed=1)
    finish(tmp_path, ids[2], [set(), set(range(10))], seed=0, search={"dives": 3})
    finish(tmp_path, ids[3], [set(), set(range(14))], seed=1, search={"dives": 3})
    table, page = compare_runs(tmp_path, ids)
    text = " ".join(table.partition("Runs")[2].translate(DASHES).split())
    # 20% and 30%; Student's t of one degree of freedom over two seeds is 12.7.
    assert "iteration 1 search.dives=8 25.0 (0.0 to 88.5)" in text
    assert "iteration 1 search.dives=3 60.0 (0.0 to 100.0) +35.0 (-28.5 to +98.5)" in text
    rows = [line for line in page.with_suffix(".md").read_text().splitlines() if "search.dives=3" in line]
    assert len(rows) == 2
    assert rows[1].startswith("| test | iteration 1 | search.dives=3 |")
    assert rows[1].endswith("| 0, 1 |")
    # Each run a group of its own: there is nothing to take a mean of.
    assert "Means over seeds" not in compare_runs(tmp_path, [ids[0], ids[2]])[1].read_text()
    viewer = app(tmp_path / STORE_FILE, index=tmp_path / "texts.sqlite", hosts=None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(viewer), base_url="http://localhost") as http:
        html = (await http.get("/means")).text
    assert html.count("search.dives=3") == 3
    assert f'href="/run/{ids[3]}"' in html
    assert "+35.0 <small>" in html


def test_groups_of_runs_are_named_by_what_they_differ_in() -> None:
    data = {"name": "toy", "method": "agent-r", "model": {"path": "m"}, "environment": {"name": "toy"}}
    plain = {str(seed): parse(data | {"seed": seed}) for seed in range(2)}
    (group,) = seed_groups(plain)
    assert group == ("toy", {0: "0", 1: "1"})
    # How far a run goes, and its name, change no score.
    assert len(seed_groups(plain | {"2": parse(data | {"seed": 2, "iterations": 5, "name": "other"})})) == 1
    recipe = parse(data | {"training": {"learning_rate": 3e-5}})
    names = [group.name for group in seed_groups(plain | {"beside": recipe})]
    assert [name.partition("=")[0] for name in names] == ["training.learning_rate"] * 2
    assert names[1] == "training.learning_rate=3e-05"
    far = {
        "learning_rate": 3e-5,
        "num_train_epochs": [9],
        "warmup_ratio": 0.5,
        "weight_decay": 0.5,
        "max_grad_norm": 9.0,
    }
    assert seed_groups(plain | {"beside": parse(data | {"training": far})})[1].name.endswith(
        "and 1 more, as run beside"
    )


@pytest.mark.slow
def test_without_a_viewer_no_page_leads_there(tmp_path: Path) -> None:
    finish(tmp_path, FIRST, [set(), {1}])
    *_, index = write_reports(tmp_path, FIRST, viewer="")
    assert re.findall(r'href="([^"#]+)"', index.read_text()) == ["iteration-01.html"]


@pytest.mark.slow
def test_runs_are_compared_on_the_episodes_that_they_share(tmp_path: Path) -> None:
    finish(tmp_path, FIRST, [set(range(4)), set(range(10))])
    finish(tmp_path, SECOND, [set(range(4)), set(range(8, 20))], episodes=25, seed=1, method="eto")
    table, page = compare_runs(tmp_path, [FIRST[:4], SECOND[:4]])
    first, second = table.translate(DASHES).splitlines()[1:]
    # Of 20 shared episodes the second wins 10 to 19 alone and loses 0 to 7.
    assert first.split()[:4] == ["test", "toy-agent-r", "50.0", "(29.9-70.1)"]
    assert re.split(r"\s{2,}", second)[4:] == ["10", "8", "20"]
    assert "+10.0 (-35.3 to +55.3)" in second
    text = page.with_suffix(".md").read_text()
    assert "5 of its 25 episodes of set test were not played by the first run" in text
    assert "seed" in next(line for line in text.splitlines() if SECOND in line)
    assert page.read_text().count("<polyline") == 2


@pytest.mark.slow
def test_an_evaluation_that_is_not_finished_gives_no_score(tmp_path: Path) -> None:
    """Won episodes end first, so what has ended looks like a success."""
    ctx = finish(tmp_path, FIRST, [set(range(8)), set(range(20))])
    key = evaluation_id(ctx, 1, TEST)
    with ctx.store.transaction() as con:
        con.execute("update evaluation set finished = false where evaluation_id = ?", [key])
        con.execute("delete from episode where evaluation_id = ? and not instance_id like '%1'", [key])
    assert evaluated_stop_counts(ctx.store, [key]) == {}
    message = "iteration 1: the evaluation is not finished: 2 of 20 episodes of test; the command that began"
    for page in write_reports(tmp_path, FIRST):
        text, html = page.with_suffix(".md").read_text(), page.read_text()
        assert text.split("## ")[1].startswith(f"Held-out success\n\n{message}")
        assert "| iteration 1 | not finished | - | - | - | 2 of 20 |" in text.translate(DASHES)
        assert "100.0" not in text.split("## ")[2]
        assert "points" not in text
        assert html.count('<g class="now">') == 0
    assert "iteration 1  not finished" in score_table(RunRef(workspace=str(tmp_path), run_id=FIRST))
    finish(tmp_path, SECOND, [set(), set(range(20))], seed=1)
    table, _ = compare_runs(tmp_path, [SECOND, FIRST])
    comparison, _ = table.split("\n\n", 1)
    assert "40.0" in comparison.splitlines()[-1], "its last model that was evaluated to the end"
    with ctx.store.transaction() as con:
        con.execute("update evaluation set finished = false where evaluation_id = ?", [evaluation_id(ctx, 0, TEST)])
    with pytest.raises(
        ConfigError, match=f"run {FIRST} cannot be compared yet; iteration 1: .* 2 episodes of test; the"
    ):
        compare_runs(tmp_path, [SECOND, FIRST])


@pytest.mark.slow
@pytest.mark.parametrize(("given", "shared"), [("slip", ["2", "1", "4"]), ("fall", ["0", "0", "0"])])
def test_revision_tests_of_two_runs_are_compared_where_they_go_on_from_the_same_steps(
    tmp_path: Path, given: str, shared: list[str]
) -> None:
    for run, seed, steps, wins in ((FIRST, 0, "slip", {0, 1}), (SECOND, 1, given, {1, 2, 3})):
        revise(finish(tmp_path, run, [set(), set(range(9))], seed=seed), 1, given=steps, wins=wins)
    table, _ = compare_runs(tmp_path, [FIRST, SECOND])
    comparison, _ = table.translate(DASHES).split("\n\n", 1)
    row = [line for line in comparison.splitlines() if line.startswith("revision")][-1]
    assert re.split(r"\s{2,}", row.strip())[-3:] == shared

    rows = Store(tmp_path / STORE_FILE).rows(
        "select episodes, won, lost from v_comparisons "
        "where run_id = ? and other_run_id = ? and evaluation = 'revision_test'",
        SECOND,
        FIRST,
    )
    assert rows == ([(4, 2, 1)] if given == "slip" else [])
    before, after = (
        key
        for run in (FIRST, SECOND)
        for (key,) in Store(tmp_path / STORE_FILE).rows(
            "select evaluation_id from evaluation join iteration using (iteration_id) "
            "where run_id = ? and name = 'revision_test' and iteration = 1",
            run,
        )
    )
    pairs = read_list(
        Store(tmp_path / STORE_FILE), LISTINGS["differences"], {"before": before, "after": after}, offset=0, limit=9
    )
    assert pairs.total == len(pairs.rows) == (4 if given == "slip" else 0)


@pytest.mark.slow
def test_runs_that_cannot_be_compared_are_told(tmp_path: Path) -> None:
    finish(tmp_path, FIRST, [set()])
    with pytest.raises(ConfigError, match="a run is named twice"):
        compare_runs(tmp_path, [FIRST, FIRST[:5]])
    finish(tmp_path, SECOND, [])
    with pytest.raises(ConfigError, match="has no model that was evaluated"):
        compare_runs(tmp_path, [FIRST, SECOND])
    with pytest.raises(ConfigError, match=r"no run in .* begins with 'cccc'"):
        compare_runs(tmp_path, [FIRST, "cccc"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["agent-r", "eto", "grpo"])
def test_every_method_has_the_page_of_a_run(tmp_path: Path, method: str) -> None:
    finish(tmp_path, FIRST, [set(), {1, 2}], method=method)
    *_, index = write_reports(tmp_path, FIRST)
    html = index.read_text()
    assert html.count("<h1>") == 1
    assert [key for key in ("scores", "funnels", "costs", "reports") if f'<section id="{key}">' not in html] == []


@pytest.mark.slow
def test_ten_thousand_trajectories_make_small_pages(tmp_path: Path) -> None:
    ctx = finish(tmp_path, FIRST, [set(), {1, 2}])
    with ctx.store.transaction() as con:
        con.execute(
            "insert into trajectory by name select t.* replace (trajectory_id || '-' || n as trajectory_id, "
            "'rollout' as source, null as evaluation_id, ? as iteration_id) from (from trajectory limit 1) t, "
            "range(10000) r(n)",
            [ctx.iteration_id(1)],
        )
    pages = write_reports(tmp_path, FIRST)
    assert (tmp_path / STORE_FILE).exists()
    assert max(page.stat().st_size for page in pages) < 3_000_000
    assert ">10,020</a>" in pages[-1].read_text()


def ratio(one: str, other: str) -> float:
    """Return the contrast of two colours `#rrggbb`. Source: WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        digits = colour.removeprefix("#")
        full = digits if len(digits) == 6 else "".join(c * 2 for c in digits)
        parts = [int(full[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1, 2])
def test_colours_can_be_read_in_light_dark_and_print(theme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", CSS.read_text(), re.S)
    colours = dict(re.findall(r"--([\w-]+): (#\w+);", blocks[theme]))
    for name in ("ink", "soft", "faint", "accent", "error", "s1", "s2", "s3", "s4", "s5"):
        assert ratio(colours[name], colours["paper"]) >= 4.5, f"{name}: {ratio(colours[name], colours['paper']):.2f}"
    assert ratio(colours["accent"], colours["accent-wash"]) >= 4.5
    assert ratio(colours["soft"], colours["error-wash"]) >= 4.5


def test_on_a_phone_names_wrap_and_a_table_that_goes_on_has_a_shadow() -> None:
    phone = CSS.read_text().partition("@media screen and (max-width: 48rem)")[2].partition("@media")[0]
    assert "td.text { white-space: normal; }" in phone
    # What covers the shadow moves with the table, and is there only at its end.
    assert re.search(r"\.scroll \{\s+background: [^;]* no-repeat local,[^;]* no-repeat scroll;", phone)


@pytest.mark.slow
def test_what_is_drawn_and_what_scrolls_has_a_name_and_the_keyboard_gets_there(tmp_path: Path) -> None:
    finish(tmp_path, FIRST, [set(), {1, 2}])
    html = write_reports(tmp_path, FIRST)[-1].read_text()
    assert len(re.findall(r'<svg [^>]*role="img"[^>]*aria-label="[^"]+"', html)) == html.count('role="img"') > 0
    assert html.count('class="scroll"') == len(
        re.findall(r'class="scroll" tabindex="0" role="region" aria-label="[^"]+"', html)
    )
    assert '<a class="skip" href="#main">' in html
    assert '<main id="main">' in html
    assert '<html lang="en">' in html


STEPS = [
    JudgedStep(Verdict.BAD, 0.9),
    JudgedStep(Verdict.BAD, 0.2),
    JudgedStep(Verdict.GOOD, 0.2),
    JudgedStep(Verdict.GOOD, -0.5),
    JudgedStep(Verdict.GOOD, None),
]
PATHS = [
    PathAudit(depth=1, judge_error=2, tree_error=2, oracle_error=2, has_oracle=True),
    PathAudit(depth=1, judge_error=1, tree_error=3, oracle_error=2, has_oracle=True),
    PathAudit(depth=2, judge_error=None, tree_error=None, oracle_error=None, has_oracle=False),
    PathAudit(depth=2, judge_error=0, tree_error=None, oracle_error=None, has_oracle=False),
]


def test_drops_are_ordered_as_the_area_under_the_curve_says() -> None:
    # Of four pairs of a bad and a good step three are in order, and one is a tie.
    assert auc_of_drops(STEPS) == 3.5 / 4
    assert auc_of_drops(STEPS[:2]) is None


def test_the_witnesses_of_first_errors_are_compared() -> None:
    agreement, figure, drops, _, depths = audit_section(PATHS, STEPS).blocks
    text = table_markdown(agreement).translate(DASHES)  # type: ignore[arg-type]
    assert "| judge and tree | 50.0 (15.0-85.0) | 50.0 (15.0-85.0) | -1.0 | 2 | 4 |" in text
    assert "| judge and oracle | 50.0 (9.5-90.5) | 100.0 (34.2-100.0) | -0.5 | 2 | 2 |" in text
    assert "-2: 1; -1: 0; 0: 1" in figure.svg.translate(DASHES)  # type: ignore[union-attr]
    assert "| bad | 2 | 2 | +0.550 | 100.0 |" in table_markdown(drops).translate(DASHES)  # type: ignore[arg-type]
    assert "| 2 | 2 | 50.0 (9.5-90.5) |" in table_markdown(depths).translate(DASHES)  # type: ignore[arg-type]
    (of_run,) = run_audit_section({1: PATHS}).blocks
    assert "| iteration 1 | 4 | 50.0 (15.0-85.0) |" in table_markdown(of_run).translate(DASHES)  # type: ignore[arg-type]
    assert audit_section([], []).blocks[0].text == "Not measured: no path was judged in this iteration."  # type: ignore[union-attr]


def test_a_report_without_a_viewer_is_as_before() -> None:
    report = IterationReport(recipe_name="r", run_id="x", iteration=1, date="d", environment="e", model="m")
    assert "http:" not in render_html(report)
