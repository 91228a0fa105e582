"""The Python tool, which runs code written by a model: warm interpreters that fork a confined
process for each call.
"""
