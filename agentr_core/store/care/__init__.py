"""Maintenance of a whole store: its sizes, and rewriting it to compact it, to merge other stores
into it, or to prune runs.
"""
