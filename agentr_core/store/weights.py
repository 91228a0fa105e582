"""Where the weights of a store's checkpoints lie."""

from __future__ import annotations

from agentr_core.models.checkpoint_dir import checkpoint_folder
from agentr_core.store.database import Store


def weights_now(store: Store, checkpoint_id: str, stored: str) -> str:
    """Return the folder of a checkpoint's weights: the one beside its store if it is there, since a
    workspace may have been copied or moved, else the one that is `stored`.
    """
    folder = checkpoint_folder(store.path.parent, checkpoint_id)
    return str(folder) if folder.is_dir() else stored
