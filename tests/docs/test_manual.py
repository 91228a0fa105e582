"""The manual: its pages are built, its tutorial is followed, and what it says of the program is
true.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gallery
import pytest
import yaml
from asgi import running
from browser import browse
from click.testing import CliRunner
from door import register
from readme import BLOCK, MANUAL, ROOT, TUTORIAL
from starlette.staticfiles import StaticFiles

from agentr_core.environments import registry
from agentr_core.environments.reasoning import problems
from agentr_core.methods.faults import load, parse
from agentr_core.recipes.alarms import RULES
from agentr_core.recipes.recipe import resolved
from agentr_core.runtime import instances
from agentr_core.store.questions import examples
from agentr_core.types import Message, Sample, SampleKind
from flows.cli import cli
from flows.commands.plan import describe

PAGES = sorted(MANUAL.rglob("*.md"))
NAVIGATION = yaml.safe_load((MANUAL.parent / "mkdocs.yml").read_text("utf-8"))["nav"]
WORDS_A_MINUTE = 230
INSTALL = "pip install --no-build-isolation -e my-lock"


def text_of(name: str) -> str:
    return (MANUAL / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(text_of(name)) if kind == language]


def nav_targets(nav: Any) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else nav_targets(target)


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables, without heads and rules."""
    tables = re.findall(r"^\|.*\n\|-.*\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in row.strip("|").split("|")] for rows in tables for row in rows.splitlines()]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_contents_list_every_page_once() -> None:
    assert sorted(nav_targets(NAVIGATION)) == [str(page.relative_to(MANUAL)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text("utf-8"))):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert MANUAL in file.parents, f"{target} is not in the built pages"
        assert not anchor or anchor in anchors(file.read_text("utf-8")), target


def test_the_minutes_are_those_of_a_reader() -> None:
    total = 0
    for title, minutes, _ in table_rows(text_of("index")):
        (page,) = re.findall(r"\((\w+)\.md\)", title)
        if minutes != "as needed":
            words = len(re.findall(r"\w+", BLOCK.sub("", text_of(page))))
            # Tables of fields are looked things up in.
            words = words // 3 if page == "methods" else words
            assert words / WORDS_A_MINUTE <= int(minutes) + 0.5, (page, words)
            total += int(minutes)
    assert total <= 20


class Loads(HTMLParser):
    """Finds the addresses that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "link"):
            self.found += [address for name in ("src", "href") if (address := attributes.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages."""
    pytest.importorskip("zensical", reason="the builder comes with the extra `manual`: make manual")
    folder = tmp_path_factory.mktemp("book")
    book = folder / "manual"
    shutil.copytree(MANUAL.parent, book, ignore=shutil.ignore_patterns("site", ".cache"))
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(book / "mkdocs.yml")]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return book / "site"


def test_the_pages_are_built_and_load_nothing_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        file = (site / page.relative_to(MANUAL)).with_suffix(".html")
        loads = Loads()
        loads.feed(file.read_text(encoding="utf-8"))
        assert loads.found
        for address in loads.found:
            assert "//" not in address, f"{file.name} loads {address}"
            assert (file.parent / address.partition("#")[0].partition("?")[0]).exists(), address
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


SEARCH = """
<script>
  const everywhere = () => [document, ...[...document.querySelectorAll("*")].flatMap((each) => each.shadowRoot ?? [])];
  const find = (what) => everywhere().flatMap((root) => [...root.querySelectorAll(what)]);
  setInterval(() => {
    const [box] = find("dialog[open] input");
    if (!box) return find(".md-search__button").forEach((each) => each.click());
    if (!box.value) {
      box.value = "reflection";
      box.dispatchEvent(new Event("input", { bubbles: true }));
    }
    const links = find("dialog[open] a");
    if (links.length) document.body.dataset.found = links.map((each) => each.href.split("/").at(-1)).join(" ");
  }, 100);
</script>
"""


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_words_are_found_in_pages_on_a_disk_and_behind_a_server(site: Path, tmp_path: Path, scheme: str) -> None:
    page = site / f"probe-{scheme}.html"
    page.write_text((site / "index.html").read_text("utf-8").replace("</body>", f"{SEARCH}</body>"), encoding="utf-8")
    with running(StaticFiles(directory=site)) as address:
        dom = browse(page.as_uri() if scheme == "file" else f"{address}/{page.name}", tmp_path, seconds=20)
    (hits,) = re.findall(r'data-found="([^"]*)"', dom)
    assert {"concepts.html", "glossary.html"} <= set(hits.split()), hits


def test_the_picture_is_drawn_by_itself_and_is_readable_on_any_ground() -> None:
    picture = ElementTree.parse(MANUAL / "concepts.svg").getroot()
    assert not [each for each in picture.iter() if each.tag.rpartition("}")[2] in ("script", "image", "foreignObject")]
    words = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    order = ["instance", "tree", "verdict", "splice", "dataset", "checkpoint", "score"]
    assert [word for word in words if word in order] == order


