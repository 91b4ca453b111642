from __future__ import annotations

import pytest
import torch

from dockyard_actors.policy.logprobs import token_logprobs

COUNT, WIDTH, VOCABULARY = 23, 16, 311
OWNER = torch.tensor(
    [0, 0, 0, 1, 3, 4, 4, *range(5, 17), 20, 22, 22, 22]
)  # some rows predict several targets, some none


def inputs(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (len(OWNER),)), torch.randn(len(OWNER))


def reference(hidden, weight, targets, temperature, slope):
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    table = torch.log_softmax(hidden @ weight.t() / temperature, -1)[OWNER]
    logprobs = table.gather(-1, targets[:, None])[:, 0]
    (logprobs * slope).sum().backward()
    return logprobs.detach(), -(table.exp() * table).sum(-1).detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_entropy_and_gradients_are_those_of_a_float64_log_softmax(chunk: int, temperature: float):
    hidden, weight, targets, slope = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, OWNER, targets, temperature, chunk, entropy=True)
    (logprobs * slope).sum().backward()
    expected = reference(hidden, weight, targets, temperature, slope)
    for found, wanted in zip((logprobs, entropy, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), wanted, atol=2e-5, rtol=2e-5)


def test_bfloat16_hidden_states_give_float32_logprobs_and_master_gradients():
    hidden, weight, targets, slope = inputs(torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, OWNER, targets, 1.0, 8, entropy=False)
    (logprobs * slope).sum().backward()
    expected = reference(hidden, weight, targets, 1.0, slope)
    assert (logprobs.dtype, weight.grad.dtype, hidden.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert (logprobs.double() - expected[0]).abs().max() < 0.15
    relative = (weight.grad.double() - expected[3]).norm() / expected[3].norm()
    assert relative < 0.02


def test_entropy_is_free_of_charge_when_it_is_not_asked_for():
    hidden, weight, targets, _ = inputs()
    _, entropy = token_logprobs(hidden, weight, OWNER, targets, 1.0, 8, entropy=False)
    assert (entropy == 0).all()
