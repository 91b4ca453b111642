"""What a training step is: from a batch of groups to new weights. The trainer actor says when; this says how.

Blocking code for the trainer's compute thread. Which groups teach is read from metadata; the tensors of the others are never touched.
Knows no actors.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dockyard_actors.algorithms.advantages import group_advantages, has_signal
from dockyard_actors.algorithms.diagnostics import age_histogram, group_stats, summarise
from dockyard_actors.algorithms.losses import LossResult, policy_loss
from dockyard_actors.algorithms.m2po import m2po_mask
from dockyard_actors.algorithms.reduction import Denominators
from dockyard_actors.config import Config
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.policy.batch import GroupRows, TrainBatch
from dockyard_actors.policy.checkpoint import latest
from dockyard_actors.policy.policy import LossInputs, Policy, StepResult
from dockyard_actors.policy.types import ModelConfig
from dockyard_actors.policy.warmup import WarmupPlan, warm_up
from dockyard_actors.roles.ledger import GroupMeta
from dockyard_actors.roles.messages import OpenGroup
from dockyard_actors.roles.weight_routes import Collective, Kind, Route, SharedMemory
from dockyard_actors.runtime import memory
from dockyard_actors.tasks.repair import warmup_pairs
from dockyard_actors.tasks.types import Task
from dockyard_actors.transport.base import Address
from dockyard_actors.transport.fdclient import FdClient
from dockyard_actors.transport.plane import DataPlane
from dockyard_actors.transport.weights_collective import CollectiveSender
from dockyard_actors.transport.weights_shm import WeightPublisher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutcome:
    """What a step did, for the ledger and for metrics. `version`: of the weights that were trained from."""

    step: int
    version: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    trained: tuple[int, ...]
    filtered: tuple[tuple[int, str], ...]
    diagnostics: Mapping[str, float] = field(default_factory=dict)


def checkpoint_name(step: int) -> str:
    return f"step-{step:05d}"


def step_of(directory: Path) -> int:
    return int(directory.name.rpartition("-")[2])


class Learner:
    """The policy, its data and its checkpoints. `step` counts batches taken; an all-uniform batch counts and changes nothing."""

    def __init__(self, config: Config, model: ModelConfig, plane: DataPlane, run_dir: RunDir):
        self.config = config
        self.model = model
        self.plane = plane
        self.run_dir = run_dir
        self.step = 0
        self.fresh = False  # no checkpoint of this run existed
        self.needs_warmup = False
        self._policy: Policy | None = None

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("the policy is not loaded: call load() first")
        return self._policy

    # ---- life

    def load(self) -> None:
        """The newest checkpoint of this run, else the model as it is given."""
        config = self.config
        policy = Policy.open(self.model, config.policy, config.optimizer, config.generation.temperature, log.info)
        self._policy = policy
        newest = latest(self.run_dir.checkpoints)
        if newest is None:
            self.fresh = True
            self.needs_warmup = config.warmup.steps > 0
        else:
            if config.loss.kl_coef > 0:
                policy.load(self.run_dir.checkpoints / checkpoint_name(0))
                policy.freeze_reference()
            policy.load(newest)
            self.step = step_of(newest)
            log.info("resumed from %s", newest)

    def warm_up(self, progress: Callable[[int, int, float], None]) -> None:
        w = self.config.warmup
        torch.set_num_threads(w.threads)
        pairs = warmup_pairs(random.Random(self.config.run.seed))
        loss = warm_up(self.policy, pairs, WarmupPlan(steps=w.steps, batch_size=w.batch_size, lr=w.lr), progress)
        torch.set_num_threads(self.config.policy.threads)
        log.info("warm-up of %d steps done, loss %.3f", w.steps, loss)

    def begin(self) -> None:
        """The first checkpoint: what a trainer killed before the next one starts from, and the reference of the KL."""
        if self.config.loss.kl_coef > 0:
            self.policy.freeze_reference()
        self.save()

    def save(self) -> None:
        """Saves this step and keeps the newest checkpoints up to it. Later ones were left by a trainer that died while saving."""
        root = self.run_dir.checkpoints
        self.policy.save(root / checkpoint_name(self.step))
        found = sorted(step_of(path) for path in root.glob("step-*") if path.is_dir())
        kept = set([step for step in found if step <= self.step][-self.config.checkpoint.keep :])
        if self.config.loss.kl_coef > 0:
            kept.add(0)  # the reference
        for step in found:
            if step not in kept:
                shutil.rmtree(root / checkpoint_name(step))

    # ---- while the engine has the device

    def offload(self) -> memory.Change:
        """Puts the optimizer's moments away, beside the checkpoints."""
        before = memory.resident()
        self.policy.offload_optimizer(self.run_dir.checkpoints)
        return memory.Change(before, memory.resident())

    def onload(self) -> memory.Change:
        before = memory.resident()
        self.policy.onload_optimizer()
        return memory.Change(before, memory.resident())

    # ---- weights out

    def route(self, kind: Kind, client: FdClient, here: Address) -> Route:
        """One way for weights to leave this process. here: where it can be reached."""
        config = self.config.weight_sync
        manifest = self.policy.manifest(config.dtype)
        if kind == "shm":
            return SharedMemory(WeightPublisher(client, manifest), self.policy.write_weights)
        sender = CollectiveSender(
            manifest,
            here.interface,
            bucket_bytes=config.bucket_mib << 20,
            timeout_s=config.timeout_s / 2,  # when it breaks off there is time for those who are left
        )
        return Collective(sender, self.policy.refit.stream)

    def canary_ids(self, tasks: Sequence[Task], most: int) -> np.ndarray:
        """(T,) int32, 2 <= T <= most: the first prompts, one behind the other."""
        ids: list[int] = []
        for task in tasks:
            ids += self.policy.tokenizer.encode(task.prompt)
            if len(ids) >= most:
                break
        return np.asarray(ids[:most], dtype=np.int32)

    # ---- one step

    def train(self, groups: Sequence[OpenGroup], version: int) -> StepOutcome:
        """One optimizer step on the groups that have a signal. Raises NonFiniteGradient as optimizer.nonfinite says."""
        config, metas = self.config, [group.meta for group in groups]
        rewards = torch.tensor([meta.rewards for meta in metas], dtype=torch.float64)
        valid = torch.tensor([meta.valid for meta in metas])
        advantages = group_advantages(rewards, valid, config.advantage)
        signal = teaching(metas)
        batch = self._batch([g for g, teaches in zip(groups, signal, strict=True) if teaches], advantages[signal])
        result = self._optimize(batch, _denominators(metas))
        self.step += 1
        self.policy.version = version
        lost = "nonfinite_gradient" if result.metrics.skipped and batch.micro_batches else ""
        trained = tuple(meta.lease for meta, teaches in zip(metas, signal, strict=True) if teaches and not lost)
        return StepOutcome(
            step=self.step,
            version=version,
            loss=result.metrics.loss,
            grad_norm=result.metrics.grad_norm,
            lr=result.metrics.lr,
            tokens=batch.sampled_tokens,
            trained=trained,
            filtered=tuple(
                (meta.lease, lost if teaches else _why(meta))
                for meta, teaches in zip(metas, signal, strict=True)
                if lost or not teaches
            ),
            diagnostics=_figures(result, batch, group_stats(rewards, valid, advantages), version),
        )

    def _batch(self, groups: Sequence[OpenGroup], advantages: torch.Tensor) -> TrainBatch:
        """Copies what is trained out of the slabs into packed micro-batches."""
        fields = [self.plane.get(group.ref, verify=True) for group in groups]
        try:
            rows = [
                GroupRows(
                    prompt_ids=f["prompt"],
                    tokens=f["tokens"],
                    behaviour_logprobs=f["logprobs"],
                    versions=f["versions"],
                    lengths=f["lengths"],
                    advantages=advantage.numpy(),
                    valid=np.asarray(group.meta.valid),
                )
                for f, group, advantage in zip(fields, groups, advantages, strict=True)
            ]
            return TrainBatch.build(rows, self.config.policy.micro_batch_tokens)
        finally:
            for f in fields:
                f.release()

    def _optimize(self, batch: TrainBatch, denominators: Denominators) -> StepResult:
        loss, correction = self.config.loss, self.config.correction
        keep = proximal = None
        if loss.kind == "m2po" and batch.micro_batches:
            proximal = self.policy.score(batch)
            keep = m2po_mask(
                proximal - batch.behaviour_logprobs,
                batch.advantages.unsqueeze(-1).expand_as(proximal),
                batch.loss_mask,
                loss.m2_threshold,
                batch.row_weights,
            )
        reference = self.policy.score(batch, reference=True) if loss.kl_coef > 0 else None

        def loss_fn(x: LossInputs) -> LossResult:
            return policy_loss(
                x.logprobs,
                x.behaviour_logprobs,
                x.proximal_logprobs,
                x.reference_logprobs,
                x.advantages,
                x.loss_mask,
                loss,
                correction,
                denominators,
                row_weights=x.row_weights,
                keep_mask=None if keep is None else keep[x.rows],
            )

        return self.policy.train_step(batch, loss_fn, proximal, reference)


