"""Prefect tasks, one for each stage or shard, and the wiring that builds adapters from recipes."""
