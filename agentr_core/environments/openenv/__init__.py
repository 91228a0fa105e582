"""Worlds behind servers of OpenEnv, without its package: a client of any such server, and our own
server of any world.
"""
