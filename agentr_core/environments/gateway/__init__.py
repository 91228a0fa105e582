"""Agents in their own processes, as an environment: they call our policy as they call OpenAI."""

from agentr_core.environments.gateway.world import Gateway

__all__ = ["Gateway"]
