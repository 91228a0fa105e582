"""Agents in their own processes, as an environment: they call the policy as they would call a
hosted model.
"""

from agentr_core.environments.gateway.world import Gateway

__all__ = ["Gateway"]
