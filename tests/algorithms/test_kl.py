from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.algorithms.kl import kl_estimate, kl_loss_term
from dockyard_actors.algorithms.ratios import clamp_log_ratio, fill_masked
from tests.algorithms import reference

KINDS = ["k1", "k2", "k3"]


def test_reference_values_at_minus_three():
    x = torch.tensor(-3.0, dtype=torch.float64)
    assert kl_estimate(x, "k3").item() == pytest.approx(16.0855, abs=1e-4)
    assert kl_estimate(x, "k2").item() == 4.5
    assert kl_estimate(x, "k1").item() == -3


@pytest.mark.parametrize("kind", KINDS)
@given(st.floats(-20, 20))
@settings(deadline=None)
def test_estimators_equal_the_reference_and_k2_and_k3_are_never_negative(kind, x):
    got = kl_estimate(torch.tensor(x, dtype=torch.float64), kind).item()
    assert got == pytest.approx(reference.kl(x, kind), rel=1e-9, abs=1e-12)
    assert kind == "k1" or got >= 0


@pytest.fixture
def two_policies():
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=g, dtype=torch.float64, requires_grad=True)
    other = torch.randn(7, generator=g, dtype=torch.float64).log_softmax(-1)
    return logits, other


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimators_average_to_the_true_kl(kind, two_policies):
    logits, log_ref = two_policies
    logp = logits.log_softmax(-1).detach()
    true = (logp.exp() * (logp - log_ref)).sum()
    assert torch.allclose((logp.exp() * kl_estimate(logp - log_ref, kind)).sum(), true)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_terms_have_the_gradient_of_the_true_kl_in_expectation(kind, two_policies):
    logits, log_ref = two_policies
    logp = logits.log_softmax(-1)
    (want,) = torch.autograd.grad((logp.exp() * (logp - log_ref)).sum(), logits, retain_graph=True)
    ratio = torch.exp(logp - logp.detach())
    term = kl_loss_term(logp, logp.detach() - log_ref, ratio, kind)
    (got,) = torch.autograd.grad((logp.detach().exp() * term).sum(), logits)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_off_policy_samples_get_the_same_expected_gradient_through_the_ratio(kind, two_policies):
    logits, log_ref = two_policies
    logp = logits.log_softmax(-1)
    log_prox = (logits.detach() + torch.linspace(-0.5, 0.5, 7)).log_softmax(-1)
    (want,) = torch.autograd.grad((logp.exp() * (logp - log_ref)).sum(), logits, retain_graph=True)
    term = kl_loss_term(logp, logp.detach() - log_ref, torch.exp(logp - log_prox), kind)
    (got,) = torch.autograd.grad((log_prox.exp() * term).sum(), logits)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_derivative_is_that_of_the_value(kind):
    g = torch.Generator().manual_seed(1)
    logp = (2 * torch.randn(12, generator=g, dtype=torch.float64)).requires_grad_()
    ref, prox = (2 * torch.randn(12, generator=g, dtype=torch.float64) for _ in range(2))

    def term(logp):
        return kl_loss_term(logp, clamp_log_ratio(logp - ref)[0], torch.exp(clamp_log_ratio(logp - prox)[0]), kind)

    assert torch.autograd.gradcheck(term, (logp,))
    value = term(logp).detach().numpy()
    ratio = np.ones(12) if kind == "k2" else np.exp((logp - prox).detach().numpy())
    x = (logp - ref).detach().numpy()
    np.testing.assert_allclose(value, [r * reference.kl(v, kind) for r, v in zip(ratio, x, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", [-300.0, -25.0, -18.5, 25.0, 300.0])
def test_far_from_the_reference_the_gradient_still_points_back_and_stays_bounded(kind, x):
    logp = torch.tensor(-1.0, requires_grad=True)
    clamped, _ = clamp_log_ratio(torch.tensor(x))
    term = kl_loss_term(logp, clamped, torch.tensor(1.0), kind)
    term.backward()
    assert torch.isfinite(term)
    assert logp.grad is not None
    assert logp.grad.sign().item() == np.sign(x)
    assert 15 < logp.grad.abs().item() < 22


def test_the_clamp_reports_what_it_touched_and_lets_nan_through():
    values, hit = clamp_log_ratio(torch.tensor([-25.0, -20.0, 0.0, 20.5, float("inf"), float("nan")]))
    assert values[:5].tolist() == [-20.0, -20.0, 0.0, 20.0, 20.0]
    assert values[5].isnan()
    assert hit.tolist() == [True, False, False, True, True, False]


def test_masked_places_become_zero_whatever_they_hold():
    values = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    assert fill_masked(values, torch.tensor([True, False, False, True])).tolist() == [1.0, 0.0, 0.0, -2.0]
