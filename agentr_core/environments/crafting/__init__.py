"""Crafting worlds: TextCraft, and worlds of its kind that are drawn from a seed."""

from agentr_core.environments.crafting.textcraft import TextCraft

__all__ = ["TextCraft"]
