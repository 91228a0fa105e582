"""Stored episodes scored again: the grader that a command line names, and old and new scores side
by side.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from agentr_core.environments.gold import read_gold
from agentr_core.environments.graders import (
    Command,
    ExactAnswer,
    NumericAnswer,
    Pattern,
    Rubric,
    answer_within,
    last_answer,
)
from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault
from agentr_core.fingerprint import file_sha256
from agentr_core.recipes import parsing
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.recipe import replace as replaced
from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row, Table
from agentr_core.reports.model_card import table_text
from agentr_core.runtime.place import Workplace
from agentr_core.stages.regrade import Regraded, Scoring, asked_model, by_world, regrade
from agentr_core.store.queries.runs import run_config
from agentr_core.store.queries.scorings import OF_A_SCORING, Changed, Scored, changed, side_by_side
from agentr_core.texts import counted, quoted, unreadable
from agentr_core.types import Instance
from flows import interruption
from tasks.wiring import RunRef, quiet_workplace
from tasks.workspaces import find_run, open_store

_OPTIONS = {
    "world": {"judge"},
    "exact": {"gold", "pattern"},
    "numeric": {"gold", "pattern", "tolerance"},
    "regex": {"pattern", "where"},
    "command": {"command", "seconds", "success_from"},
    "rubric": {"rubric", "judge", "success_from"},
}
"""The options of each grader."""
_NEEDED = {"exact": "gold", "numeric": "gold", "regex": "pattern", "command": "command", "rubric": "rubric"}
_REPLY = 200
_EVERY_S = 10.0


def regraded(
    workspace: Path,
    run: str,
    grader: str,
    given: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    evaluations: bool | None,
    iteration: int | None,
    examples: int,
    form: str,
) -> tuple[str, Sequence[str]]:
    """Score the episodes of a run again; return old and new scores as text, and the reasons why
    episodes have no new score.

    Args:
        run: the beginning of the run's id.
        given: the options of the grader that were given, by name.
        overrides: changes of the run's recipe.
        evaluations: only the episodes of evaluations, or only the others; None: all.
        examples: how many changed episodes are shown.
        form: `table` or `json`.

    Raises `UserError`, and as `stages.regrade.regrade`.
    """
    if strange := sorted(given.keys() - _OPTIONS[grader]):
        raise ConfigError(f"--{strange[0].replace('_', '-')} does not belong to --by {grader}; leave it out")
    if (needed := _NEEDED.get(grader)) and needed not in given:
        raise ConfigError(f"--by {grader} needs --{needed}")
    run_id = find_run(workspace, run)
    recipe = _recipe(workspace, run_id, overrides, given.get("judge"))
    place = replace(quiet_workplace(RunRef(workspace=str(workspace), run_id=run_id), recipe), progress=_progress())
    scoring = _scoring(place, grader, given)
    done = interruption.run(regrade(place, scoring, evaluations=evaluations, iteration=iteration))
    scored = side_by_side(place.store, scoring.id, run_id)
    differing = changed(place.store, scoring.id, run_id, examples)
    shown = _plain if form == "json" else _text
    return shown(place, scoring, done, scored, differing), done.faults


def _recipe(workspace: Path, run_id: str, overrides: Sequence[str], judge: Path | None) -> Recipe:
    """Return the recipe of a run with changes, which are checked by themselves alone: what a method
    refuses does not matter where nothing is collected or trained.
    """
    config = run_config(open_store(workspace, must_exist=True), run_id)
    assert config is not None
    source = f"recipe of run {run_id}"
    this = () if judge is None else (f"models.judge={{path: {parsing.quoted(str(judge))}}}",)
    if not overrides and not this:
        recipe = parsing.restored(json.loads(config), source=source)
    else:
        changes = [*overrides, *this]
        recipe = parsing.parse(json.loads(config), changes, check=lambda name, found: [], source=source, stored=True)
    return replaced(recipe, workspace=str(workspace))


def _scoring(place: Workplace, grader: str, given: Mapping[str, Any]) -> Scoring:
    if grader == "world":
        return by_world(place)
    # The time that a command has decides no reward.
    settings = {name: value for name, value in given.items() if name not in ("gold", "rubric", "judge", "seconds")}
    options = {
        name: value for name, value in given.items() if name in ("tolerance", "seconds", "success_from", "where")
    }
    if grader == "regex":
        return Scoring(name=grader, settings=settings, grader=Pattern(given["pattern"], **options))
    if grader == "command":
        return Scoring(name=grader, settings=settings, grader=Command(given["command"], **options))
    if grader == "rubric":
        text = _read(given["rubric"])
        rubric = Rubric(text, **options)
        settings |= {"rubric": text, "judge": asked_model(place, "judge")}
        return Scoring(name=grader, settings=settings, grader=rubric)
    options["answer"] = answer_within(given["pattern"]) if "pattern" in given else last_answer
    kind = ExactAnswer if grader == "exact" else NumericAnswer
    settings["gold"] = file_sha256(given["gold"])
    return Scoring(name=grader, settings=settings, grader=kind(_golds(place, given["gold"]), **options))


def _golds(place: Workplace, file: Path) -> Callable[[Instance], Sequence[str]]:
    with place.worlds() as worlds:
        names = [env.name for _, env in worlds]
    if len(names) > 1:
        raise ConfigError("gold answers are of one world, and the recipe has several; choose another grader")
    found = read_gold(file, world=names[0])

    def golds(instance: Instance) -> Sequence[str]:
        if instance not in found or not found[instance].answers:
            raise EnvironmentFault(f"{instance.key} has no answer in {file}")
        return found[instance].answers

    return golds


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"file {file} cannot be read: {unreadable(error)}") from error


def _progress() -> Callable[[int, int, str], None]:
    """Return a function that shows progress on the standard error: in one line of a terminal, else
    in a line every ten seconds.
    """
    last = time.monotonic()

    def show(done: int, total: int, note: str) -> None:
        nonlocal last
        if sys.stderr.isatty():
            click.echo(f"\r{done:,} of {total:,} {note}", err=True, nl=done == total)
        elif time.monotonic() - last >= _EVERY_S:
            last = time.monotonic()
            click.echo(f"{done:,} of {total:,} {note}", err=True)

    return show


def _text(
    place: Workplace, scoring: Scoring, done: Regraded, scored: Sequence[Scored], differing: Sequence[Changed]
) -> str:
    columns = (
        Column("Iteration"),
        Column("Episodes of", "text"),
        Column("Number"),
        Column("Success %"),
        Column("New"),
        Column("Reward"),
        Column("New"),
        Column("Won"),
        Column("Lost"),
        Column("Up"),
        Column("Down"),
        Column("Unreadable"),
    )
    rows = [
        Row(
            (
                wording.NOTHING if one.iteration is None else str(one.iteration),
                one.episodes_of,
                wording.count(one.episodes),
                wording.percent(one.success),
                wording.percent(one.new_success),
                wording.decimal(one.reward, 3),
                wording.decimal(one.new_reward, 3),
                *map(wording.count, (one.won, one.lost, one.up, one.down, one.unreadable)),
            )
        )
        for one in scored
    ]
    lines = [
        f"{counted(done.episodes, 'episode')} of run {place.run_id}, {done.new:,} of them scored now by {scoring.name}",
        table_text(Table(columns, tuple(rows))),
    ]
    if differing:
        lines += ["Changed", *(_told(one) for one in differing), ""]
    if done.faults:
        lines += [
            f"Without a new score: {counted(len(done.faults), 'episode')}; the same command tries them again",
            *(f"  {fault}" for fault in dict.fromkeys(done.faults[:5])),
            "",
        ]
    query = OF_A_SCORING.format(scoring.id)
    lines += [f"scoring {scoring.id}", f'ask     agentr sql "{query}" -w {shlex.quote(str(place.root))}']
    return "\n".join(lines) + "\n"


def _told(one: Changed) -> str:
    new = "no score" if one.new_reward is None else f"{one.new_reward:.3g}"
    reply = "" if one.reply is None else f": {quoted(' '.join(one.reply.split()), _REPLY)}"
    return f"  {one.change:<10}  {one.reward:.3g} -> {new}  {one.instance_id}  {one.trajectory_id}{reply}"


def _plain(
    place: Workplace, scoring: Scoring, done: Regraded, scored: Sequence[Scored], differing: Sequence[Changed]
) -> str:
    found = {
        "run_id": place.run_id,
        "scoring_id": scoring.id,
        "grader": scoring.name,
        "settings": scoring.settings,
        "episodes": done.episodes,
        "new": done.new,
        "faults": list(done.faults),
        "scores": [one._asdict() for one in scored],
        "changed": [one._asdict() for one in differing],
    }
    return json.dumps(found, indent=2, default=str) + "\n"