@cache
def sentences() -> tuple[str, ...]:
    """Return every text of the program, with `…` for what is filled in."""

    def template(node: ast.JoinedStr) -> str:
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)

    texts = []
    for folder in ("agentr_core", "flows", "tasks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    texts.append(template(node))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return tuple(texts)


@pytest.mark.parametrize("told", blocks("troubleshooting", "text"))
def test_the_program_says_what_troubleshooting_quotes(told: str) -> None:
    assert any(told.strip() in sentence for sentence in sentences())


RECIPE = resolved(parse({"name": "manual", "model": {"path": "m"}}))
FIELDS = [row for row in table_rows(text_of("methods")) if len(row) == 4]


@pytest.mark.parametrize(("name", "field", "default", "where"), FIELDS)
def test_recipes_have_the_fields_of_the_papers(name: str, field: str, default: str, where: str) -> None:
    value: Any = RECIPE
    for key in field.strip("`").split("."):
        value = value[key]
    assert yaml.safe_load(default.strip("`")) == value
    assert name
    assert where


def test_the_page_of_alarms_has_each_with_its_default() -> None:
    rows = [row for row in table_rows(text_of("alarms")) if len(row) == 5]
    assert [name.strip("`") for name, *_ in rows] == [rule.name for rule in RULES]
    for name, default, *cells in rows:
        assert yaml.safe_load(default.strip("`")) == RECIPE["alarms"][name.strip("`")]
        assert all(cells)


def test_the_recipes_and_folders_of_the_methods_are_there() -> None:
    text = text_of("methods")
    for recipe in re.findall(r"`([\w-]+\.yaml)`", text):
        assert load(ROOT / "deployments" / "recipes" / recipe).method in text.lower()
    for folder in re.findall(r"`(agentr_core/[\w/]+)`", text):
        assert (ROOT / folder).is_dir()


def test_the_page_of_questions_has_every_source_and_column() -> None:
    page = text_of("questions")

    def read_table(mark: str) -> dict[str, list[str]]:
        part = page.partition(f"<!-- {mark} -->")[2].partition("<!-- end -->")[0]
        return {row[0].strip("`"): re.findall(r"`([^`]+)`", row[1]) for row in table_rows(part)}

    assert read_table("sources") == {domain: list(names) for domain, names in problems.SOURCES.items()}
    columns = read_table("columns")
    expected = {"question": problems._QUESTION_COLUMNS, "answer": problems._ANSWER_COLUMNS, "id": problems._ID_COLUMNS}
    assert {field: tuple(columns[field][: len(names)]) for field, names in expected.items()} == expected


def test_results_are_those_of_the_log() -> None:
    entries = [file.read_text(encoding="utf-8") for file in (ROOT / "deployments" / "log").glob("*.md")]
    log = dict(entry.removeprefix("# ").split("\n", 1) for entry in entries)
    _, *sections = re.split(r"^(?=LOG: )", text_of("results"), flags=re.M)
    assert len(sections) > 3
    for section in sections:
        heading = section.splitlines()[0].removeprefix("LOG: ")
        entry = " ".join(log[heading].split())
        for cell in (cell for row in table_rows(section) for cell in row[1:] if cell):
            for number in re.findall(r"[-+]?\d+(?:\.\d+)?", cell):
                assert re.search(rf"(?<![\d.]){re.escape(number.lstrip('+'))}(?![\d.]*\d)", entry), (heading, cell)


def test_panels_have_the_hashes_that_the_store_gives_them(tmp_path: Path) -> None:
    def hash_of(lines: Iterable[str]) -> str:
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]

    store = gallery.fill(tmp_path / "store.duckdb")
    panels = store.rows(examples()["panels"].sql)
    assert panels
    for evaluation, *_, panel, run, iteration in panels:
        query = (
            "select instance_id, repeat from v_episodes where (evaluation, run_id, iteration) = (?, ?, ?) and cut = 0"
        )
        assert panel == hash_of(f"{key}#{repeat}" for key, repeat in store.rows(query, evaluation, run, iteration))

    part = text_of("results").partition("## Reproduce")[2].partition("\n## ")[0]
    rows = table_rows(part)
    assert len(rows) == 3
    for name, recipes, count, expected in rows:
        for stem in re.findall(r"[a-z-]+-[a-z-]+", recipes) or ["textcraft-climb"]:
            recipe = load(ROOT / "deployments" / "recipes" / f"{stem}.yaml")
            env = registry.make(recipe.environment.name, recipe.environment.options)
            panel = (
                instances.test_instances(recipe, env)
                if name == "official"
                else instances.instances_of_set(recipe.evaluation.sets[name], env)
            )
            digest = hash_of(f"{instance.key}#0" for instance in panel)
            assert [str(len(panel)), f"`{digest}`"] == [count, expected]


def test_the_glossary_is_in_order_and_has_each_word_once() -> None:
    words = [row[0] for row in table_rows(text_of("glossary"))]
    assert words == sorted(set(words))
    assert len(words) > 40


