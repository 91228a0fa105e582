"""Worlds on the HTTP servers of AgentGym (arXiv 2406.04151): the contract, a client, and our own
server.
"""
