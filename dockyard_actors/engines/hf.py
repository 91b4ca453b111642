"""Generation with a transformers model in this process: KV cache, batches over groups, weights swapped in place.
A group joins at the next step that has room, finished rows leave, and a completion depends on its prompt, seed and weights
alone up to floating point (see `HFEngine`). Knows nothing of tasks, rewards or where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dockyard_actors.engines.base import (
    EngineError,
    GroupOutput,
    GroupRequest,
    GroupResult,
    Manifest,
    SamplingConfig,
    WeightArrays,
)
from dockyard_actors.engines.groups import LiveGroup
from dockyard_actors.engines.hf_batch import Batch, LiveModel, Row, causal, columns
from dockyard_actors.engines.kvcache import ATTENTION
from dockyard_actors.engines.manifest import fitting
from dockyard_actors.engines.sampling import greedy
from dockyard_actors.engines.stops import StopTable
from dockyard_actors.runtime import memory
from dockyard_actors.transport.torch_views import as_torch


@dataclass(frozen=True)
class HFEngineConfig:
    """max_batch_rows: completions decoded at once. max_batch_tokens: bound on what the KV caches hold, in tokens: rows x
    (prompt + new tokens) of every batch. Groups beyond wait; one that no empty engine could hold is run in parts."""

    max_batch_rows: int = 128
    max_batch_tokens: int = 65536

    def __post_init__(self) -> None:
        for name in ("max_batch_rows", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name}: {getattr(self, name)!r} must be >= 1")


class HFEngine:
    """Engine (see engines/base.py) over a transformers causal language model.

    load: gives (model, tokenizer, ids that end a completion); called by `start`.
    version: of the weights that `load` brings; None when they mean nothing and `update_weights` must come first.

    In float32 the same prompt, seed and weights give the same tokens whatever runs beside, and whether or not a completion
    was cut and resumed, unless a draw falls within rounding (about 1e-6) of the border between two tokens; in bfloat16 the
    shape of a batch changes logits by bf16 rounding, and now and then a token.
    """

    def __init__(
        self,
        load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase, Sequence[int]]],
        config: HFEngineConfig | None = None,
        version: int | None = None,
    ) -> None:
        self._load = load
        self.config = config or HFEngineConfig()
        self._version = -1 if version is None else version
        self._live: LiveModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._groups: dict[int, LiveGroup] = {}  # by key, in order of submission
        self._batches: list[Batch] = []
        self._shapes: dict[str, torch.Size] | None = None  # of parameters that are not there: the engine sleeps
        self._emptied = False  # it slept, and weights have not come since

    def start(self) -> None:
        """Loads the model. Raises EngineError when its attention cannot be run from this cache."""
        model, tokenizer, eos = self._load()
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise EngineError(
                f"the hf engine decodes full attention only; {type(model).__name__} has layers of kind {sorted(kinds)}"
            )
        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION)
        # The last position of a prefill is a strided view, for which torch would copy the whole head once per prompt.
        head = model.get_output_embeddings()
        if head is None:
            raise EngineError(f"{type(model).__name__} has no output head: it is not a causal language model")
        head.register_forward_pre_hook(lambda module, args: (args[0].contiguous(),))
        self._tokenizer = tokenizer
        self._live = LiveModel(model, StopTable(tokenizer, model.config.vocab_size, eos))

    def close(self) -> None:
        """Frees the model; groups that run are gone."""
        self._live = None
        self._groups, self._batches = {}, []

    @property
    def live(self) -> LiveModel:
        if self._live is None:
            raise EngineError("the engine is not started (or closed): call start() first")
        return self._live

    @property
    def model(self) -> PreTrainedModel:
        return self.live.model

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_tokens(self) -> int | None:
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def unfinished(self) -> int:
        return len(self._groups)

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise EngineError("the engine is not started: call start() first")
        return self._tokenizer

    @torch.no_grad()
    def update_weights(
        self, weights: WeightArrays, manifest: Manifest, version: int, recompute_kv_cache: bool = True
    ) -> None:
        """Copies `weights` into the live parameters (converting between float32 and bfloat16) and sets `version`. With
        `recompute_kv_cache` the next step computes the keys and values of every running completion anew.

        Names, shapes and dtypes of the whole manifest are checked first: on WeightsMismatch nothing has changed.
        The version may move to any number but back: EngineError.
        """
        if version < self.version:
            raise EngineError(f"weight version {version} is older than the live one ({self.version})")
        if self._shapes is not None:
            raise EngineError("the engine sleeps: call prepare_for_generation() first")
        live = dict(self.model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in live.items()}
        what = f"weights of version {version} do not fit {type(self.model).__name__}"
        for name, view in fitting(shapes, weights, manifest, what):
            live[name].copy_(as_torch(view))
        self._version, self._emptied = version, False
        if recompute_kv_cache:
            for batch in self._batches:
                batch.forget()

    def sleep(self) -> None:
        """Keys and values, and the parameters' storage (see engines/base.py)."""
        if self._groups:
            raise EngineError(f"the engine cannot sleep: {len(self._groups)} groups are not finished")
        if self._shapes is not None:
            return
        parameters = dict(self.model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._emptied = True
        for parameter in parameters.values():
            parameter.data = parameter.data.new_empty(0)
        self._batches = []
        self.live.forget()
        memory.trim()

    def prepare_for_generation(self) -> None:
        if self._shapes is None:
            return
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.new_empty(self._shapes[name])
        self._shapes = None

    def _need_awake(self) -> None:
        if self._emptied:
            raise EngineError(
                "the engine slept and has no weights: prepare_for_generation() and update_weights() first"
            )

    def submit(
        self, request: GroupRequest, output: GroupOutput, sampling: SamplingConfig, resume: GroupResult | None = None
    ) -> None:
        limit = self.max_tokens  # EngineError when it was never started
        if self.version < 0:
            raise EngineError("the engine has no weights yet: call update_weights() first")
        self._need_awake()
        if request.key in self._groups:
            raise ValueError(f"group {request.key}: a group with this key is not finished yet")
        self._groups[request.key] = LiveGroup(request, output, sampling, resume, limit)

    @torch.no_grad()
    def step(self) -> list[GroupResult]:
        self._admit()
        for batch in self._batches:
            batch.step(self.version)
        self._batches = [batch for batch in self._batches if batch.rows]
        self._merge()
        ended = [key for key, group in self._groups.items() if group.ended]
        return [self._groups.pop(key).result() for key in ended]

    def abort(self, keys: Collection[int] | None = None) -> list[GroupResult]:
        chosen = [key for key in self._groups if keys is None or key in keys]
        gone = [self._groups.pop(key) for key in chosen]
        for batch in self._batches:
            batch.drop(gone)
        self._batches = [batch for batch in self._batches if batch.rows]
        return [group.result() for group in gone]

    def _admit(self) -> None:
        """Queued groups form new batches, in their order: the first that has no room holds up those behind it, so that none
        waits for ever. One that no empty engine could hold starts with as many rows as fit."""
        rows_free = self.config.max_batch_rows - sum(len(batch.rows) for batch in self._batches)
        tokens_free = self.config.max_batch_tokens - sum(batch.held_tokens for batch in self._batches)
        forming: dict[SamplingConfig, list[Row]] = {}
        for group in self._groups.values():
            if not group.waiting:
                continue
            beside = forming.get(group.sampling, [])
            others = [rows for rows in forming.values() if rows is not beside]
            joined = [*beside, *((group, i) for i in group.waiting)]
            width = columns(joined)
            rows = rows_free - sum(map(len, others))
            tokens = tokens_free - sum(len(other) * columns(other) for other in others)
            fit = min(rows, tokens // width)
            if fit < len(joined):
                if self._batches or forming:
                    break
                joined = joined[: max(fit, 1)]
            group.waiting = group.waiting[len(joined) - len(beside) :]
            forming[group.sampling] = joined
        self._batches += [Batch(self.live, rows) for rows in forming.values()]

    def _merge(self) -> None:
        """Batches of one sampling become one where the memory allows it: a decode step costs little more with more rows."""
        held = sum(batch.held_tokens for batch in self._batches)
        merged: list[Batch] = []
        for batch in self._batches:
            for first in merged:
                after = held - first.held_tokens - batch.held_tokens + first.held_tokens_with(batch)
                if first.sampling == batch.sampling and after <= self.config.max_batch_tokens:
                    first.absorb(batch)
                    held = after
                    break
            else:
                merged.append(batch)
        self._batches = merged

    @torch.no_grad()
    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Logprobs (T-1,) float32 of ids[1:] under the live weights, without a cache."""
        self._need_awake()
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
        mask = causal(torch.ones_like(tokens, dtype=torch.bool), self.model.dtype)
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        return logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy()

    @torch.no_grad()
    def next_token(self, ids: np.ndarray, temperature: float = 1.0) -> tuple[int, float]:
        """The most likely token behind `ids` and its logprob: all but the last are prefilled, the last is decoded, both in a
        cache of their own. With `score` it proves that decoding is right, not that running completions forgot their old keys:
        groups share no cache here, so nothing of theirs is read; that `update_weights` recomputes it is proven by tests."""
        self._need_awake()
        ids = np.asarray(ids, dtype=np.int32)
        sampling = SamplingConfig(temperature, max_new_tokens=2, greedy=True)
        request = GroupRequest(0, ids[:-1] if ids.size > 1 else ids, n=1, seeds=(0,))
        batch = Batch(self.live, [(LiveGroup(request, GroupOutput.allocate(1, 2), sampling), 0)])
        logits = batch.forward()
        if ids.size > 1:
            batch.force(int(ids[-1]))
            logits = batch.forward()
        token, logprob = greedy(logits.float(), temperature)
        return int(token), float(logprob)