@pytest.fixture
def early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the method that the cookbook's filter makes, installed."""
    program, _ = blocks("cookbook", "python")
    (points,) = (text for text in blocks("cookbook", "toml") if "agentr.methods" in text)
    (tmp_path / "early.py").write_text(program, encoding="utf-8")
    ((name, target),) = tomllib.loads(points)["project"]["entry-points"]["agentr.methods"].items()
    monkeypatch.syspath_prepend(str(register(tmp_path, "early", f"[agentr.methods]\n{name} = {target}\n")))
    yield name
    sys.modules.pop("early", None)


def test_a_filter_of_ones_own_is_a_method_that_takes_fewer_samples(early: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentr_core.methods.table import method_of

    def sample(bad: int) -> Sample:
        messages = [Message(role="assistant", text=str(n), train=n > bad) for n in range(bad + 3)]
        return Sample(kind=SampleKind.REVISION, messages=tuple(messages), instance=None)

    monkeypatch.chdir(ROOT)
    path = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
    recipe = load(path, [f"method={early}"])
    takes = method_of(recipe).plan(recipe, 1).takes_sample
    assert takes is not None
    assert [takes(sample(bad)) for bad in (0, 4, 5)] == [True, True, False]
    assert "Agent-R, early revisions" in describe(path, [f"method={early}"])


def test_the_method_that_is_shown_is_one_that_is_run() -> None:
    _, block = blocks("cookbook", "python")
    assert block in (ROOT / "data" / "templates" / "method" / "reply_recital.py").read_text(encoding="utf-8")


def test_group_rl_on_vllm_is_set_as_shown() -> None:
    texts = [text for text in blocks("learning", "yaml") if "backend: vllm" in text]
    alone, turns = (parse({"name": "manual", "method": "grpo"} | yaml.safe_load(text)) for text in texts)
    assert alone.model.backend == turns.model.backend == "vllm"
    assert 0 not in alone.model.vllm.gpus, "the trainer has it"
    assert turns.model.shares_gpus
    assert turns.model.vllm.gpus == tuple(range(turns.training.num_processes))


def script_files(script: str) -> dict[str, str]:
    """Return the files that a script writes with `cat`, by name."""
    return dict(re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", script, re.M | re.S))


TUTORIAL_SCRIPT = "".join(blocks(TUTORIAL.stem, "sh"))


def test_the_tutorial_names_commands_that_there_are() -> None:
    inside = re.findall(r"^agentr (.+)$", TUTORIAL_SCRIPT, re.M)
    for words in (shlex.split(line) for line in inside):
        assert CliRunner().invoke(cli, [*words[:1], "--help"]).exit_code == 0, words
    assert {line.split()[0] for line in inside} == {"new", "env", "plan", "run", "runs", "sql"}
    done = subprocess.run(["make", "install", "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    recipe = parse(yaml.safe_load(script_files(TUTORIAL_SCRIPT)["my-recipe.yaml"]))
    assert f"agentr new world {recipe.environment.name}\n{INSTALL}\n" in TUTORIAL_SCRIPT


def test_the_model_of_the_tutorial_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^python \$AGENTR_HOME/(\S+) my-model$", TUTORIAL_SCRIPT, re.M)
    subprocess.run([sys.executable, str(ROOT / line), "my-model"], cwd=tmp_path, env=program_environment(), check=True)
    (tmp_path / "my-recipe.yaml").write_text(script_files(TUTORIAL_SCRIPT)["my-recipe.yaml"])
    monkeypatch.chdir(tmp_path)
    plan = describe(tmp_path / "my-recipe.yaml", ["environment.name=textcraft"])
    (parameters,) = set(re.findall(r"([\d,]+) (?:random )?parameters", text_of("tutorial")))
    assert f"actor, transformers: {parameters} parameters" in plan


def program_environment(**more: str) -> dict[str, str]:
    """Return an environment in which the programs of this one are found."""
    return {
        **{name: value for name, value in os.environ.items() if name not in ("AGENTR_VLLM", "PREFECT_API_URL")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        **more,
    }


@pytest.mark.long
def test_the_tutorial_leads_from_an_empty_folder_to_a_report(tmp_path: Path) -> None:
    """The package is registered as `pip install` would, which is for good."""
    registering = f"""python - <<'END'
import sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from pathlib import Path
from door import register_package
register_package(Path("my-lock"))
END
"""
    _, script = TUTORIAL_SCRIPT.split("export AGENTR_HOME=$PWD\n")
    assert script.count(INSTALL) == 1
    env = program_environment(AGENTR_HOME=str(ROOT), PYTHONPATH=f"{ROOT}:{tmp_path / 'my-agent' / 'my-lock'}")
    done = subprocess.run(
        ["bash", "-e", "-c", script.replace(INSTALL, registering)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my-lock: ok - keeps the contract" in done.stdout
    (report,) = re.findall(r"^report  (\S+)$", done.stdout, re.M)
    page = (tmp_path / "my-agent" / report).read_text(encoding="utf-8")
    assert "my-agent" in page
    (output,) = (text for kind, text in BLOCK.findall(text_of("tutorial")) if not kind)
    assert output in done.stdout
