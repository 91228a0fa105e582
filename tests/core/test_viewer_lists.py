"""Lists of the viewer: their order, columns, completions, files and comparisons."""

from __future__ import annotations

import csv
import io
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gallery
import httpx
import pytest
from browser import HOSTILE

from agentr_core.http_server import address_elsewhere
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.listings import LISTINGS, sortable_columns
from agentr_core.system import LOOPBACK
from agentr_core.types import Instance, StopReason, Trajectory
from agentr_core.viewer.lists import LIST_VIEWS, list_file, list_page
from agentr_core.viewer.server import app

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = gallery.fill(tmp_path_factory.mktemp("ws") / "store.duckdb")
    ((key,),) = store.rows("select min(trajectory_id) from trajectory where source = 'episode'")
    regrade_row = {"scoring_id": "5c01", "trajectory_id": key, "reward": 0.25, "success": False, "answer": None}
    store.write({"scoring": [{"scoring_id": "5c01", "grader": "regex", "settings": "{}"}], "regrade": [regrade_row]})
    return store


@pytest.fixture
async def pages(store: Store) -> Any:
    viewer = app(store.path, index=store.path.with_name("texts.sqlite"), hosts=LOOPBACK)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(viewer), base_url="http://localhost:4280") as http:
        yield http


async def test_a_head_sorts_and_sorts_the_other_way_round(pages: httpx.AsyncClient) -> None:
    async def rewards(query: str) -> list[float]:
        return [row["reward"] for row in (await pages.get(f"/trajectories.json{query}")).json()["rows"]]

    assert await rewards("?sort=reward") == sorted(await rewards(""))
    assert await rewards("?sort=-reward") == sorted(await rewards(""), reverse=True)
    page = (await pages.get("/trajectories?sort=-reward&outcome=success")).text
    assert 'aria-sort="descending"' in page
    assert 'href="/trajectories?outcome=success&amp;sort=reward"' in page
    assert (await pages.get("/trajectories?sort=reward;drop")).status_code == 200


@pytest.mark.parametrize("name", LISTINGS)
async def test_every_list_sorts_by_each_of_its_columns(pages: httpx.AsyncClient, name: str) -> None:
    always = f"before={gallery.BEFORE}&after={gallery.AFTER}&" if name == "differences" else ""
    page = (await pages.get(f"/{name}?{always}")).text
    heads = [unescape(link) for link in re.findall(r'<a class="sort" href="([^"]*)"', page)]
    assert (
        len(heads)
        == sum(not c.is_optional and c.name in sortable_columns(LISTINGS[name]) for c in LIST_VIEWS[name].columns)
        >= 4
    )
    for head in heads:
        answer = await pages.get(head)
        assert answer.status_code == 200
        assert "aria-sort" in answer.text, head


@pytest.mark.parametrize("name", [name for name in LISTINGS if name not in ("rejections", "differences")])
async def test_every_list_of_what_was_played_names_the_goals(pages: httpx.AsyncClient, name: str) -> None:
    rows = (await pages.get(f"/{name}.json")).json()["rows"]
    goals = {row["first_observation"] for row in rows if row["instance_id"]}
    assert goals
    assert None not in goals
    assert ">Goal<" in (await pages.get(f"/{name}")).text


async def test_columns_are_chosen_and_stay(pages: httpx.AsyncClient) -> None:
    page = (await pages.get("/trajectories?columns=trajectory_id&columns=environment")).text
    assert re.findall(r'<th class="\w+"><a[^>]*>(\w+)', page) == ["Trajectory", "World"]
    assert "columns=trajectory_id%2Cenvironment" in page


async def test_filters_complete(pages: httpx.AsyncClient) -> None:
    page = (await pages.get("/trajectories")).text
    assert 'list="some-run"' in page
    assert f'<option value="{gallery.RUN}">toy</option>' in page
    assert '<option value="toy/train/' in page


async def test_an_instance_is_found_by_its_id(pages: httpx.AsyncClient) -> None:
    instance = (await pages.get("/trajectories.json")).json()["rows"][0]["instance_id"]
    answer = await pages.get("/find", params={"q": instance})
    assert answer.headers["location"] == f"/trajectories?{urlencode({'instance': instance})}"
    assert (await pages.get("/find?q=toy/nowhere")).headers["location"].startswith("/search")


@pytest.mark.parametrize(("instance", "total"), [("toy/train/3", 6), ("toy/train/30", 1), ("toy/train/", 7)])
def test_a_whole_id_is_that_of_one_instance_though_another_begins_with_it(
    tmp_path: Path, instance: str, total: int
) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    longer = Instance(environment="toy", split="train", index=30)
    trajectory = Trajectory.ended(longer, "Start.", (), StopReason.TIME_LIMIT)
    store.write(trajectory_rows("aaaa000000000030", trajectory, source="rollout", iteration_id=gallery.ITERATION))
    page = list_page(store, "trajectories", {"instance": instance})
    assert page.total == total
    assert store.count(f"select count(*) from ({page.sql})") == total


