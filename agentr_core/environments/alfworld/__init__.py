"""ALFWorld in this process: household tasks as text."""

from agentr_core.environments.alfworld.world import AlfWorld

__all__ = ["AlfWorld"]
