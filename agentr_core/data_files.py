"""The location of the shipped data."""

from __future__ import annotations

from pathlib import Path

from agentr_core.errors import DataFileError

_PACKAGE = Path(__file__).resolve().parent
ROOTS = (_PACKAGE / "_data", _PACKAGE.parent / "data")
"""An installed package has its data inside itself, a checkout beside the packages; the first one
that has a path is used.
"""


def data_path(*parts: str) -> Path:
    """Return the path of a shipped file or folder, named by its parts below `data/`.

    Raises:
        DataFileError: neither the installed package nor a checkout has it.
    """
    for root in ROOTS:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    looked = " and ".join(str(root) for root in ROOTS)
    raise DataFileError(f"shipped data {'/'.join(parts)} is missing below {looked}; install the package again")
