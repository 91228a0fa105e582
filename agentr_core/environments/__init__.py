"""The worlds, in one folder each; the registry that finds worlds by name; and the checker of the
contract that all of them keep.
"""
