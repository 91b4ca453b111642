"""Whether a manifest of weights, and the arrays that come with it, fit a model's parameters.
Promises to find every misfit of the manifest before a byte is copied. Knows names, shapes and dtypes, and no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dockyard_actors.engines.base import EngineError, Manifest, ManifestEntry, WeightsMismatch

VIEW_DTYPES = {"float32": "float32", "bfloat16": "uint16"}
SHOWN = 5  # misfits in the message


def fitting(
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, np.ndarray] | Iterator[tuple[str, np.ndarray]],
    manifest: Manifest,
    what: str,
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights in the manifest's order. Raises WeightsMismatch at once, naming `what` and the misfits, unless the manifest has every
    parameter of `shapes` once and nothing else, and a mapping has a view of its shape and dtype for each. A stream is looked at as it
    comes: EngineError at the first array that is not the manifest's next."""
    views = None if isinstance(weights, Iterator) else weights
    problems = _misfits(shapes, views, manifest)
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WeightsMismatch(f"{what}: {'; '.join(problems[:SHOWN])}{more}")
    if isinstance(weights, Iterator):
        return _streamed(weights, manifest, what)
    return ((entry.name, weights[entry.name]) for entry in manifest.entries)


def _streamed(
    weights: Iterator[tuple[str, np.ndarray]], manifest: Manifest, what: str
) -> Iterator[tuple[str, np.ndarray]]:
    for entry in manifest.entries:
        name, view = next(weights, ("", None))
        if name != entry.name or view is None:
            raise EngineError(f"{what}: {entry.name} is next and {name or 'the end'} came")
        if problem := _unlike(entry, view):
            raise EngineError(f"{what}: {problem}")
        yield name, view
    if (more := next(weights, None)) is not None:
        raise EngineError(f"{what}: {more[0]} came after the last one")


def _misfits(
    shapes: Mapping[str, tuple[int, ...]], views: Mapping[str, np.ndarray] | None, manifest: Manifest
) -> list[str]:
    named = [entry.name for entry in manifest.entries]
    problems = [f"{name} is missing" for name in shapes if name not in set(named)]
    problems += [f"{name} is in the manifest twice" for name in dict.fromkeys(named) if named.count(name) > 1]
    for entry in manifest.entries:
        shape, view = tuple(entry.shape), None if views is None else views.get(entry.name)
        if entry.name not in shapes:
            problems.append(f"{entry.name} is unknown to the model")
        elif entry.dtype not in VIEW_DTYPES:
            problems.append(f"{entry.name} has dtype {entry.dtype}, expected one of {', '.join(VIEW_DTYPES)}")
        elif shape != tuple(shapes[entry.name]):
            problems.append(f"{entry.name} has shape {shape}, the model {tuple(shapes[entry.name])}")
        elif views is not None and view is None:
            problems.append(f"{entry.name} is in the manifest but has no view")
        elif view is not None and (problem := _unlike(entry, view)):
            problems.append(problem)
    return problems


def _unlike(entry: ManifestEntry, view: np.ndarray) -> str:
    shape = tuple(entry.shape)
    if view.dtype == VIEW_DTYPES[entry.dtype] and tuple(view.shape) == shape:
        return ""
    return f"the view of {entry.name} is {view.dtype}{view.shape}, not {entry.dtype}{shape}"
