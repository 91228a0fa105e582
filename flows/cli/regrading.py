"""The command that scores stored episodes again."""

from __future__ import annotations

from pathlib import Path

import click

from flows.cli.options import OVERRIDE, WORKSPACE, IdPrefix, NamedPath

_FILE = NamedPath(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("run", type=IdPrefix())
@click.option(
    "--by",
    "grader",
    type=click.Choice(["world", "exact", "numeric", "regex", "command", "rubric"]),
    default="world",
    show_default=True,
    help="Who scores.",
)
@click.option(
    "--gold",
    type=_FILE,
    metavar="FILE",
    help="exact, numeric: the right answers, as `env doctor` reads them.  [default: those of a question world]",
)
@click.option(
    "--tolerance", type=float, metavar="SHARE", help="numeric: how far an answer may be off.  [default: 1e-6]"
)
@click.option(
    "--pattern", metavar="REGEX", help="regex: what must be found; exact, numeric: what takes the answer from a reply."
)
@click.option(
    "--where",
    type=click.Choice(["reply", "action", "observation"]),
    help="regex: in what of the last step.  [default: reply]",
)
@click.option("--command", metavar="LINE", help="command: what reads an episode and prints its reward.")
@click.option("--seconds", type=float, metavar="N", help="command: its time for one episode.  [default: 60]")
@click.option("--rubric", type=_FILE, metavar="FILE", help="rubric: the text that the judge reads.")
@click.option(
    "--success-from", type=float, metavar="SHARE", help="command, rubric: success is above this.  [default: 0.5]"
)
@click.option(
    "--judge",
    type=NamedPath(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="world, rubric: the model that judges.  [default: the recipe's judge, else its model]",
)
@click.option("--only", type=click.Choice(["evaluations", "experience"]), help="Only these episodes.")
@click.option("--iteration", type=click.IntRange(min=0), help="Only the episodes of this iteration.")
@click.option("--examples", type=click.IntRange(min=0), default=5, show_default=True, help="Changed episodes to show.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@OVERRIDE
@WORKSPACE
def regrade(
    run: str,
    grader: str,
    only: str | None,
    iteration: int | None,
    examples: int,
    form: str,
    overrides: tuple[str, ...],
    workspace: Path,
    **settings: object,
) -> None:
    """Score a run's stored episodes again, without playing them.

    RUN is the beginning of a run's id. Its recipe, with overrides, says what the world and its
    judge are now. Paths of search trees are scored, too. The old scores stay; the new ones are
    stored beside them, and both are shown. What is scored already is not scored again. A recipe
    whose data.scoring is the id that is printed makes its training data by the new scores.

    \b
    world    the world of the version installed now: its grader, else the
             recorded actions, replayed
    exact    the words of a right answer
    numeric  the number of a right answer
    regex    a regular expression in the last step
    command  a command that reads the episode as JSON on its standard input
             and prints a number from 0 to 1 on its last line; where it
             fails there is no score
    rubric   a model that reads a rubric; what it thinks is no answer
    """
    from flows.commands.regrading import regrade_run

    grader_settings = {name: value for name, value in settings.items() if value is not None}
    of_evaluations = None if only is None else only == "evaluations"
    text, faults = regrade_run(
        workspace,
        run,
        grader,
        grader_settings,
        overrides,
        evaluations=of_evaluations,
        iteration=iteration,
        examples=examples,
        form=form,
    )
    click.echo(text, nl=False)
    if faults:
        raise SystemExit(1)
