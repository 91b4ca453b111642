"""Opens vLLM's engine inside this process, quickly and without meaningful weights, and closes it.
Sets the environment variables that vLLM reads when it is imported, so the process should be the engine's own. Says what an
installed vLLM lacks before anything is built. Knows no requests.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from dockyard_actors.engines.base import EngineError
from dockyard_actors.engines.choose import HEAD_FACTS, VERSIONS, head_size, installed_vllm
from dockyard_actors.transport.weights_shm import WeightRef

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine, scheduler and worker in this process: updates happen between steps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that CPUs have too
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a thread pinned to a core fights whoever else runs there
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled: 3 s to start, not 20
    "HF_HUB_OFFLINE": "1",  # only a directory written here is read
}
DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}  # whoever set it keeps it
CPU_BLOCK_TOKENS = 32  # the least its CPU attention takes; the default of 128 would share no prompt of ordinary length
CPU_BATCH_TOKENS = 4096  # prefilled in one step, at least; longer prompts widen it
TAILS = "dockyard_actors.engines.vllm_tails"
TRANSFER = "dockyard_actors.engines.vllm_transfer"
EXTENSION = f"{TRANSFER}.TransferExtension"
BACKEND = "dockyard_shm"  # what vLLM knows this package's weight transfer by


def open_engine(
    structure: PretrainedConfig,
    *,
    dtype: str,
    rows: int,
    kv_cache_bytes: int,
    max_model_len: int | None,
    threads: int,
    scratch: str | None = None,
    sleeps: bool = False,
) -> Any:
    """vLLM's LLMEngine for a model of this structure, with random weights.

    rows: requests that run at once. scratch: existing directory for files that only a killed process leaves behind; None: the
    system's. sleeps: a CUDA device's memory can be given back. Raises EngineError when vLLM is missing, unsupported, does not
    start or cannot run the model.
    """
    text = structure.get_text_config()
    found, problem = installed_vllm(head_size({name: getattr(text, name, None) for name in HEAD_FACTS}))
    if problem is not None:
        raise EngineError(f"the vllm engine cannot start: {problem}")
    os.environ.update(ENVIRONMENT)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in DEFAULTS.items():
        os.environ[name] = os.environ.get(name) or value  # an empty one counts as unset
    torch.set_num_threads(threads)
    set_num_threads, environment = torch.set_num_threads, dict(os.environ)
    try:
        with _temporary_files_in(scratch), tempfile.TemporaryDirectory(prefix="vllm-model-") as directory:
            write_config(structure, Path(directory))
            longest = max_model_len or getattr(text, "max_position_embeddings", None) or 0
            return _open(found, directory, dtype, rows, kv_cache_bytes, max_model_len, longest, sleeps)
    except EngineError:
        raise
    except Exception as error:  # of many kinds, and all of them mean that there is no engine
        about_model = getattr(error, "title", "") == "ModelConfig"  # pydantic's name for what it refused
        problem = "cannot run this model" if about_model else "could not start"
        raise EngineError(f"{found} {problem}: {_with_causes(error)}") from error
    finally:
        torch.set_num_threads = set_num_threads  # vLLM puts one there that only warns
        os.environ.clear()  # and preloads libraries into every child of this process
        os.environ.update(environment)


@contextmanager
def _temporary_files_in(directory: str | None) -> Iterator[None]:
    """Inside, new temporary files of this process and its children go to `directory`. open_engine restores TMPDIR."""
    before = tempfile.tempdir
    if directory is not None:
        tempfile.tempdir = os.environ["TMPDIR"] = directory
    try:
        yield
    finally:
        tempfile.tempdir = before


def _with_causes(error: BaseException) -> str:
    told = f"{type(error).__name__}: {error}"
    return told if error.__cause__ is None else f"{told}; caused by {_with_causes(error.__cause__)}"


def close_engine(llm: Any) -> None:
    """Frees the model, its cache and vLLM's process group, so that this process may open another engine."""
    llm.engine_core.shutdown()


def sleep(llm: Any) -> None:
    """Frees keys, values and weights. Nothing may be running or cached."""
    if _on_cpu():
        llm.collective_rpc("dockyard_sleep")
    else:
        llm.sleep(level=2)


def wake_up(llm: Any) -> None:
    """Memory again; what is in the weights means nothing until they are loaded."""
    if _on_cpu():
        llm.collective_rpc("dockyard_wake")
    else:
        llm.wake_up()


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return current_platform.is_cpu()


def longest_completion(llm: Any) -> int:
    """Most tokens that a request may have, its prompt included: a longer one would wait for room in the cache for ever."""
    cache = llm.vllm_config.cache_config
    held = (cache.num_gpu_blocks - 1) * cache.block_size  # one block stands for 'none'
    return int(min(llm.model_config.max_model_len, held))


