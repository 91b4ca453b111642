"""Weights that did not arrive as they were, each kind caught at once by digest or canary: with real models, engines and transports."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from dockyard_actors.engines.base import EngineError, WeightsMismatch
from dockyard_actors.policy.refit import Refit
from dockyard_actors.roles.canary import LIMITS, CanaryFailed, canary_of, check_canary
from dockyard_actors.transport.torch_views import as_array
from dockyard_actors.transport.weights_collective import CollectiveError
from dockyard_actors.transport.weights_shm import WeightManifest
from tests.policy.models import engine_of, policy_of, sent, sharp_model, weights_of

LIMIT = LIMITS["float32"]
IDS = np.arange(3, 40, dtype=np.int32)


def canary_by(model: torch.nn.Module):
    """What a trainer with this model sends."""
    with torch.no_grad():
        logits = model(torch.from_numpy(IDS).long()[None]).logits[0]
    logprobs = torch.log_softmax(logits.double(), -1).numpy()
    return canary_of(IDS, logprobs[np.arange(IDS.size - 1), IDS[1:]], 1.0)


def test_an_adapter_that_was_never_delivered_fails_the_canary() -> None:
    base = sharp_model()
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(base), config).eval()
    canary, engine = canary_by(adapted), engine_of()
    manifest = WeightManifest.of({name: ("float32", shape) for name, shape in Refit(base).shapes.items()})
    for version, model, right in ((1, base, False), (2, adapted, True)):
        stream = ((name, as_array(tensor)) for name, tensor in Refit(model).stream())
        engine.update_weights(stream, manifest, version)
        if right:
            assert check_canary(engine, canary, LIMIT, True) < LIMIT
        else:
            with pytest.raises(CanaryFailed, match="trainer and engine disagree"):
                check_canary(engine, canary, LIMIT, True)


def test_a_transport_that_drops_a_tensor_is_an_error_on_both_sides() -> None:
    policy, engine = policy_of(sharp_model(seed=5)), engine_of()
    before = engine.score(IDS)
    whole = policy.refit.stream
    dropped = list(policy.refit.shapes)[3]
    policy.refit.stream = lambda: ((name, tensor) for name, tensor in whole() if name != dropped)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=dropped), sent(policy, 1) as (stream, manifest):  # noqa: PT012
        with pytest.raises(CollectiveError, match="the trainer"):
            engine.update_weights(stream, manifest, 1)
        assert engine.version == 0
    views, manifest = weights_of(policy_of(sharp_model(seed=5)))
    del views[dropped]
    with pytest.raises(WeightsMismatch, match=dropped):
        engine.update_weights(views, manifest, 1)
    engine.update_weights(*weights_of(policy_of(sharp_model())), 1)
    np.testing.assert_allclose(engine.score(IDS), before, atol=1e-6)


def test_a_stream_of_another_model_is_refused_before_anything_is_copied() -> None:
    engine = engine_of()
    policy = policy_of(sharp_model(seed=5))
    live = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    views, manifest = weights_of(policy)
    first, second = list(views)[:2]
    pairs = iter([(second, views[second]), (first, views[first])])
    with pytest.raises(EngineError, match=f"{first} is next and {second} came"):
        engine.update_weights(pairs, manifest, 1)
    assert all(torch.equal(live[name], parameter) for name, parameter in engine.model.named_parameters())
