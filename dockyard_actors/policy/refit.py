"""The refit seam: a trained model's weights under the names and shapes of a Hugging Face checkpoint, one tensor at a time.

However the trainer holds them (sharded over ranks, tied, fused into one, with an adapter beside them), an engine sees the plain model.
Promises to make at most one full tensor at a time, and nothing else of the model. Knows no transport and no versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Fused = Mapping[str, Sequence[tuple[str, int]]]
"""Of a parameter's name: the names it is handed out under, each with its rows, in the order in which they lie in it."""


class RefitError(ValueError):
    """A parameter cannot be handed out as a plain tensor; the text names it and says why."""


class Refit:
    """What a model hands out. fused: parameters that hold several of the checkpoint's tensors, one above the other.

    LoRA layers of peft are merged on the way out: W + s·B·A for every active adapter, in float32. The model is not changed. Every rank of
    a sharded model must iterate `stream` to its end: each tensor is gathered from all of them.
    """

    def __init__(self, model: torch.nn.Module, fused: Fused | None = None) -> None:
        self._sources: dict[
            str, tuple[torch.nn.Parameter, Any]
        ] = {}  # name: the parameter, and the LoRA layer it is the base of
        fused = dict(fused or {})
        layers = {id(p): layer for layer, p in _adapted(model)}
        for name, parameter in model.named_parameters():  # tied weights once, under their first name
            if ".lora_" in name:
                continue
            self._sources[_plain(name)] = (parameter, layers.get(id(parameter)))
        self._parts = {name: tuple(fused.pop(name, ((name, -1),))) for name in self._sources}
        if fused:
            raise RefitError(f"fused parameters that the model does not have: {', '.join(sorted(fused))}")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, (parameter, _) in self._sources.items():
            for part, shape in _shapes(name, tuple(parameter.shape), self._parts[name]):
                if part in self.shapes:
                    raise RefitError(f"{part} would be handed out twice")
                self.shapes[part] = shape

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the order of `shapes`: plain tensors on the parameter's device, detached, in the parameter's dtype (float32
        where an adapter was merged). Valid until the next one is asked for or the model is trained on."""
        for name, (parameter, layer) in self._sources.items():
            whole = _whole(parameter)
            if layer is not None:
                whole = _merged(name, whole, layer)
            at = 0
            for part, rows in self._parts[name]:
                yield part, whole if rows < 0 else whole[at : at + rows]
                at += rows
            del whole


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _adapted(model: torch.nn.Module) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """Layers with an adapter, and the weight that each stands beside."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if base is not None and hasattr(module, "lora_A"):
            yield module, base.weight


def _merged(name: str, weight: torch.Tensor, layer: Any) -> torch.Tensor:
    if getattr(layer, "merged", False):
        return weight  # peft has merged it in place already
    if getattr(layer, "fan_in_fan_out", False):
        raise RefitError(f"{name}: a transposed layer (fan_in_fan_out) with an adapter")
    merged = weight.to(torch.float32, copy=True)
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        if getattr(layer, "use_dora", {}).get(adapter) or getattr(layer, "lora_bias", {}).get(adapter):
            raise RefitError(f"{name}: adapter {adapter!r} uses DoRA or a bias, which are not merged here")
        down, up = _whole(layer.lora_A[adapter].weight), _whole(layer.lora_B[adapter].weight)
        if merged.ndim != 2 or down.ndim != 2:
            raise RefitError(f"{name}: an adapter of a layer that is not linear")
        merged.addmm_(up.float(), down.float(), alpha=float(layer.scaling[adapter]))
    return merged


def _plain(name: str) -> str:
    """peft's wrapping is no part of a checkpoint's names."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _shapes(
    name: str, shape: tuple[int, ...], parts: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if parts == ((name, -1),):
        yield name, shape
        return
    rows = [count for _, count in parts]
    if min(rows) < 1 or sum(rows) != shape[0]:
        raise RefitError(f"{name} has {shape[0]} rows and its parts {' + '.join(map(str, rows))}")
    for part, count in parts:
        yield part, (count, *shape[1:])
