#!/usr/bin/env bash
# A query compares several columns at once, `(a, b) = (c, d)`, to tell whether two rows belong to the same thing, such as an
# episode and the group that it was sampled for. For rows that belong to nothing all four are null.
#
# One would assume: a comparison with null is null, so that rows that belong to nothing belong to no same thing. `a = c and b = d`
#   says so in DuckDB, and the comparison of rows does in SQLite, whose answers are printed beside.
# What happens: in DuckDB a row is a value of its own that may hold nulls, and two of these with nulls in the same places are
#   equal: `(null, null) = (null, null)` is true, and so is `(1, null) = (1, null)`, where SQLite says null. A subquery of
#   several columns, `(a, b) in (select c, d ...)`, keeps SQL's rule.
# Versions: duckdb 1.5.6; the sqlite3 of Python 3.11.
# Why it matters: after a left join whatever was not joined has nulls in all columns of the other side, so that the comparison
#   takes every such row for a match of every other. Nothing fails, and a test with joined rows alone passes. Put `a is not null`
#   beside it, or write the columns out.
#
# Needs python3.11 and a registry of packages. Takes about ten seconds, most of it for the installation.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==1.5.6
cat > "$work/trial.py" <<'PY'
import sqlite3

import duckdb

EXPRESSIONS = {
    "(null, null) = (null, null)": (True, None),
    "(1, null) = (1, null)": (True, None),
    "(1, null) = (2, null)": (False, False),
    "null = null and null = null": (None, None),
    "(null, null) in (select null, null)": (None, None),
}
changed = []
for expression, expected in EXPRESSIONS.items():
    answers = []
    for connection in (duckdb.connect(), sqlite3.connect(":memory:")):
        ((answer,),) = connection.execute(f"select {expression}").fetchall()
        answers.append(None if answer is None else bool(answer))
    print(f"{expression:38} DuckDB {answers[0]!s:6} SQLite {answers[1]}")
    if tuple(answers) != expected:
        changed.append(expression)
DATA = (
    "create table episode (id integer); insert into episode values (1), (2), (3);"
    "create table member (id integer, step integer, number integer); insert into member values (3, 7, 0);"
)
QUESTION = (
    "select count(*) from episode a left join member m on m.id = a.id "
    "join episode b on b.id > a.id left join member n on n.id = b.id where (m.step, m.number) = (n.step, n.number)"
)
counts = []
for connection in (duckdb.connect(), sqlite3.connect(":memory:")):
    for statement in DATA.split(";"):
        connection.execute(statement)
    ((count,),) = connection.execute(QUESTION).fetchall()
    counts.append(count)
print(f"pairs of episodes of the same group, of which there are none: DuckDB {counts[0]}, SQLite {counts[1]}")
assert not changed and counts == [1, 0], f"this has changed: {changed}, {counts}"
PY
"$work/venv/bin/python" "$work/trial.py"
