"""Torch tensors over data plane arrays, without copies. The only module of the data plane that imports torch.

A tensor made here keeps its block's memory mapped and its block unreleased (see `DataPlane.release`) for as long as it or any view
of it lives. Torch knows no read-only tensors: **writing into a view of sealed memory kills the process with SIGSEGV, so a
writer copies** (`.clone()`) first.
"""

from __future__ import annotations

import numpy as np
import torch


class _Writable:
    """Lends an array's memory to numpy as if it were writable, because torch warns about (and copies nothing for) one that is not."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._array = array


def as_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor on the array's own memory; shape (*array.shape), uint16 becomes bfloat16 (the data plane's convention).

    Writable arrays (of a `Block` or a weight slot) give tensors that may be written; of read-only ones see the module's warning.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The opposite, for a CPU tensor: its memory as an array, bfloat16 as uint16."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
