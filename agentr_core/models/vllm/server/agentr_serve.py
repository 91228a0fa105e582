"""Does what `vllm serve` does, for every build of vLLM: a script that the Python of vLLM's
environment runs.

The command `vllm` first looks up the version of a distribution named `vllm`, which fails for the
CPU build, whose distribution has another name. Its subcommand `serve`, called directly, does not.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Serve the model that the command line names, until the process is told to end."""
    # As `vllm` itself does, since the default, a fork, hangs some accelerators.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # Imported here, since each process of the engine imports this file.
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (serve,) = cmd_init()
    parser = FlexibleArgumentParser(prog="vllm")
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args([serve.name, *sys.argv[1:]])
    configure_logging_from_args(args)
    serve.validate(args)
    serve.cmd(args)


if __name__ == "__main__":
    main()
