"""Chat templates that print the date: it is that of the run's start, in sampling and in training,
on every day.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from asked import run_id_of

from agentr_core.errors import DataFault, ModelDirectoryError
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, check_model_directory, prints_date
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.samples.chat_template import ChatTemplate
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.stages.dataset import dataset, dataset_file
from agentr_core.stages.demonstrate import expert_samples
from agentr_core.store.database import Store
from agentr_core.types import Message, Request, Sampling
from flows.preflight.checks import check
from tasks.wiring import RunRef, make_environment, quiet_context

# As Llama 3.1's: a variable may give the date, else a function, and texts are trimmed.
DATED = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}{{- '<|im_start|>system\nToday Date: ' + date_string + '<|im_end|>' }}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THEN = datetime(2024, 2, 29, 23, 59, tzinfo=UTC)
TALK = (
    Message(role="user", text="Craft."),
    Message(role="assistant", text="look", train=True),
    Message(role="user", text=" Nothing. "),
    Message(role="assistant", text="stop", train=True),
)


def test_the_date_is_that_of_the_run(make_tiny_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tiny_tokenizer(template=DATED)
    renderer = Renderer(tokenizer, at=THEN)
    ids, _ = renderer.render_sample(TALK)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nToday Date: 29 Feb 2024<|im_end|>")
    prompt = renderer.render_prompt(TALK[:3])
    assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize("layout", ["%d %b %Y", "%A, %-d %B %Y", "%Y-%m-%dT%H:%M:%S", "100%% %j %y"])
def test_any_layout_is_printed_as_ever(make_tiny_tokenizer: Callable[..., Any], layout: str) -> None:
    template = "{%- set parts = strftime_now('" + layout + "').split(' ') %}{{ parts | join('_') }}\n" + CHATML
    tokenizer = make_tiny_tokenizer(template=template)
    text = tokenizer.decode(Renderer(tokenizer, at=THEN).render_prompt(TALK[:1]))
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Craft."}], tokenize=False, add_generation_prompt=True
    )
    assert text == THEN.strftime(layout).replace(" ", "_") + plain[plain.index("\n") :]


def test_llamas_template_works(make_tiny_tokenizer: Callable[..., Any]) -> None:
    template = files("trl").joinpath("chat_templates/llama3_2.jinja").read_text(encoding="utf-8")
    tokenizer = make_tiny_tokenizer(template=template)
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"bos_token": names[0], "additional_special_tokens": names[1:]})
    ids, labels = Renderer(tokenizer, at=THEN).render_sample(TALK)
    assert "Today Date: 29 Feb 2024" in tokenizer.decode(ids)
    text = tokenizer.decode([label for label in labels if label >= 0])
    assert text == "look<|eot_id|>stop<|eot_id|>"


def test_a_date_that_nobody_gave_is_not_guessed(make_tiny_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ModelDirectoryError, match="prints the date, and no run says which"):
        Renderer(make_tiny_tokenizer(template=DATED))


@pytest.mark.parametrize("chance", ["{{ ['a', 'b'] | random }}", "{{ lipsum(n=1) }}"])
def test_a_template_that_draws_at_random_is_refused(make_tiny_tokenizer: Callable[..., Any], chance: str) -> None:
    template = chance + make_tiny_tokenizer().chat_template
    with pytest.raises(ModelDirectoryError, match="draws at random"):
        Renderer(make_tiny_tokenizer(template=template), at=THEN)


NAMED = {
    "tool_use": "{{ tools | length }} tools, {{ strftime_now('%Y') }}\n" + CHATML,
    "default": "{{ strftime_now('%d %b %Y') }}\n" + CHATML,
    "2024-07-26": "{{ ['a', 'b'] | random }}" + CHATML,
}


def named_model_dir(source: Path, target: Path, templates: dict[str, str], form: str) -> Path:
    """A copy of a model directory whose tokenizer has several templates: in its configuration, as
    most published ones have them, or in files.
    """
    shutil.copytree(source, target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    file = target / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    config.pop("chat_template", None)
    if form == "list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    for name, text in templates.items() if form == "files" else ():
        template = target / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        template.parent.mkdir(exist_ok=True)
        template.write_text(text, encoding="utf-8")
    file.write_text(json.dumps(config), encoding="utf-8")
    return target


@pytest.mark.parametrize("form", ["list", "files"])
def test_of_several_templates_those_that_are_used_print_the_date_of_the_run(
    tiny_model_dir: Path, tmp_path: Path, form: str
) -> None:
    path = named_model_dir(tiny_model_dir, tmp_path / form, NAMED, form)
    check_model_directory(path)
    chat = ChatTemplate(load_tokenizer(path), THEN)
    turns = [{"role": "user", "content": "Craft."}]
    tools = [{"type": "function", "function": {"name": "craft", "parameters": {}}}]
    assert chat.render(turns, prompt=True).startswith("29 Feb 2024\n<|im_start|>user")
    assert chat.render(turns, prompt=True, tools=tools).startswith("1 tools, 2024\n<|im_start|>user")
    assert prints_date(path)
    with pytest.raises(ModelDirectoryError, match="prints the date, and no run says which"):
        ChatTemplate(load_tokenizer(path), None)


def test_each_template_is_part_of_what_a_model_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = named_model_dir(tiny_model_dir, tmp_path / "files", NAMED, "files")
    before = behaviour_files_sha256(path)
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML)
    assert behaviour_files_sha256(path) != before


def test_several_templates_without_a_default_are_refused_in_a_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    templates = {"tool_use": CHATML, "2024-07-26": CHATML}
    path = named_model_dir(tiny_model_dir, tmp_path / "named", templates, "list")
    with pytest.raises(ModelDirectoryError, match="templates tool_use, 2024-07-26, and none is named default") as error:
        Renderer(load_tokenizer(path), at=THEN)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "kind", "said"),
    [("{% for", ModelDirectoryError, "is no template .*on line 1"), ("{{ 1 / 0 }}", DataFault, "ZeroDivisionError")],
)
def test_a_template_that_is_broken_is_told_in_a_sentence(
    make_tiny_tokenizer: Callable[..., Any], template: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as error:
        Renderer(make_tiny_tokenizer(template=template), at=THEN)
    assert "\n" not in str(error.value)


@pytest.fixture
def dated_model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "dated"
    shutil.copytree(tiny_model_dir, path)
    (path / "chat_template.jinja").write_text(DATED, encoding="utf-8")
    config = json.loads((path / "config.json").read_text("utf-8"))
    # With the instruction and the date, an episode is longer than the tiny model takes.
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}), encoding="utf-8")
    return path


@pytest.fixture
def ctx(dated_model_dir: Path, tmp_path: Path) -> RunContext:
    recipe = parse(
        {
            "name": "dated",
            "instances": {"train_limit": 2},
            "workspace": str(tmp_path / "runs"),
            "model": {"path": str(dated_model_dir)},
            "data": {"use": "expert", "max_length": 0},
        }
    )
    return RunContext(
        recipe=recipe,
        method=method_of(recipe),
        run_id=run_id_of(recipe),
        root=tmp_path / "runs",
        store=Store(tmp_path / "runs" / "store.duckdb"),
        make_environment=lambda _: make_environment(recipe),
        load_model=lambda role, path: ScriptedModel(lambda messages, seed, number: "open"),
        progress=lambda done, total, note: None,
    )


@pytest.mark.slow
async def test_a_dataset_has_the_date_of_the_runs_start_whenever_it_is_made(ctx: RunContext) -> None:
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    with ctx.store.transaction() as con:
        con.execute("update run set started_at = ?", [THEN.replace(tzinfo=None)])
    await expert_samples(ctx, 1)
    counts = await dataset(ctx, 1)
    tokenizer = load_tokenizer(ctx.policy(1).path)
    rows = pq.read_table(dataset_file(ctx, 1))["input_ids"].to_pylist()
    assert rows
    assert all("Today Date: 29 Feb 2024" in tokenizer.decode(row) for row in rows)
    dataset_file(ctx, 1).unlink()
    assert await dataset(ctx, 1) == counts
    # What a stage loads its models with, and a further start of the same run, have that date, too.
    await start_run(ctx)
    new_ctx = quiet_context(RunRef(str(ctx.root), ctx.run_id), ctx.recipe)
    assert new_ctx.started_at() == THEN


def test_the_model_reads_the_date_it_is_given(dated_model_dir: Path) -> None:
    model = TransformersModel.load(dated_model_dir, device="cpu", at=THEN)
    request = Request(messages=TALK[:1], sampling=Sampling(max_new_tokens=1), seed=0)
    assert model.count_tokens(request) == len(
        Renderer(load_tokenizer(dated_model_dir), at=THEN).render_prompt(TALK[:1])
    )
    assert "29 Feb 2024" in load_tokenizer(dated_model_dir).decode(model.renderer.render_prompt(TALK[:1]))


def test_a_recipe_with_such_a_template_can_be_started(ctx: RunContext) -> None:
    check(ctx.recipe)
