"""Score stored episodes again with the grader that a command line names, and show old and new
scores side by side.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentr_core.environment import Environment
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
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault
from agentr_core.fingerprint import file_sha256, fingerprint
from agentr_core.recipes import parsing
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.recipe import replace as replaced
from agentr_core.reports.model_card import table_text
from agentr_core.runtime.context import RunContext
from agentr_core.stages.regrade import Scoring, ScoringResult, model_settings, regrade, world_scoring
from agentr_core.stages.scorings import scored_table
from agentr_core.store.queries.runs import run_config
from agentr_core.store.queries.scorings import (
    SCORING_SQL,
    ScoreChange,
    ScoreComparison,
    score_changes,
    score_comparisons,
)
from agentr_core.texts import count_text, quoted, unreadable_reason
from agentr_core.types import Instance
from flows import interruption
from flows.commands.progress import progress_printer
from tasks.wiring import RunRef, quiet_context
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
_REQUIRED_OPTION = {"regex": "pattern", "command": "command", "rubric": "rubric"}
_REPLY = 200


def regrade_run(
    workspace: Path,
    run: str,
    grader: str,
    grader_settings: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    evaluations: bool | None,
    iteration: int | None,
    examples: int,
    form: str,
) -> tuple[str, Sequence[str]]:
    """Score the episodes of a run and the paths of its trees again; return old and new scores as
    text, and a reason for each episode that has no new score.

    Args:
        run: the beginning of the run's id.
        grader: a key of `_OPTIONS`.
        grader_settings: the options of the grader that were given, by name.
        overrides: changes of the run's recipe.
        evaluations: True: only the episodes of evaluations; False: only the others; None: all.
        iteration: only the episodes of this iteration; None: of all.
        examples: how many changed episodes are shown.
        form: `table` or `json`.

    Raises `UserError` if the arguments are wrong, and what `stages.regrade.regrade` raises.
    """
    if unknown_options := sorted(grader_settings.keys() - _OPTIONS[grader]):
        raise ConfigError(f"--{unknown_options[0].replace('_', '-')} does not belong to --by {grader}; leave it out")
    if (required_option := _REQUIRED_OPTION.get(grader)) and required_option not in grader_settings:
        raise ConfigError(f"--by {grader} needs --{required_option}")
    run_id = find_run(workspace, run)
    recipe = _recipe(workspace, run_id, overrides, grader_settings.get("judge"))
    ctx = replace(quiet_context(RunRef(workspace=str(workspace), run_id=run_id), recipe), progress=progress_printer())
    scoring = _scoring(ctx, grader, grader_settings)
    result = interruption.run(regrade(ctx, scoring, evaluations=evaluations, iteration=iteration))
    comparisons = score_comparisons(ctx.store, scoring.id, run_id)
    differing = score_changes(ctx.store, scoring.id, run_id, examples)
    formatter = _as_json if form == "json" else _text
    return formatter(ctx, scoring, result, comparisons, differing), result.faults


def _recipe(workspace: Path, run_id: str, overrides: Sequence[str], judge: Path | None) -> Recipe:
    """Return the recipe of a run with overrides and, if given, another judge. The method's own
    checks are skipped, since nothing is collected or trained.
    """
    config = run_config(open_store(workspace, must_exist=True), run_id)
    assert config is not None
    source = f"recipe of run {run_id}"
    judge_change = () if judge is None else (f"models.judge={{path: {parsing.yaml_quoted(str(judge))}}}",)
    if not overrides and not judge_change:
        recipe = parsing.restore_recipe(json.loads(config), source=source)
    else:
        changes = [*overrides, *judge_change]
        recipe = parsing.parse(json.loads(config), changes, check=lambda name, faults: [], source=source, stored=True)
    return replaced(recipe, workspace=str(workspace))


def _scoring(ctx: RunContext, grader: str, grader_settings: Mapping[str, Any]) -> Scoring:
    if grader == "world":
        return world_scoring(ctx)
    # Options that affect rewards are part of the scoring's id; the time limit of a command is not.
    # Files and models are added below by their contents.
    settings = {
        name: value for name, value in grader_settings.items() if name not in ("gold", "rubric", "judge", "seconds")
    }
    options = {
        name: value
        for name, value in grader_settings.items()
        if name in ("tolerance", "seconds", "success_from", "where")
    }
    if grader == "regex":
        return Scoring(name=grader, settings=settings, grader=Pattern(grader_settings["pattern"], **options))
    if grader == "command":
        return Scoring(name=grader, settings=settings, grader=Command(grader_settings["command"], **options))
    if grader == "rubric":
        text = _read(grader_settings["rubric"])
        rubric = Rubric(text, **options)
        settings |= {"rubric": text, "judge": model_settings(ctx, "judge")}
        return Scoring(name=grader, settings=settings, grader=rubric)
    options["answer"] = answer_within(grader_settings["pattern"]) if "pattern" in grader_settings else last_answer
    kind = ExactAnswer if grader == "exact" else NumericAnswer
    golds, settings["gold"] = _golds(ctx, grader, grader_settings.get("gold"))
    return Scoring(name=grader, settings=settings, grader=kind(golds, **options))


def _golds(ctx: RunContext, grader: str, file: Path | None) -> tuple[Callable[[Instance], Sequence[str]], str]:
    """Return a function from an instance to its right answers, and a hash of all answers; they are
    from the file or, without one, from the question worlds of the run.

    The function raises `EnvironmentFault` for an instance without answers.
    """
    with ctx.worlds() as worlds:
        envs = [env for _, env in worlds]
        if file is None:
            own = _own_golds(envs, grader)
    if file is None:
        answers_by_key = {instance.key: answers for instance, answers in own.items()}
        return lambda instance: _answers(own, instance, "its world"), fingerprint("golds", answers_by_key)
    if len(envs) > 1:
        raise ConfigError("gold answers are of one world, and the recipe has several; choose another grader")
    golds = {instance: gold.answers for instance, gold in read_gold(file, world=envs[0].name).items()}
    return lambda instance: _answers(golds, instance, str(file)), file_sha256(file)


def _own_golds(worlds: Sequence[Environment], grader: str) -> dict[Instance, Sequence[str]]:
    golds: dict[Instance, Sequence[str]] = {}
    for env in worlds:
        if not isinstance(env, ReasoningWorld):
            raise ConfigError(f"--by {grader} needs --gold: world {env.name} has no right answers of its own")
        golds |= {instance: env.problem(instance).golds for split in env.splits() for instance in env.instances(split)}
    return golds


def _answers(golds: Mapping[Instance, Sequence[str]], instance: Instance, where: str) -> Sequence[str]:
    if not golds.get(instance):
        raise EnvironmentFault(f"{instance.key} has no answer in {where}")
    return golds[instance]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"file {file} cannot be read: {unreadable_reason(error)}") from error


def _text(
    ctx: RunContext,
    scoring: Scoring,
    result: ScoringResult,
    comparisons: Sequence[ScoreComparison],
    differing: Sequence[ScoreChange],
) -> str:
    paths = f" and {count_text(result.paths, 'path')} of search trees" if result.paths else ""
    lines = [
        f"{count_text(result.episodes, 'episode')}{paths} of run {ctx.run_id}, {result.new:,} of them "
        f"scored now by {scoring.name}",
        table_text(scored_table(comparisons)),
    ]
    if differing:
        lines += ["Changed", *map(_change_text, differing), ""]
    if result.faults:
        lines += [
            f"Without a new score: {len(result.faults):,}; the same command tries them again",
            *(f"  {fault}" for fault in dict.fromkeys(result.faults[:5])),
            "",
        ]
    query = SCORING_SQL.format(scoring.id)
    lines += [f"scoring {scoring.id}", f'ask     agentr sql "{query}" -w {shlex.quote(str(ctx.root))}']
    return "\n".join(lines) + "\n"


def _change_text(row: ScoreChange) -> str:
    name = row.trajectory_id or f"{row.tree_id}#{row.leaf}"
    new = "no score" if row.new_reward is None else f"{row.new_reward:.3g}"
    reply = "" if row.reply is None else f": {quoted(' '.join(row.reply.split()), _REPLY)}"
    return f"  {row.change:<10}  {row.reward:.3g} -> {new}  {row.instance_id}  {name}{reply}"


def _as_json(
    ctx: RunContext,
    scoring: Scoring,
    result: ScoringResult,
    comparisons: Sequence[ScoreComparison],
    differing: Sequence[ScoreChange],
) -> str:
    fields = {
        "run_id": ctx.run_id,
        "scoring_id": scoring.id,
        "grader": scoring.name,
        "settings": scoring.settings,
        "episodes": result.episodes,
        "paths": result.paths,
        "new": result.new,
        "faults": list(result.faults),
        "scores": [row._asdict() for row in comparisons],
        "changed": [row._asdict() for row in differing],
    }
    return json.dumps(fields, indent=2, default=str) + "\n"
