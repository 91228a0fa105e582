"""The search tool: corpora and their indexes, a server for them, and clients with a cache."""

from agentr_core.tools.search.corpus import Document
from agentr_core.tools.search.providers import InProcess, Provider, RetrievalServer, Serper
from agentr_core.tools.search.retriever import Hit, Retriever, open_retriever
from agentr_core.tools.search.tool import SearchTool

__all__ = [
    "Document",
    "Hit",
    "InProcess",
    "Provider",
    "RetrievalServer",
    "Retriever",
    "SearchTool",
    "Serper",
    "open_retriever",
]
