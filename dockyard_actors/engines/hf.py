"""Generation with a transformers model in this process: KV cache, batches over groups, weights swapped in place.
A prompt is prefilled once for its group, finished rows leave the batch, and a completion depends on its prompt, seed and
weights alone up to floating point (see `generate`). Knows nothing of tasks, rewards or where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dockyard_actors.engines.base import (
    EngineError,
    FinishReason,
    GroupOutput,
    GroupRequest,
    GroupResult,
    Manifest,
    SamplingConfig,
    WeightsMismatch,
)
from dockyard_actors.engines.kvcache import ATTENTION, GROWTH, RowCache
from dockyard_actors.engines.sampling import greedy, sample, uniforms
from dockyard_actors.engines.stops import StopTable
from dockyard_actors.transport.torch_views import as_torch

VIEW_DTYPES = {"float32": "float32", "bfloat16": "uint16"}
SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class HFEngineConfig:
    """max_batch_rows: completions decoded together. max_batch_tokens: bound on rows x (prompt + new tokens) of one batch,
    which is what the KV cache holds. Longer work runs as several batches, one after another."""

    max_batch_rows: int = 128
    max_batch_tokens: int = 65536

    def __post_init__(self) -> None:
        for name in ("max_batch_rows", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name}: {getattr(self, name)!r} must be >= 1")


@dataclass(frozen=True)
class _Span:
    """Rows [first, last) of request `index`: what one batch takes of a group."""

    index: int
    first: int
    last: int


class HFEngine:
    """Engine (see engines/base.py) over a transformers causal language model.

    load: gives (model, tokenizer, ids that end a completion); called by `start`.
    version: of the weights that `load` brings; None when they mean nothing and `update_weights` must come first.
    """

    def __init__(
        self,
        load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase, Sequence[int]]],
        config: HFEngineConfig | None = None,
        version: int | None = None,
    ) -> None:
        self._load = load
        self.config = config or HFEngineConfig()
        self.version = -1 if version is None else version
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._stops: StopTable | None = None

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
        self._model, self._tokenizer = model, tokenizer
        self._stops = StopTable(tokenizer, model.config.vocab_size, eos)

    def close(self) -> None:
        self._model = self._stops = None

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineError("the engine is not started (or closed): call start() first")
        return self._model

    @property
    def max_tokens(self) -> int | None:
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise EngineError("the engine is not started: call start() first")
        return self._tokenizer

    @torch.no_grad()
    def update_weights(self, views: Mapping[str, np.ndarray], manifest: Manifest, version: int) -> None:
        """Copies `views` into the live parameters (converting between float32 and bfloat16) and sets `version`.

        Names, shapes and dtypes of the whole manifest are checked first: on WeightsMismatch nothing has changed.
        The version may move to any number but back: EngineError.
        """
        if version < self.version:
            raise EngineError(f"weight version {version} is older than the live one ({self.version})")
        live = dict(self.model.named_parameters())
        problems = _differences(live, views, manifest)
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise WeightsMismatch(f"weights of version {version} do not fit {type(self.model).__name__}: {shown}")
        for entry in manifest.entries:
            live[entry.name].copy_(as_torch(views[entry.name]))
        self.version = version

    def generate(
        self,
        requests: Sequence[GroupRequest],
        outputs: Sequence[GroupOutput],
        sampling: SamplingConfig,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[GroupResult]:
        """Samples request.n completions of every request into its output.

        In float32 the same prompt, seed and weights give the same tokens whatever shares the batch, unless a draw falls
        within rounding (about 1e-6) of the border between two tokens; in bfloat16 the shape of a batch changes logits by
        bf16 rounding, and now and then a token. Raises ValueError for a misfit, EngineError before the first weights.
        """
        limit = self.max_tokens  # EngineError when it was never started
        if self.version < 0:
            raise EngineError("the engine has no weights yet: call update_weights() first")
        if len(requests) != len(outputs):
            raise ValueError(f"{len(requests)} requests but {len(outputs)} outputs; one each")
        for request, output in zip(requests, outputs, strict=True):
            new = _max_new(request, sampling)
            output.check(request, new)
            if limit is not None and request.prompt_ids.size + new > limit:
                raise ValueError(
                    f"group {request.key}: {request.prompt_ids.size} prompt + {new} new tokens exceed the model's "
                    f"{limit} positions"
                )
        reasons = [[FinishReason.CUT] * request.n for request in requests]
        for output in outputs:
            output.clear()
        for spans in self._batches(requests, sampling):
            if should_stop is not None and should_stop():
                break
            _Batch(self, requests, outputs, reasons, spans, sampling).run(should_stop)
        return [
            GroupResult(r.key, tuple(why), int(r.prompt_ids.size), int(out.lengths.sum()))
            for r, out, why in zip(requests, outputs, reasons, strict=True)
        ]

    @torch.no_grad()
    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Logprobs (T-1,) float32 of ids[1:] under the live weights, without a cache."""
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
        mask = _causal(torch.ones_like(tokens, dtype=torch.bool), self.model.dtype)
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        return logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy()

    def _batches(self, requests: Sequence[GroupRequest], sampling: SamplingConfig) -> list[list[_Span]]:
        """Splits the requests, in order, into batches within both bounds; a batch has at least one row."""
        batches: list[list[_Span]] = []
        spans: list[_Span] = []
        rows = width = 0
        for index, request in enumerate(requests):
            need = int(request.prompt_ids.size) + _max_new(request, sampling)
            first = 0
            while first < request.n:
                wider = max(width, need)
                room = min(self.config.max_batch_rows, self.config.max_batch_tokens // wider) - rows
                if room <= 0 and spans:
                    batches.append(spans)
                    spans, rows, width = [], 0, 0
                    continue
                last = min(request.n, first + max(room, 1))
                spans.append(_Span(index, first, last))
                rows, width, first = rows + last - first, wider, last
        return [*batches, spans] if spans else batches


class _Batch:
    """One batch from prefill to its last token. Slot i of the model's batch decodes completion `row[i]`."""

    def __init__(
        self,
        engine: HFEngine,
        requests: Sequence[GroupRequest],
        outputs: Sequence[GroupOutput],
        reasons: list[list[FinishReason]],
        spans: Sequence[_Span],
        sampling: SamplingConfig,
    ) -> None:
        assert engine._stops is not None
        self.engine, self.model, self.stops, self.sampling = engine, engine.model, engine._stops, sampling
        self.requests, self.outputs, self.reasons = requests, outputs, reasons
        self.prompts = [requests[span.index].prompt_ids for span in spans]
        self.row = [(span.index, i) for span in spans for i in range(span.first, span.last)]
        self.source = torch.tensor([u for u, span in enumerate(spans) for _ in range(span.first, span.last)])
        self.seeds = np.array([requests[g].seeds[i] & SEED_MASK for g, i in self.row], dtype=np.uint64)
        self.limit = np.array([_max_new(requests[g], sampling) for g, _ in self.row])
        suspects: dict[tuple[str, ...], np.ndarray] = {}
        for span in spans:
            stop = requests[span.index].stop
            if stop not in suspects:
                suspects[stop] = self.stops.suspects(stop)
        self.kinds = list(suspects)
        self.suspects = np.stack(list(suspects.values()))
        self.kind = np.array([self.kinds.index(requests[g].stop) for g, _ in self.row])
        self.scratch = torch.empty(0, dtype=torch.float32)
        self.longest = max(prompt.size for prompt in self.prompts)

    @torch.no_grad()
    def run(self, should_stop: Callable[[], bool] | None) -> None:
        logits, barrier = self._prefill()
        steps = int(self.limit.max())
        for step in range(steps):
            tokens, logprobs = self._draw(logits, step)
            alive = self._record(tokens.numpy(), logprobs.numpy(), step)
            if step + 1 == steps or not alive.any() or (should_stop is not None and should_stop()):
                return
            kept = self._drop(alive)
            if kept is not None:
                tokens, barrier = tokens[kept], barrier[kept]
            width = self.cache.reserve()
            barrier[:, self.longest + step] = 0.0
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=barrier[:, None, None, :width],
                position_ids=self.prompt_lengths[:, None] + step,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]

    def _prefill(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, V) of every row's first token, and the additive key mask (B, capacity) of the rows."""
        capacity = self.longest + int(self.limit.max()) + GROWTH
        ids = np.zeros((len(self.prompts), self.longest), dtype=np.int64)
        known = np.zeros((len(self.prompts), capacity), dtype=bool)
        for u, prompt in enumerate(self.prompts):  # on the left, so that every row writes its next key at one place
            ids[u, self.longest - prompt.size :] = prompt
            known[u, self.longest - prompt.size : self.longest] = True
        known_t = torch.from_numpy(known)
        positions = (known_t[:, : self.longest].long().cumsum(-1) - 1).clamp(min=0)
        self.cache = RowCache(self.model.config)
        logits = self.model(
            input_ids=torch.from_numpy(ids),
            attention_mask=_causal(known_t[:, : self.longest], self.model.dtype),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self.cache.spread(self.source)
        self.prompt_lengths = torch.tensor([prompt.size for prompt in self.prompts])[self.source]
        barrier = torch.zeros(known.shape, dtype=self.model.dtype).masked_fill_(~known_t, -torch.inf)
        return logits[self.source], barrier[self.source]

    def _draw(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scratch.shape[0] < len(logits):
            self.scratch = torch.empty(
                logits.shape, dtype=torch.float32
            )  # once: fresh pages cost more than the softmax
        wide = self.scratch[: len(logits)].copy_(logits)
        if self.sampling.greedy:
            return greedy(wide, self.sampling.temperature)
        return sample(wide, self.sampling.temperature, torch.from_numpy(uniforms(self.seeds, step)))

    def _record(self, tokens: np.ndarray, logprobs: np.ndarray, step: int) -> np.ndarray:
        """Writes one token of every row; returns (B,) bool, which rows go on."""
        version = self.engine.version
        for (group, i), token, logprob in zip(self.row, tokens.tolist(), logprobs.tolist(), strict=True):
            output = self.outputs[group]
            output.tokens[i, step] = token
            output.logprobs[i, step] = logprob
            output.versions[i, step] = version
            output.lengths[i] = step + 1
        ended = self.stops.eos[tokens]
        full = self.limit == step + 1
        suspect = self.suspects[self.kind, tokens]
        alive = ~(ended | full)
        for slot in np.flatnonzero(ended | full | suspect):
            group, i = self.row[slot]
            if ended[slot]:
                self.reasons[group][i] = FinishReason.EOS
            elif suspect[slot] and self.stops.stopped(
                self.outputs[group].tokens[i, : step + 1], self.kinds[self.kind[slot]]
            ):
                self.reasons[group][i] = FinishReason.STOP
                alive[slot] = False
            elif full[slot]:
                self.reasons[group][i] = FinishReason.LENGTH
        return alive

    def _drop(self, alive: np.ndarray) -> torch.Tensor | None:
        """Fills the slots of finished rows with the last living ones: copies as few rows as rows finished.

        Returns the old slot of every new slot, or None when all live.
        """
        rows = int(alive.sum())
        if rows == len(alive):
            return None
        order = np.arange(rows)
        holes = np.flatnonzero(~alive[:rows])
        order[holes] = movers = rows + np.flatnonzero(alive[rows:])
        self.cache.move(torch.from_numpy(movers), torch.from_numpy(holes), rows)
        self.row = [self.row[slot] for slot in order]
        self.seeds, self.limit, self.kind = self.seeds[order], self.limit[order], self.kind[order]
        kept = torch.from_numpy(order)
        self.prompt_lengths = self.prompt_lengths[kept]
        return kept


def _max_new(request: GroupRequest, sampling: SamplingConfig) -> int:
    if request.max_new_tokens is None:
        return sampling.max_new_tokens
    return min(request.max_new_tokens, sampling.max_new_tokens)


def _causal(known: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive causal mask (B, 1, T, T) for rows padded where `known` (B, T) is False; padding sees itself only."""
    length = known.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & known[:, None, None, :]
    seen = seen | torch.eye(length, dtype=torch.bool)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _differences(live: Mapping[str, torch.Tensor], views: Mapping[str, np.ndarray], manifest: Manifest) -> list[str]:
    problems = []
    named = [entry.name for entry in manifest.entries]
    problems += [f"{name} is missing" for name in live if name not in set(named)]
    if len(set(named)) < len(named):
        problems.append("the manifest names a tensor twice")
    for entry in manifest.entries:
        if entry.name not in live:
            problems.append(f"{entry.name} is unknown to the model")
        elif entry.dtype not in VIEW_DTYPES:
            problems.append(f"{entry.name} has dtype {entry.dtype}, expected one of {', '.join(VIEW_DTYPES)}")
        elif tuple(entry.shape) != tuple(live[entry.name].shape):
            problems.append(f"{entry.name} has shape {tuple(entry.shape)}, the model {tuple(live[entry.name].shape)}")
        elif (view := views.get(entry.name)) is None:
            problems.append(f"{entry.name} is in the manifest but has no view")
        elif view.dtype != VIEW_DTYPES[entry.dtype] or tuple(view.shape) != tuple(entry.shape):
            problems.append(
                f"the view of {entry.name} is {view.dtype}{view.shape}, not {entry.dtype}{tuple(entry.shape)}"
            )
    return problems