def teaching(metas: Sequence[GroupMeta]) -> list[bool]:
    """Which groups have a signal: nobody looks at the tensors of the others."""
    rewards = torch.tensor([meta.rewards for meta in metas], dtype=torch.float64)
    return has_signal(rewards, torch.tensor([meta.valid for meta in metas])).tolist()


def _denominators(metas: Sequence[GroupMeta]) -> Denominators:
    """Of the whole batch, groups without signal included: their zero advantages weigh, as in a batch trained row by row."""
    lengths = [n for meta in metas for n, valid in zip(meta.lengths, meta.valid, strict=True) if valid and n > 0]
    return Denominators(tokens=float(sum(lengths)), sequences=float(len(lengths)))


def _why(meta: GroupMeta) -> str:
    return "no_signal" if sum(meta.valid) >= 2 else "too_few_valid"


def _figures(result: StepResult, batch: TrainBatch, groups: Mapping[str, float], version: int) -> dict[str, float]:
    figures = {**groups, **summarise(result.partials)}
    if batch.micro_batches:
        weights = batch.loss_mask * batch.row_weights.unsqueeze(-1)
        figures["entropy/mean"] = float((result.entropy * weights).sum() / weights.sum())
        ages = age_histogram(batch.versions, batch.loss_mask, version, batch.row_weights)
        figures |= {"age/token_mean": float(ages.mean), "age/token_max": float(ages.max)}
    metrics = result.metrics
    figures |= {
        "batch/packed_tokens": float(metrics.packed_tokens),
        "batch/sampled_tokens": float(batch.sampled_tokens),
        "batch/merged_rows": float(metrics.merged_rows),
        "seconds/forward": metrics.seconds_forward,
        "seconds/backward": metrics.seconds_backward,
        "seconds/optimizer": metrics.seconds_optimizer,
    }
    return figures
