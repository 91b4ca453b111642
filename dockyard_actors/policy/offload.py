"""Where optimizer state is while somebody else has the device: host memory for CUDA's, an unnamed file for the CPU's.

Promises the very same bits back. The state stays readable meanwhile, so a checkpoint can be written of it. Knows AdamW's state only as
tensors by name, and not who has the device.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dockyard_actors.runtime import memory

ALIGNMENT = 64  # bytes


def offload(optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Moves the moments off the parameters' device and drops the gradients. directory: where a CPU's go, in a file without a name, so that
    nothing is left of it after a kill; on a memory file system nothing is gained. Raises OSError when the file does not fit the disk; nothing
    has moved then."""
    optimizer.zero_grad(set_to_none=True)
    moments = list(_moments(optimizer))
    mapped = [(state, name) for _, state, name in moments if state[name].device.type == "cpu"]
    for _, state, name in moments:
        if state[name].device.type != "cpu":
            state[name] = state[name].to("cpu")
    if mapped:
        _to_file(mapped, directory)
    memory.trim()


def onload(optimizer: torch.optim.Optimizer) -> None:
    """Brings the moments back to where their parameters are, in memory of their own."""
    for parameter, state, name in _moments(optimizer):
        state[name] = state[name].to(parameter.device, copy=True)


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any], str]]:
    """(parameter, its state, name of a tensor there). A step counter is one number and stays where it is."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                yield parameter, state, name


def _to_file(mapped: list[tuple[dict[str, Any], str]], directory: Path) -> None:
    places, size = [], 0
    for state, name in mapped:
        places.append(size)
        size += -(-state[name].nbytes // ALIGNMENT) * ALIGNMENT
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(
            file.fileno(), 0, max(size, 1)
        )  # a full disk is an error here; in a mapping it would be a SIGBUS
        pages = mmap.mmap(file.fileno(), max(size, 1))
    for (state, name), at in zip(mapped, places, strict=True):
        value = state[name]
        there = torch.frombuffer(pages, dtype=value.dtype, count=value.numel(), offset=at).view(value.shape)
        state[name] = there.copy_(value)
    pages.flush()  # else they would stay in memory, as pages that are still to be written
    pages.madvise(mmap.MADV_DONTNEED)
