"""The sections of the configuration tree, one class each: every key with its default, its unit and its bounds.

What combinations make sense is `config.py`'s to say. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    """What this run is and where it goes."""

    name: str = "run"
    dir: str | None = None  # run directory; default runs/<time>-<name>
    seed: int = Field(default=0, ge=0, lt=2**63)


class TasksConfig(Section):
    """Which prompts to train and evaluate on."""

    path: str = "functions"  # a shipped set (functions, repair) or a JSONL file


class GrpoConfig(Section):
    """The shape of the loop."""

    mode: Literal["sync", "async"] = "async"
    max_num_steps: int = Field(default=100, ge=0)
    num_prompts_per_step: int = Field(default=12, ge=1)
    num_generations_per_prompt: int = Field(default=8, ge=2)


class AsyncConfig(Section):
    """How old data may be. Age of a group = trainer version - oldest token version, enforced when a batch is taken."""

    max_trajectory_age_steps: int = Field(default=1, ge=0)


class GenerationConfig(Section):
    """Sampling. The trainer applies the same temperature, so that ratios compare like with like."""

    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=24, ge=1)
    # auto: vllm where it is installed and fits the model, else hf. vllm-http: a vLLM server of its own on this host, at `url`.
    engine: Literal["auto", "vllm", "hf", "vllm-http"] = "auto"
    url: str = ""  # of the server, http://HOST:PORT or unix:/PATH; only with vllm-http
    api_key_file: str = ""  # holds the server's key; empty: VLLM_API_KEY of the environment, if any
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_batch_rows: int = Field(default=128, ge=1)  # sequences decoded together
    kv_cache_mib: int = Field(default=512, ge=1)  # keys and values of the vllm engine; work that does not fit waits
    threads: int = Field(default=1, ge=1)


class RewardConfig(Section):
    """1 when every test passes, else `partial` times the share of tests that pass."""

    partial: float = Field(default=0.3, ge=0, le=1)


class WarmupConfig(Section):
    """Supervised warm-up from scratch, for models that start with random weights (tiny)."""

    steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=32, ge=1)
    lr: float = Field(default=3e-3, gt=0)
    threads: int = Field(default=1, ge=1)  # a second one gains a tiny model nothing and loses much on shared cores


class EvalConfig(Section):
    """Pass rates on pinned weights: before and after training by the rollouts, in between by an evaluator with an engine of its own."""

    before: bool = True
    after: bool = True
    every: int = Field(default=0, ge=0)  # steps, while training goes on; 0 = only before and after
    train_tasks: int = Field(default=64, ge=0)  # a fixed, seeded choice of training tasks
    heldout_tasks: int = Field(default=1000, ge=0)  # at most; all by default
    samples: int = Field(default=4, ge=1)  # at T=1, for each task
    timeout_s: float = Field(
        default=900.0, gt=0
    )  # one evaluation of one split; generous: it shares cores with everything else


class CheckpointConfig(Section):
    """Where a killed trainer resumes from."""

    every: int = Field(default=25, ge=1)  # steps
    keep: int = Field(default=2, ge=1)  # newest checkpoints kept; the last one of a run always stays


class RolloutConfig(Section):
    count: int = Field(default=1, ge=1)  # rollout processes
    groups_per_batch: int = Field(default=0, ge=0)  # most groups leased at once; 0 = num_prompts_per_step / count


class GroupConfig(Section):
    """One prompt and its G samples."""

    deadline_s: float = Field(
        default=300.0, gt=0
    )  # of generation, then again of scoring and push; late samples are cut
    min_size: int = Field(
        default=2, ge=2
    )  # scored samples below which a group is failed and its prompt tried once more
    max_attempts: int = Field(default=3, ge=1)  # times a lease is handed out before its prompt is quarantined


class SandboxConfig(Section):
    """Where programs run. A host that cannot isolate refuses unless allow_weak, which every summary then shows."""

    workers: int = Field(default=2, ge=1)
    timeout_s: float = Field(default=4.0, gt=0)  # wall time of one program
    memory_mib: int = Field(default=256, ge=32)
    allow_weak: bool = False
    start_timeout_s: float = Field(default=60.0, gt=0)
    score_timeout_s: float = Field(default=120.0, gt=0)  # a group's programs, queueing included


class DataPlaneConfig(Section):
    """Shared slabs for rollout tensors, and how they travel to other hosts."""

    # auto: UCX where both hosts have it, else TCP, and the log says why. none: the memory of one process, shared with nobody.
    backend: Literal["auto", "ucx", "tcp", "none"] = "auto"
    block_bytes: int = Field(default=256 << 10, ge=4096)  # one group
    blocks: int = Field(default=256, ge=4)
    alloc_timeout_s: float = Field(default=600.0, gt=0)  # a full arena is backpressure: the trainer is behind
    fetch_timeout_s: float = Field(
        default=120.0, gt=0
    )  # a batch from other hosts; what does not come is lost: re-issued


class WeightSyncConfig(Section):
    """How new weights reach engines that generate."""

    # How they travel: shm (one host), collective (Gloo, to any host, from the parameters as they are), auto: by where each engine is.
    transport: Literal["auto", "shm", "collective"] = "auto"
    # Trainer and engine share one device: the engine sleeps while the trainer steps, the optimizer's moments are put away while it generates.
    # Only in sync mode, where one waits for the other anyway.
    colocated: bool = False
    bucket_mib: int = Field(default=16, ge=1)  # collective: sent in pieces of this size, two of which each side holds
    timeout_s: float = Field(default=300.0, gt=0)  # a dead engine restarts and pulls meanwhile
    dtype: Literal["float32", "bfloat16"] = "float32"
    # What runs when new weights come: keep (goes on under the new weights), wait (ends first), abort (is cut, then resumed).
    pause: Literal["keep", "wait", "abort"] = "keep"
    recompute_kv_cache: bool = True  # false: new weights on old keys and values, whose logprobs no trainer reproduces
    canary: bool = True  # one fixed sequence must score alike in trainer and engine before decoding goes on
    canary_limit: float | None = Field(
        default=None, gt=0
    )  # mean |Δ log p| in nats; default 1e-3 in float32, 0.2 in bfloat16


class SupervisionConfig(Section):
    """Restarts within a window; beyond them the run stops with the first cause."""

    max_restarts: int = Field(default=5, ge=0)
    window_s: float = Field(default=1800.0, gt=0)  # long enough that a role that fails slowly is found out too
    stall_s: float = Field(default=1800.0, gt=0)  # training without a finished step for this long ends the run
    backoff_s: float = Field(default=0.2, gt=0)
    backoff_max_s: float = Field(default=5.0, gt=0)
    hang_s: float = Field(
        default=10.0, gt=0
    )  # a loop that answers no ping for this long is killed; two busy cores need slack
    start_timeout_s: float = Field(default=180.0, gt=0)  # a cold import of torch and a model load
    stop_grace_s: float = Field(default=10.0, gt=0)
    drain_s: float = Field(default=120.0, gt=0)  # Ctrl-C: the step under way ends, then a checkpoint


class RendezvousConfig(Section):
    """How processes of one run find each other."""

    ask_timeout_s: float = Field(default=30.0, gt=0)  # a control message between roles


class ObserveConfig(Section):
    rollouts_per_step: int = Field(default=4, ge=0)  # readable samples kept of each step
    refresh_s: float = Field(default=1.0, gt=0)  # live view
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
