"""Commands on tools that models use: the sandbox for their code, and the search of a corpus."""

from __future__ import annotations

from pathlib import Path

import click

from flows.cli.options import NamedPath


@click.command("doctor")
@click.option("--attempts", is_flag=True, help="Also show each attempt to escape.")
def machine_doctor(attempts: bool) -> None:
    """Check the machine, the sandbox and the scheduler.

    It says which Python, PyTorch, GPU and vLLM there are and how much room is on the disk, how well
    a model's Python code can be confined here, what the number format `auto` means, and whether
    Prefect's server starts what is scheduled. Environments have a doctor of their own, `agentr env
    doctor`. Exits with 2 if code cannot be confined at all, or the server starts nothing.
    """
    from flows.commands.doctor import machine, numbers, sandbox

    for line in [*sandbox(attempts=attempts), numbers(), *machine()]:
        click.echo(line)

    from flows import scheduler

    click.echo(scheduler.scheduler_line())


@click.group()
def retrieve() -> None:
    """Retrieval servers: search a corpus."""


@retrieve.command("serve")
@click.argument("corpus", type=NamedPath(path_type=Path, dir_okay=False))
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=1243, show_default=True, help="0 means a free one.")
@click.option(
    "--index",
    "cache",
    type=NamedPath(path_type=Path, file_okay=False),
    default=Path("runs/indexes"),
    show_default=True,
    help="Folder of indexes, which are kept by what they were made from.",
)
@click.option(
    "--encoder",
    type=NamedPath(path_type=Path, file_okay=False),
    help="Search by the vectors of this model directory instead of by words.",
)
@click.option(
    "--vectors",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="A flat FAISS index of the corpus by that model, instead of one made here.",
)
@click.option("--device", default="cpu", show_default=True, help="Device of the encoder, such as cuda:0.")
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Searches done at once.")
def retrieve_serve(
    corpus: Path,
    host: str,
    port: int,
    cache: Path,
    encoder: Path | None,
    vectors: Path | None,
    device: str,
    threads: int,
) -> None:
    """Serve searches of a corpus, until interrupted.

    CORPUS has JSON lines with id, title and contents. POST /search takes {"query", "top_n",
    "return_score"}, /batch_search a list of queries in "query"; GET /health tells whether it works.
    """
    from flows.commands.retrieval import serve as serve_corpus

    serve_corpus(
        corpus,
        cache=cache,
        encoder=encoder,
        vectors=vectors,
        device=device,
        host=host,
        port=port,
        threads=threads,
        say=click.echo,
    )
