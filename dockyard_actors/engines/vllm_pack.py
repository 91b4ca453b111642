"""Copies of a CPU model's linear weights in the order in which oneDNN multiplies fastest: a tenth fewer CPU seconds for their memory again.

New weights drop them, and they are made again a few layers at a decode step, so that no engine stands still for them. A layer without one
multiplies with its plain weights. Knows layers, and nothing of requests.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch

PRIMITIVES = 32  # shapes of batches for which oneDNN keeps its code, as vLLM does
LAYERS_A_STEP = 8  # a hundredth of a second for a model of 135M parameters


class Packing:
    def __init__(self, model: torch.nn.Module) -> None:
        self._plain: list[tuple[Any, Any]] = [
            (layer, layer.cpu_linear)
            for layer in model.modules()
            if hasattr(layer, "cpu_linear") and layer.weight.ndim == 2  # pyright: ignore[reportAttributeAccessIssue]
        ]
        self._left: deque[Any] = deque()
        self._handlers: dict[int, Any] = {}  # by address: a head may be tied to the embedding

    def drop(self) -> None:
        """The weights are about to change: every layer uses its plain ones until it is packed again."""
        for layer, plain in self._plain:
            layer.cpu_linear = plain
        self._handlers.clear()
        self._left = deque(layer for layer, _ in self._plain)

    def some(self) -> bool:
        """Packs the next few; whether there are more."""
        if not self._left:
            return False
        import vllm._custom_ops as operations  # pyright: ignore[reportMissingImports]

        for _ in range(min(LAYERS_A_STEP, len(self._left))):
            layer = self._left.popleft()
            at = layer.weight.data_ptr()
            if at not in self._handlers:
                self._handlers[at] = operations.create_onednn_mm(layer.weight.t(), PRIMITIVES)
            layer.cpu_linear = partial(_packed, operations.onednn_mm, self._handlers[at])
        return bool(self._left)


def _packed(multiply: Any, handler: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    return multiply(handler, x, bias)
