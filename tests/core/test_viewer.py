"""The viewer's pages over a store that has a row of each kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gallery
import httpx
import pytest
from browser import HOSTILE, browse
from hypothesis import example, given
from hypothesis import strategies as st

from agentr_core.errors import ConfigError
from agentr_core.evaluation.metrics import is_stuck
from agentr_core.reports import wording
from agentr_core.samples.rendering import RenderedToken
from agentr_core.store.codec.trajectories import episode_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.trees import PathStep, SampledTokens, TreeNode
from agentr_core.store.tables import merge
from agentr_core.store.text_index import TextIndex
from agentr_core.system import LOOPBACK
from agentr_core.types import Instance, Step, StopReason, Trajectory
from agentr_core.viewer import pages as viewer_pages
from agentr_core.viewer import strip
from agentr_core.viewer.bundle import bundle
from agentr_core.viewer.pages import extract
from agentr_core.viewer.server import app

pytestmark = pytest.mark.slow
TOKEN = "let-me-in"


def client(store: Store, base_url: str = "http://localhost:4280", **options: Any) -> httpx.AsyncClient:
    viewer = app(store.path, index=store.path.with_name("texts.sqlite"), **{"hosts": LOOPBACK, **options})
    return httpx.AsyncClient(transport=httpx.ASGITransport(viewer), base_url=base_url)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    gallery_store = gallery.fill(tmp_path_factory.mktemp("ws") / "store.duckdb")
    TextIndex(gallery_store, gallery_store.path.with_name("texts.sqlite")).refresh(budget_s=60)
    return gallery_store


@pytest.fixture
async def pages(store: Store) -> Any:
    async with client(store) as http:
        yield http


def visible_text(page: str) -> str:
    """Return the text of a page without its markup, blanks joined."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


async def test_every_page_is_there_and_its_links_lead_somewhere(pages: httpx.AsyncClient) -> None:
    links: set[str] = set()
    for page in gallery.PAGES:
        answer = await pages.get(page)
        assert answer.status_code == 200, page
        links |= {link.replace("&amp;", "&") for link in re.findall(r' href="(/[^"#]*)', answer.text)}
    assert f"/node/{gallery.TREE}/3" in links
    for link in sorted(links - set(gallery.PAGES)):
        assert (await pages.get(link)).status_code in (200, 303), link


async def test_a_run_leads_to_its_lists_and_to_what_changed(pages: httpx.AsyncClient) -> None:
    page = (await pages.get(f"/run/{gallery.RUN}")).text
    assert f"/differences?before={gallery.BEFORE}&amp;after={gallery.AFTER}" in page
    assert f"/trajectories?run={gallery.RUN}&amp;iteration=1" in page
    assert "filter: duplicate" in visible_text(page)
    assert 'href="/dataset/aaaa00000000d000"' in page
    assert "Trained on samples of" not in page
    gain_page = await pages.get(f"/differences?before={gallery.BEFORE}&after={gallery.AFTER}&change=gained")
    assert "before and after 1" in visible_text(gain_page.text)
    loss_page = await pages.get(f"/differences?before={gallery.BEFORE}&after={gallery.AFTER}&change=lost")
    assert "Nothing passes these filters" in loss_page.text


async def test_the_reports_of_a_run_are_served_and_nothing_beside_them(pages: httpx.AsyncClient, store: Store) -> None:
    folder = store.path.parent / "reports" / gallery.RUN
    folder.mkdir(parents=True)
    (folder / "iteration-01.html").write_text("<p>A report", encoding="utf-8")
    (folder.parent / "secret.html").write_text("<p>A secret", encoding="utf-8")
    page = await pages.get(f"/report/{gallery.RUN}/iteration-01.html")
    assert page.text == "<p>A report"
    # Its style is in the page itself, and still nothing in it runs.
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert page.headers["x-content-type-options"] == "nosniff"
    for path in (
        f"{gallery.RUN}/iteration-02",
        f"{gallery.RUN}/%2e%2e%2fsecret",
        "%2e%2e/secret",
        "./secret",
        "a b/c",
    ):
        assert (await pages.get(f"/report/{path}.html")).status_code == 404, path


