"""ScienceWorld on its real simulator, a Java process."""

from agentr_core.environments.sciworld.world import SciWorld

__all__ = ["SciWorld"]
