"""The library: everything except the order of a run and Prefect. Its root holds the domain types,
the protocols and the errors.
"""
