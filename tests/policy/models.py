"""Small models and batches for the tests of policy and engines: random weights, but with logits far from uniform."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dockyard_actors.engines import base
from dockyard_actors.engines.base import GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.engines.hf import HFEngine, HFEngineConfig
from dockyard_actors.policy.batch import GroupRows, TrainBatch
from dockyard_actors.policy.policy import LossInputs, Policy
from dockyard_actors.policy.tiny import tiny_config, tiny_tokenizer
from dockyard_actors.policy.types import OptimizerConfig, PolicyConfig
from dockyard_actors.transport.weights_collective import CollectiveReceiver, CollectiveSender

EOS = 1


def grouped_config(**changes: object) -> LlamaConfig:
    """The tiny model with 4 query heads on 2 key heads and an untied head: what the tied, ungrouped one cannot show."""
    config = tiny_config()
    config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings = 4, 2, False
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def sharp_model(config: LlamaConfig | None = None, seed: int = 0) -> PreTrainedModel:
    """Initialised so wide that one token often holds most of the probability, as in a trained model."""
    config = copy.deepcopy(config) if config is not None else tiny_config()  # a model writes into its own
    config.initializer_range = 0.15
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def policy_of(
    model: PreTrainedModel | None = None,
    config: PolicyConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    temperature: float = 1.0,
) -> Policy:
    return Policy(model or sharp_model(), tiny_tokenizer(), config, optimizer, temperature)


def engine_of(config: LlamaConfig | None = None, seed: int = 0, engine: HFEngineConfig | None = None) -> HFEngine:
    started = HFEngine(lambda: (sharp_model(config, seed), tiny_tokenizer(), [EOS]), engine, version=0)
    started.start()
    return started


def weights_of(policy: Policy, dtype: str = "float32"):
    """(views, manifest) as a trainer publishes them."""
    manifest = policy.manifest(dtype)
    kind = np.float32 if dtype == "float32" else np.uint16
    views = {entry.name: np.zeros(entry.shape, kind) for entry in manifest.entries}
    policy.write_weights(views)
    return views, manifest


@contextmanager
def sent(policy: Policy, version: int, dtype: str = "float32"):
    """(stream, manifest) as an engine on another host gets them: from the policy's live parameters, over Gloo, in small buckets."""
    manifest = policy.manifest(dtype)
    sender = CollectiveSender(manifest, "127.0.0.1", bucket_bytes=1 << 14, timeout_s=60.0)
    receiver = CollectiveReceiver()
    with ThreadPoolExecutor(1) as thread:
        meeting = sender.meet(["engine"])["engine"]
        sending = thread.submit(sender.send, version, policy.refit.stream())
        try:
            yield receiver.receive(meeting, manifest, version), manifest
            assert len(sending.result()) == len(manifest.entries)
        finally:
            receiver.close()
            sender.close()


PROMPTS = (
    "def f(a,b): # sum of a and b\n return a-b\n@@\n",
    "def f(x,y): # x squared\n return x\n@@\n",
    "short",
    "def f(n,m): # distance of n and m\n return max(n,m)\n@@\n",
)


def requests_of(
    prompts: Sequence[str] = PROMPTS, n: int = 4, seed: int = 0, stop: tuple[str, ...] = ()
) -> list[GroupRequest]:
    tokenizer = tiny_tokenizer()
    return [
        GroupRequest(
            key=key,
            prompt_ids=np.array(tokenizer.encode(prompt), dtype=np.int32),
            n=n,
            seeds=tuple(seed + 1000 * key + i for i in range(n)),
            stop=stop,
        )
        for key, prompt in enumerate(prompts)
    ]


class Sampled(NamedTuple):
    requests: list[GroupRequest]
    outputs: list[GroupOutput]


def generate(engine: HFEngine, requests: list[GroupRequest], sampling: SamplingConfig) -> Sampled:
    outputs = [GroupOutput.allocate(request.n, sampling.max_new_tokens) for request in requests]
    base.generate(engine, requests, outputs, sampling)
    return Sampled(requests, outputs)


def group_rows(sampled: Sampled, seed: int = 0) -> list[GroupRows]:
    """With random advantages."""
    rng = np.random.default_rng(seed)
    return [
        GroupRows(r.prompt_ids, o.tokens, o.logprobs, o.versions, o.lengths, rng.normal(size=r.n).astype(np.float32))
        for r, o in zip(sampled.requests, sampled.outputs, strict=True)
    ]


def random_group(
    prompt: int, lengths: Sequence[int], advantages: Sequence[float], seed: int = 0, vocabulary: int = 99
) -> GroupRows:
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths, default=0))
    return GroupRows(
        prompt_ids=rng.integers(3, vocabulary, prompt).astype(np.int32),
        tokens=rng.integers(3, vocabulary, shape).astype(np.int32),
        behaviour_logprobs=-rng.random(shape).astype(np.float32),
        versions=np.zeros(shape, dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        advantages=np.array(advantages, dtype=np.float32),
    )


class SimpleResult(NamedTuple):
    loss: torch.Tensor
    stats: dict[str, torch.Tensor]


def reinforce(batch: TrainBatch):
    """Advantage-weighted log-likelihood, the token mean over the whole batch: enough of a loss to test a step with."""
    total = float((batch.loss_mask * batch.row_weights[:, None]).sum())

    def loss_fn(x: LossInputs) -> SimpleResult:
        weights = x.loss_mask * (x.row_weights * x.advantages)[:, None]
        return SimpleResult(-(weights * x.logprobs).sum() / total, {"tokens": x.loss_mask.sum()})

    return loss_fn
