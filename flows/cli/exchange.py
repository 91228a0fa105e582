"""Commands that write training sets for other programs, and read the files of others."""

from __future__ import annotations

from pathlib import Path

import click

from agentr_core.system import gc_paused_for_imports
from agentr_core.texts import escape_invisible
from flows.cli.options import WORKSPACE, IdPrefix, NamedPath, refuse_given
from flows.cli.prefect_settings import quiet_prefect

_OF_RECORDS = ("environment", "options", "split", "opening", "tools", "skip_bad")
FORMATS = (
    *("parquet", "trl", "sharegpt", "llama-factory", "agenttraj", "alpaca", "xtuner", "atif"),
    *("claude-code", "codex", "pi", "verl", "inspect"),
)


@click.command()
@click.argument("source", type=IdPrefix())
@click.argument("folder", type=NamedPath(path_type=Path, file_okay=False))
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    required=True,
    # With all names as the placeholder, the line would be wider than a terminal.
    metavar="FORM",
    help="One of those above.",
)
@click.option(
    "--iteration",
    type=click.IntRange(min=0),
    help="Of a run, this iteration; by default, its last one, and for inspect all of them, from 0, the first model.",
)
@click.option(
    "--without-mask", is_flag=True, help="Write the set even where the format cannot say which turns carry no loss."
)
@click.option(
    "--data-source",
    "sources",
    multiple=True,
    metavar="DOMAIN=NAME",
    help="For verl: the data source of math or knowledge, by which a reward function knows its rule; by default, "
    "those of ET-Agent.",
)
@click.option(
    "--push",
    metavar="OWNER/NAME",
    help="Then add the files to this dataset of the Hugging Face hub, with the token in HF_TOKEN; one that is not "
    "there is made, as a private one.",
)
@click.option("--license", "licence", default="", help="For the head of the card: the identifier of a licence.")
@WORKSPACE
def export(
    source: str,
    folder: Path,
    form: str,
    iteration: int | None,
    without_mask: bool,
    sources: tuple[str, ...],
    push: str | None,
    licence: str,
    workspace: Path,
) -> None:
    """Write a training set, or evaluations, for another program.

    FOLDER is new. SOURCE is the beginning of the id of a dataset, an iteration or a run. Some turns
    must not be trained, and each program is told this in its own way, which the README.md in the
    folder describes. A format that cannot tell it is refused unless --without-mask is given. The
    folder appears once it is complete.

    \b
    parquet        for `datasets.load_dataset`, with a card and the ids of rows
    trl            messages with token ids and labels; for pairs, preferences
    sharegpt       turns, each with a flag `train`
    llama-factory  a line for each trained turn, and dataset_info.json
    agenttraj      as AgentTraj-L of AgentGym, with `loss` of each turn
    alpaca         a line for each trained turn, the turns before it as history
    xtuner         inputs and outputs, each with a flag `output_with_loss`
    atif           trajectories in the agent trajectory interchange format
    claude-code, codex, pi
                   a session for each sample, with which the program goes on
    verl           prompts and golds for reinforcement learning, with a
                   script that starts it; also of a selection or of group RL
    inspect        no training set, but evaluations: logs that Inspect reads,
                   with the conversation and the scores of each episode

    For inspect, SOURCE may be the id of an evaluation, too. README.md is a card in the form that
    the hub reads: what the set is, how it was made, its counts, and the licences of its worlds.
    """
    if form == "inspect":
        refuse_given(
            "belongs to training sets, and --format inspect writes evaluations",
            "without_mask",
            "sources",
            "push",
            "licence",
        )
        from flows.commands.logs import export_logs

        click.echo(export_logs(workspace, source, folder, iteration=iteration))
        return
    if form != "verl":
        refuse_given("belongs to --format verl", "sources")
    from flows.commands.exporting import data_sources, export_folder

    summary = export_folder(
        workspace,
        source,
        folder,
        form,
        iteration=iteration,
        without_mask=without_mask,
        sources=data_sources(sources),
        push_to=push or "",
        licence=licence,
    )
    click.echo(summary)


@click.command("import")
@click.argument("source", type=NamedPath(path_type=Path))
@click.argument("target", type=NamedPath(path_type=Path, dir_okay=False), required=False)
@click.option("--as", "use", type=click.Choice(["expert", "pairs", "general", "iteration"]), required=True)
@click.option(
    "--environment", default="", metavar="NAME", help="The environment of the instances; general chat has none."
)
@click.option("-o", "--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the environment.")
@click.option(
    "--split", default="train", show_default=True, help="The split of instances that are named by their index alone."
)
@click.option(
    "--opening",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Turns before the problem in an expert's conversation.",
)
@click.option(
    "--tools",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Of --as general: a JSON list of tools for conversations that call some and define none.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out unsound records; otherwise they stop the import.")
@click.option("--run", "run", type=IdPrefix(), help="Of --as iteration: the run, if the workspace has several.")
@WORKSPACE
def import_records(
    source: Path,
    target: Path | None,
    use: str,
    environment: str,
    options: tuple[str, ...],
    split: str,
    opening: int,
    tools: Path | None,
    skip_bad: bool,
    run: str | None,
    workspace: Path,
) -> None:
    """Take in what another program wrote or trained.

    With expert, pairs or general, records are checked and written for recipes: SOURCE is a file or
    a folder of files, TARGET the new file. A file is JSON lines, one array or Parquet:
    conversations of AgentTraj, ETO, ShareGPT or OpenAI, prompts and completions or pairs of TRL, or
    trajectories in ATIF; or what a program wrote: Agent-R a tree or a revision, ETO a log, or
    Claude Code, codex or pi a session. Each unsound record is reported with its line, and then
    nothing is written. Fields that are not read are named. A recipe takes TARGET as eto.expert.file
    (several demonstrations of an instance are fine), eto.preferences.file or data.general.file.

    With iteration, SOURCE is the folder of a training that verl did on exported prompts, and there
    is no TARGET: its checkpoint (config.json and *.safetensors, merged) and its rollouts (dumps of
    the trainer, or tables) become the next iteration of a run, which is evaluated and reported, and
    from which the run goes on. The same folder again changes nothing.
    """
    if use == "iteration":
        _import_training(source, target, workspace, run)
        return
    from flows.commands.environments import options_of
    from flows.commands.importing import import_file

    refuse_given("belongs to --as iteration", "run", "workspace")
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    if use == "general":
        refuse_given("is of instances, and general chat has none; leave it out", "environment", "options", "split")
    if use != "expert":
        refuse_given("belongs to --as expert", "opening")
    if use != "general":
        refuse_given("belongs to --as general", "tools")

    summary = import_file(
        source,
        target,
        use,
        environment=environment,
        options=options_of(options),
        split=split,
        opening=opening,
        skip_bad=skip_bad,
        tools=tools,
        say=lambda fault: click.echo(escape_invisible(fault), err=True),
    )
    click.echo(summary)


def _import_training(folder: Path, target: Path | None, workspace: Path, run: str | None) -> None:
    if target is not None:
        raise click.UsageError(f"--as iteration writes no file, but into the workspace; leave out {target}")
    refuse_given("belongs to records, and --as iteration takes none", *_OF_RECORDS)
    quiet_prefect()
    with gc_paused_for_imports():
        from flows.local import import_training

    click.echo(import_training(folder, workspace, run or ""))
