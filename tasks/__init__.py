"""Prefect tasks, one a stage or shard, and the wiring that builds adapters from recipes."""
