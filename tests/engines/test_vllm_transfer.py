"""Weights that vLLM's worker reads from shared memory by itself, in process as over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dockyard_actors.engines import vllm_boot
from dockyard_actors.engines.base import EngineError, WeightsMismatch
from dockyard_actors.transport.fdserver import FdClient
from dockyard_actors.transport.tensors import ChecksumError, StaleRef
from dockyard_actors.transport.torch_views import as_torch
from dockyard_actors.transport.weights_shm import WeightManifest, WeightPublisher, WeightRef
from tests.engines.vllm_bench import CLOSE, NEEDS_VLLM, Bench
from tests.policy.models import policy_of, requests_of, sharp_model, weights_of
from tests.transport.slab_peer import serving

pytestmark = NEEDS_VLLM


class Trainer:
    """Publishes the weights of a seed."""

    def __init__(self, bench: Bench, path: str, without: str = "") -> None:
        self._bench = bench
        manifest = weights_of(policy_of(sharp_model(bench.config(), 0)))[1]
        shapes = {e.name: (e.dtype, tuple(e.shape)) for e in manifest.entries if e.name != without}
        self.publisher = WeightPublisher(FdClient(path), WeightManifest.of(shapes))

    def publish(self, seed: int, version: int, spoilt: str = "") -> WeightRef:
        """spoilt: an entry that is written to once more after it was published."""
        views, _ = weights_of(policy_of(sharp_model(self._bench.config(), seed)))
        slot = self.publisher.slot(version)
        for name, array in slot.items():
            array[...] = views[name]
        late = as_torch(slot[spoilt]) if spoilt else None
        ref = self.publisher.publish(version)
        if late is not None:
            late.view(-1)[0] += 1
        return ref


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as server:
        yield server.path


@pytest.fixture
def trainer(bench: Bench, path: str) -> Iterator[Trainer]:
    trainer = Trainer(bench, path)
    yield trainer
    trainer.publisher.close()


def transfer(engine, ref: WeightRef) -> None:
    engine.llm.collective_rpc("start_weight_update")
    engine.llm.collective_rpc("update_weights", kwargs={"update_info": vllm_boot.ref_info(ref)})
    engine.llm.collective_rpc("finish_weight_update")


def delivered(engine) -> dict:
    return engine.llm.collective_rpc("dockyard_delivered")[0]


def test_a_slot_is_loaded_and_the_worker_says_which_bytes_arrived(bench, engine, trainer):
    ids = requests_of()[0].prompt_ids
    for version, seed in enumerate((5, 6)):
        ref = trainer.publish(seed, version)
        transfer(engine, ref)
        assert delivered(engine) == {"version": version, "checksums": list(ref.checksums)}
        np.testing.assert_allclose(engine.score(ids), bench.logprobs(seed, ids), atol=CLOSE)
    bench.put(5)
    assert delivered(engine) == {"version": bench.version, "checksums": []}


def test_what_cannot_be_read_or_does_not_fit_changes_nothing(bench, engine, trainer, path):
    ids = requests_of()[0].prompt_ids
    before, told = engine.score(ids), delivered(engine)
    released = trainer.publish(5, 0)
    assert trainer.publisher.release(0)
    with pytest.raises(StaleRef):
        transfer(engine, released)
    lacking = Trainer(bench, path, without="model.norm.weight")
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight is missing"):
        transfer(engine, lacking.publish(5, 1))
    lacking.publisher.close()
    assert delivered(engine) == told
    np.testing.assert_array_equal(engine.score(ids), before)
    transfer(engine, trainer.publish(5, 2))
    np.testing.assert_allclose(engine.score(ids), bench.logprobs(5, ids), atol=CLOSE)


def test_an_entry_that_is_not_what_was_published_is_named_and_not_copied(bench, engine, trainer):
    told = delivered(engine)
    first = trainer.publisher.manifest.entries[0].name
    with pytest.raises(ChecksumError, match=first):
        transfer(engine, trainer.publish(5, 0, spoilt=first))
    assert delivered(engine) == told
    ids = requests_of()[0].prompt_ids
    np.testing.assert_allclose(engine.score(ids), bench.logprobs(0, ids), atol=CLOSE)  # it was the first entry


@pytest.mark.parametrize(("info", "error"), [({}, "needs a ref"), ({"pickle": "no"}, "Invalid update_info")])
def test_an_update_brings_weights_that_the_worker_knows_how_to_read(engine, info: dict, error: str):
    engine.llm.collective_rpc("start_weight_update")
    with pytest.raises((EngineError, ValueError), match=error):
        engine.llm.collective_rpc("update_weights", kwargs={"update_info": info})


def test_weights_may_come_as_a_stream_of_arrays(bench, engine):
    views, manifest = weights_of(policy_of(sharp_model(bench.config(), 5)))
    bench.version += 1
    engine.update_weights(((e.name, views[e.name]) for e in manifest.entries), manifest, bench.version)
    ids = requests_of()[0].prompt_ids
    np.testing.assert_allclose(engine.score(ids), bench.logprobs(5, ids), atol=CLOSE)
