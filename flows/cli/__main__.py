"""`python -m flows.cli`: the same as `agentr`."""

from __future__ import annotations

from flows.cli import main

if __name__ == "__main__":
    main()
