"""The trained model: forward on packed micro-batches, one optimizer step, weights out, checkpoint in and out.
Promises that the gradient of a step does not depend on how it was split into micro-batches. The loss is a callable of the
caller's: this module knows no algorithm, and no roles.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.func import functional_call
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dockyard_actors.policy import checkpoint, offload
from dockyard_actors.policy.batch import MicroBatch, Segment, TrainBatch
from dockyard_actors.policy.logprobs import token_logprobs
from dockyard_actors.policy.model import ModelSourceError, eos_ids, load_model, load_tokenizer
from dockyard_actors.policy.packing import ATTENTION
from dockyard_actors.policy.refit import Refit
from dockyard_actors.policy.types import ModelConfig, OptimizerConfig, PolicyConfig, StepMetrics
from dockyard_actors.transport.torch_views import as_torch
from dockyard_actors.transport.weights_shm import WeightManifest

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NonFiniteGradient(ArithmeticError):
    """A gradient is NaN or infinite; the weights were not changed."""


class LossResult(Protocol):
    """A scalar to call backward on, and whatever statistics belong to it."""

    @property
    def loss(self) -> torch.Tensor: ...
    @property
    def stats(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one micro-batch: the rows `rows` (b,) int64 of the batch.

    logprobs (b, S) float32, differentiable, 0 outside the mask; behaviour_logprobs (b, S); proximal_logprobs and
    reference_logprobs (b, S) or None; advantages (b,); loss_mask (b, S) bool; row_weights (b,).
    """

    rows: torch.Tensor
    logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    row_weights: torch.Tensor


LossFn = Callable[[LossInputs], LossResult]
"""Returns the micro-batch's share of the batch's loss: denominators are global, gradients are added."""


@dataclass
class StepResult:
    """metrics; logprobs and entropy (B, S) before the update, detached; partials: each micro-batch's loss statistics."""

    metrics: StepMetrics
    logprobs: torch.Tensor
    entropy: torch.Tensor
    partials: list[Mapping[str, torch.Tensor]] = field(default_factory=list)


