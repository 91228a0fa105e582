"""Worlds, a folder each; the registry that finds them, and the contract that all of them keep."""
