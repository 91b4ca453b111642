"""An HF engine with the groups of a test, and engines that only ever had one set of weights."""

from __future__ import annotations

from functools import cache

import numpy as np
from transformers import LlamaConfig

from dockyard_actors.engines.base import GroupOutput, GroupRequest, GroupResult, SamplingConfig
from dockyard_actors.engines.hf import HFEngine, HFEngineConfig
from tests.policy.models import (
    engine_of,
    generate,
    grouped_config,
    policy_of,
    requests_of,
    sent,
    sharp_model,
    weights_of,
)

SAMPLING = SamplingConfig(max_new_tokens=40)
CLOSE = 1e-4


@cache
def weights(seed: int, grouped: bool = False):
    return weights_of(policy_of(sharp_model(grouped_config() if grouped else None, seed)))


@cache
def clean(seed: int, grouped: bool = False) -> HFEngine:
    """An engine that only ever had these weights."""
    return engine_of(grouped_config() if grouped else None, seed)


class Gauge:
    """Rows decoded, and cache positions used, in every step; the last entry is of the step to come."""

    def __init__(self, engine: HFEngine) -> None:
        self.rows, self.tokens = [0], [0]
        engine.model.register_forward_hook(self._seen, with_kwargs=True)

    def _seen(self, module: object, args: object, kwargs: dict, output: object) -> None:
        rows, columns = kwargs["input_ids"].shape
        if columns == 1:  # a decode step, not a prefill
            self.rows[-1] += rows
            self.tokens[-1] += rows * kwargs["past_key_values"].length

    def next(self) -> None:
        self.rows.append(0)
        self.tokens.append(0)


class Run:
    """An engine with the groups of a test: submits them, steps, and keeps what comes back."""

    def __init__(self, config: LlamaConfig | None = None, engine: HFEngineConfig | None = None) -> None:
        self.engine = engine_of(config, engine=engine)
        self.gauge = Gauge(self.engine)
        self.requests: dict[int, GroupRequest] = {}
        self.outputs: dict[int, GroupOutput] = {}
        self.done: dict[int, GroupResult] = {}

    def submit(self, *requests: GroupRequest, sampling: SamplingConfig = SAMPLING) -> None:
        for request in requests:
            self.requests[request.key] = request
            self.outputs[request.key] = GroupOutput.allocate(request.n, sampling.max_new_tokens)
            self.engine.submit(request, self.outputs[request.key], sampling)

    def resume(self, *results: GroupResult, sampling: SamplingConfig = SAMPLING) -> None:
        for result in results:
            self.engine.submit(self.requests[result.key], self.outputs[result.key], sampling, resume=result)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for result in self.engine.step():
                assert result.key not in self.done
                self.done[result.key] = result
            self.gauge.next()

    def finish(self) -> None:
        while self.engine.unfinished:
            self.step()

    def update(
        self, seed: int, version: int, recompute: bool = True, grouped: bool = False, gloo: bool = False
    ) -> None:
        if not gloo:
            self.engine.update_weights(*weights(seed, grouped), version, recompute_kv_cache=recompute)
            return
        policy = policy_of(sharp_model(grouped_config() if grouped else None, seed))
        with sent(policy, version) as (stream, manifest):
            self.engine.update_weights(stream, manifest, version, recompute_kv_cache=recompute)

    def errors(self, key: int, row: int, engine: HFEngine) -> np.ndarray:
        """Per token: how far its logprob is from a full forward pass of `engine`."""
        request, output = self.requests[key], self.outputs[key]
        length = output.lengths[row]
        scored = engine.score(np.concatenate([request.prompt_ids, output.tokens[row, :length]]))
        return np.abs(output.logprobs[row, :length] - scored[request.prompt_ids.size - 1 :])

    def rows(self):
        """(key, row, versions of its tokens) of everything."""
        for key, output in self.outputs.items():
            for row, length in enumerate(output.lengths):
                yield key, row, output.versions[row, :length]

    def same_as(self, requests: list[GroupRequest], outputs: list[GroupOutput]) -> None:
        for request, expected in zip(requests, outputs, strict=True):
            output = self.outputs[request.key]
            np.testing.assert_array_equal(output.tokens, expected.tokens)
            np.testing.assert_array_equal(output.lengths, expected.lengths)
            np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=CLOSE)


@cache
def undisturbed(n: int = 4, stop: tuple[str, ...] = ()):
    return generate(clean(0), requests_of(n=n, stop=stop), SAMPLING)
