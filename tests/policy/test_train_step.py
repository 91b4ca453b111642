from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.engines.base import SamplingConfig
from dockyard_actors.policy.batch import GroupRows, TrainBatch
from dockyard_actors.policy.model import ModelSourceError
from dockyard_actors.policy.policy import LossInputs, NonFiniteGradient, Policy
from dockyard_actors.policy.types import ModelConfig, OptimizerConfig, PolicyConfig
from tests.policy.models import (
    SimpleResult,
    engine_of,
    generate,
    group_rows,
    grouped_config,
    policy_of,
    random_group,
    reinforce,
    requests_of,
    sharp_model,
)


def groups_of_eight() -> list[GroupRows]:
    return [random_group(12, [10] * 4, np.random.default_rng(g).normal(size=4).tolist(), seed=g) for g in range(8)]


POLICY = policy_of()  # of tests that leave it as it is


def gradient_of(policy: Policy, batch: TrainBatch) -> torch.Tensor:
    return caught_step(policy, batch)[1]


def caught_step(policy: Policy, batch: TrainBatch) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of a step, caught before the optimizer takes it."""
    caught: list[torch.Tensor] = []
    update = policy._update
    policy._update = lambda metrics: caught.append(  # type: ignore[method-assign]
        torch.cat([p.grad.flatten() for p in policy.parameters.values() if p.grad is not None])
    )
    result = policy.train_step(batch, reinforce(batch))
    policy._update = update  # type: ignore[method-assign]
    return result.metrics.loss, caught[0]


def test_the_gradient_does_not_depend_on_the_number_of_micro_batches():
    policy, groups = policy_of(), groups_of_eight()
    size = 12 + 4 * 9
    batches = {count: TrainBatch.build(groups, 8 // count * size) for count in (1, 2, 4, 8)}
    assert {count: len(batch.micro_batches) for count, batch in batches.items()} == {1: 1, 2: 2, 4: 4, 8: 8}
    gradients = {count: gradient_of(policy, batch) for count, batch in batches.items()}
    scale = gradients[1].abs().max()
    for count in (2, 4, 8):
        assert (gradients[count] - gradients[1]).abs().max() / scale <= 1e-6, count


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(20, 120), st.integers(0, 99))
def test_loss_and_gradient_of_uneven_groups_are_those_of_one_micro_batch(prompts, budget: int, seed: int):
    rng = np.random.default_rng(seed)
    groups = [
        random_group(p, rng.integers(1, 12, 5).tolist(), rng.normal(size=5).tolist(), seed=seed + i, vocabulary=6)
        for i, p in enumerate(prompts)
    ]
    whole, split = TrainBatch.build(groups, 100_000), TrainBatch.build(groups, budget)
    assert len(whole.micro_batches) == 1
    (loss, gradient), (other_loss, other) = caught_step(POLICY, whole), caught_step(POLICY, split)
    assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert (other - gradient).norm() <= 5e-6 * gradient.norm()


@pytest.mark.parametrize("config", [None, grouped_config()], ids=["tied", "grouped"])
def test_loss_and_gradient_are_those_of_a_plain_forward_pass_per_row(config):
    groups = [
        random_group(12, [9, 6, 9, 1, 4, 9], [1.0, -0.5, 2.0, 0.7, -1.0, 0.3], seed=g, vocabulary=6) for g in (0, 1)
    ]
    model = sharp_model(config)
    policy = policy_of(copy.deepcopy(model))
    batch = TrainBatch.build(groups, 4096)
    assert batch.packed_tokens < sum(12 + n - 1 for g in groups for n in g.lengths)
    loss, gradient = caught_step(policy, batch)
    total = torch.zeros(())
    for group in groups:
        for i, n in enumerate(group.lengths.tolist()):
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, group.tokens[i, :n]])).long()
            logprobs = torch.log_softmax(model(ids[None], use_cache=False).logits[0, 11:-1], -1)
            total = total - float(group.advantages[i]) * logprobs.gather(-1, ids[12:, None]).sum()
    total = total / sum(int(group.lengths.sum()) for group in groups)
    total.backward()
    plain = dict(model.named_parameters())
    expected = torch.cat([plain[name].grad.flatten() for name in policy.parameters])
    assert loss == pytest.approx(total.item(), rel=1e-5)
    assert (gradient - expected).norm() / expected.norm() <= 1e-5


def test_the_gradient_of_merged_rows_is_that_of_separate_ones():
    group = random_group(12, [10] * 6, [1.0, 1.0, 1.0, -0.5, -0.5, 2.0])
    group.tokens[1:3] = group.tokens[0]
    group.tokens[4] = group.tokens[3]
    apart = GroupRows(**{**vars(group), "versions": np.arange(6, dtype=np.int32)[:, None].repeat(10, 1)})
    merged, separate = TrainBatch.build([group], 1000), TrainBatch.build([apart], 1000)
    assert (len(merged.advantages), len(separate.advantages)) == (3, 6)
    policy = policy_of()
    a, b = gradient_of(policy, merged), gradient_of(policy, separate)
    assert (a - b).abs().max() / b.abs().max() <= 5e-6  # other sums of the same float32 terms


def test_steps_make_rewarded_completions_likelier_and_the_others_less_likely():
    policy = policy_of(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0))
    sampled = generate(engine_of(), requests_of(n=4), SamplingConfig(max_new_tokens=20))
    groups = [GroupRows(**{**vars(g), "advantages": np.array([1, 1, -1, -1], np.float32)}) for g in group_rows(sampled)]
    batch = TrainBatch.build(groups, 4096)
    before = policy.score(batch)
    results = [policy.train_step(batch, reinforce(batch)) for _ in range(3)]
    assert torch.allclose(results[0].logprobs, before, atol=1e-5)
    assert [r.metrics.step for r in results] == [0, 1, 2]
    change = (policy.score(batch) - before).sum(-1)
    assert (change * batch.advantages).mean() > 0
    assert change[batch.advantages > 0].mean() > change[batch.advantages < 0].mean()
    width = batch.loss_mask.sum()
    assert all(0 < r.entropy.sum() / width < math.log(99) for r in results)


def test_bfloat16_autocast_stays_close_to_float32_and_keeps_master_weights():
    groups = groups_of_eight()
    batch = TrainBatch.build(groups, 4096)
    exact, rough = policy_of(), policy_of(config=PolicyConfig(autocast_bf16=True))
    a, b = gradient_of(exact, batch), gradient_of(rough, batch)
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.99
    assert all(p.dtype == torch.float32 for p in rough.parameters.values())


def test_proximal_and_reference_logprobs_reach_the_loss_row_by_row():
    policy, batch = policy_of(), TrainBatch.build(groups_of_eight(), 60)
    policy.freeze_reference()
    policy.train_step(batch, reinforce(batch))
    proximal, reference = policy.score(batch), policy.score(batch, reference=True)
    assert not torch.equal(proximal, reference)

    def loss_fn(x: LossInputs) -> SimpleResult:
        assert x.proximal_logprobs is not None
        assert x.reference_logprobs is not None
        assert torch.allclose(x.logprobs.detach(), x.proximal_logprobs, atol=1e-5)
        assert torch.equal(x.reference_logprobs, reference[x.rows])
        return SimpleResult((x.logprobs * 0).sum(), {})

    result = policy.train_step(batch, loss_fn, proximal, reference)
    assert len(result.partials) == len(batch.micro_batches) > 1
    with pytest.raises(ValueError, match="freeze_reference"):
        policy_of().score(batch, reference=True)


def test_a_batch_without_signal_changes_neither_weights_nor_step():
    policy = policy_of()
    before = {name: p.clone() for name, p in policy.parameters.items()}
    batch = TrainBatch.build([random_group(5, [3, 4], [0.0, 0.0])], 100)
    result = policy.train_step(batch, reinforce(batch))
    assert result.metrics.skipped
    assert policy.step == 0
    assert all(torch.equal(p, before[name]) for name, p in policy.parameters.items())


def poisoned(x: LossInputs) -> SimpleResult:
    return SimpleResult((x.logprobs * float("nan")).sum(), {})


def test_a_gradient_that_is_not_finite_is_an_error_that_leaves_the_weights():
    policy, batch = policy_of(), TrainBatch.build(groups_of_eight(), 4096)
    before = {name: p.clone() for name, p in policy.parameters.items()}
    with pytest.raises(NonFiniteGradient, match=r"step 0.*model\.embed_tokens\.weight"):
        policy.train_step(batch, poisoned)
    assert all(torch.equal(p, before[name]) for name, p in policy.parameters.items())


def test_skipped_gradients_are_counted_and_too_many_in_a_row_are_an_error():
    policy = policy_of(optimizer=OptimizerConfig(nonfinite="skip", max_skips=2))
    batch = TrainBatch.build(groups_of_eight(), 4096)
    before = {name: p.clone() for name, p in policy.parameters.items()}
    assert policy.train_step(batch, poisoned).metrics.skipped
    assert policy.train_step(batch, poisoned).metrics.skipped
    assert all(torch.equal(p, before[name]) for name, p in policy.parameters.items())
    assert not policy.train_step(batch, reinforce(batch)).metrics.skipped
    assert policy.skipped_steps == 2
    for _ in range(2):
        policy.train_step(batch, poisoned)
    with pytest.raises(NonFiniteGradient, match="Skipped before: 4"):
        policy.train_step(batch, poisoned)


def test_learning_rate_schedules():
    constant = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [constant.lr_at(s) for s in (0, 1, 3, 4, 500)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", total_steps=12, min_lr_ratio=0.1)
    assert [round(linear.lr_at(s), 6) for s in (1, 2, 7, 12, 99)] == [1.0, 1.0, 0.55, 0.1, 0.1]
    cosine = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="cosine", total_steps=12)
    assert [round(cosine.lr_at(s), 6) for s in (2, 7, 12)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"schedule": "linear"}, "total_steps"),
        ({"schedule": "step"}, "schedule"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused_by_name(change, field: str):
    with pytest.raises(ValueError, match=rf"optimizer\.{field}"):
        OptimizerConfig(**change)


def test_models_that_cannot_be_packed_and_master_weights_that_are_not_float32_are_refused():
    model = sharp_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelSourceError, match="final_logit_softcapping"):
        policy_of(model)
    with pytest.raises(ModelSourceError, match="float32"):
        Policy.open(ModelConfig("tiny", dtype="bfloat16"))
