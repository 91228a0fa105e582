"""Inspect's own reader on what `agentr export --format inspect` writes.

`make test-inspect` installs inspect_ai into `.venv-inspect` and runs

    python tests/logs/read_logs.py .venv-inspect/bin/python

The other Python lists the folder, reads each log, with its samples and its head alone, and works
the means out again from the samples: they must be those of the head. A further argument names the
folder of an export; without one, an evaluation with an episode of each kind is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

TESTS = Path(__file__).parents[1]


def write(folder: Path) -> None:
    """Write a log with an episode of each kind."""
    sys.path[:0] = [str(TESTS / "support")]
    from logged import evaluation
    from toy import Line

    from agentr_core.exchange.inspect_log import write_log

    write_log(evaluation(Line()), folder)


def check_logs(folder: Path) -> None:
    """Read all logs of a folder with Inspect, and fail unless they are what the files say."""
    log = import_module("inspect_ai.log")
    files = sorted(folder.glob("*.json"))
    listing = sorted(Path(info.name.removeprefix("file://")) for info in log.list_eval_logs(str(folder)))
    assert listing == files, (listing, files)
    for file in files:
        data = json.loads(file.read_text(encoding="utf-8"))
        eval_log = log.read_eval_log(str(file))
        head = log.read_eval_log(str(file), header_only=True)
        assert head.samples is None
        assert head.results == eval_log.results
        assert (eval_log.version, eval_log.status, eval_log.eval.eval_id) == (2, "success", data["eval"]["eval_id"])
        means = {}
        for score in eval_log.results.scores:
            values = [sample.scores[score.name].as_float() for sample in eval_log.samples if sample.scores]
            means[score.name] = fmean(values)
            assert abs(means[score.name] - score.metrics["mean"].value) < 1e-9, (file, score, means)
            assert len(values) == score.scored_samples, (file, score)
        for sample, record in zip(eval_log.samples, data["samples"], strict=True):
            turns = [(turn.role, turn.text) for turn in sample.messages]
            assert turns == [(turn["role"], turn["content"]) for turn in record["messages"]], sample.id
            assert [turn.role for turn in sample.input] == [turn["role"] for turn in record["input"]], sample.id
            assert sample.metadata == record["metadata"], sample.id
            assert (sample.error is None) == ("error" not in record), sample.id
            assert sample.output.completion == record["output"].get("completion", ""), sample.id
        tokens = sum(usage.total_tokens for usage in eval_log.stats.model_usage.values())
        summary = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
        print(f"{file.name}: {len(eval_log.samples)} samples, {tokens:,} tokens; means {summary}")  # noqa: T201
        copy = file.with_name("copy.json")
        log.write_eval_log(eval_log, str(copy))
        assert log.read_eval_log(str(copy)).samples == eval_log.samples
        copy.unlink()
    assert files, f"{folder} has no log"
    print(f"inspect_ai {version('inspect_ai')}: {len(files)} logs read")  # noqa: T201


def main() -> None:
    """Write here and read with the Python that is named, or read here."""
    if sys.argv[1] == "--read":
        check_logs(Path(sys.argv[2]))
        return
    with TemporaryDirectory() as temp_dir:
        if len(sys.argv) == 2:
            write(Path(temp_dir))
        folder = sys.argv[2] if len(sys.argv) > 2 else temp_dir
        subprocess.run([sys.argv[1], __file__, "--read", folder], check=True)


if __name__ == "__main__":
    main()
