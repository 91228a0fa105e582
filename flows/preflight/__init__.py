"""Checks that find what would stop a run, before anything is started."""
