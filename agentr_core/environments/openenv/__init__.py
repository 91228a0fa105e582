"""Worlds on OpenEnv servers, without OpenEnv's package: a client for any such server, and our own
server for any world.
"""
