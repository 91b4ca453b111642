"""What every generation engine takes and gives: token ids in, token ids with logprobs and weight versions out.
Torch-free; arrays are written in place into buffers of the caller, who may have them in a shared slab.
Knows nothing of tasks, rewards or training.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop string appeared; its token is part of the completion
    EOS = "eos"  # an end-of-sequence token, which is part of the completion
    LENGTH = "length"  # max_new_tokens reached
    CUT = "cut"  # ended from outside; the tokens so far are kept and can be continued


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the message says what and why."""


class WeightsMismatch(EngineError):
    """A manifest does not fit the live model. Nothing was copied."""


@dataclass(frozen=True)
class SamplingConfig:
    """The distribution to sample from.

    temperature: logits are divided by it; > 0. max_new_tokens: bound for every completion, its stop token included.
    greedy: take the most likely token; logprobs are then those at `temperature`, and the result is for evaluation.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    greedy: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"sampling.temperature: {self.temperature!r} must be > 0; for the mode set greedy")
        if self.max_new_tokens < 1:
            raise ValueError(f"sampling.max_new_tokens: {self.max_new_tokens!r} must be >= 1")


@dataclass(frozen=True)
class GroupRequest:
    """One prompt and how many completions of it.

    key: the caller's, returned as it came. prompt_ids: (P,) int32, P >= 1. n: completions.
    seeds: n integers; a completion's randomness comes from its seed alone. stop: strings that end a completion.
    max_new_tokens: lowers SamplingConfig.max_new_tokens for this group.
    """

    key: int
    prompt_ids: np.ndarray
    n: int
    seeds: tuple[int, ...]
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_ids.ndim != 1 or self.prompt_ids.size == 0:
            raise ValueError(
                f"group {self.key}: prompt_ids has shape {self.prompt_ids.shape}, expected (P,) with P >= 1"
            )
        if self.n < 1 or len(self.seeds) != self.n:
            raise ValueError(f"group {self.key}: {len(self.seeds)} seeds for n={self.n} completions; one seed each")
        if any(not text for text in self.stop):
            raise ValueError(f"group {self.key}: a stop string is empty")


OUTPUT_DTYPES = {"tokens": "int32", "logprobs": "float32", "versions": "int32", "lengths": "int32"}


@dataclass(frozen=True)
class GroupOutput:
    """Buffers of one group, written in place. Entries at and beyond `lengths` hold token 0, logprob 0, version -1.

    tokens (n, S) int32; logprobs (n, S) float32, of the distribution sampled from; versions (n, S) int32, of the
    weights that sampled the token; lengths (n,) int32, stop and end tokens included.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def fields(n: int, max_new_tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) by name: what to allocate for a group of n completions."""
        return {
            name: (dtype, (n,) if name == "lengths" else (n, max_new_tokens)) for name, dtype in OUTPUT_DTYPES.items()
        }

    @classmethod
    def allocate(cls, n: int, max_new_tokens: int) -> GroupOutput:
        """Buffers in plain memory."""
        return cls(**{k: np.zeros(shape, dtype) for k, (dtype, shape) in cls.fields(n, max_new_tokens).items()})

    def check(self, request: GroupRequest, max_new_tokens: int) -> None:
        """Raises ValueError when a buffer does not fit the request."""
        for name, dtype in OUTPUT_DTYPES.items():
            array = getattr(self, name)
            rows_fit = array.shape[:1] == (request.n,)
            width_fits = array.ndim == 1 if name == "lengths" else array.ndim == 2 and array.shape[1] >= max_new_tokens
            if not (rows_fit and width_fits and array.dtype == dtype and array.flags.writeable):
                raise ValueError(
                    f"group {request.key}: output {name!r} is {array.dtype}{array.shape}, expected a writable {dtype} "
                    f"array for {request.n} completions of up to {max_new_tokens} tokens"
                )

    def clear(self) -> None:
        """Recycled buffers hold old data: sets everything to 'no token'."""
        self.tokens.fill(0)
        self.logprobs.fill(0.0)
        self.versions.fill(-1)
        self.lengths.fill(0)


@dataclass(frozen=True)
class GroupResult:
    """What happened to one group; its tensors are in the GroupOutput. finish_reasons: one per completion."""

    key: int
    finish_reasons: tuple[FinishReason, ...]
    prompt_tokens: int
    new_tokens: int


class ManifestEntry(Protocol):
    """One tensor of a weight manifest; dtype is 'float32' or 'bfloat16' (bytes of the latter come as uint16)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Manifest(Protocol):
    """The tensors of one model, in a fixed order."""

    @property
    def entries(self) -> Sequence[ManifestEntry]: ...