@contextmanager
def alone(llm: Any) -> Iterator[Callable[[], None]]:
    """Inside, vLLM schedules only requests that are added inside; the others keep their keys and their order. Yields what takes
    the keys from the one that would wait longest, for a step that found no room: it computes them anew, as after any preemption.
    """
    scheduler = _scheduler(llm)
    running, waiting = scheduler.running, scheduler.waiting
    scheduler.running, scheduler.waiting = [], type(waiting)()

    def make_room() -> None:
        if scheduler.running:  # a long prompt is being computed in parts
            return
        victim = running.pop()
        scheduler._preempt_request(victim, time.monotonic(), drop_stale_output=True)
        scheduler.waiting.remove_request(victim)
        waiting.prepend_request(victim)

    try:
        yield make_room
    finally:
        scheduler.running, scheduler.waiting = running, waiting


def _scheduler(llm: Any) -> Any:
    return llm.engine_core.engine_core.scheduler


def ref_info(ref: WeightRef) -> dict[str, Any]:
    """What `update_weights` of vLLM takes for it, in process or over HTTP."""
    return {"ref": msgspec.to_builtins(ref)}


def parameter_shapes(structure: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the Hugging Face model's parameters by name; tied ones appear once. Allocates nothing."""
    return {name: tuple(parameter.shape) for name, parameter in _skeleton(structure).named_parameters()}


def _skeleton(structure: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(structure)


def write_config(structure: PretrainedConfig, directory: Path) -> None:
    written = type(structure).from_dict(structure.to_dict())
    written.architectures = [type(_skeleton(structure)).__name__]
    written.save_pretrained(directory)


def _open(
    found: str,
    directory: str,
    dtype: str,
    rows: int,
    kv_cache_bytes: int,
    max_model_len: int | None,
    longest: int,
    sleeps: bool,
) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig  # pyright: ignore[reportMissingImports]
    from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    _check_features(found, LLMEngine)
    if parallel_state.model_parallel_is_initialized():
        raise EngineError("this process already has a vLLM engine; close it first")
    arguments: dict[str, Any] = {
        "model": directory,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": -1 if max_model_len is None else max_model_len,  # -1: what the cache holds
        "max_num_seqs": rows,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        arguments |= _for_cpu(longest)
    elif sleeps:
        arguments["enable_sleep_mode"] = True
    try:
        llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except BaseException:
        parallel_state.cleanup_dist_env_and_memory()
        raise
    try:
        check_scheduler(found, llm)
        if llm.model_config.use_mla:
            raise EngineError("models with latent attention keep derived weights, which cannot be updated in place")
        llm.collective_rpc("dockyard_prepare")
    except BaseException:
        close_engine(llm)
        raise
    return llm


def _for_cpu(longest: int) -> dict[str, Any]:
    from vllm.config import KVTransferConfig  # pyright: ignore[reportMissingImports]

    return {
        "block_size": CPU_BLOCK_TOKENS,
        "enable_chunked_prefill": False,  # see TailConnector
        "max_num_batched_tokens": max(CPU_BATCH_TOKENS, longest),
        "disable_hybrid_kv_cache_manager": True,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="TailConnector", kv_connector_module_path=TAILS, kv_role="kv_consumer"
        ),
    }


def _check_features(found: str, engine: Any) -> None:
    from vllm.outputs import CompletionOutput  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]

    present = {
        "LLMEngine.set_weight_version": hasattr(engine, "set_weight_version"),
        "CompletionOutput.weight_versions": "weight_versions" in {f.name for f in dataclasses.fields(CompletionOutput)},
        "reset_prefix_cache(reset_running_requests=…)": "reset_running_requests"
        in inspect.signature(engine.reset_prefix_cache).parameters,
        "SamplingParams(skip_reading_prefix_cache=…)": "skip_reading_prefix_cache"
        in inspect.signature(SamplingParams).parameters,
    }
    _need(found, present)


def check_scheduler(found: str, llm: Any) -> None:
    """What `alone` takes hold of."""
    scheduler = getattr(getattr(getattr(llm, "engine_core", None), "engine_core", None), "scheduler", None)
    present = {f"Scheduler.{name}": hasattr(scheduler, name) for name in ("running", "waiting", "_preempt_request")}
    queue = getattr(scheduler, "waiting", None)
    present |= {f"RequestQueue.{name}": hasattr(queue, name) for name in ("prepend_request", "remove_request")}
    _need(found, present)


def _need(found: str, present: dict[str, bool]) -> None:
    lacking = [name for name, there in present.items() if not there]
    if lacking:
        raise EngineError(f"{found} lacks {', '.join(lacking)}; {VERSIONS} is needed")