@pytest.mark.parametrize(
    ("query", "total"),
    [
        ("", 6),
        ("outcome=success", 3),
        ("outcome=no+success", 3),
        ("stop=step_limit", 3),
        ("depth=2", 6),
        ("depth=3", 0),
        ("depth=x", 0),
        ("source=rollout", 4),
        ("iteration=0", 1),
        (f"run={gallery.RUN}&iteration=1&outcome=success", 3),
        (f"evaluation={gallery.AFTER}", 1),
        ("instance=toy/train", 6),
        ("instance=boat", 0),
        ("unknown=1&page=x", 6),
    ],
)
async def test_lists_are_filtered(pages: httpx.AsyncClient, query: str, total: int) -> None:
    page = visible_text((await pages.get(f"/trajectories?{query}")).text)
    assert f"Trajectories {total} " in page.partition("<h1>")[0]


async def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    with store.transaction() as con:
        con.execute(
            "insert into rejection select iteration_id, stage, subject || n, reason, detail, created_at "
            "from rejection, range(119) numbers(n)"
        )
    async with client(store) as http:
        first_page = (await http.get("/rejections")).text
        assert f"1{wording.DASH}50 of 120" in first_page
        assert 'rel="prev"' not in first_page
        (following,) = re.findall(r'rel="next" href="([^"]*)"', first_page)
        last_page = (await http.get("/rejections?page=2")).text
        assert following == "/rejections?page=1"
        assert f"101{wording.DASH}120 of 120" in last_page
        assert 'rel="next"' not in last_page
        assert (await http.get(f"/rejections?page={10**30}")).status_code == 200


async def test_a_pair_shows_first_error_verdict_and_splice(pages: httpx.AsyncClient) -> None:
    page = (await pages.get(f"/pair/{gallery.PAIR}")).text
    prefix, bad, good = re.split(r'<section class="side \w+-side">', page)
    assert "LOOK" in prefix
    assert bad.count("First error") == 1
    assert "Judgement: bad" in bad
    assert "LOSE" in bad
    # Of the other path a side has only the sibling, which was not taken there.
    details = re.compile(r'<details class="beside">.*?</details>', re.DOTALL)
    assert "WIN" in bad
    assert "WIN" not in details.sub("", bad)
    assert "WIN" in good
    assert "LOSE" not in details.sub("", good.partition("The splice")[0])
    assert re.search(r"\d visits?, value&nbsp;\d", good)
    assert f"/sample/{gallery.REVISION}" in good


async def test_trained_spans_are_marked_and_no_others(pages: httpx.AsyncClient) -> None:
    page = (await pages.get(f"/sample/{gallery.REVISION}")).text
    spans = re.findall(r'<span class="trained"[^>]*>([^<]*)</span>', page)
    assert spans == ["trained", "think"]
    assert '<span class=""> result</span>' in page
    legend = page.partition('<p class="legend">')[2].partition("</p>")[0]
    assert re.findall(r">([^<]+)<", legend) == ["trained", "reply, not trained", "only read"]


def token_reader(store: Store, kind: str, key: str) -> Callable[[], list[list[RenderedToken]]]:
    """Read everything as three turns, or fail as for a run whose model is gone."""
    tokens = [
        RenderedToken(1, "<s>", "BOS", False),
        RenderedToken(7, "Go", "user", False),
        RenderedToken(2, "</s>", "end of turn", False),
        RenderedToken(8, f"{HOSTILE}\n", "assistant", True),
        RenderedToken(2, "</s>", "end of turn", True),
    ]

    def read() -> list[list[RenderedToken]]:
        if key == gallery.GOOD:
            raise ConfigError("the model of run r, /gone, is no directory here")
        return [tokens]

    if kind == "trajectory" and key == gallery.ROLLOUTS[1]:
        raise ConfigError("the store has no run of it")
    return read


