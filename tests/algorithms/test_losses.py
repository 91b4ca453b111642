from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dockyard_actors.algorithms.corrections import correction_weights
from dockyard_actors.algorithms.losses import LossResult, policy_loss
from dockyard_actors.algorithms.m2po import m2po_mask
from dockyard_actors.algorithms.reduction import Denominators
from dockyard_actors.algorithms.types import CorrectionConfig, LossConfig
from tests.algorithms import reference
from tests.algorithms.reference import Batch, make_batch

TIS = CorrectionConfig(kind="tis", tis_max=1.3, tis_min=0.8)
NONE = CorrectionConfig()
LOSSES = [
    (LossConfig(), NONE),
    (LossConfig(kind="grpo", reduction="sequence"), TIS),
    (LossConfig(dual_clip=1.4, reduction="constant", constant_length=16), TIS),
    (LossConfig(kind="reinforce"), TIS),
    (LossConfig(kind="reinforce", reduction="sequence", kl_coef=0.3, kl_kind="k2"), NONE),
    (LossConfig(kl_coef=0.2, kl_kind="k1"), TIS),
    (LossConfig(kl_coef=0.2, kl_kind="k3", reduction="sequence"), TIS),
    (LossConfig(kind="m2po"), NONE),
    (LossConfig(kind="m2po", reduction="sequence", kl_coef=0.1), NONE),
]


def keep_of(batch: Batch, loss: LossConfig):
    if loss.kind != "m2po":
        return None
    log_ratio = batch.logprobs.detach() - batch.behaviour
    return m2po_mask(log_ratio, batch.advantages, batch.mask, loss.m2_threshold, batch.row_weights)


def run(batch: Batch, loss: LossConfig, correction: CorrectionConfig, denominators=None, keep=None) -> LossResult:
    return policy_loss(
        batch.logprobs,
        batch.behaviour,
        batch.proximal,
        batch.reference,
        batch.advantages,
        batch.mask,
        loss,
        correction,
        denominators or Denominators.of(batch.mask, batch.row_weights),
        row_weights=batch.row_weights,
        keep_mask=keep_of(batch, loss) if keep is None else keep,
    )


def gradient(batch: Batch, loss: LossConfig, correction: CorrectionConfig) -> torch.Tensor:
    batch = replace(batch, logprobs=batch.logprobs.detach().requires_grad_())
    return torch.autograd.grad(run(batch, loss, correction).loss, batch.logprobs)[0]


@pytest.mark.parametrize(("loss", "correction"), LOSSES, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_equal_the_float64_reference(loss, correction, per_token, weighted):
    for seed in range(5):
        batch = make_batch(seed, per_token=per_token)
        if weighted:
            batch.row_weights = torch.tensor([1.0, 3, 0, 1, 2, 1])
        want = reference.batch_loss(batch, loss, correction, keep_of(batch, loss))
        assert run(batch, loss, correction).loss.item() == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("loss", "correction"), LOSSES, ids=str)
def test_fp32_and_bf16_inputs_are_computed_in_fp32(loss, correction):
    want = reference.batch_loss(make_batch(0), loss, correction, keep_of(make_batch(0), loss))
    result = run(make_batch(0, dtype=torch.float32), loss, correction, keep=keep_of(make_batch(0), loss))
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert run(make_batch(0, dtype=torch.bfloat16), loss, correction).loss.dtype == torch.float32


@pytest.mark.parametrize(("loss", "correction"), LOSSES, ids=str)
def test_gradients_are_those_of_the_reference_by_finite_differences(loss, correction):
    batch = make_batch(7, rows=4, width=5)
    keep = keep_of(batch, loss)
    got, h = gradient(batch, loss, correction), 1e-6
    for b in range(4):
        for t in range(5):
            sides = []
            for sign in (1, -1):
                moved = batch.logprobs.clone()
                moved[b, t] += sign * h
                sides.append(reference.batch_loss(replace(batch, logprobs=moved), loss, correction, keep))
            assert got[b, t].item() == pytest.approx((sides[0] - sides[1]) / (2 * h), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("loss", "correction"), LOSSES, ids=str)
