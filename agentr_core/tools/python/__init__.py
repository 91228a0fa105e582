"""A Python interpreter for code written by a model: kept warm, with one confined process per
call.
"""
