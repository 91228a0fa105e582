"""What commands of `agentr` do beside running flows: plans, samples, questions, environments, model
servers.
"""