def test_autograd_agrees_with_the_loss_it_differentiates(loss, correction):
    batch = make_batch(11, rows=3, width=4)
    keep = keep_of(batch, loss)
    logprobs = batch.logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: run(replace(batch, logprobs=x), loss, correction, keep=keep).loss, (logprobs,)
    )


@pytest.mark.parametrize(("loss", "correction"), LOSSES, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_nothing_under_the_mask_reaches_loss_gradient_or_statistics(loss, correction, poison):
    clean = make_batch(2, per_token=True)
    names = ("logprobs", "behaviour", "proximal", "reference", "advantages")
    dirty = replace(clean, **{name: torch.where(clean.mask, getattr(clean, name), poison) for name in names})
    a, b = run(clean, loss, correction), run(dirty, loss, correction)
    assert torch.equal(a.loss, b.loss)
    assert {k: v.item() for k, v in a.stats.items()} == {k: v.item() for k, v in b.stats.items()}
    slopes = gradient(dirty, loss, correction)
    assert torch.equal(slopes, gradient(clean, loss, correction))
    assert not slopes[~clean.mask].any()


def test_a_nan_on_a_trained_token_is_seen_and_counted():
    batch = make_batch(2)
    batch.logprobs[0, 0] = float("nan")
    result = run(batch, LossConfig(), NONE)
    assert result.loss.isnan()
    assert result.stats["nonfinite:sum"].item() == 1


def test_a_batch_without_tokens_has_zero_loss_and_zero_gradient():
    batch = replace(make_batch(2), mask=torch.zeros(6, 9, dtype=torch.bool))
    for loss, correction in LOSSES:
        assert run(batch, loss, correction).loss.item() == 0
        assert not gradient(batch, loss, correction).any()


def single(log_ratio: float, advantage: float, loss: LossConfig) -> float:
    logprobs = torch.tensor([[log_ratio - 1.0]], dtype=torch.float64)
    old = torch.full((1, 1), -1.0, dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = Batch(logprobs, old, old, None, torch.tensor([advantage], dtype=torch.float64), mask)
    return run(batch, loss, NONE).loss.item()


def test_reference_values_of_the_clipped_loss():
    symmetric = LossConfig(ratio_clip_high=0.2)
    assert single(15.0, 1.0, symmetric) == pytest.approx(-1.2)
    assert single(100.0, 2.0, LossConfig()) == pytest.approx(-2.56)  # clip-higher
    assert single(-9.0, -1.0, LossConfig()) == pytest.approx(0.8)
    assert single(4.6051702, -1.0, LossConfig()) == pytest.approx(100.0, rel=1e-6)
    assert single(4.6051702, -1.0, LossConfig(dual_clip=3.0)) == pytest.approx(3.0)
    assert single(4.6051702, 1.0, LossConfig(dual_clip=3.0)) == pytest.approx(-1.28)


def test_on_policy_the_clipped_loss_is_minus_the_masked_mean_of_the_advantages():
    batch = replace(make_batch(4), proximal=None, reference=None)
    tokens = batch.mask.sum(-1)
    want = -(batch.advantages * tokens).sum() / tokens.sum()
    assert run(batch, LossConfig(), NONE).loss.item() == pytest.approx(want.item())


@pytest.mark.parametrize("correction", [NONE, TIS], ids=str)
def test_without_proximal_logprobs_ppo_and_reinforce_have_one_gradient(correction):
    batch = replace(make_batch(4), proximal=None)
    torch.testing.assert_close(
        gradient(batch, LossConfig(), correction), gradient(batch, LossConfig(kind="reinforce"), correction)
    )


def test_clipped_tokens_have_no_gradient_and_unclipped_ones_the_surrogates():
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    new = old + torch.tensor([[0.5, -0.5, 0.1, -0.1]], dtype=torch.float64)
    for sign, dead in ((1.0, 0), (-1.0, 1)):
        batch = Batch(new, old, old, None, torch.tensor([sign], dtype=torch.float64), torch.ones(1, 4).bool())
        slopes = gradient(batch, LossConfig(), NONE)[0]
        for t in range(4):
            assert slopes[t].item() == pytest.approx(0 if t == dead else -sign * (new - old).exp()[0, t].item() / 4)


def test_the_correction_weighs_the_loss_and_is_not_differentiated():
    batch = make_batch(4)
    batch.behaviour.requires_grad_()
    assert batch.proximal is not None
    batch.proximal.requires_grad_()
    batch.logprobs.requires_grad_()
    run(batch, LossConfig(), TIS).loss.backward()
    assert batch.behaviour.grad is None
    assert batch.proximal.grad is None
    assert batch.logprobs.grad is not None


@pytest.mark.parametrize("config", [NONE, TIS], ids=str)
def test_correction_weights_carry_no_gradient(config):
    assert not correction_weights(torch.zeros(2, 3, requires_grad=True), config).weights.requires_grad


def test_tis_truncates_on_both_sides_and_says_how_often():
    behaviour = torch.full((1, 4), -1.0, dtype=torch.float64)
    proximal = behaviour + torch.tensor([[5.0, 0.1, -0.1, -5.0]], dtype=torch.float64)
    batch = Batch(proximal.clone(), behaviour, proximal, None, torch.ones(1), torch.ones(1, 4).bool())
    result = run(batch, LossConfig(), CorrectionConfig(kind="tis", tis_max=2.0, tis_min=0.5))
    weights = torch.tensor([2.0, 0.1, -0.1, 0.5], dtype=torch.float64)
    weights[1:3] = weights[1:3].exp()
    assert result.loss.item() == pytest.approx(-weights.mean().item())
    assert result.stats["truncated/high:mean"].item() == 1
    assert result.stats["truncated/low:mean"].item() == 1


def test_a_dropped_m2po_token_has_no_loss_but_still_counts_in_the_denominator():
    behaviour = torch.full((1, 4), -1.0, dtype=torch.float64)
    current = behaviour + torch.tensor([[0.1, 0.1, 0.1, 2.0]], dtype=torch.float64)
    batch = Batch(current, behaviour, None, behaviour, torch.ones(1), torch.ones(1, 4).bool())
    loss = LossConfig(kind="m2po", kl_coef=0.5)
    assert gradient(batch, loss, NONE)[0, 3] == 0
    without_kl = run(batch, replace(loss, kl_coef=0.0), NONE)
    assert without_kl.loss.item() == pytest.approx(-3 * torch.tensor(0.1).exp().item() / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "loss", "message"),
    [
        ({"behaviour": torch.zeros(6, 8)}, LossConfig(), "behaviour_logprobs has shape"),
        ({"proximal": torch.zeros(5, 9)}, LossConfig(), "proximal_logprobs has shape"),
        ({"mask": torch.ones(9, 6).bool()}, LossConfig(), "loss_mask has shape"),
        ({"advantages": torch.zeros(9)}, LossConfig(), "advantages have shape"),
        ({"row_weights": torch.zeros(9)}, LossConfig(), "row_weights have shape"),
        ({"reference": None}, LossConfig(kl_coef=0.1), "needs reference_logprobs"),
        ({}, LossConfig(reduction="constant"), "constant_length"),
        ({"logprobs": torch.zeros(0, 9)}, LossConfig(), "must have shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, loss, message):
    batch = replace(make_batch(0), **change)
    with pytest.raises(ValueError, match=message):
        run(batch, loss, NONE, Denominators(1.0, 1.0))


def test_m2po_wants_its_mask_from_the_global_batch_and_no_other_loss_takes_one():
    batch = make_batch(0)

    def call(loss, keep):
        args = (batch.logprobs, batch.behaviour, None, None, batch.advantages, batch.mask, loss, NONE)
        return policy_loss(*args, Denominators.of(batch.mask), keep_mask=keep)

    assert torch.isfinite(call(LossConfig(kind="m2po"), batch.mask).loss)
    with pytest.raises(ValueError, match="m2po needs keep_mask"):
        call(LossConfig(kind="m2po"), None)
    with pytest.raises(ValueError, match="masks nothing"):
        call(LossConfig(), batch.mask)
