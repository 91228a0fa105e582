"""The worlds, one folder each, the registry that finds them, and the contract that they all
keep.
"""
