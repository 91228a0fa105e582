"""Modules that the Python of vLLM's environment runs. They use only the standard library and vLLM:
that environment has no agentr.
"""