WeightArrays = Mapping[str, np.ndarray] | Iterator[tuple[str, np.ndarray]]
"""Arrays by entry name (bfloat16 as uint16): all at hand, or a stream in the manifest's order, each valid until the next is asked for."""


class Engine(Protocol):
    """Continuous generation with weights that may change between two decode steps. Methods block and none is safe to call
    from two threads: they belong to the role's engine thread (`roles/engine_driver.py`)."""

    @property
    def version(self) -> int:
        """Version of the live weights; -1 before the first ones."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer that made the vocabulary."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Most tokens that one completion may have, its prompt included, by the model's positions and by the engine's KV
        memory; None when neither sets a bound. `submit` takes whatever fits, and what has no room yet waits inside."""
        ...

    @property
    def unfinished(self) -> int:
        """Groups that were submitted and neither returned by `step` nor by `abort`."""
        ...

    def start(self) -> None:
        """Loads the model."""
        ...

    def submit(
        self, request: GroupRequest, output: GroupOutput, sampling: SamplingConfig, resume: GroupResult | None = None
    ) -> None:
        """Queues a group; it joins the running ones at a later `step`. The output is cleared, filled step by step, and read back
        when keys are computed anew: nobody else may touch it until the group is returned.

        resume: what `abort` returned for the same request and output: its CUT completions go on behind the tokens they have,
        which keep their logprobs and versions. Raises ValueError for a misfit or a key in use, EngineError before the first
        weights. A completion without room for one more token is LENGTH at once.
        """
        ...

    def step(self) -> list[GroupResult]:
        """One decode step of everything that runs (and the prefill of what joins). Returns the groups that ended, often none."""
        ...

    def abort(self, keys: Collection[int] | None = None) -> list[GroupResult]:
        """Ends these groups (all when None) now: completions that had not ended are CUT and keep their tokens. Keys that are
        unknown, or already returned, are left out. A later `submit(resume=…)` may continue them."""
        ...

    def update_weights(
        self, weights: WeightArrays, manifest: Manifest, version: int, recompute_kv_cache: bool = True
    ) -> None:
        """Copies weights into the live model between two steps, after the whole manifest was checked. Running completions go
        on with the new weights; with `recompute_kv_cache` their keys and values, and every cached prefix, are computed anew,
        else the old ones stay and no trainer can reproduce the logprobs. Raises WeightsMismatch with nothing changed, and
        EngineError when a stream fails half-way: the engine then holds half of one version and half of another."""
        ...

    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Logprobs (T-1,) float32 of ids[1:] given what precedes each, computed from scratch: no cache is read. `score` and
        `next_token` advance no group: until `step`, no token is drawn from weights that they are to prove."""
        ...

    def next_token(self, ids: np.ndarray, temperature: float = 1.0) -> tuple[int, float]:
        """The most likely token behind `ids` and its logprob, computed the way generation does. `score` and `next_token`
        advance no group. Where prompts share cached prefixes (vLLM), `score` then shows whether keys outlived their weights;
        where no group reads what another wrote (HF), only whether decoding agrees with a forward pass."""
        ...

    def sleep(self) -> None:
        """Gives back the memory that generation holds: keys and values, and the weights where the next `update_weights` brings them.
        Only without unfinished groups: EngineError. Until it is prepared again, and has weights again, everything that computes raises
        EngineError. Does nothing to an engine that sleeps."""
        ...

    def prepare_for_generation(self) -> None:
        """Takes the memory back that `sleep` gave away. Generation is possible after the next `update_weights`, which takes the version
        it had as well. Does nothing to an engine that is awake."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...


def generate(
    engine: Engine,
    requests: Sequence[GroupRequest],
    outputs: Sequence[GroupOutput],
    sampling: SamplingConfig,
    should_stop: Callable[[], bool] | None = None,
) -> list[GroupResult]:
    """Runs these groups, and whatever else the engine has, to the end. `should_stop` is asked between decode steps; what ran
    is then CUT. For an engine that nobody else steps: offline evaluation, tests, benchmarks."""
    if len(requests) != len(outputs):
        raise ValueError(f"{len(requests)} requests but {len(outputs)} outputs; one each")
    submitted: list[int] = []
    try:
        for request, output in zip(requests, outputs, strict=True):
            engine.submit(request, output, sampling)
            submitted.append(request.key)
    except BaseException:
        engine.abort(submitted)
        raise
    done: dict[int, GroupResult] = {}
    while engine.unfinished:
        if should_stop is not None and should_stop():
            done |= {result.key: result for result in engine.abort()}
        else:
            done |= {result.key: result for result in engine.step()}
    return [done[request.key] for request in requests]
