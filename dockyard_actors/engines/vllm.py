"""Generation with vLLM inside this process, driven step by step, on a CPU or a CUDA device.
Tokens, logprobs and versions are written as every step brings them; weights change between two steps. Randomness is that of
the Hugging Face engine. Knows nothing of tasks, rewards or where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dockyard_actors.engines import vllm_boot
from dockyard_actors.engines.base import (
    EngineError,
    FinishReason,
    GroupOutput,
    GroupRequest,
    GroupResult,
    Manifest,
    SamplingConfig,
    WeightArrays,
    WeightsMismatch,
)
from dockyard_actors.engines.groups import LiveGroup, check_length
from dockyard_actors.engines.stops import StopTable
from dockyard_actors.engines.vllm_worker import FIRST, GREEDY, PROMPT, SEED, TEMPERATURE
from dockyard_actors.runtime import memory


@dataclass(frozen=True)
class VLLMEngineConfig:
    """max_batch_rows: completions decoded together. kv_cache_bytes: memory for keys and values. max_model_len: positions of
    prompt and completion together; None: as many as the model has and the cache holds. dtype: of the live weights.
    threads: of torch in this process. scratch: existing directory for temporary files, which whoever made it removes after a
    kill; None: the system's. sleeps: on a CUDA device the memory is allocated so that `sleep` can give it back."""

    max_batch_rows: int = 128
    kv_cache_bytes: int = 1 << 30
    max_model_len: int | None = None
    dtype: str = "float32"
    threads: int = 1
    scratch: str | None = None
    sleeps: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch_rows", "kv_cache_bytes", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name}: {getattr(self, name)!r} must be >= 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"engine.max_model_len: {self.max_model_len!r} must be >= 2")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"engine.dtype: {self.dtype!r} is unknown; choose float32 or bfloat16")


@dataclass(frozen=True)
class _Row:
    """One completion as one request of vLLM. first: tokens it had before this request."""

    group: LiveGroup
    index: int
    first: int


