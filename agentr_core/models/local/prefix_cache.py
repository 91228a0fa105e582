"""Keys and values of prompt prefixes that were computed before.

The turns of an episode, and the nodes of a tree, share almost all of their prompts. Prefixes are
stored in blocks of fixed length. A block's keys and values depend only on the tokens up to its end,
so a block is looked up by the hash of those tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from agentr_core.models.local.kv import Block


def block_names(tokens: Sequence[int], length: int) -> list[bytes]:
    """Return one name for each whole block of `length` tokens; it identifies all tokens up to the
    block's end.
    """
    names = []
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens) - length + 1, length):
        digest.update(array("q", tokens[start : start + length]).tobytes())
        names.append(digest.digest())
    return names


class PrefixCache:
    """A cache of the most recently used blocks, up to a number of bytes. Not thread-safe: one
    worker owns it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._bytes = 0

    def get(self, name: bytes) -> Block | None:
        """Return a stored block and mark it as used, or None."""
        block = self._blocks.get(name)
        if block is not None:
            self._blocks.move_to_end(name)
        return block

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def put(self, name: bytes, block: Block) -> None:
        """Store a block, unless it is cached already. Nothing is evicted before `trim`."""
        if name not in self._blocks:
            self._blocks[name] = block
            self._bytes += _size(block)

    def trim(self) -> None:
        """Evict the least recently used blocks until the rest fits."""
        while self._bytes > self.max_bytes:
            _, block = self._blocks.popitem(last=False)
            self._bytes -= _size(block)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)


def _size(block: Block) -> int:
    return sum(part.numel() * part.element_size() for part in block)