async def test_a_sample_and_a_trajectory_show_every_token_when_asked(store: Store, tmp_path: Path) -> None:
    async with client(store, token_reader=token_reader) as http:
        for kind, key in (("sample", gallery.REVISION), ("trajectory", gallery.ROLLOUTS[0])):
            assert f'href="/tokens/{kind}/{key}"' in (await http.get(f"/{kind}/{key}")).text
            page = (await http.get(f"/tokens/{kind}/{key}")).text
            assert f'href="/{kind}/{key}"' in page
            assert re.search(rf"<title>\S.* · tokens of {kind} {key[:8]} · agentr</title>", page)
            assert "5, 2 trained" in visible_text(page)
            classes = re.findall(r'<span class="(token[ \w]*)" title="(\d+): token (\d+), ([\w ]+)"', page)
            assert classes[:3] == [("token control", "0", "1", "BOS"), ("token", "1", "7", "user"),
                                   ("token control", "2", "2", "end of turn")]  # fmt: skip
            assert 'title="4: token 2, end of turn, trained"' in page
            assert re.findall(r'<div class="who"><b>([^<]*)</b>', page) == ["BOS", "user", "assistant"]
            assert "<script>document" not in page
            assert not {"\u202e", "\u2066", "\x1b"} & set(page)
        missing_model = await http.get(f"/tokens/sample/{gallery.GOOD}")
        assert "the model of run r, /gone, is no directory here" in visible_text(missing_model.text)
        missing_run = await http.get(f"/tokens/trajectory/{gallery.ROLLOUTS[1]}")
        assert (missing_model.status_code, missing_run.status_code) == (200, 200)
        assert "the store has no run of it" in visible_text(missing_run.text)
        assert (await http.get("/tokens/sample/none")).status_code == 404
        assert (await http.get("/tokens/pair/x")).status_code == 404
    viewer = app(store.path, index=tmp_path / "texts.sqlite", hosts=LOOPBACK, token_reader=token_reader)
    await bundle(viewer, tmp_path / "site", start="/", max_pages=500)
    bundle_pages = [file.read_text("utf-8") for file in (tmp_path / "site").glob("*.html")]
    assert not [page for page in bundle_pages if "Every token" in page]


async def test_a_tree_is_drawn_with_visits_values_and_what_was_not_taken(pages: httpx.AsyncClient) -> None:
    page = (await pages.get(f"/tree/{gallery.TREE}")).text
    drawing = page[page.index("<svg") : page.index("</svg>")]
    assert drawing.count('class="node') == 5
    assert {"node both", "node good", "node bad", "node passed"} <= set(re.findall(r'class="(node \w+)"', drawing))
    assert f"2 {wording.TIMES} 0.50 success" in visible_text(drawing)
    # The root is where the drawing is first looked at.
    spots = re.findall(r'class="ground" cx="([^"]+)" cy="([^"]+)"', drawing)
    assert (float(spots[0][0]), float(spots[0][1])) == tuple(min(map(float, ways)) for ways in zip(*spots, strict=True))
    beside = visible_text((await pages.get(f"/node/{gallery.TREE}/3")).text)
    assert "1 not taken here WIN" in beside
    assert "1 not taken here WAIT" in beside


def test_the_paths_of_a_pair_stand_together_at_the_top_of_a_tree() -> None:
    def node(number: int, parent: int, depth: int, visits: int) -> TreeNode:
        return TreeNode(number, parent, depth, "go", visits, 0.0, 0.0, False, False, True, None, 1, None)

    # Most visited is a long path of no pair (2, 5 to 8), with branches; a pair parts at node 1.
    nodes = [node(0, -1, 0, 9), node(1, 0, 1, 2), node(2, 0, 1, 7), node(3, 1, 2, 1), node(4, 1, 2, 1)]
    nodes += [node(number, parent, depth, 5) for number, parent, depth in ((5, 2, 2), (6, 5, 3), (7, 6, 4), (8, 7, 5))]
    nodes += [node(9, 2, 2, 1), node(10, 5, 3, 1), node(11, 6, 4, 1)]
    drawing = viewer_pages.tree_drawing(nodes, "t", {0, 1, 4}, {0, 1, 3}, [{0, 1, 4}, {0, 1, 3}])
    spots = re.findall(r'class="ground" cx="([^"]+)" cy="([^"]+)"', drawing)
    rows = [(float(y) - float(spots[0][1])) / viewer_pages._ROW_HEIGHT for _, y in spots]
    assert [rows[number] for number in (0, 1, 4, 3)] == [0, 0, 0, 1]
    assert [rows[number] for number in (2, 5, 6, 7, 8)] == [2] * 5
    # Short branches stand side by side below the path that they leave.
    assert [rows[number] for number in (9, 10, 11)] == [3, 3, 3]
    assert len(set(spots)) == len(nodes)
    # Six columns are printed on a page that lies on its side, two on an upright one.
    assert 'class="tree wide"' in drawing
    assert 'class="tree"' in viewer_pages.tree_drawing(nodes[:3], "t", (), ())


