"""Prefect flows and the command line: the order of things."""
