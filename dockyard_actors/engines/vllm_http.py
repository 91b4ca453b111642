"""Generation by a vLLM server of its own (`vllm serve`) on this host, over HTTP: token ids in, token ids with logprobs out.
No request outlives an update of the weights, so every token's version is the one its request was sent under, and what the server
reports of a finished completion must agree. Knows nothing of tasks, rewards or where weights come from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
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
)
from dockyard_actors.engines.choose import BEYOND, OLDEST, VERSIONS
from dockyard_actors.engines.groups import LiveGroup, check_length
from dockyard_actors.engines.manifest import fitting
from dockyard_actors.engines.stops import StopTable
from dockyard_actors.engines.vllm_client import (
    SERVER_ENVIRONMENT,
    SERVER_FLAGS,
    Answer,
    Choice,
    ServerRefused,
    VLLMClient,
    VLLMHTTPConfig,
)
from dockyard_actors.engines.vllm_worker import FIRST, GREEDY, PROMPT, SEED, TEMPERATURE
from dockyard_actors.transport.fdclient import FdClient
from dockyard_actors.transport.weights_shm import WeightManifest, WeightPublisher, WeightRef

OWNER = "vllm-http"  # of the shared memory that weights are copied to


@dataclass(frozen=True)
class _Row:
    """One completion as one request. first: tokens it had before. version: of the weights that draw all of its tokens."""

    group: LiveGroup
    index: int
    first: int
    version: int


class VLLMHTTPEngine:
    """Engine (see engines/base.py) over a server started with SERVER_FLAGS and SERVER_ENVIRONMENT; one engine a server.

    load: gives (structure of the model that is served, tokenizer, ids that end a completion); called by `start`.

    Draws as the engine in this process does: this package's sampler runs in the server's worker. What differs: the server decodes
    on between two steps, `step` takes what has come; at an abort and at an update tokens that are still on their way are left and
    drawn again, equal under equal weights; keys are always computed anew.
    """

    def __init__(
        self,
        load: Callable[[], tuple[PretrainedConfig, PreTrainedTokenizerBase, Sequence[int]]],
        config: VLLMHTTPConfig,
    ) -> None:
        self._load = load
        self.config = config
        self.version = -1
        self._http: VLLMClient | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._table: StopTable | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._longest = 0
        self._model = ""
        self._publisher: WeightPublisher | None = None
        self._published = 0
        self._groups: dict[int, LiveGroup] = {}  # by key, in order of submission
        self._rows: dict[str, _Row] = {}  # what the server has, by its name there
        self._names = 0
        self._silent_s = 0.0
        self._broken: str | None = None

    def start(self) -> None:
        """Waits until the server is ready, and makes its state this engine's: whatever it ran is aborted. Raises EngineError when it
        is not there, of another version, or lacks a flag."""
        structure, self._tokenizer, eos = self._load()
        self._table = StopTable(self._tokenizer, structure.get_text_config().vocab_size, eos)
        self._shapes = vllm_boot.parameter_shapes(structure)
        self._http = VLLMClient(self.config.url, self.config.api_key_file)
        try:
            self._http.wait_ready(self.config.connect_s)
            self._take_over(self._http)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        http, self._http = self._http, None
        self._broken, self.version = None, -1
        self._groups, self._rows = {}, {}
        if http is not None:
            http.close()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def sleep(self) -> None:
        raise EngineError(f"the server at {self.config.url} keeps its memory: it does not sleep for a trainer")

    def prepare_for_generation(self) -> None:
        """It never sleeps."""

    @property
    def http(self) -> VLLMClient:
        """Raises EngineError when there is none or a failure left the server in an unknown state."""
        if self._broken is not None:
            raise EngineError(f"the engine is unusable since {self._broken}; restart it")
        if self._http is None:
            raise EngineError("the engine is not started (or closed): call start() first")
        return self._http

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise EngineError("the engine is not started: call start() first")
        return self._tokenizer

    @property
    def table(self) -> StopTable:
        if self._table is None:
            raise EngineError("the engine is not started: call start() first")
        return self._table

    @property
    def max_tokens(self) -> int | None:
        _ = self.http
        return self._longest

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
        """Sends what waits and takes the tokens that came; waits up to `step_s` for one. Raises EngineError when the server fails or
        is silent for `silence_s`."""
        _ = self.http
        self._admit()
        if self._rows:
            self._take(self.config.step_s)
        ended = [key for key, group in self._groups.items() if group.ended]
        return [self._groups.pop(key).result() for key in ended]

    def abort(self, keys: Collection[int] | None = None) -> list[GroupResult]:
        http = self.http
        self._take(0.0)
        chosen = [key for key in self._groups if keys is None or key in keys]
        gone = [self._groups.pop(key) for key in chosen]
        names = [name for name, row in self._rows.items() if row.group in gone]
        http.cancel(names)
        for name in names:
            del self._rows[name]
        return [group.result() for group in gone]

    # Weights.

    def update_weights(
        self, weights: WeightArrays, manifest: Manifest, version: int, recompute_kv_cache: bool = True
    ) -> None:
        """Copies weights into shared memory and has the server load them (see engines/base.py). A stream that fails half-way has
        changed nothing in the server. Weights that lie there already need no copy: `update_shared`."""
        self._check_update(version, recompute_kv_cache)
        arrays = fitting(self._shapes, weights, manifest, f"weights of version {version} do not fit the model")
        publisher = self._publisher_of(manifest)
        self._published += 1
        slot = publisher.slot(self._published)
        for name, array in arrays:
            np.copyto(slot[name], array, casting="no")
        ref = publisher.publish(self._published)
        try:
            self._update(msgspec.structs.replace(ref, version=version))
        finally:
            publisher.release(self._published)

    def update_shared(self, ref: WeightRef, manifest: Manifest, recompute_kv_cache: bool = True) -> None:
        """As `update_weights`, of weights that a WeightPublisher on this host holds and `manifest` describes."""
        self._check_update(ref.version, recompute_kv_cache)
        fitting(self._shapes, iter(()), manifest, f"weights of version {ref.version} do not fit the model")
        self._update(ref)

    def _check_update(self, version: int, recompute_kv_cache: bool) -> None:
        _ = self.http
        if version < self.version:
            raise EngineError(f"weight version {version} is older than the live one ({self.version})")
        if not recompute_kv_cache:
            raise EngineError("a vLLM server behind HTTP always computes keys anew; set weight_sync.recompute_kv_cache")

    def _publisher_of(self, manifest: Manifest) -> WeightPublisher:
        laid_out = WeightManifest.of({e.name: (e.dtype, tuple(e.shape)) for e in manifest.entries})
        if self._publisher is not None and self._publisher.manifest != laid_out:
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            self._publisher = WeightPublisher(FdClient(self.config.fd_path), laid_out, owner=OWNER)
            self._publisher.drop_predecessors()  # of engines that died with a version published
        return self._publisher

    def _update(self, ref: WeightRef) -> None:
        """Takes every request out of the server, which goes on behind the tokens it has at the next step: not before the caller
        has proved the weights."""
        http = self.http
        self._take(0.0)
        http.cancel(list(self._rows))
        for row in self._rows.values():
            row.group.waiting = sorted([*row.group.waiting, row.index])
        self._rows.clear()
        try:
            http.call("/pause?mode=abort&clear_cache=true", timeout_s=self.config.call_s)
            http.call("/start_weight_update", timeout_s=self.config.call_s)
            http.call("/update_weights", {"update_info": vllm_boot.ref_info(ref)}, timeout_s=self.config.update_s)
            http.call("/finish_weight_update", {"weight_version": str(ref.version)}, timeout_s=self.config.call_s)
            arrived = {"version": ref.version, "checksums": list(ref.checksums)}
            if any(told != arrived for told in self._rpc(http, "dockyard_delivered")):
                raise EngineError("a worker's checksums are not those of the bytes that were sent")
            http.call("/resume", timeout_s=self.config.call_s)
        except Exception as error:
            self._broken = f"loading weights of version {ref.version} failed half-way ({type(error).__name__}: {error})"
            raise EngineError(f"the engine is unusable since {self._broken}; restart it") from error
        self.version = ref.version

    # Single questions.

    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        if ids.size < 2:
            return np.zeros(0, dtype=np.float32)
        self._need_weights()
        self._sure(lambda: self._rpc(self.http, "dockyard_score_at", temperature))
        answer = self._ask(ids, temperature, skip_reading_prefix_cache=True, prompt_logprobs=0)
        scored = answer.prompt_logprobs or []  # nothing is known of the first token: its entry is empty
        return np.array(
            [(at or {})[str(token)].logprob for token, at in zip(ids[1:].tolist(), scored[1:], strict=True)],
            dtype=np.float32,
        )

    def next_token(self, ids: np.ndarray, temperature: float = 1.0) -> tuple[int, float]:
        self._need_weights()
        choice = self._ask(ids, temperature).choices[0]
        return choice.token_ids[0], choice.logprobs.content[0].logprob

    def _ask(self, ids: np.ndarray, temperature: float, **how: Any) -> Answer:
        http = self.http
        check_length("the sequence", ids.size, 1, self.max_tokens)
        params = self._params(SamplingConfig(temperature, 1, greedy=True), 1, ids.size, **how)
        body = {"model": self._model, "token_ids": ids.tolist(), "sampling_params": params}
        return self._sure(lambda: http.generate(body, self.config.call_s))

    # Between the two.

    def _sure(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives; when that fails otherwise than by a refusal, nothing is known of the server any more."""
        try:
            return ask()
        except ServerRefused:
            raise
        except EngineError as error:
            self._broken = str(error)
            raise

    def _rpc(self, http: VLLMClient, method: str, *args: Any) -> list[Any]:
        """What a method of the worker extension returns in every worker."""
        body = {"method": method, "args": args}
        return msgspec.json.decode(http.call("/collective_rpc", body, timeout_s=self.config.call_s))["results"]

    def _take_over(self, http: VLLMClient) -> None:
        told = msgspec.json.decode(http.call("/version", method="GET", timeout_s=self.config.call_s))["version"]
        if not OLDEST <= tuple(int(part) for part in re.findall(r"\d+", told)[:2]) < BEYOND:
            raise EngineError(f"the server at {http.url} is vLLM {told}, and {VERSIONS} is needed")
        models = msgspec.json.decode(http.call("/v1/models", method="GET", timeout_s=self.config.call_s))["data"]
        served = {model["id"]: model for model in models if self.config.model in (None, model["id"])}
        if len(served) != 1:
            names = ", ".join(model["id"] for model in models)
            raise EngineError(f"the server at {http.url} serves {names}; set the model to one of them")
        self._model, model = served.popitem()
        try:
            http.call("/pause?mode=abort&clear_cache=true", timeout_s=self.config.call_s)
            (facts, *_) = self._rpc(http, "dockyard_serve")
            shapes = {"init_info": {"shapes": self._shapes}}
            http.call("/init_weight_transfer_engine", shapes, timeout_s=self.config.call_s)
            http.call("/resume", timeout_s=self.config.call_s)
            self._longest = min(int(model["max_model_len"]), int(facts["positions"]))
            self._ask(np.zeros(1, np.int32), 1.0)
        except EngineError as error:
            flags = " ".join(SERVER_FLAGS)
            raise EngineError(f"{error}. A server for this engine needs {flags} and {SERVER_ENVIRONMENT}") from error

    def _need_weights(self) -> None:
        _ = self.http
        if self.version < 0:
            raise EngineError("the engine has no weights yet: call update_weights() first")

    def _params(
        self, sampling: SamplingConfig, new: int, prompt: int, first: int = 0, seed: int = 0, **how: Any
    ) -> dict[str, Any]:
        """vLLM's SamplingParams. RowSampler draws, and reads extra_args."""
        ways = {SEED: seed, PROMPT: prompt, FIRST: first, TEMPERATURE: sampling.temperature, GREEDY: sampling.greedy}
        fixed = {"temperature": 1.0, "logprobs": 0, "detokenize": False, "ignore_eos": True}
        return {**fixed, "max_tokens": new, "extra_args": ways, **how}

    def _admit(self) -> None:
        """Sends completions in their order, as many as the server may have."""
        for group in self._groups.values():
            room = self.config.max_batch_rows - len(self._rows)
            if not room:
                break
            begun, group.waiting = group.waiting[:room], group.waiting[room:]
            for i in begun:
                row = _Row(group, i, int(group.output.lengths[i]), self.version)
                ids = np.concatenate([group.request.prompt_ids, group.output.tokens[i, : row.first]]).tolist()
                params = self._params(
                    group.sampling,
                    new=group.limit - row.first,
                    prompt=group.prompt_tokens,
                    first=row.first,
                    seed=group.seed(i),
                    stop_token_ids=self.table.stops(group.request.stop).tokens,
                )
                self._names += 1
                name = f"{group.request.key}-{i}-{self._names}"
                self._rows[name] = row
                self.http.stream(name, {"model": self._model, "token_ids": ids, "sampling_params": params})

    def _take(self, wait_s: float) -> None:
        """Writes the tokens that came and ends the completions that they complete."""
        http = self.http
        events = http.events(wait_s)
        self._silent_s = 0.0 if events else self._silent_s + wait_s
        if self._rows and self._silent_s >= self.config.silence_s:
            self._break(
                f"{http.url} sent no token for {self.config.silence_s:g} s with {len(self._rows)} requests open"
            )
        stopped = []
        for name, event in events:
            if (row := self._rows.get(name)) is None:
                continue  # it was cancelled
            if isinstance(event, EngineError):
                self._break(str(event))
            reason = self._write(row, event)
            if event.finish_reason is not None:
                self._check_finished(row, reason, event)
            elif reason is not None:
                stopped.append(name)
            if reason is not None:
                row.group.reasons[row.index] = reason
                del self._rows[name]
        if stopped:
            http.cancel(stopped)

    def _break(self, problem: str) -> NoReturn:
        self._broken = problem
        raise EngineError(f"the engine is unusable since {problem}; restart it")

    def _write(self, row: _Row, choice: Choice) -> FinishReason | None:
        """Up to the token that ends the completion."""
        output, i, stops = row.group.output, row.index, self.table.stops(row.group.request.stop)
        for token, drawn in zip(choice.token_ids, choice.logprobs.content, strict=True):
            at = int(output.lengths[i])
            output.tokens[i, at], output.logprobs[i, at], output.versions[i, at] = token, drawn.logprob, row.version
            output.lengths[i] = at + 1
            if reason := self.table.reason(output.tokens[i, : at + 1], stops):
                return reason
            if at + 1 == row.group.limit:
                return FinishReason.LENGTH
        return None

    def _check_finished(self, row: _Row, reason: FinishReason | None, choice: Choice) -> None:
        """The server's own account of a finished completion must agree with what was written."""
        written = row.group.output.versions[row.index, row.first : row.group.output.lengths[row.index]].tolist()
        told = [span.version for span in choice.weight_versions or () for _ in range(span.start, span.end)]
        if reason is None or told[: len(written)] != [str(version) for version in written]:
            self._break(
                f"completion {row.index} of group {row.group.request.key} finished in the server "
                f"({choice.finish_reason}, weight versions {told}) but not here ({reason}, {written})"
            )
