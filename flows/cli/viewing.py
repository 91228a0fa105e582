"""The command that shows a workspace in a browser."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from flows.cli.options import WORKSPACE, IdPrefix, NamedPath, refuse_given


def _token(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[A-Za-z0-9_-]{16,100}", value):
        raise click.BadParameter("a token is 16 to 100 letters, digits, - and _")
    return value


@click.command()
@WORKSPACE
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Beyond this machine, the address contains a token."
)
@click.option("--port", type=click.IntRange(0, 65535), default=4280, show_default=True, help="0 means a free one.")
@click.option(
    "--token",
    callback=_token,
    metavar="TOKEN",
    help="Part of the address, so that a bookmark stays good.  [default: a new one where --host needs one]",
)
@click.option(
    "--index",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="File that indexes the words of texts for searches; by default, one in the workspace.",
)
@click.option(
    "--bundle",
    "folder",
    type=NamedPath(path_type=Path),
    help="Write pages as files into this new folder, for sharing, and serve nothing.",
)
@click.option("--run", type=IdPrefix(), metavar="RUN", help="With --bundle: only the pages of this run.")
@click.option(
    "--pages", type=click.IntRange(min=1), default=2000, show_default=True, help="With --bundle: the most pages."
)
def view(
    workspace: Path,
    host: str,
    port: int,
    token: str | None,
    index: Path | None,
    folder: Path | None,
    run: str | None,
    pages: int,
) -> None:
    """Show a workspace in a browser, even while a run is writing.

    It serves until interrupted. Runs, iterations and evaluations; trajectories, search trees,
    pairs, samples and groups, with filters; what each was made from; and a search of all texts.
    Nothing in the store is changed but your tags and notes.
    """
    from flows.commands.viewing import serve, write

    if folder is not None:
        refuse_given("is for serving pages, and --bundle serves none; leave it out", "host", "port", "token", "index")
        click.echo(write(workspace, folder, run=run, most=pages, say=partial(click.echo, err=True)))
        return
    refuse_given("belongs to --bundle", "run", "pages")
    serve(workspace, index=index, host=host, port=port, token=token, say=click.echo)
