"""Training samples: their identity, rendering and loss masks, filters and datasets, and the readers
of files with conversations.
"""
