"""WebShop in process: a shop of text pages, its goals and its rewards."""

from agentr_core.environments.webshop.world import WebShop

__all__ = ["WebShop"]