class VLLMEngine:
    """Engine (see engines/base.py) over vLLM's LLMEngine.

    load: gives (structure of the model, tokenizer, ids that end a completion); called by `start`. The model is built from
    its structure alone: weights always come through `update_weights`.
    """

    def __init__(
        self,
        load: Callable[[], tuple[PretrainedConfig, PreTrainedTokenizerBase, Sequence[int]]],
        config: VLLMEngineConfig | None = None,
    ) -> None:
        self._load = load
        self.config = config or VLLMEngineConfig()
        self.version = -1
        self._llm: Any = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._table: StopTable | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._groups: dict[int, LiveGroup] = {}  # by key, in order of submission
        self._rows: dict[str, _Row] = {}  # what vLLM has, by its name there: never more than it may run at once
        self._names = 0
        self._asleep = self._emptied = False  # without its memory; without weights since it slept
        self._broken: str | None = None
        self._unpacked = False  # some linear weights are not packed again since the last update

    def start(self) -> None:
        """Builds the model, in about three seconds once vllm is imported (six more).

        Sets environment variables of this process before it imports vllm (`vllm_boot.ENVIRONMENT`: no subprocesses, no
        compilation, no pinned threads, no usage statistics, no hub; OMP_NUM_THREADS) and torch's number of threads. One
        engine of this kind fits into a process. Raises EngineError when vLLM is not installed, not of a supported version,
        does not start or cannot run the model.
        """
        structure, self._tokenizer, eos = self._load()
        self._table = StopTable(self._tokenizer, structure.get_text_config().vocab_size, eos)
        self._shapes = vllm_boot.parameter_shapes(structure)
        self._llm = vllm_boot.open_engine(
            structure,
            dtype=self.config.dtype,
            rows=self.config.max_batch_rows,
            kv_cache_bytes=self.config.kv_cache_bytes,
            max_model_len=self.config.max_model_len,
            threads=self.config.threads,
            scratch=self.config.scratch,
            sleeps=self.config.sleeps,
        )
        self._transfer("init_weight_transfer_engine", init_info={"shapes": self._shapes})

    def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            self._broken, self.version = None, -1
            self._asleep = self._emptied = False
            self._groups, self._rows = {}, {}
            vllm_boot.close_engine(llm)

    @property
    def llm(self) -> Any:
        """vLLM's engine. Raises EngineError when there is none or a failure left it in an unknown state."""
        if self._broken is not None:
            raise EngineError(f"the engine is unusable since {self._broken}; restart it")
        if self._llm is None:
            raise EngineError("the engine is not started (or closed): call start() first")
        return self._llm

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise EngineError("the engine is not started: call start() first")
        return self._tokenizer

    @property
    def max_tokens(self) -> int | None:
        return vllm_boot.longest_completion(self.llm)

    @property
    def unfinished(self) -> int:
        return len(self._groups)

    # Groups.

    def submit(
        self, request: GroupRequest, output: GroupOutput, sampling: SamplingConfig, resume: GroupResult | None = None
    ) -> None:
        """Queues a group (see engines/base.py). A resumed completion draws what it would have drawn without the break."""
        longest = self.max_tokens
        self._need_weights()
        if request.key in self._groups:
            raise ValueError(f"group {request.key}: a group with this key is not finished yet")
        self._groups[request.key] = LiveGroup(request, output, sampling, resume, longest)

    def step(self) -> list[GroupResult]:
        llm = self.llm
        self._admit()
        if self._rows:
            if self._unpacked:
                self._unpacked = llm.collective_rpc("dockyard_pack")[0]
            self._consume(self._advance(llm))
        ended = [key for key, group in self._groups.items() if group.ended]
        return [self._groups.pop(key).result() for key in ended]

    def abort(self, keys: Collection[int] | None = None) -> list[GroupResult]:
        llm = self.llm
        chosen = [key for key in self._groups if keys is None or key in keys]
        gone = [self._groups.pop(key) for key in chosen]
        names = [name for name, row in self._rows.items() if row.group in gone]
        llm.abort_request(names)
        for name in names:
            del self._rows[name]
        return [group.result() for group in gone]

    # Weights.

    def update_weights(
        self, weights: WeightArrays, manifest: Manifest, version: int, recompute_kv_cache: bool = True
    ) -> None:
        """Copies weights into the live model (see engines/base.py). Raises EngineError, and the engine is unusable from then
        on, when copying fails half-way."""
        llm = self.llm
        if self._asleep:
            raise EngineError("the engine sleeps: call prepare_for_generation() first")
        if version < self.version:
            raise EngineError(f"weight version {version} is older than the live one ({self.version})")
        self._transfer("start_weight_update")
        try:
            self._transfer("update_weights", update_info={"arrays": weights, "manifest": manifest, "version": version})
            self._transfer("finish_weight_update")
            if recompute_kv_cache and not llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM did not let go of its prefix cache")
            llm.set_weight_version(str(version))
        except WeightsMismatch:
            raise
        except Exception as error:
            self._broken = f"loading weights of version {version} failed half-way ({type(error).__name__}: {error})"
            raise EngineError(f"the engine is unusable since {self._broken}; restart it") from error
        self.version, self._emptied = version, False
        self._unpacked = True

    def _transfer(self, step: str, **what: Any) -> None:
        """One step of vLLM's weight transfer, which its LLMEngine has in its worker alone. There is nothing to pause: no step runs."""
        self.llm.collective_rpc(step, kwargs=what)

    def sleep(self) -> None:
        """Keys and values, and the weights (see engines/base.py): by vLLM's sleep mode where it has one, on the CPU by emptying the storages,
        which leaves every view of them in place."""
        llm = self.llm
        if self._groups:
            raise EngineError(f"the engine cannot sleep: {len(self._groups)} groups are not finished")
        if self._asleep:
            return
        if not llm.reset_prefix_cache():
            raise EngineError("vLLM did not let go of its prefix cache")
        self._move_memory(vllm_boot.sleep)
        self._asleep = self._emptied = True
        memory.trim()

    def prepare_for_generation(self) -> None:
        if self._asleep:
            self._move_memory(vllm_boot.wake_up)
            self._asleep = False

    def _move_memory(self, function: Callable[[Any], None]) -> None:
        llm = self.llm
        try:
            function(llm)
        except Exception as error:
            self._broken = f"{function.__name__} failed half-way ({type(error).__name__}: {error})"
            raise EngineError(f"the engine is unusable since {self._broken}; restart it") from error

    # Single questions.

    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        llm = self.llm
        if ids.size < 2:
            return np.zeros(0, dtype=np.float32)
        llm.collective_rpc("dockyard_score_at", args=(temperature,))
        answer = self._ask(ids, temperature, skip_reading_prefix_cache=True, prompt_logprobs=0)
        scored = answer.prompt_logprobs  # nothing is known of the first token: its entry is empty
        return np.array(scored.logprobs, dtype=np.float32)

    def next_token(self, ids: np.ndarray, temperature: float = 1.0) -> tuple[int, float]:
        completion = self._ask(ids, temperature).outputs[0]
        return int(completion.token_ids[0]), float(completion.logprobs.logprobs[0])

    def _ask(self, ids: np.ndarray, temperature: float, **how: Any) -> Any:
        """The answer to a request of one greedy token, for which everything else stands still."""
        llm = self.llm
        self._need_weights()
        check_length("the sequence", ids.size, 1, self.max_tokens)
        params = self._params(SamplingConfig(temperature, 1, greedy=True), 1, ids.size, **how)
        with vllm_boot.alone(llm) as make_room:
            name = self._add(ids.tolist(), params)
            while True:
                for output in self._advance(llm):
                    if output.request_id == name and output.finished:
                        return output
                make_room()

    # Between the two.

    def _need_weights(self) -> None:
        if self.version < 0:
            raise EngineError("the engine has no weights yet: call update_weights() first")
        if self._emptied:
            raise EngineError(
                "the engine slept and has no weights: prepare_for_generation() and update_weights() first"
            )

    def _params(
        self, sampling: SamplingConfig, new: int, prompt: int, first: int = 0, seed: int = 0, **how: Any
    ) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

        params = SamplingParams(
            max_tokens=new,
            temperature=1.0,  # RowSampler draws, and reads extra_args
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # vLLM knows no tokenizer: stop_token_ids has what ends a completion
            output_kind=RequestOutputKind.DELTA,
            extra_args={
                SEED: seed,
                PROMPT: prompt,
                FIRST: first,
                TEMPERATURE: sampling.temperature,
                GREEDY: sampling.greedy,
            },
            **how,
        )
        params.skip_clone = True  # nobody else changes it
        return params

    def _add(self, ids: list[int], params: Any) -> str:
        """Gives vLLM a request; returns its name."""
        from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]

        self._names += 1
        name = str(self._names)
        self.llm.add_request(name, tokens_input(ids), params)
        return name

    def _admit(self) -> None:
        """Hands completions to vLLM in their order, as many as it may run."""
        assert self._table is not None
        for group in self._groups.values():
            room = self.config.max_batch_rows - len(self._rows)
            if not room:
                break
            begun, group.waiting = group.waiting[:room], group.waiting[room:]
            for i in begun:
                row = _Row(group, i, int(group.output.lengths[i]))
                ids = np.concatenate([group.request.prompt_ids, group.output.tokens[i, : row.first]]).tolist()
                params = self._params(
                    group.sampling,
                    new=group.limit - row.first,
                    prompt=group.prompt_tokens,
                    first=row.first,
                    seed=group.seed(i),
                    stop_token_ids=self._table.stops(group.request.stop).tokens,
                )
                self._rows[self._add(ids, params)] = row

    def _advance(self, llm: Any) -> list[Any]:
        try:
            return llm.step()
        except Exception as error:
            self._broken = f"a step failed ({type(error).__name__}: {error})"
            raise EngineError(f"the engine is unusable since {self._broken}; restart it") from error

    def _consume(self, outputs: Iterable[Any]) -> None:
        """Writes what a step brought and ends the completions that it completes."""
        stopped = []
        for output in outputs:
            row, completion = self._rows.get(output.request_id), output.outputs[0]
            if row is None or not completion.token_ids:
                continue
            reason = None
            for token, logprob in zip(completion.token_ids, completion.logprobs.logprobs, strict=True):
                reason = self._write(row, token, logprob)
            if output.finished:
                self._check_finished(row, reason, completion)
            elif reason is not None:
                stopped.append(output.request_id)
            if reason is not None:
                row.group.reasons[row.index] = reason
                del self._rows[output.request_id]
        if stopped:
            self.llm.abort_request(stopped)

    def _write(self, row: _Row, token: int, logprob: float) -> FinishReason | None:
        assert self._table is not None
        output, i = row.group.output, row.index
        at = int(output.lengths[i])
        output.tokens[i, at], output.logprobs[i, at], output.versions[i, at] = token, logprob, self.version
        output.lengths[i] = at + 1
        if reason := self._table.reason(output.tokens[i, : at + 1], self._table.stops(row.group.request.stop)):
            return reason
        return FinishReason.LENGTH if at + 1 == row.group.limit else None

    def _check_finished(self, row: _Row, reason: FinishReason | None, completion: Any) -> None:
        """vLLM's own account of a finished completion must agree with what was written."""
        written = row.group.output.versions[row.index, row.first : row.group.output.lengths[row.index]].tolist()
        told = [int(span.version) for span in completion.weight_versions or () for _ in range(span.start, span.end)]
        if reason is None or told != written:
            self._broken = (
                f"completion {row.index} of group {row.group.request.key} finished in vLLM "
                f"({completion.finish_reason}, weight versions {told}) but not here ({reason}, {written})"
            )
            raise EngineError(f"the engine is unusable since {self._broken}; restart it")
