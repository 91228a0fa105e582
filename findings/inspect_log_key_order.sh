#!/usr/bin/env bash
# A log of Inspect, written by Inspect itself, and the same JSON with its keys sorted: both read whole and by the head alone.
#
# One would assume: the order of keys in a JSON object says nothing, so a log that was rewritten with sorted keys (jq -S, a
#   database's JSON column, many formatters) is the same log.
# What happens: the whole log is read. `read_eval_log(..., header_only=True)`, by which logs are listed, streams the file and
#   wants `version` before `samples`, and fails with "Unable to read log file", which names the file and no reason.
# Versions: inspect_ai 0.3.285, Python 3.11.
# Why it matters: a log that opens by itself is missing from lists and overviews; who writes such logs has to write the keys
#   in Inspect's own order, which no page of the format asks for.
#
# Needs python3.11 and a registry of packages. Takes about two minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check inspect_ai==0.3.285
cd "$work"
cat > trial.py <<'PY'
import json
from importlib.metadata import version
from pathlib import Path

from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec, read_eval_log, write_eval_log

sums = EvalDataset(name="sums", samples=1)
spec = EvalSpec(
    created="2026-01-02T03:04:05+00:00", task="arithmetic", dataset=sums, model="none/none", config=EvalConfig()
)
sample = EvalSample(id=1, epoch=1, input="1 + 1", target="2")
write_eval_log(EvalLog(status="success", eval=spec, samples=[sample]), "written.json")
written = json.loads(Path("written.json").read_text(encoding="utf-8"))
Path("sorted.json").write_text(json.dumps(written, sort_keys=True), encoding="utf-8")
assert json.loads(Path("sorted.json").read_text(encoding="utf-8")) == written

answers = []
for name in ("written.json", "sorted.json"):
    for head in (False, True):
        try:
            answer = f"read, {read_eval_log(name, header_only=head).status}"
        except ValueError as error:
            answer = f"ValueError: {error}"
        print(f"inspect_ai {version('inspect_ai')}: {name}, {'head' if head else 'whole'}: {answer}")
        answers.append(answer.startswith("read"))
assert answers == [True, True, True, False], "this has changed"
PY
"$work/venv/bin/python" trial.py
