"""Whether a manifest of weights, and the arrays that come with it, fit a model's parameters.
Promises to find every misfit before a byte is copied. Knows names, shapes and dtypes, and no model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dockyard_actors.engines.base import Manifest, WeightsMismatch

VIEW_DTYPES = {"float32": "float32", "bfloat16": "uint16"}
SHOWN = 5  # misfits in the message


def check_manifest(
    shapes: Mapping[str, tuple[int, ...]], views: Mapping[str, np.ndarray], manifest: Manifest, what: str
) -> None:
    """Raises WeightsMismatch, naming `what` and the misfits, unless the manifest has every parameter of `shapes` once and
    nothing else, each with a view of its shape and dtype."""
    problems = _misfits(shapes, views, manifest)
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WeightsMismatch(f"{what}: {'; '.join(problems[:SHOWN])}{more}")


def _misfits(shapes: Mapping[str, tuple[int, ...]], views: Mapping[str, np.ndarray], manifest: Manifest) -> list[str]:
    named = [entry.name for entry in manifest.entries]
    problems = [f"{name} is missing" for name in shapes if name not in set(named)]
    problems += [f"{name} is in the manifest twice" for name in dict.fromkeys(named) if named.count(name) > 1]
    for entry in manifest.entries:
        shape, view = tuple(entry.shape), views.get(entry.name)
        if entry.name not in shapes:
            problems.append(f"{entry.name} is unknown to the model")
        elif entry.dtype not in VIEW_DTYPES:
            problems.append(f"{entry.name} has dtype {entry.dtype}, expected one of {', '.join(VIEW_DTYPES)}")
        elif shape != tuple(shapes[entry.name]):
            problems.append(f"{entry.name} has shape {shape}, the model {tuple(shapes[entry.name])}")
        elif view is None:
            problems.append(f"{entry.name} is in the manifest but has no view")
        elif view.dtype != VIEW_DTYPES[entry.dtype] or tuple(view.shape) != shape:
            problems.append(f"the view of {entry.name} is {view.dtype}{view.shape}, not {entry.dtype}{shape}")
    return problems
