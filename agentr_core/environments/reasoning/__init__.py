"""Questions that are answered by thinking, searching and calculating."""

from agentr_core.environments.reasoning.world import Reasoning

__all__ = ["Reasoning"]
