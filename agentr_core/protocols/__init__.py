"""The interfaces of the system: an environment to act in, a transcript that makes its steps a
conversation, and a chat model that acts.
"""
