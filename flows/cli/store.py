"""Commands on the store of a workspace as a whole."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flows.cli.options import WORKSPACE, IdPrefix, NamedPath


@click.group()
def store() -> None:
    """The store of a workspace: sizes, checks, backups, merging."""


@store.command()
@click.argument("target", metavar="FILE|FOLDER", type=NamedPath())
@WORKSPACE
def backup(target: str, workspace: Path) -> None:
    """Write the whole store to one sound FILE, even during a run.

    In a FOLDER, which is made if its name ends with a slash, the file is named store.duckdb; that
    makes the folder a workspace.
    """
    from flows.commands.stores import back_up

    click.echo(back_up(workspace, target))


@store.command("check")
@WORKSPACE
def store_check(workspace: Path) -> None:
    """Look for rows that point nowhere or contradict each other.

    Trees that two processes wrote are an example. Exits with 1 if there are such rows.
    """
    from flows.commands.stores import faults

    problems = faults(workspace)
    for line in problems:
        click.echo(line)
    if problems:
        sys.exit(1)
    click.echo(f"the store of {workspace} is sound")


@store.command()
@WORKSPACE
def sizes(workspace: Path) -> None:
    """Show rows and size of each table, and idle space."""
    from flows.commands.stores import sizes_of

    click.echo(sizes_of(workspace), nl=False)


@store.command()
@WORKSPACE
def compact(workspace: Path) -> None:
    """Rewrite the store without the idle space in its file.

    The new file replaces the old one once it is complete; whatever happens before that, nothing is
    lost.
    """
    from flows.commands.stores import compacted

    click.echo(compacted(workspace))


@store.command()
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=NamedPath(path_type=Path, exists=True))
@WORKSPACE
def merge(others: tuple[Path, ...], workspace: Path) -> None:
    """Add the rows of other stores to that of the workspace.

    OTHER is a workspace or the file of a store, such as a backup from another machine; it stays as
    it is. Each row is added once, and nothing is added if two stores have different rows under the
    same id. Weights, datasets and reports stay where they are, and so do tables and views that are
    not agentr's.
    """
    from flows.commands.stores import merged

    click.echo(merged(workspace, others))


@store.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=IdPrefix(6))
@click.option("--dry-run", is_flag=True, help="Only say what would go and stay.")
@WORKSPACE
def prune(runs: tuple[str, ...], dry_run: bool, workspace: Path) -> None:
    """Remove runs from the store, but not what others need.

    What other runs were made from stays, however far back. RUN is the beginning of a run's id, at
    least 6 characters of it.

    Weights, datasets and reports stay where they are; those that nothing in the store names any
    longer are listed, with logs and unfinished trainings.
    """
    from flows.commands.stores import pruned

    click.echo(pruned(workspace, runs, dry_run=dry_run), nl=False)


@store.command()
@click.argument("folder", type=NamedPath(path_type=Path, file_okay=False))
def schema(folder: Path) -> None:
    """Write a page of all tables and views into FOLDER.

    It has their columns, too, and a picture.
    """
    from flows.commands.schema import write_schema

    for path in write_schema(folder):
        click.echo(path)
