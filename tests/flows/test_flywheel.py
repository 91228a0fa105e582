"""The whole wheel under Prefect: from trees to a trained model and its report, and the way back in
the store.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from datasets import load_dataset
from door import Door
from huggingface_hub import ModelCard
from readme import COMMANDS, command
from transformers import AutoModelForCausalLM, AutoTokenizer
from wheel import write_recipe

from agentr_core.errors import ConfigError, DataFault
from agentr_core.exchange.formats import FORMATS
from agentr_core.methods.faults import load, parse
from agentr_core.models.checkpoint_dir import weights_sha256
from agentr_core.reports import wording
from agentr_core.store.care.rewriting import table_sizes
from agentr_core.store.database import Store
from flows.cli import cli
from flows.commands.exporting import export_folder
from flows.commands.lineage import traced
from flows.commands.publishing import publish_checkpoint
from flows.commands.stores import pruned
from flows.flywheel import flywheel
from flows.local import evaluate_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
GROWING = (
    "tree",
    "node",
    "judgement",
    "pair",
    "sample",
    "dataset",
    "checkpoint",
    "evaluation",
    "episode",
)


@dataclass(frozen=True)
class DoorRun:
    """A run of the door recipe that is over."""

    recipe: Path
    result: dict[str, Any]
    root: Path

    def ask(self, sql: str) -> pd.DataFrame:
        return Store(self.root / "store.duckdb").query(sql)


@pytest.fixture(scope="module")
def turned(
    prefect_server: None, door_installed: None, door_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> DoorRun:
    folder = tmp_path_factory.mktemp("wheel")
    recipe = write_recipe(folder, door_model)
    return DoorRun(recipe=recipe, result=asyncio.run(flywheel(str(recipe))), root=folder / "runs")


def test_a_checkpoint_and_a_sample_are_traced_to_the_base(turned: DoorRun) -> None:
    (checkpoint,) = turned.ask("select checkpoint_out from iteration where iteration = 1")["checkpoint_out"]
    (base,) = turned.ask("select checkpoint_out from iteration where iteration = 0")["checkpoint_out"]
    lines = traced(turned.root, checkpoint[:12], "text").splitlines()
    assert lines[0].startswith(f"checkpoint {checkpoint}  recipe door")
    assert lines[1].startswith(f"  trained from: checkpoint {base}  model ")
    assert re.fullmatch(
        r"  trained on: dataset \w+  hash \w+  run \w+  iteration 1  rows [1-9]\d*  samples [1-9].*", lines[2]
    )
    assert lines[3] == f"    collected by: checkpoint {base}  see above"

    revision, *_ = turned.ask("select sample_id from sample where kind = 'revision'")["sample_id"]
    entries = json.loads(traced(turned.root, revision, "json"))
    kinds = [line["entity"]["kind"] for line in entries]
    assert kinds == ["sample", "pair", "node", "tree", "checkpoint", "node", "tree"]
    assert [line["relation"] for line in entries if line["entity"]["kind"] == "node"] == ["good path to", "bad path to"]
    assert entries[4]["entity"]["key"] == base
    assert entries[-1]["seen"]
    tree = entries[3]["entity"]["key"]
    assert traced(turned.root, f"{tree}#0", "text").startswith(f"node {tree}#0  depth 0")


def test_a_published_checkpoint_loads_elsewhere_and_says_what_it_is(turned: DoorRun, tmp_path: Path) -> None:
    (checkpoint,) = turned.ask("select checkpoint_out from iteration where iteration = 1")["checkpoint_out"]
    folder = tmp_path / "given"
    publish_checkpoint(turned.root, checkpoint[:10], folder, base_model="somebody/door", licence="apache-2.0")

    assert weights_sha256(folder) == weights_sha256(turned.root / "checkpoints" / checkpoint)
    tokens = AutoTokenizer.from_pretrained(folder)("open the door", return_tensors="pt")
    assert AutoModelForCausalLM.from_pretrained(folder)(**tokens).logits.isfinite().all()
    card = ModelCard.load(folder / "README.md")
    assert (card.data.base_model, card.data.license, card.data.library_name) == (
        "somebody/door",
        "apache-2.0",
        "transformers",
    )
    assert "agent-r" in card.data.tags
    assert f"checkpoint {checkpoint}" in card.text
    (success,) = turned.ask("select success from v_iterations where iteration = 1")["success"]
    assert re.search(rf"\| test \(test\) \| {100 * success:.1f} \(\d", card.text)
    assert str(turned.root.parent) not in (folder / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in folder.iterdir()}.isdisjoint({"manifest.json", "training_history.jsonl"})
    assert not list(tmp_path.glob(".*"))

    with pytest.raises(ConfigError, match="already exists; name a new folder"):
        publish_checkpoint(turned.root, checkpoint, folder, base_model="", licence="")


def test_a_model_that_was_not_trained_here_is_not_published(turned: DoorRun, tmp_path: Path) -> None:
    (base,) = turned.ask("select checkpoint_out from iteration where iteration = 0")["checkpoint_out"]
    with pytest.raises(ConfigError, match="and were trained there"):
        publish_checkpoint(turned.root, base, tmp_path / "given", base_model="", licence="")
    assert not (tmp_path / "given").exists()


def test_an_id_that_names_nothing_or_several_is_refused(turned: DoorRun) -> None:
    with pytest.raises(ConfigError, match=r"no ids in .* begin with 'nothing'; give that of one checkpoint"):
        traced(turned.root, "nothing", "text")
    (run_id,) = turned.ask("select run_id from run")["run_id"]
    with pytest.raises(ConfigError, match=rf"{run_id} is a run; trace something that it made, such as a checkpoint"):
        traced(turned.root, run_id, "text")
    with pytest.raises(ConfigError, match=r"more than 5 ids in .* begin with '': .*, \.\.\.; give"):
        traced(turned.root, "", "text")


def test_every_stage_leaves_something(turned: DoorRun) -> None:
    (funnel,) = turned.ask("select * from v_funnel where iteration = 1").to_dict("records")

    assert funnel["trees"] == funnel["finished_trees"] == 6
    for stage in ("leaves", "pairs", "critiques", "errors_found", "spliced", "verified", "samples", "dataset_rows"):
        assert funnel[stage] > 0, stage
    assert turned.ask("select status from run")["status"].tolist() == ["finished"]
    assert set(turned.ask("select status from iteration")["status"]) == {"finished"}


def test_each_model_has_a_score_with_an_interval(turned: DoorRun) -> None:
    scores = turned.ask(
        "select run_id, iteration, split, success, success_low, success_high, reward, episodes "
        "from v_iterations order by iteration"
    )

    assert scores["iteration"].tolist() == [0, 1]
    assert set(scores["run_id"]) == {turned.result["run_id"]}
    assert set(scores["split"]) == {"test"}
    assert scores["episodes"].tolist() == [12, 12]
    assert (scores["success_low"] <= scores["success"]).all()
    assert (scores["success"] <= scores["success_high"]).all()
    assert (scores["success_high"] - scores["success_low"] > 0.1).all()
    assert (scores["reward"] == scores["success"]).all()
    assert "iteration 1" in turned.result["table"]


def test_a_checkpoint_leads_back_to_nodes_seeds_and_recipe(turned: DoorRun) -> None:
    (base, trained) = turned.ask("select checkpoint_out from iteration order by iteration")["checkpoint_out"]
    lineage = turned.ask(f"select * from v_lineage where checkpoint_id = '{trained}'")
    revisions = lineage[lineage["kind"] == "revision"]

    assert set(lineage["parent_checkpoint_id"]) == {base}
    assert len(set(lineage["dataset_position"])) == turned.ask("select count(*) n from dataset_row")["n"][0]
    assert not revisions.empty
    assert set(revisions["policy_checkpoint_id"]) == {base}
    columns = [
        "tree_id",
        "node_index",
        "reply",
        "observation",
        "instance_id",
        "tree_seed",
        "generation_seed",
        "verdict",
    ]
    assert not revisions[columns].isna().any(axis=None)
    config = parse(json.loads(lineage["config"][0]))
    assert config == load(turned.recipe)


def test_nothing_dangles(turned: DoorRun) -> None:
    assert turned.ask("select * from v_orphans").empty
    assert turned.ask("select * from event").empty


def test_training_changed_the_weights(turned: DoorRun, door_model: Path) -> None:
    rows = turned.ask("select path, weights_sha256 from checkpoint where parent_id is not null")

    assert rows["weights_sha256"].tolist() == [weights_sha256(Path(rows["path"][0]))]
    assert rows["weights_sha256"][0] != weights_sha256(door_model)


def test_the_export_for_trl_has_the_tokens_that_were_trained(turned: DoorRun, tmp_path: Path) -> None:
    run = turned.result["run_id"]
    export_folder(turned.root, run, tmp_path / "trl", "trl")
    lines = [json.loads(line) for line in (tmp_path / "trl" / "messages.jsonl").read_text("utf-8").splitlines()]
    (file,) = (turned.root / "datasets").glob("*.parquet")

    assert [{name: line[name] for name in ("input_ids", "labels")} for line in lines] == pq.read_table(file).to_pylist()
    assert sum(sum(line["completion_mask"]) for line in lines) > 0
    aside = file.rename(file.with_suffix(".aside"))
    with pytest.raises(ConfigError, match="has the tokens of iteration 1, is missing; restore it"):
        export_folder(turned.root, run, tmp_path / "again", "trl")
    aside.rename(file)


def test_an_export_is_found_by_every_id_and_leads_back_to_the_store(turned: DoorRun, tmp_path: Path) -> None:
    words = shlex.split(next(line for line in COMMANDS if line.startswith("agentr export ")))
    ids = turned.ask("select dataset_id, iteration_id, run_id from dataset join iteration using (iteration_id)").iloc[0]
    folders = []
    for key in ids:
        folders.append(tmp_path / key)
        args = [*words[1:2], key[:12], str(folders[-1]), *words[4:], "-w", str(turned.root)]
        assert CliRunner().invoke(cli, args, catch_exceptions=False).exit_code == 0
    files = [(folder / "data" / "train-00000-of-00001.parquet").read_bytes() for folder in folders]
    assert files[0] == files[1] == files[2]

    rows = load_dataset(str(folders[0]), split="train", cache_dir=str(tmp_path / "cache"))
    samples = turned.ask(
        "select s.sample_id as id, kind, instance_id, pair_id, trajectory_id, tree_id from dataset_row "
        "join sample s using (sample_id) order by position"
    )
    assert [[row[name] for name in samples] for row in rows] == [
        [None if pd.isna(value) else value for value in line] for line in samples.values.tolist()
    ]
    assert set(rows["run_id"]) == {turned.result["run_id"]}
    (file,) = (turned.root / "datasets").glob("*.parquet")
    assert list(rows["labels"]) == pq.read_table(file)["labels"].to_pylist()

    card = (folders[0] / "README.md").read_text("utf-8")
    (trees,) = turned.ask("select count(*) n from tree join iteration using (iteration_id) where iteration = 1")["n"]
    assert f"## How it was made\n\n- trees grown: {trees}\n" in card
    assert f"- rows: {len(rows)}\n" in card
    assert "## Licence of the world\n\n- door: it names none; ask its authors" in card

    for form in FORMATS:
        export_folder(turned.root, ids["run_id"], tmp_path / form, form, without_mask=True)
    with pytest.raises(ConfigError, match="has no dataset of iteration 7; it has 1"):
        export_folder(turned.root, ids["run_id"], tmp_path / "seventh", "trl", iteration=7)


def test_answers_of_another_system_are_scored_beside_the_run(turned: DoorRun, tmp_path: Path) -> None:
    words = shlex.split(command("agentr eval "))
    door = Door(knows=True)
    records = []
    for instance in door.instances("test"):
        replies = door.expert(instance) or ()
        turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(("Say.", "Ok.", "?"))]
        for reply in replies if instance.index else replies[:1]:
            turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "?"}]
        records.append({"id": instance.index, "messages": turns})
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")

    done = CliRunner().invoke(cli, ["eval", str(turned.recipe), words[3], str(file)], catch_exceptions=False)

    rows = [re.split(r"\s{2,}", line.strip()) for line in done.output.splitlines()]
    scores = dict(turned.ask("select iteration, success from v_iterations").values.tolist())
    assert [row[0] for row in rows] == ["Episodes of", "answers.jsonl", "base", "iteration 1"]
    assert (rows[1][1], rows[1][-1]) == (f"{100 * 5 / 6:.1f}", "6")
    assert [row[1] for row in rows[2:]] == [f"{100 * scores[number]:.1f}" for number in (0, 1)]
    assert rows[2][4].split()[0] == wording.points(5 / 6 - scores[0])

    file.write_text(json.dumps(records[0] | {"id": "door/train/0"}), encoding="utf-8")
    wrong = CliRunner().invoke(cli, ["eval", str(turned.recipe), words[3], str(file)])
    assert "answers.jsonl:1: door/train/0 is no instance of split test" in str(wrong.exception)


def test_the_run_is_pruned_whole(turned: DoorRun, tmp_path: Path) -> None:
    copy = tmp_path / "ws" / "store.duckdb"
    copy.parent.mkdir()
    Store(turned.root / "store.duckdb").backup(copy)
    output = pruned(copy.parent, [turned.result["run_id"][:6]], dry_run=False)
    (path,) = turned.ask("select path from checkpoint where iteration_id is not null")["path"]
    assert f"no row names {path} any longer" in output
    assert {table.table: table.rows for table in table_sizes(Store(copy)).tables if table.rows} == {}


def test_reports_are_written(turned: DoorRun) -> None:
    html = Path(turned.result["report"])

    assert "Held-out success" in html.with_suffix(".md").read_text(encoding="utf-8")
    assert turned.result["run_id"] in html.read_text(encoding="utf-8")
    index = (html.parent / "index.html").read_text(encoding="utf-8")
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", index), "the index says when an iteration ended"


def test_the_same_flow_again_does_nothing_new(turned: DoorRun) -> None:
    def state() -> dict[str, Any]:
        return {
            name: turned.ask(f"select count(*) n, max(created_at) as latest from {name}").iloc[0] for name in GROWING
        }

    before = state()
    sha = turned.ask("select weights_sha256 from checkpoint order by 1")["weights_sha256"].tolist()
    ends = turned.ask("select iteration, finished_at from iteration order by 1")

    result = asyncio.run(flywheel(str(turned.recipe)))

    assert result == turned.result
    after = state()
    for name in GROWING:
        assert after[name].equals(before[name]), name
    assert turned.ask("select weights_sha256 from checkpoint order by 1")["weights_sha256"].tolist() == sha
    assert turned.ask("select iteration, finished_at from iteration order by 1").equals(ends)


def test_an_evaluation_alone_is_a_finished_run(turned: DoorRun) -> None:
    evaluate_recipe(turned.recipe, ["seed=77"])

    runs = turned.ask("select status, config->>'seed' as seed from run order by seed")
    assert set(runs["status"]) == {"finished"}
    assert "77" in runs["seed"].tolist()
    # So is the iteration of its model, which the viewer would show as interrupted.
    iterations = turned.ask("select i.status from iteration i join run using (run_id) where config->>'seed' = '77'")
    assert iterations["status"].tolist() == ["finished"]


@pytest.mark.long
def test_a_model_that_never_succeeds_is_told_in_one_sentence(tmp_path: Path) -> None:
    from base_settings import BaseConfig
    from pretrain import make_model, make_tokenizer

    shape = BaseConfig(hidden_size=32, num_hidden_layers=1, head_dim=32, intermediate_size=64)
    tokenizer = make_tokenizer(shape, seed=0)
    make_model(shape, tokenizer, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = write_recipe(tmp_path, tmp_path / "model")
    overrides = ["environment.name=textcraft", "instances.train_limit=2", "instances.test_limit=2"]

    with pytest.raises(DataFault, match=r"^iteration 1 of run \w+ has no sample to train on; `select.*were lost$"):
        asyncio.run(flywheel(str(recipe), overrides))

    store = Store(tmp_path / "runs" / "store.duckdb")
    assert store.query("select status from run")["status"].tolist() == ["failed"]
    assert store.query("select * from v_orphans").empty
