#!/usr/bin/env bash
# A program that never uses pandas asks DuckDB a question with one integer as its parameter: `execute("select ?", [1])`.
#
# One would assume: the number is bound, as sqlite3 does it, and a question with a parameter costs what one without does.
# What happens: where pandas is installed, the first parameter of a process imports all of it, be the parameter a number, a
#   text or a list, since each value is compared with pandas' NaT and NA before its type is looked at. The same question
#   without a parameter imports nothing.
# Versions: duckdb 1.5.6, pandas 3.1.1, Python 3.11.
# Why it matters: pandas is installed beside most programs of this field, and its import takes several times as long as opening
#   the file and asking it. It can be half of a short command that looks something up, and a profile shows it within
#   `execute`, as if the database were slow. To import duckdb alone, or to leave out `df()`, does not help.
#
# Needs python3.11 and a registry of packages. Takes about half a minute, most of it for the installation.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==1.5.6 pandas==3.1.1
cat > "$work/trial.py" <<'PY'
import sys
import time

import duckdb

con = duckdb.connect()


def asked(question, *parameters):
    started = time.perf_counter()
    con.execute(question, *parameters).fetchall()
    milliseconds = 1000 * (time.perf_counter() - started)
    print(f"{question} {list(parameters)}: {milliseconds:.0f} ms, pandas imported: {'pandas' in sys.modules}")
    return "pandas" in sys.modules


assert not asked("select 1"), "this has changed"
assert asked("select ?", [1]), "this has changed"
asked("select ?", ["again"])
PY
"$work/venv/bin/python" "$work/trial.py"
