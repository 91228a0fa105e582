"""The protocols in which agents speak to the gateway, as pure functions: the server does the
sending and receiving.
"""