async def test_a_comparison_names_its_models_and_counts(pages: httpx.AsyncClient) -> None:
    page = (await pages.get(f"/differences?before={gallery.BEFORE}&after={gallery.AFTER}&change=changed")).text
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "Before toy aaaa0000 , base, test After toy aaaa0000 , iteration 1, test" in text
    assert "Won now 1 Lost now 0 As before 0" in text
    # What it belongs to stands at its head, though no filter names the run.
    assert f'<a href="/run/{gallery.RUN}">{gallery.RUN}</a>' in page
    run = (await pages.get(f"/run/{gallery.RUN}")).text
    assert f"/differences?before={gallery.BEFORE}&amp;after={gallery.AFTER}&amp;change=changed" in run
    choices = (await pages.get("/differences")).text
    assert f'<option value="{gallery.BEFORE}">toy aaaa0000, base, test</option>' in choices


async def test_a_list_is_a_file_with_its_sql(pages: httpx.AsyncClient, store: Store) -> None:
    page = (await pages.get("/trajectories?outcome=success&instance=toy'")).text
    (sql,) = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    assert len(store.query(unescape(sql))) == 0
    answer = await pages.get("/trajectories.json?outcome=success")
    assert answer.json()["total"] == len(answer.json()["rows"]) == len(store.query(answer.json()["sql"])) == 3
    lines = list(csv.DictReader(io.StringIO((await pages.get("/trajectories.csv?outcome=success")).text)))
    assert [line["trajectory_id"] for line in lines] == [row["trajectory_id"] for row in answer.json()["rows"]]


def test_a_spreadsheet_computes_no_text(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb", HOSTILE)
    with store.transaction() as con:
        con.execute("update rejection set detail = '=1+1'")
    text = list_file(store, "rejections", "csv", {})
    assert text is not None
    assert {row["detail"] for row in csv.DictReader(io.StringIO(text))} == {"'=1+1"}


async def test_notes_are_kept_shown_and_filtered_and_only_own_pages_write_them(tmp_path: Path) -> None:
    store = gallery.fill(tmp_path / "store.duckdb", HOSTILE)
    viewer = app(store.path, index=tmp_path / "texts.sqlite", hosts=LOOPBACK)
    same_origin = {"origin": "http://localhost:4280", "sec-fetch-site": "same-origin"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(viewer), base_url=same_origin["origin"]) as http:
        key = (await http.get("/trajectories.json")).json()["rows"][0]["trajectory_id"]
        form = await http.get(f"/notes/{key}")
        assert form.headers["referrer-policy"] == "same-origin"
        assert f"notes on trajectory {key[:8]}" in form.text
        assert "<small>notes, toy" in form.text
        (secret,) = re.findall(r'name="key" value="([^"]*)"', form.text)
        note = {"key": secret, "tags": "odd, <b>wrong</b>, odd", "text": "</textarea><script>x</script>"}
        for headers in (
            {"origin": "http://elsewhere"},
            {"origin": "null"},
            {**same_origin, "sec-fetch-site": "cross-site"},
        ):
            assert (await http.post(f"/notes/{key}", data=note, headers=headers)).status_code == 403
        assert (await http.post(f"/notes/{key}", data={**note, "key": "?"}, headers=same_origin)).status_code == 403
        assert (
            await http.post(f"/notes/{key}", data={**note, "tags": "x" * 99}, headers=same_origin)
        ).status_code == 400
        assert (await http.post("/notes/none", data=note, headers=same_origin)).status_code == 404
        assert store.rows("select * from note") == []
        assert (await http.post(f"/notes/{key}", data=note, headers=same_origin)).status_code == 303
        assert store.rows("select trajectory_id, tags, text from note") == [
            (key, ["odd", "<b>wrong</b>"], note["text"])
        ]
        page = (await http.get(f"/notes/{key}")).text
        assert "<b>wrong" not in page
        assert "<script>x" not in page
        rows = (await http.get("/trajectories.json?tag=odd&columns=trajectory_id&columns=tags")).json()["rows"]
        assert rows == [{"trajectory_id": key, "tags": ["odd", "<b>wrong</b>"]}]
        assert (await http.get("/trajectories.json?tag=even")).json()["total"] == 0
        assert "odd, &lt;b&gt;wrong" in (await http.get("/trajectories?columns=tags")).text
    plain_viewer = app(store.path, index=tmp_path / "texts.sqlite", hosts=LOOPBACK, takes_notes=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(plain_viewer), base_url=same_origin["origin"]) as http:
        assert (await http.get(f"/notes/{key}")).status_code == 404
        assert "tags and notes" not in (await http.get(f"/trajectory/{key}")).text
        assert (await http.post(f"/notes/{key}", data=note, headers=same_origin)).status_code == 403


def test_an_address_for_all_names_one_that_opens_elsewhere() -> None:
    assert address_elsewhere("http://127.0.0.1:80") == "http://127.0.0.1:80"
    for where in ("http://0.0.0.0:4280", "http://[::]:4280"):
        address = address_elsewhere(where)
        assert address.endswith(":4280")
        assert "0.0.0.0" not in address
        assert "[::]" not in address
