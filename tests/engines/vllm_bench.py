"""One vLLM engine on the tiny models in this process: vLLM takes one a process, so one is open at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from dockyard_actors.engines import base
from dockyard_actors.engines.base import GroupOutput, GroupRequest, GroupResult, SamplingConfig
from dockyard_actors.engines.choose import installed_vllm
from dockyard_actors.engines.vllm import VLLMEngine, VLLMEngineConfig
from dockyard_actors.policy.tiny import tiny_config, tiny_tokenizer
from tests.policy.models import EOS, grouped_config, policy_of, sent, sharp_model, weights_of

PROBLEM = installed_vllm()[1]
NEEDS_VLLM = [pytest.mark.vllm, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]

SAMPLING = SamplingConfig(max_new_tokens=40)
CONFIGS = {"tied": tiny_config, "grouped": grouped_config}
CLOSE = 1e-4  # of float32 logprobs
CACHE_BYTES = 8 << 20
BLOCK = 32  # tokens that vLLM shares on a CPU


class Bench:
    """One engine, and the weights and reference models that tests put into it by seed."""

    def __init__(self, config: Callable) -> None:
        self.config = config
        settings = VLLMEngineConfig(max_batch_rows=40, kv_cache_bytes=CACHE_BYTES)
        self.engine = VLLMEngine(lambda: (config(), tiny_tokenizer(), [EOS]), settings)
        self.version = -1

    def open(self) -> None:
        self.engine.start()
        self.version = -1

    def put(self, seed: int, dtype: str = "float32", recompute: bool = True, gloo: bool = False) -> int:
        """Weights of `seed` under the next version, which is returned."""
        policy = policy_of(sharp_model(self.config(), seed))
        self.version += 1
        if gloo:
            with sent(policy, self.version, dtype) as (stream, manifest):
                self.engine.update_weights(stream, manifest, self.version, recompute)
            return self.version
        views, manifest = weights_of(policy, dtype)
        for view in views.values():
            view.flags.writeable = False  # as sealed shared memory is
        self.engine.update_weights(views, manifest, self.version, recompute)
        return self.version

    def logprobs(self, seed: int, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """(T-1,) of ids[1:], from a plain forward pass."""
        return self.distribution(seed, ids, temperature)[np.arange(ids.size - 1), ids[1:]]

    def distribution(self, seed: int, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        with torch.no_grad():
            logits = sharp_model(self.config(), seed)(torch.from_numpy(ids).long()[None]).logits[0]
        return torch.log_softmax(logits.double() / temperature, -1).numpy()

    @contextmanager
    def small(self, blocks: int, longest: int | None = None) -> Iterator[VLLMEngine]:
        """Instead of the engine for a while: one with the weights of seed 0, little memory, and no token that ends."""
        token_bytes = token_bytes_of(self.config())
        settings = VLLMEngineConfig(40, kv_cache_bytes=blocks * BLOCK * token_bytes, max_model_len=longest)
        self.engine.close()
        engine = VLLMEngine(lambda: (self.config(), tiny_tokenizer(), []), settings)
        engine.start()
        try:
            engine.update_weights(*weights_of(policy_of(sharp_model(self.config(), 0))), version=0)
            yield engine
        finally:
            engine.close()
            self.open()


def token_bytes_of(structure: LlamaConfig) -> int:
    """What the keys and values of one token take in float32."""
    return 2 * 4 * structure.num_hidden_layers * structure.num_key_value_heads * structure.head_dim


class Run:
    """Groups on their way through an engine."""

    def __init__(self, engine: base.Engine, requests: list[GroupRequest], sampling: SamplingConfig = SAMPLING) -> None:
        self.engine, self.requests, self.sampling = engine, requests, sampling
        self.outputs = [GroupOutput.allocate(r.n, sampling.max_new_tokens) for r in requests]
        self.results: dict[int, GroupResult] = {}
        for request, output in zip(requests, self.outputs, strict=True):
            engine.submit(request, output, sampling)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.take(self.engine.step())
        return self

    def end(self) -> Run:
        while self.engine.unfinished:
            self.take(self.engine.step())
        assert set(self.results) == {request.key for request in self.requests}
        return self

    def take(self, results: list[GroupResult]) -> None:
        for result in results:
            assert result.key not in self.results
            self.results[result.key] = result

    def rows(self) -> Iterator[tuple[np.ndarray, int, np.ndarray, np.ndarray]]:
        """(prompt and tokens, length of the prompt, logprobs, versions) of every completion."""
        for request, output in zip(self.requests, self.outputs, strict=True):
            for i, length in enumerate(output.lengths):
                ids = np.concatenate([request.prompt_ids, output.tokens[i, :length]])
                yield ids, request.prompt_ids.size, output.logprobs[i, :length], output.versions[i, :length]


def same(one: Run, other: Run) -> None:
    for a, b in zip(one.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=CLOSE)
    assert {k: r.finish_reasons for k, r in one.results.items()} == {
        k: r.finish_reasons for k, r in other.results.items()
    }
