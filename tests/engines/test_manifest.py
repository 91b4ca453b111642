"""Every way in which a manifest can fail to fit a model is found before anything is copied."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dockyard_actors.engines.base import EngineError, WeightsMismatch
from dockyard_actors.engines.manifest import SHOWN, fitting

SHAPES = {"embed": (4, 2), "head": (4,)}


def entry(name: str, dtype: str, shape: tuple[int, ...]):
    return SimpleNamespace(name=name, dtype=dtype, shape=shape)


ENTRIES = [entry("embed", "float32", (4, 2)), entry("head", "bfloat16", (4,))]
VIEWS = {"embed": np.zeros((4, 2), np.float32), "head": np.zeros(4, np.uint16)}


def test_a_manifest_with_every_parameter_once_fits_in_any_order():
    for entries in (ENTRIES, ENTRIES[::-1]):
        arrays = fitting(SHAPES, VIEWS, SimpleNamespace(entries=entries), "weights")
        assert [(name, array is VIEWS[name]) for name, array in arrays] == [(e.name, True) for e in entries]


@pytest.mark.parametrize(
    ("reason", "entries", "views"),
    [
        ("head is missing", ENTRIES[:1], VIEWS),
        ("extra is unknown", [*ENTRIES, entry("extra", "float32", (1,))], VIEWS),
        ("head is in the manifest twice", [*ENTRIES, ENTRIES[1]], VIEWS),
        ("head has shape", [ENTRIES[0], entry("head", "bfloat16", (1, 4))], VIEWS),
        ("head has dtype int8", [ENTRIES[0], entry("head", "int8", (4,))], VIEWS),
        ("head is in the manifest but has no view", ENTRIES, {"embed": VIEWS["embed"]}),
        ("the view of embed is float64", ENTRIES, {**VIEWS, "embed": np.zeros((4, 2))}),
        ("the view of head is float32", ENTRIES, {**VIEWS, "head": np.zeros(4, np.float32)}),
        ("the view of embed is float32", ENTRIES, {**VIEWS, "embed": np.zeros((2, 4), np.float32)}),
    ],
)
def test_a_misfit_is_named(reason: str, entries: list, views: dict[str, np.ndarray]):
    with pytest.raises(WeightsMismatch, match=f"^weights: {reason}"):
        fitting(SHAPES, views, SimpleNamespace(entries=entries), "weights")


def test_of_many_misfits_some_are_named_and_the_rest_counted():
    shapes = {f"layer{i}": (1,) for i in range(SHOWN + 3)}
    with pytest.raises(WeightsMismatch, match=r"layer4 is missing; and 3 more$"):
        fitting(shapes, {}, SimpleNamespace(entries=[]), "weights")


def test_a_stream_is_handed_on_as_it_comes_and_a_misfit_of_the_manifest_stops_it_before_its_first():
    asked: list[str] = []

    def stream():
        for name, view in VIEWS.items():
            asked.append(name)
            yield name, view

    with pytest.raises(WeightsMismatch, match="head is missing"):
        fitting(SHAPES, stream(), SimpleNamespace(entries=ENTRIES[:1]), "weights")
    assert not asked
    arrays = fitting(SHAPES, stream(), SimpleNamespace(entries=ENTRIES), "weights")
    assert next(arrays) == ("embed", VIEWS["embed"])
    assert asked == ["embed"]
    assert [name for name, _ in arrays] == ["head"]


@pytest.mark.parametrize(
    ("reason", "pairs"),
    [
        ("head is next and the end came", [("embed", VIEWS["embed"])]),
        ("embed is next and head came", [("head", VIEWS["head"]), ("embed", VIEWS["embed"])]),
        ("the view of embed is float64", [("embed", np.zeros((4, 2)))]),
        ("embed came after the last one", [*VIEWS.items(), ("embed", VIEWS["embed"])]),
    ],
)
def test_a_stream_that_is_not_what_the_manifest_says_is_an_error(reason: str, pairs: list):
    with pytest.raises(EngineError, match=f"^weights: {reason}"):
        list(fitting(SHAPES, iter(pairs), SimpleNamespace(entries=ENTRIES), "weights"))
