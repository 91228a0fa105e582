"""The protocols in which agents speak to the gateway. Pure: the server sends and receives."""
