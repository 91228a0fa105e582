"""verl's own dataset class and collate function on what `agentr export --format verl` writes.

`make test-verl` installs verl without anything for GPUs into `.venv-verl` and runs

    python tests/verl/read_prompts.py .venv-verl/bin/python

The selection of a small run is exported, with a question of mathematics among those of knowledge.
The other Python loads the file with `RLHFDataset`, collates it, and makes the token ids of each
prompt as verl's agent loop does; they must be those with which agentr samples. Columns that a
reward manager reads must come through as they were written.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).parents[1]


def export(folder: Path) -> None:
    """Write a model, an export of a selection, and `expected.json`, what a reader must find in
    it.
    """
    sys.path[:0] = [str(TESTS), str(TESTS / "support")]
    import curricula
    import groups

    from agentr_core.episodes.transcript import transcript_of
    from agentr_core.methods.et_agent.selection import rollout, select_questions
    from agentr_core.samples.rendering import load_renderer
    from flows.commands.exporting import export_folder

    model = curricula.save_model(folder / "model", import_module("conftest").make_model_dir)
    file = curricula.write(folder, model)
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row |= {"domain": "math" if number % 4 < 2 else "knowledge", "answer": [row["answer"], f"{row['answer']}.0"]}
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    async def choose() -> Any:
        ctx = await groups.begun(file)
        await rollout(ctx, 1)
        await select_questions(ctx, 1)
        return ctx

    ctx = asyncio.run(choose())
    print(export_folder(folder / "runs", ctx.run_id, folder / "verl", "verl"))  # noqa: T201
    renderer, expected = load_renderer(model), []
    chosen = ctx.store.rows("select instance_id from selection where selected order by 1")
    with ctx.worlds() as worlds:
        instances = {instance.key: instance for _, env in worlds for instance in env.instances("train")}
        for (key,) in chosen:
            env = worlds.env_of(instances[key])
            prompt = transcript_of(env).prompt(env, env.reset(instances[key]), ())
            problem = env.problem(instances[key])
            fields = {"instance_id": key, "ids": renderer.render_prompt(prompt), "golds": [*problem.golds]}
            expected.append({**fields, "math": problem.domain == "math", "question": problem.question})
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


def check_export(folder: Path) -> None:
    """Load the export with verl, and fail unless it has what is expected."""
    dataset = import_module("verl.utils.dataset.rl_dataset")
    templates = import_module("verl.utils.tokenizer.chat_template")
    tokenizer = import_module("verl.utils.tokenizer").hf_tokenizer(str(folder / "model"))
    settings = {"max_prompt_length": 2000, "truncation": "error", "cache_dir": str(folder / "cache")}
    config = import_module("omegaconf").OmegaConf.create({**settings, "filter_overlong_prompts_workers": 1})
    rows = dataset.RLHFDataset(str(folder / "verl" / "train.parquet"), tokenizer, config)
    batch = dataset.collate_fn([rows[number] for number in range(len(rows))])
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    assert len(rows) == len(expected), (len(rows), len(expected))
    assert sorted(batch["index"].tolist()) == list(range(len(rows))), "the reward finds a group by its number"
    for number, entry in enumerate(expected):
        ids = templates.apply_chat_template(tokenizer, batch["raw_prompt"][number])
        assert ids == entry["ids"], entry["instance_id"]
        assert batch["reward_model"][number] == {"style": "rule", "ground_truth": entry["golds"]}
        source = ("math_effi_rl", "math") if entry["math"] else ("qa_effi_rl", "qa")
        assert (batch["data_source"][number], batch["ability"][number]) == source
        extra = batch["extra_info"][number]
        assert (extra["instance_id"], extra["question"]) == (entry["instance_id"], entry["question"])
    kinds = {source: batch["data_source"].tolist().count(source) for source in sorted({*batch["data_source"]})}
    tokens = sum(len(row["ids"]) for row in expected)
    summary = f"{len(rows)} prompts of {tokens} tokens are equal, token for token"
    print(f"verl {version('verl')}: {summary}; {kinds}")  # noqa: T201


def main() -> None:
    """Export here and read with the Python that is named, or read here."""
    if sys.argv[1] == "--read":
        check_export(Path(sys.argv[2]))
        return
    with TemporaryDirectory() as folder:
        export(Path(folder))
        subprocess.run([sys.argv[1], __file__, "--read", folder], check=True)


if __name__ == "__main__":
    main()
