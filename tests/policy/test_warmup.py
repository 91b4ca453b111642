from __future__ import annotations

import itertools

import numpy as np
import torch

from dockyard_actors.engines.base import SamplingConfig
from dockyard_actors.engines.hf import HFEngine
from dockyard_actors.policy.model import load_model
from dockyard_actors.policy.warmup import WarmupPlan, warm_up
from tests.policy.models import generate, policy_of, requests_of


def test_a_warm_model_answers_as_it_was_taught_and_ends_its_answer():
    policy = policy_of(load_model("tiny"))
    pairs = [("a?", "yes"), ("b?", "no"), ("a longer prompt?", "perhaps so")]
    seen: list[tuple[int, int]] = []
    losses: list[float] = []

    def progress(step: int, steps: int, loss: float) -> None:
        seen.append((step, steps))
        losses.append(loss)

    last = warm_up(policy, itertools.cycle(pairs), WarmupPlan(steps=110, batch_size=6), progress, every=20)
    assert seen == [*((step, 110) for step in range(20, 101, 20)), (110, 110)]
    assert last == losses[-1] < 0.1 * losses[0]
    assert policy.step == 0
    assert not policy.optimizer.state
    assert all(p.grad is None for p in policy.parameters.values())
    engine = HFEngine(lambda: (policy.model, policy.tokenizer, policy.eos_ids), version=0)
    engine.start()
    greedy = SamplingConfig(max_new_tokens=12, greedy=True)
    sampled = generate(engine, requests_of([prompt for prompt, _ in pairs], n=1), greedy)
    for (_, answer), output in zip(pairs, sampled.outputs, strict=True):
        assert policy.tokenizer.decode(output.tokens[0, : output.lengths[0]]) == answer + "<eos>"


def test_the_same_pairs_and_seed_give_the_same_weights():
    pairs = [("a?", "yes"), ("b?", "no")]
    first, second = (policy_of(load_model("tiny", seed=2)) for _ in range(2))
    for policy in (first, second):
        warm_up(policy, itertools.cycle(pairs), WarmupPlan(steps=5, batch_size=4))
    assert all(torch.equal(p, second.parameters[name]) for name, p in first.parameters.items())


def test_the_learning_rate_rises_and_falls():
    plan = WarmupPlan(steps=100, lr=1.0, ramp_steps=10, decay=0.3)
    rates = [plan.lr_at(step) for step in range(100)]
    assert np.argmax(rates) == 9
    assert rates[70] == 1.0
    assert 0 < rates[99] < 0.05
