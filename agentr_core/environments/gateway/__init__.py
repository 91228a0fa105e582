"""Agents in processes of their own, as an environment: they ask our policy as they ask OpenAI."""

from agentr_core.environments.gateway.world import Gateway

__all__ = ["Gateway"]
