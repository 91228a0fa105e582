"""Settings of Prefect, to be set before it is first imported."""

from __future__ import annotations

import os

PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # A busy machine takes longer than Prefect's 20 s to start the server of a local run.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Task states written one by one collide with other writes; SQLite refuses those, and the client
    # waits for two seconds.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # No run uses Prefect's blocks. Registering those of all installed packages adds two seconds to
    # the first start with a new database; `prefect server start` still does it.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
}
"""Prefect's environment variables for a server that this process or the tests start."""


def set_defaults() -> None:
    """Set `PREFECT_DEFAULTS` in the environment, except for variables that are set already."""
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def quiet_prefect() -> None:
    """Silence Prefect's own logs in a local run, unless PREFECT_LOGGING_LEVEL is set: errors are
    printed as one sentence, and Prefect's database keeps the traceback.
    """
    if "PREFECT_LOGGING_LEVEL" not in os.environ:
        os.environ["PREFECT_LOGGING_LEVEL"] = "WARNING"
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
