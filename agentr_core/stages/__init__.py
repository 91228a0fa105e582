"""The stages of a run: each reads its input from the store, does what is not done yet, and stores
what it made.

A stage is an ordinary coroutine `stage(ctx, iteration)`; Prefect tasks are thin wrappers around
them.
"""
