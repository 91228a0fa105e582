"""The program's queries of the store, a module for each subject. They return records, not rows; if
there is no store yet, nothing is found.
"""
