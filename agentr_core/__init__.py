"""The library: everything but the order of a run and Prefect. Its root holds the nouns, the seams
and the errors.
"""
