"""The vLLM engine on a GPU, by the same code as on a CPU: parity with a plain forward pass, and weights updated in flight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dockyard_actors.engines import base
from dockyard_actors.engines.base import GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.engines.choose import installed_vllm
from dockyard_actors.engines.vllm import VLLMEngine, VLLMEngineConfig
from dockyard_actors.policy.tiny import tiny_config, tiny_tokenizer
from tests.policy.models import EOS, policy_of, sharp_model, weights_of

MISSING = installed_vllm()[1] or (None if torch.cuda.is_available() else "no CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]

CLOSE = 2e-3  # float32 on a GPU sums in another order, with TF32 off
PROMPT = np.arange(10, 50, dtype=np.int32)


def expected(seed: int, ids: np.ndarray) -> np.ndarray:
    """(T-1,) logprobs of ids[1:] from a float64 softmax over a plain float32 forward pass on the CPU."""
    with torch.no_grad():
        logits = sharp_model(tiny_config(), seed)(torch.from_numpy(ids).long()[None]).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()[np.arange(ids.size - 1), ids[1:]]


def test_tokens_before_an_update_are_the_old_weights_and_after_it_the_new_ones() -> None:
    engine = VLLMEngine(
        lambda: (tiny_config(), tiny_tokenizer(), [EOS]), VLLMEngineConfig(max_batch_rows=40, kv_cache_bytes=64 << 20)
    )
    engine.start()
    try:
        for version, seed in enumerate((0, 1)):
            views, manifest = weights_of(policy_of(sharp_model(tiny_config(), seed)), "float32")
            if version == 0:
                engine.update_weights(views, manifest, 0)
                whole = GroupOutput.allocate(8, 24)
                base.generate(
                    engine, [GroupRequest(0, PROMPT, 8, tuple(range(8)))], [whole], SamplingConfig(max_new_tokens=24)
                )
                request, output = GroupRequest(1, PROMPT, 8, tuple(range(8))), GroupOutput.allocate(8, 24)
                engine.submit(request, output, SamplingConfig(max_new_tokens=24))
                while int(output.lengths.max()) < 8:
                    engine.step()
            else:
                engine.update_weights(views, manifest, 1)
        while engine.unfinished:
            engine.step()
        for row in range(8):
            length = int(output.lengths[row])
            ids = np.concatenate([PROMPT, output.tokens[row, :length]]).astype(np.int32)
            by_version = {version: expected(version, ids)[PROMPT.size - 1 :] for version in (0, 1)}
            for position in range(length):
                version = int(output.versions[row, position])
                assert abs(output.logprobs[row, position] - by_version[version][position]) < CLOSE
        assert set(np.unique(output.versions[output.versions >= 0]).tolist()) == {0, 1}
    finally:
        engine.close()
