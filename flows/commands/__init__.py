"""The work of `agentr` commands besides running flows: plans, samples, questions, environments,
model servers.
"""
