"""What this package adds inside vLLM's worker: its own drawing of tokens.
A completion's randomness comes from (seed, position) as in the Hugging Face engine, so it depends on nothing that shares the
batch and goes on unchanged after an interruption. Knows one worker in this process and no requests beyond the current batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash

from dockyard_actors.engines.base import EngineError
from dockyard_actors.engines.sampling import greedy, sample, uniforms

SEED, PROMPT, FIRST, TEMPERATURE, GREEDY = "seed", "prompt", "first", "temperature", "greedy"
"""Names in `SamplingParams.extra_args`: seed of the completion, tokens of its prompt, tokens it has before the request draws
one, and how to draw."""


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def dockyard_prepare(self) -> None:
        """Replaces the sampler. Raises EngineError when this vLLM would not let weights be loaded in place, or would draw a token before
        it knows the one before."""
        runner = self.model_runner
        if self.vllm_config.scheduler_config.async_scheduling:
            raise EngineError("vLLM schedules ahead of its sampler; start it with --no-async-scheduling")
        missing = [name for name in ("sampler", "input_batch", "requests", "model") if not hasattr(runner, name)]
        if missing:
            raise EngineError(f"vLLM's {type(runner).__name__} has no {', '.join(missing)}; 0.32 or 0.33 is needed")
        packed = [name for name, parameter in runner.model.named_parameters() if not parameter.numel()]
        if packed:
            raise EngineError(f"vLLM keeps {packed[0]} in a packed form here, which cannot be updated in place")
        runner.sampler = RowSampler(runner)

    def dockyard_score_at(self, temperature: float) -> None:
        """Sets the temperature at which given tokens are scored."""
        self.model_runner.sampler.score_temperature = temperature


class RowSampler:
    """Stands in for vLLM's sampler: no filters or penalties, one pass over the logits, the logprob of the drawn token alone.

    Each request says in its `extra_args` how it is drawn. Logprobs are those of the distribution sampled from.
    """

    logprobs_mode = "processed_logprobs"

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.score_temperature = 1.0
        self.forget()

    def forget(self) -> None:
        """Frees the buffer to draw in."""
        self._scratch = torch.empty(0)

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any, **kwargs: Any) -> Any:
        """logits: (B, V), a row for each request of the batch. Returns vLLM's SamplerOutput."""
        from vllm.v1.outputs import SamplerOutput  # pyright: ignore[reportMissingImports]

        requests = [self.runner.requests[name] for name in self.runner.input_batch.req_ids[: len(logits)]]
        ways = [request.sampling_params.extra_args or _usual(request) for request in requests]
        seeds = np.array([way[SEED] for way in ways], dtype=np.uint64)
        positions = np.array([way[FIRST] + len(r.output_token_ids) for way, r in zip(ways, requests, strict=True)])
        kinds: dict[tuple[float, bool], list[int]] = {}
        for row, way in enumerate(ways):
            kinds.setdefault((way[TEMPERATURE], way[GREEDY]), []).append(row)
        wide = self._wide(logits)
        draws = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
        if len(kinds) == 1:
            tokens, logprobs = _draw(wide, *next(iter(kinds)), draws)
        else:
            tokens = torch.empty(len(ways), dtype=torch.int64, device=logits.device)
            logprobs = torch.empty(len(ways), dtype=torch.float32, device=logits.device)
            for kind, rows in kinds.items():
                tokens[rows], logprobs[rows] = _draw(wide[rows], *kind, draws[rows])
        tensors = _logprobs_tensors(tokens, logprobs)
        return SamplerOutput(sampled_token_ids=tensors.logprob_token_ids, logprobs_tensors=tensors)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Called for the logits (T, V) of a prompt that is scored."""
        return torch.log_softmax(logits.float() / self.score_temperature, dim=-1)

    def gather_logprobs(self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        return _logprobs_tensors(token_ids, logprobs.gather(-1, token_ids[:, None])[:, 0])

    def _wide(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in float32, in memory that is kept: fresh pages cost more than the softmax."""
        if self._scratch.shape[:1] < logits.shape[:1] or self._scratch.device != logits.device:
            self._scratch = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        return self._scratch[: len(logits)].copy_(logits)


def _usual(request: Any) -> dict[str, Any]:
    """How to draw for whoever else asks a server, and knows vLLM's own parameters alone."""
    params = request.sampling_params
    seed = xxhash.xxh3_64_intdigest(request.req_id) if params.seed is None else params.seed
    return {SEED: seed, FIRST: 0, TEMPERATURE: params.temperature or 1.0, GREEDY: params.temperature == 0}


def _draw(wide: torch.Tensor, temperature: float, mode: bool, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return greedy(wide, temperature) if mode else sample(wide, temperature, draws)


def _logprobs_tensors(tokens: torch.Tensor, logprobs: torch.Tensor) -> Any:
    from vllm.v1.outputs import LogprobsTensors  # pyright: ignore[reportMissingImports]

    return LogprobsTensors(
        logprob_token_ids=tokens.to(torch.int32)[:, None],
        logprobs=logprobs[:, None],
        selected_token_ranks=torch.zeros_like(tokens, dtype=torch.int32),
    )
