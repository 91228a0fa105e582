"""ALFWorld in process: household tasks in words."""

from agentr_core.environments.alfworld.world import AlfWorld

__all__ = ["AlfWorld"]
