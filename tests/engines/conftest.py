"""The vLLM engine of a test module; see vllm_bench.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from dockyard_actors.engines.vllm import VLLMEngine
from tests.engines.vllm_bench import CONFIGS, Bench


@pytest.fixture(scope="module", params=list(CONFIGS))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    environment, threads = dict(os.environ), torch.get_num_threads()
    made = Bench(CONFIGS[request.param])
    made.open()
    yield made
    made.engine.close()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.fixture
def engine(bench: Bench) -> Iterator[VLLMEngine]:
    """With the weights of seed 0 and nothing cached or running."""
    bench.put(0)
    yield bench.engine
    bench.engine.abort()
