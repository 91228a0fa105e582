"""Modules that vLLM's server imports. They use only the standard library: its environment has no
agentr.
"""
