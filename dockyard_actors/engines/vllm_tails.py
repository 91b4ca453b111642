"""Lets the completions of one prompt share its last, partly filled block of keys and values inside vLLM on a CPU.
vLLM shares whole blocks (32 tokens there), so each completion would compute up to 32 prompt tokens again, and once more after
every weight update. A follower gets the leader's block copied instead. Imported by vLLM itself; knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.request import RequestStatus  # pyright: ignore[reportMissingImports]

from dockyard_actors.engines.vllm_worker import PROMPT


@dataclass
class TailCopies(KVConnectorMetadata):
    """Blocks (from, to) that one step copies in every layer: before it, and inside it once the layer's keys are written."""

    before: list[tuple[int, int]] = field(default_factory=list)
    inside: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Leader:
    """A request that has computed the prompt, or does in the pass `since`, and the block of its last prompt token."""

    request: Any
    preemptions: int
    block: int
    since: int

    def holds(self) -> bool:
        """Its blocks are still its own; after a preemption (weights were updated, memory ran out) they are not."""
        return self.request.status == RequestStatus.RUNNING and self.request.num_preemptions == self.preemptions


class TailConnector(KVConnectorBase_V1):
    """vLLM's interface for keys and values from elsewhere, where elsewhere is a block of the same cache.

    A new follower computes one token, the last of the prompt, whose keys are those of the leader: its block is copied between
    the writing of a layer's new keys and the attention that reads them, so that leader and followers run in one step. A
    follower that has tokens of its own (after an update or an interruption) writes them into the same block: it waits for
    the step after the leader's and gets its block before. Needs prompts that are prefilled in one piece (no chunked
    prefill) and an attention backend that writes keys before, not inside, its attention call: vLLM's CPU attention does.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._leaders: dict[tuple[int, ...], _Leader] = {}
        self._next = TailCopies()
        self._pass = 0
        self._caches: Mapping[str, torch.Tensor] = {}

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the shared whole blocks that a leader has; None to be asked again in the next pass."""
        prompt = _prompt_of(request)
        tail = len(prompt) - 1 - num_computed_tokens
        leader = self._leader_of(request, prompt) if 0 < tail < self._block_tokens else None
        if leader is None:
            return 0, False
        if request.num_tokens == len(prompt):
            return tail, False
        return (tail + 1 if leader.since < self._pass else None), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        prompt = _prompt_of(request)
        index, inside = divmod(len(prompt) - 1, self._block_tokens)
        if not inside:
            return
        block, leader = blocks.get_block_ids()[0][index], self._leader_of(request, prompt)
        if num_external_tokens:
            assert leader is not None  # it was there a moment ago, in the same scheduling pass
            copies = self._next.inside if request.num_tokens == len(prompt) else self._next.before
            copies.append((leader.block, block))
        elif leader is None:
            self._leaders[prompt] = _Leader(request, request.num_preemptions, block, self._pass)

    def build_connector_meta(self, scheduler_output: Any) -> TailCopies:
        copies, self._next = self._next, TailCopies()
        self._pass += 1
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        prompt = _prompt_of(request)
        if (leader := self._leaders.get(prompt)) is not None and leader.request is request:
            del self._leaders[prompt]
        return False, None

    def _leader_of(self, request: Any, prompt: tuple[int, ...]) -> _Leader | None:
        leader = self._leaders.get(prompt)
        return leader if leader is not None and leader.request is not request and leader.holds() else None

    # The model's side.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called before the forward pass of a step that has something to copy."""
        copies: Any = self._get_connector_metadata()
        for cache in self._caches.values() if copies.before else ():
            _copy(cache, copies.before)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called between a layer's writing of keys and its attention."""
        copies: Any = self._get_connector_metadata()
        if copies.inside:
            _copy(self._caches[layer_name], copies.inside)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def _copy(cache: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """cache: (blocks, heads, tokens of a block, 2 x head size)."""
    source, target = torch.tensor(pairs).T
    cache.index_copy_(0, target, cache[source])


def _prompt_of(request: Any) -> tuple[int, ...]:
    """What it shares with others of its group: a resumed completion has more, its own tokens."""
    ways = request.sampling_params.extra_args
    return tuple(request.prompt_token_ids[: ways[PROMPT]])
