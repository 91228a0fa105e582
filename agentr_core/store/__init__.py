"""The trajectory store: DuckDB schema, bursts of reading and writing, the codec between records and
rows, and the queries of the program.
"""

from agentr_core.store.database import Store, Writer
from agentr_core.store.tables import Rows

__all__ = ["Rows", "Store", "Writer"]
