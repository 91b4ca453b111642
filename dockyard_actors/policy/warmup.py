"""Supervised warm-up on (prompt, answer) pairs, for models that start from random weights.
It leaves the weights changed and the optimizer of the policy untouched. Knows no task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dockyard_actors.policy.policy import Policy

PROMPT_WEIGHT = 0.1  # a little of the loss on the prompt teaches the language that the answers are made of


@dataclass(frozen=True)
class WarmupPlan:
    """steps x batch_size pairs; learning rate lr, reached over ramp_steps and falling linearly over the last decay share."""

    steps: int = 600
    batch_size: int = 32
    lr: float = 3e-3
    weight_decay: float = 0.01
    ramp_steps: int = 20
    decay: float = 0.3
    clip_norm: float = 1.0

    def lr_at(self, step: int) -> float:
        """Of step `step`, counted from 0."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, (step + 1) / max(1, self.ramp_steps), left)


def warm_up(
    policy: Policy,
    pairs: Iterator[tuple[str, str]],
    plan: WarmupPlan,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    every: int = 20,
) -> float:
    """Trains on the next plan.steps x plan.batch_size pairs; each answer ends in the eos token. Returns the last loss.

    progress(step, steps, loss) is called every `every` steps and at the end, from this thread.
    """
    optimizer = torch.optim.AdamW(
        policy.parameters.values(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True
    )
    loss = float("nan")
    for step in range(plan.steps):
        batch = [next(pairs) for _ in range(plan.batch_size)]
        for group in optimizer.param_groups:
            group["lr"] = plan.lr_at(step)
        value = _loss(policy, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters.values(), plan.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % every == 0 or step + 1 == plan.steps:
            loss = float(value.detach())
            progress(step + 1, plan.steps, loss)
    return loss


def _loss(policy: Policy, batch: list[tuple[str, str]]) -> torch.Tensor:
    """Weighted cross-entropy of the pairs, padded on the right: causal rows never look at what is behind them."""
    encoded = [(policy.tokenizer.encode(p), [*policy.tokenizer.encode(a), policy.eos_ids[0]]) for p, a in batch]
    width = max(len(prompt) + len(answer) for prompt, answer in encoded)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    weight = torch.zeros(len(batch), width)
    for i, (prompt, answer) in enumerate(encoded):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        weight[i, 1 : len(prompt)] = PROMPT_WEIGHT
        weight[i, len(prompt) : len(prompt) + len(answer)] = 1.0
    logits = policy.model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = weight[:, 1:].flatten()
    return (losses * weight).sum() / weight.sum()
