"""How many bytes a piece of work has alive at most."""

from __future__ import annotations

from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors made inside that are alive; what was there before is not counted.

    What a library allocates inside of one operator is not seen, nor tensors in oneDNN's own layout,
    which it makes inside as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: int = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._total: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **kwargs)
        for storage in _storages(out):
            key = storage._cdata
            if key not in given and key not in self._live:
                self._live[key] = (StorageWeakRef(storage), storage.nbytes())
                self._total += storage.nbytes()
        # looking at all of them is slow; until then a weak reference keeps a dead one's key taken
        if self._total > self.peak:
            self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
            self._total = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._total)
        return out


def _storages(tree: Any) -> list[UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and not leaf.is_mkldnn
    ]