async def test_an_arm_leads_to_its_pool_and_an_evaluation_that_goes_on_has_no_score(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    with store.transaction() as con:
        con.execute("update evaluation set finished = false")
        con.execute("""update run set config = '{"compare": {"pool": "bbbb", "samples": ""}}'""")
    async with client(store) as pages:
        page = (await pages.get(f"/run/{gallery.RUN}")).text
    assert "Trained on samples of bbbb" in visible_text(page)
    assert visible_text(page).count("not finished") == 2, "of two evaluations, compared with another or not"
    assert "<meter" not in page


async def test_why_a_path_ended_is_told_in_words(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    with store.transaction() as con:
        con.execute("update node set stop = 'step_limit' where node_index = 2")
    async with client(store) as pages:
        tree = (await pages.get(f"/tree/{gallery.TREE}")).text
        beside = visible_text((await pages.get(f"/node/{gallery.TREE}/3")).text)
    assert "step_limit" not in tree
    assert tree.count("step limit") == 2, "in the drawing and in the table"
    assert ", step limit" in beside


async def test_a_group_and_a_family(pages: httpx.AsyncClient) -> None:
    group = visible_text((await pages.get(f"/group/{gallery.ITERATION}/1/0")).text)
    assert "Wins 2 of 4" in group
    assert f"no success 0 {wording.MINUS}1 " in group
    page = (await pages.get(f"/family/{gallery.ROLLOUTS[0]}")).text
    members = re.findall(r'<span class="indent"></span>|/trajectory/(\w+)"', page)
    # The parent comes first; what was made of it stands one level in.
    assert members[1:] == [gallery.ROLLOUTS[1], "", gallery.ROLLOUTS[0]]


async def test_the_steps_that_an_episode_goes_on_from_are_marked(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    with store.transaction() as con:
        con.execute("update trajectory set given = 1 where trajectory_id = ?", [gallery.ROLLOUTS[0]])
    async with client(store) as http:
        continued = (await http.get(f"/trajectory/{gallery.ROLLOUTS[0]}")).text
        sibling = (await http.get(f"/trajectory/{gallery.ROLLOUTS[1]}")).text
    assert re.findall(r'<article class="step( given)?" id="(\d+)"', continued) == [(" given", "0"), ("", "1")]
    assert "Steps 2, 1 given" in visible_text(continued)
    assert "given" not in sibling


async def test_the_steps_that_a_revision_test_replays_are_marked(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    key, instance = "aaaa0000000000ff", Instance(environment="toy", split="train", index=3)
    step = Step(reply="look", action="LOOK", observation="seen", reward=0.0)
    trajectory = Trajectory.ended(instance, "Start.", (step, step), StopReason.STEP_LIMIT)
    store.write(episode_rows(key, trajectory, evaluation_id=gallery.AFTER, iteration_id=gallery.ITERATION, cut=1))
    async with client(store) as http:
        page = (await http.get(f"/trajectory/{key}")).text
    assert re.findall(r'<article class="step( given)?" id="(\d+)"', page) == [(" given", "0"), ("", "1")]
    assert "Steps 2, 1 given" in visible_text(page)


@pytest.mark.parametrize(("operator", "whose"), [("revision", "a failed"), ("continuation", "the expert's")])
async def test_a_group_tells_whose_first_steps_it_was_given(tmp_path: Path, operator: str, whose: str) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    with store.transaction() as con:
        con.execute("update rl_group set prefix = 1")
        con.execute("update derivation set operator = ?", [operator])
    async with client(store) as http:
        page = (await http.get(f"/group/{gallery.ITERATION}/1/0")).text
    assert f"Given steps 1, of {whose} episode" in visible_text(page)


async def test_what_is_known_by_the_beginning_of_its_id_is_found(pages: httpx.AsyncClient) -> None:
    for words, where in (
        (gallery.PAIR, f"/pair/{gallery.PAIR}"),
        (gallery.RUN, f"/run/{gallery.RUN}"),
        (f"{gallery.TREE}#3", f"/node/{gallery.TREE}/3"),
        (gallery.TRAINED, f"/checkpoint/{gallery.TRAINED}"),
        ("aaaa", "/search?q=aaaa"),
        ("look there", "/search?q=look+there"),
    ):
        answer = await pages.get("/find", params={"q": words})
        assert (answer.status_code, answer.headers["location"]) == (303, where)


async def test_a_search_finds_words_and_phrases_and_says_where(pages: httpx.AsyncClient) -> None:
    page = (await pages.get("/search", params={"q": "judgement BAD"})).text
    assert f'href="/pair/{gallery.PAIR}#1"' in page
    assert "<mark>Judgement</mark>: <mark>bad</mark>" in page
    assert "No text" not in (await pages.get("/search", params={"q": '"seen look"'})).text
    for words in ('"look seen"', "zeppelin", '"', "AND", "a*", "text:", "-", "(", "NEAR(a b)", "\0"):
        answer = await pages.get("/search", params={"q": words})
        assert answer.status_code == 200
        assert "<mark>" not in answer.text


async def test_what_is_not_there_is_told(pages: httpx.AsyncClient) -> None:
    for page in ("/run/x", "/tree/x", "/node/x/1", f"/node/{gallery.TREE}/9", "/group/x/1/1", "/x", "/static/x"):
        assert (await pages.get(page)).status_code == 404, page


async def test_no_page_writes_to_the_store(store: Store, pages: httpx.AsyncClient) -> None:
    before = store.path.read_bytes()
    for page in gallery.PAGES:
        await pages.get(page)
    assert store.path.read_bytes() == before
    assert (await pages.post("/")).status_code == 405


async def test_only_links_lead_here_from_other_pages(store: Store) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with client(store) as http:
        assert (await http.get("/", headers=link)).status_code == 200
        for changes in ({"Sec-Fetch-Dest": "iframe"}, {"Sec-Fetch-Mode": "cors"}, {"Origin": "http://evil.example"}):
            response = await http.get("/", headers=link | changes)
            assert response.status_code == 403
            assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        assert (await http.post("/", headers=link)).status_code == 403
        assert (await http.get("/", headers={"Host": "evil.example"})).status_code == 403


async def test_a_token_opens_once_and_a_cookie_from_then_on(store: Store) -> None:
    async with client(store, hosts=None, token=TOKEN) as http:
        for page in (*gallery.PAGES, "/static/page.css", "/?token=wrong", "/?token="):
            assert (await http.get(page)).status_code == 401, page
        assert (await http.get("/", headers={"Cookie": "agentr_view=wrong"})).status_code == 401
        response = await http.get(f"/trees?iteration=1&token={TOKEN}")
        assert (response.status_code, response.headers["location"]) == (303, "/trees?iteration=1")
        assert "httponly" in response.headers["set-cookie"].lower()
        assert (await http.get("/trees")).status_code == 200
        away = await http.get(f"//evil.example/?token={TOKEN}")
        assert not away.headers.get("location", "/").startswith("//")


def texts(index: TextIndex, words: str) -> int:
    return index.search(words, offset=0, limit=10).total


def test_the_index_takes_in_what_is_new_and_notices_another_store(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    index = TextIndex(store, tmp_path / "texts.sqlite")
    assert texts(index, "start") == 0
    assert index.refresh(budget_s=60)
    assert texts(index, "start") == 1
    store.write(gallery.begun("new", "A zeppelin over the start."))
    assert index.refresh(budget_s=60)
    assert (texts(index, "start"), texts(index, "zeppelin")) == (2, 1)
    other_store = Store(tmp_path / "other.duckdb")
    other_store.write(merge(gallery.begun(f"other{n}", f"boat {n}") for n in range(100)))
    other_index = TextIndex(other_store, tmp_path / "texts.sqlite")
    assert other_index.refresh(budget_s=60)
    assert (texts(other_index, "zeppelin"), texts(other_index, "boat")) == (0, 100)


async def test_an_origin_fits_a_phone(pages: httpx.AsyncClient, tmp_path: Path) -> None:
    page, *styles = [
        (await pages.get(path)).text
        for path in (f"/checkpoint/{gallery.TRAINED}", "/static/page.css", "/static/viewer.css")
    ]
    fits = "[...document.querySelectorAll('.scroll')].every(one => one.scrollWidth <= one.clientWidth)"
    page = page.replace("</body>", f"<style>{''.join(styles)}</style><script>document.title = {fits}</script></body>")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    dom = browse((tmp_path / "page.html").as_uri(), tmp_path / "profile", width=500)
    assert "<title>true</title>" in dom


def test_an_extract_shows_what_was_found() -> None:
    text = "x" * 500 + " the <b>Boat</b> sank " + "y" * 500
    pieces = extract(text, ["boat"])
    assert ("Boat", True) in pieces
    assert sum(len(piece) for piece, _ in pieces) < 600
    assert extract("nothing of it", ["boat"]) == [("nothing of it", False)]


def path_step(position: int, action: str, *, valid: bool | None = True, observation: str = "ok") -> PathStep:
    return PathStep(
        position, None, action, action, valid, observation, 0.0, False, False, 0, None, 1, None, None, None, None
    )


def test_a_strip_folds_what_repeats() -> None:
    words = ["look", "get", "make", "get", "make", "get", "make", "go", "go", "buy"]
    steps = [
        path_step(at, word, valid=at != 8, observation="No." if at == 8 else "ok") for at, word in enumerate(words)
    ]
    folds = strip.folds(steps, 4)
    assert [(fold.is_loop, fold.num_times, [line.action for line in fold.lines]) for fold in folds] == [
        (False, 1, ["look"]), (True, 3, ["get", "make"]), (False, 2, ["go"]), (False, 1, ["buy"]),
    ]  # fmt: skip
    # They part within a loop, which stands at its first step.
    assert [line[:2] for fold in folds for line in fold.lines if line.parting_position == 4] == [(2, "make")]
    assert [line.refused_positions for fold in folds for line in fold.lines] == [[], [], [], [8], []]


@given(st.lists(st.sampled_from("abc"), max_size=14))
@example(list("aababab"))
def test_a_strip_marks_a_loop_where_evaluations_count_one(words: list[str]) -> None:
    folds = strip.folds([path_step(at, word) for at, word in enumerate(words)])
    assert any(fold.is_loop for fold in folds) == is_stuck(words)
    assert sum(fold.num_times * len(fold.lines) for fold in folds) == len(words)


async def test_a_failed_episode_stands_beside_a_won_one_and_between_other_failures(pages: httpx.AsyncClient) -> None:
    page = (await pages.get(f"/trajectory/{gallery.ROLLOUTS[1]}")).text
    assert "<h1>Start." in page
    assert "No step was refused, and nothing repeats three times in a row; reward 0 after 2 steps" in visible_text(page)
    beside = page.partition('id="beside"')[2].partition("</section>")[0]
    assert "of the same group" in visible_text(beside)
    assert f'href="/trajectory/{gallery.ROLLOUTS[0]}"' in beside
    assert f'rel="next" href="/trajectory/{gallery.ROLLOUTS[2]}"' in page
    assert 'rel="prev"' not in page
    assert 'id="beside"' not in (await pages.get(f"/trajectory/{gallery.ROLLOUTS[0]}")).text
    group = (await pages.get(f"/group/{gallery.ITERATION}/1/0")).text
    assert group.count("#beside") == 2
    assert "Start." in (await pages.get("/trajectories")).text


async def test_a_pair_has_three_witnesses_and_a_tree_its_texts_on_hover(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb", "<b>")
    with store.transaction() as con:
        con.execute("insert into oracle_verdict (tree_id, node_index, verdict) values (?, 3, 'bad')", [gallery.TREE])
    async with client(store) as http:
        page = (await http.get(f"/pair/{gallery.PAIR}")).text
        tree = (await http.get(f"/tree/{gallery.TREE}")).text
        trajectory = (await http.get(f"/trajectory/{gallery.ROLLOUTS[1]}")).text
    witnesses = visible_text(page.partition('class="witnesses"')[2].partition("</section>")[0])
    assert witnesses.count(", first error") == 2, "no step is worth less than its siblings"
    assert "bad, first error" in witnesses
    drawing = tree[tree.index("<svg") : tree.index("</svg>")]
    assert "seen lose&lt;b&gt;" in drawing
    assert drawing.count('class="edge both"') == 1
    assert drawing.count('class="edge bad"') == 2, "the shared edge is drawn in both colours"
    assert "END&lt;b&gt;" in trajectory
    assert "END<b>" not in trajectory


def test_replies_are_placed_by_their_tokens() -> None:
    tokens = [RenderedToken(token_id, "x", "assistant", token_id < 5) for token_id in (9, 1, 2, 9, 1, 2, 3)]
    replies = viewer_pages.locate_replies(
        [tokens],
        [SampledTokens(0, [1, 2], [-0.1, -3.0], 1), SampledTokens(1, [], [], None), SampledTokens(2, [1, 2, 3], [], 4)],
    )
    assert [(at, span.start, span.end) for at, span in replies.items()] == [(0, 1, 3), (2, 4, 7)]