class Policy:
    """A causal language model with float32 master weights, its optimizer and its step counter.

    temperature: of the distribution that is trained; must be the one the engine samples at.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: PolicyConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        temperature: float = 1.0,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"policy temperature {temperature!r} must be > 0")
        self.config = config or PolicyConfig()
        self.optimizer_config = optimizer or OptimizerConfig()
        self.temperature = temperature
        self.tokenizer = tokenizer
        self.model = _prepared(model)
        self.reference: PreTrainedModel | None = None
        self.parameters = dict(self.model.named_parameters())  # tied weights once, under their first name
        self.refit = Refit(self.model)
        self.step = 0
        self.version = 0
        self.skipped_steps = 0
        self.offloaded = False
        self._skips_in_a_row = 0
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=self.optimizer_config.lr,
            betas=self.optimizer_config.betas,
            eps=self.optimizer_config.eps,
            weight_decay=self.optimizer_config.weight_decay,
            fused=True,  # one pass over the state, a third of the foreach version's time on CPUs
        )

    @classmethod
    def open(
        cls,
        model: ModelConfig,
        config: PolicyConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        temperature: float = 1.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Policy:
        """Loads `model.source` in float32 and sets this process's torch threads to config.threads."""
        if model.dtype != "float32":
            raise ModelSourceError(
                f"model.dtype: {model.dtype!r} for training; master weights are float32 (autocast_bf16)"
            )
        config = config or PolicyConfig()
        torch.set_num_threads(config.threads)
        loaded = load_model(model.source, "float32", seed=model.seed, progress=progress)
        return cls(loaded, load_tokenizer(model.source, progress), config, optimizer, temperature)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        return eos_ids(self.model.generation_config, self.tokenizer)

    # ---- forward

    def completion_logprobs(
        self, micro: MicroBatch, width: int, model: PreTrainedModel | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs (b, width) of a micro-batch's completion tokens at the policy's temperature, 0 elsewhere, differentiable
        when gradients are on; and the entropy (b, width), detached, 0 unless config.entropy. Both float32."""
        model = model or self.model
        hidden = _hidden(model, micro.input_ids, micro.position_ids, micro.segments, self.config.autocast_bf16)
        logprobs, entropy = token_logprobs(
            hidden[micro.source],
            _head(model),
            micro.owner,
            micro.target,
            self.temperature,
            self.config.logit_chunk,
            self.config.entropy,
        )
        shape = (len(micro.rows), width)
        place = (micro.row, micro.column)
        return logprobs.new_zeros(shape).index_put(place, logprobs), entropy.new_zeros(shape).index_put(place, entropy)

    @torch.no_grad()
    def score(self, batch: TrainBatch, reference: bool = False) -> torch.Tensor:
        """Logprobs (B, S) of the batch's tokens under the present weights, or under the frozen reference; 0 outside the mask.

        As proximal logprobs they let several optimizer steps be taken on one batch.
        """
        if reference and self.reference is None:
            raise ValueError("there is no reference policy: call freeze_reference() before training")
        model = self.reference if reference else self.model
        logprobs = torch.zeros(batch.loss_mask.shape)
        for micro in batch.micro_batches:
            logprobs[micro.rows] = self.completion_logprobs(micro, batch.loss_mask.shape[1], model)[0]
        return logprobs

    @torch.no_grad()
    def canary(self, ids: np.ndarray, temperature: float, dtype: str = "float32") -> np.ndarray:
        """Logprobs (T-1,) float32 of ids[1:], each given those before it: what an engine that holds the published weights
        must find again. ids (T >= 2,) token ids.

        dtype: of the published weights, which are rounded to it; `bfloat16` is computed as in training with autocast,
        `float32` without it. Raises ValueError for another dtype, or for fewer than two tokens.
        """
        if ids.ndim != 1 or ids.size < 2:
            raise ValueError(f"canary: ids have shape {ids.shape}, expected (T >= 2,)")
        bf16 = _wire_dtype(dtype) is torch.bfloat16
        tokens = torch.from_numpy(ids.astype(np.int64))
        rounded = _rounded_beside_products(self.model.base_model) if bf16 else {}
        segment = Segment(0, ids.size, torch.full((ids.size, ids.size), -torch.inf).triu_(1))
        hidden = _hidden(self.model, tokens, torch.arange(ids.size), (segment,), bf16, rounded)[:-1]
        owner = torch.arange(ids.size - 1)
        chunk = self.config.logit_chunk
        return token_logprobs(hidden, _head(self.model), owner, tokens[1:], temperature, chunk, False)[0].numpy()

    def freeze_reference(self) -> None:
        """Keeps a frozen copy of the present weights as the reference policy."""
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    # ---- training

    def train_step(
        self,
        batch: TrainBatch,
        loss_fn: LossFn,
        proximal_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
    ) -> StepResult:
        """One optimizer step on the batch. proximal_logprobs, reference_logprobs: (B, S) of `score`, when the loss uses them.

        A batch without rows leaves weights and step as they are. Raises NonFiniteGradient as OptimizerConfig.nonfinite says;
        the weights are then unchanged.
        """
        if self.offloaded:
            raise RuntimeError("the optimizer's state is offloaded: call onload_optimizer() before a step")
        lr = self.optimizer_config.lr_at(self.step)
        metrics = StepMetrics(
            step=self.step,
            loss=0.0,
            grad_norm=0.0,
            lr=lr,
            skipped=False,
            groups=batch.groups,
            rows=len(batch.advantages),
            merged_rows=batch.merged_rows,
            packed_tokens=batch.packed_tokens,
            completion_tokens=int(batch.loss_mask.sum()),
            micro_batches=len(batch.micro_batches),
        )
        result = StepResult(metrics, torch.zeros(batch.loss_mask.shape), torch.zeros(batch.loss_mask.shape))
        if not batch.micro_batches:
            metrics.skipped = True
            return result
        self.optimizer.zero_grad(set_to_none=True)
        for micro in batch.micro_batches:
            rows = micro.rows
            started = time.perf_counter()
            logprobs, entropy = self.completion_logprobs(micro, batch.loss_mask.shape[1])
            outcome = loss_fn(
                LossInputs(
                    rows=rows,
                    logprobs=logprobs,
                    behaviour_logprobs=batch.behaviour_logprobs[rows],
                    proximal_logprobs=None if proximal_logprobs is None else proximal_logprobs[rows],
                    reference_logprobs=None if reference_logprobs is None else reference_logprobs[rows],
                    advantages=batch.advantages[rows],
                    loss_mask=batch.loss_mask[rows],
                    row_weights=batch.row_weights[rows],
                )
            )
            middle = time.perf_counter()
            outcome.loss.backward()
            metrics.seconds_forward += middle - started
            metrics.seconds_backward += time.perf_counter() - middle
            metrics.loss += float(outcome.loss.detach())
            result.logprobs[rows], result.entropy[rows] = logprobs.detach(), entropy
            result.partials.append(outcome.stats)
        started = time.perf_counter()
        self._update(metrics)
        metrics.seconds_optimizer = time.perf_counter() - started
        return result

    def _update(self, metrics: StepMetrics) -> None:
        clip = self.optimizer_config.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip if clip > 0 else float("inf"))
        metrics.grad_norm = float(norm)
        if not np.isfinite(metrics.grad_norm):
            self._refuse(metrics)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = metrics.lr
            self.optimizer.step()
            self._skips_in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _refuse(self, metrics: StepMetrics) -> None:
        bad = [n for n, p in self.parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
        self._skips_in_a_row += 1
        limit = self.optimizer_config.max_skips if self.optimizer_config.nonfinite == "skip" else 0
        if self._skips_in_a_row > limit:
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(
                f"step {self.step}: the gradient has norm {metrics.grad_norm} (loss {metrics.loss}); first of {len(bad)} "
                f"parameters concerned: {', '.join(bad[:3])}. Usual causes: a learning rate too high, or NaN in the batch. "
                f"Skipped before: {self.skipped_steps}"
            )
        metrics.skipped = True
        self.skipped_steps += 1

    # ---- while somebody else has the device

    def offload_optimizer(self, directory: Path) -> None:
        """Moves the optimizer's moments away (see `offload.py`); gradients are None then. No step until `onload_optimizer`."""
        offload.offload(self.optimizer, directory)
        self.offloaded = True

    def onload_optimizer(self) -> None:
        """Brings them back bit for bit."""
        if self.offloaded:
            offload.onload(self.optimizer)
            self.offloaded = False

    # ---- weights out (the refit seam)

    def manifest(self, dtype: str = "float32") -> WeightManifest:
        """Names (as in a Hugging Face checkpoint, tied weights once), shapes and the wire dtype of every tensor."""
        _wire_dtype(dtype)
        return WeightManifest.of({name: (dtype, shape) for name, shape in self.refit.shapes.items()})

    @torch.no_grad()
    def write_weights(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Copies every parameter into its buffer: float32, or uint16 for bfloat16. Raises KeyError for a missing one."""
        for name, tensor in self.refit.stream():
            as_torch(buffers[name]).copy_(tensor)

    # ---- checkpoint

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face directory with the trainer's state beside it; whole or not at all (see checkpoint.py)."""
        checkpoint.save(self, directory)

    def load(self, directory: Path) -> None:
        """Restores weights, optimizer, counters and random state. Raises CheckpointError; nothing is changed then."""
        checkpoint.load(self, directory)


def _wire_dtype(name: str) -> torch.dtype:
    if name not in WIRE_DTYPES:
        raise ValueError(f"weight dtype {name!r} is unknown; choose one of {', '.join(WIRE_DTYPES)}")
    return WIRE_DTYPES[name]


def _hidden(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    segments: Sequence[Segment],
    bf16: bool,
    parameters: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Last hidden states (T, H), bfloat16 or float32. parameters: used instead of the base model's own of these names."""
    kwargs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "segments": segments}
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        output = functional_call(model.base_model, dict(parameters or {}), (), kwargs)
    return output.last_hidden_state[0].to(torch.bfloat16 if bf16 else torch.float32)


def _rounded_beside_products(base_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that autocast leaves in float32 (embeddings, norms), rounded to bfloat16."""
    products = {id(p) for m in base_model.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters()}
    return {n: p.bfloat16().float() for n, p in base_model.named_parameters() if id(p) not in products}


def _prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Checks the two seams that packing relies on: the attention can be replaced, and logits are one linear map."""
    capped = [n for n in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(model.config, n, None)]
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if capped or kinds != {"full_attention"}:
        raise ModelSourceError(
            f"{type(model).__name__} cannot be trained on packed rows: "
            + (f"its logits pass through {', '.join(capped)}" if capped else f"it has layers of kind {sorted(kinds)}")
        )
    model.set_attn_implementation(ATTENTION)
    model.requires_grad_(True)
    _head(model)
    return model.eval()  # no dropout: the logprobs of a token must be a function of the weights


def _head(model: PreTrainedModel) -> torch.Tensor:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ModelSourceError(f"{type(model).__name__}: its output head is {head}, expected a linear map without bias")
    return head.weight
