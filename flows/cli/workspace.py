"""Commands on the contents of a workspace: its runs and reports, its samples."""

from __future__ import annotations

from pathlib import Path

import click

from flows.cli.options import WORKSPACE, IdPrefix, NamedPath, standard_input, web_address


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=IdPrefix())
@click.option(
    "--beside",
    type=IdPrefix(),
    metavar="RUN,...",
    help="Show a run of several worlds beside runs of one world each, and write nothing.",
)
@click.option(
    "--viewer",
    metavar="URL",
    callback=web_address,
    help="Address of `agentr view` on the workspace, for links to it; empty for none.  [default: its usual one]",
)
@click.option(
    "--leaderboard",
    metavar="FILE",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Put the run's last score into the leaderboard of a Markdown FILE, and write nothing else.",
)
@WORKSPACE
def report(
    runs: tuple[str, ...], beside: str | None, viewer: str | None, leaderboard: Path | None, workspace: Path
) -> None:
    """Write the reports of a run anew, and print their paths.

    There is a page for each iteration and one for the whole run. For several runs: write one page
    that compares them with the first on the same episodes, and print its table; runs that differ in
    the seed only have their means over seeds, too.
    """
    from tasks.reporting import add_to_leaderboard, compare_runs, compare_worlds, write_reports

    if leaderboard is not None:
        if beside or len(runs) > 1:
            raise click.UsageError("--leaderboard takes one RUN")
        click.echo(add_to_leaderboard(workspace, runs[0], leaderboard), nl=False)
        return
    link_options = {} if viewer is None else {"viewer": viewer}
    if beside and len(runs) > 1:
        raise click.UsageError("--beside takes the further runs; give one RUN before it")
    if beside:
        click.echo(compare_worlds(workspace, runs[0], [name.strip() for name in beside.split(",")]))
        return
    if len(runs) > 1:
        table, path = compare_runs(workspace, runs, **link_options)
        click.echo(f"{table}\n{path}")
        return
    for path in write_reports(workspace, runs[0], **link_options):
        click.echo(path)


@click.command()
@click.argument("query", default="")
@WORKSPACE
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "parquet"]),
    help="How the answer is written.  [default: as the ending of FILE says, else table]",
)
@click.option(
    "--output", metavar="FILE", type=NamedPath(path_type=Path, dir_okay=False), help="Write the answer to FILE."
)
@click.option("--example", default="", metavar="NAME", help="Ask one of the examples instead of QUERY.")
@click.option("--examples", is_flag=True, help="List the examples and ask nothing.")
@click.option("--show", is_flag=True, help="With --example: print its SQL and ask nothing.")
@click.option("--files", is_flag=True, help="Let the query read and write files: COPY ... TO, read_csv(...), ATTACH.")
@click.option(
    "--seconds",
    type=click.IntRange(min=1),
    metavar="N",
    default=300,
    show_default=True,
    help="Stop the query after so long; a run waits while it reads.",
)
def sql(
    query: str,
    workspace: Path,
    form: str | None,
    output: Path | None,
    example: str,
    examples: bool,
    show: bool,
    files: bool,
    seconds: int,
) -> None:
    """Ask the store a question in SQL, even while a run is writing.

    QUERY - reads the question from standard input, as in `agentr sql - < question.sql`. Nothing in
    the store can be changed. JSON and CSV have all digits of a number, a table has three decimals;
    bytes are hexadecimal digits. `agentr sql "describe v_episodes"` says what its columns are.
    """
    from flows.commands.questions import answer, example_list, example_sql

    if show and (not example or query):
        raise click.UsageError("--show goes with --example NAME alone")
    if show:
        click.echo(example_sql(example), nl=False)
        return

    if examples:
        click.echo(example_list(), nl=False)
        return
    if query == "-":
        query = standard_input().read()
    click.echo(
        answer(workspace, query, form, example_name=example, output=output, files=files, seconds=seconds), nl=False
    )


@click.command()
@click.argument("entity", metavar="ID", type=IdPrefix())
@WORKSPACE
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def trace(entity: str, workspace: Path, form: str) -> None:
    """Show what something in the store was made from.

    The way leads back to the model that the run began with. Of a trajectory, what was said in it
    follows.

    ID is the beginning of the id of a checkpoint, dataset, sample, pair, preference, tree,
    trajectory or evaluation, or TREE#NUMBER for a node.
    """
    from flows.commands.lineage import traced

    click.echo(traced(workspace, entity, form), nl=False)


@click.command()
@WORKSPACE
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def runs(workspace: Path, form: str) -> None:
    """List the runs of a workspace."""
    from flows.commands.questions import runs_of

    click.echo(runs_of(workspace, form), nl=False)


@click.command()
@click.argument("checkpoint", type=IdPrefix())
@click.argument("folder", type=NamedPath(path_type=Path, file_okay=False))
@click.option("--base-model", default="", metavar="NAME", help="The name under which its parent is published.")
@click.option("--license", "licence", default="", metavar="ID", help="A licence, such as apache-2.0, for the card.")
@WORKSPACE
def publish(checkpoint: str, folder: Path, base_model: str, licence: str, workspace: Path) -> None:
    """Write a checkpoint into a new FOLDER to give away.

    It gets weights, tokenizer, template and a card. The card is a README.md with the scores, the
    budget, the recipe and the lineage; paths on this machine are left out of it.
    """
    from flows.commands.publishing import publish_checkpoint

    click.echo(publish_checkpoint(workspace, checkpoint, folder, base_model=base_model, licence=licence))


@click.command()
@click.argument("source", metavar="ID", type=IdPrefix())
@click.option("--tokens", is_flag=True, help="Show every token that training reads, those of the template too.")
@click.option("--model", type=NamedPath(path_type=Path, file_okay=False), help="With --tokens: those of this model.")
@click.option(
    "--scorer", type=click.IntRange(min=1), metavar="REPLY", help="Show what the scorer (grpo.distil) reads of a reply."
)
@WORKSPACE
def preview(source: str, tokens: bool, model: Path | None, scorer: int | None, workspace: Path) -> None:
    """Show what training reads, turn by turn; trained text is marked.

    ID is the beginning of the id of a sample or a trajectory, or FILE:LINE of general data. Of a
    trajectory all replies are shown as trained. With --scorer, the number of a reply of a
    trajectory, from 1, what is scored is marked.
    """
    from flows.commands.samples import preview_sample, preview_scored, preview_tokens

    if model is not None and not tokens:
        raise click.UsageError("--model goes with --tokens")
    if scorer is not None and tokens:
        raise click.UsageError("--scorer shows turns; leave --tokens out")
    if scorer is not None:
        turns = preview_scored(workspace, source, scorer)
    else:
        turns = preview_tokens(workspace, source, model) if tokens else preview_sample(workspace, source)
    for text, trained in turns:
        click.secho(text, fg="green" if trained else None, bold=trained)
