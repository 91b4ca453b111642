"""What a configuration would start: engine, processes, memory, transports. Loads no model and imports no torch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import psutil

from dockyard_actors.config import Config, ConfigError
from dockyard_actors.engines.base import EngineError
from dockyard_actors.engines.choose import choose_engine, head_size
from dockyard_actors.tasks.types import TaskSet
from dockyard_actors.transport.pull import NoBackend, choose_backend

MIB = 1 << 20
# Resident memory measured on the development machine: interpreter with the role's imports, model not counted.
BASE_MIB = {"controller": 90, "buffer": 60, "broker": 60, "executor": 60, "trainer": 420, "agent": 80}
ENGINE_MIB = {"hf": 420, "vllm": 1700, "auto": 1700, "vllm-http": 420}  # the server itself is somebody else's
KNOWN_HEADS = {"smollm2-135m": 64, "tiny": 32}
PARAMETERS = {"smollm2-135m": 134_515_008, "tiny": 230_000}
# Measured peak of a training step with SmolLM2-135M: 1.6 MiB a packed token; taken as proportional to the parameters.
ACTIVATION_BYTES = 1.6 * MIB / PARAMETERS["smollm2-135m"]
BYTES = {"float32": 4, "bfloat16": 2}


def parameters(source: str) -> int | None:
    """Parameter count of a known model, or an estimate from the size of a model directory's weight files; None when unknown."""
    if source in PARAMETERS:
        return PARAMETERS[source]
    files = list(Path(source).glob("*.safetensors")) if Path(source).is_dir() else []
    return sum(file.stat().st_size for file in files) // 2 if files else None


def heads_of(source: str) -> int | None:
    """Size of an attention head of a known model or of a model directory; None when its config.json cannot say."""
    if source in KNOWN_HEADS:
        return KNOWN_HEADS[source]
    try:
        return head_size(json.loads((Path(source) / "config.json").read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def with_engine(config: Config) -> tuple[Config, str]:
    """The configuration with generation.engine decided, and why. Raises ConfigError when the engine that is asked for cannot be had."""
    if config.generation.engine == "vllm-http":
        return config, f"asked for: the vLLM server at {config.generation.url}"
    try:
        kind, why = choose_engine(config.generation.engine, heads_of(config.model.source))
    except (EngineError, ValueError) as error:
        raise ConfigError(str(error)) from None  # it names the key
    return config.model_copy(update={"generation": config.generation.model_copy(update={"engine": kind})}), why


def plan(config: Config, tasks: TaskSet) -> dict[str, Any]:
    """The plan as plain data; `problems` lists what this machine lacks for it."""
    n = parameters(config.model.source)
    arena = config.data_plane.blocks * config.data_plane.block_bytes
    slots = 2 if config.weight_sync.transport != "collective" or config.eval.every else 0
    weights = slots * n * BYTES[config.weight_sync.dtype] if n else None
    processes: list[dict[str, Any]] = [
        {
            "name": "agent",
            "what": "parent of all roles, registry, holder of shared memory",
            "memory_mib": BASE_MIB["agent"],
        },
        {"name": "controller", "what": "ledger, staleness budget, metrics", "memory_mib": BASE_MIB["controller"]},
        {"name": "buffer", "what": "finished groups", "memory_mib": BASE_MIB["buffer"]},
        {"name": "broker", "what": "verdicts, parent of the executor", "memory_mib": BASE_MIB["broker"]},
        {
            "name": "executor",
            "what": f"{config.sandbox.workers} sandbox workers, {config.sandbox.memory_mib} MiB a program",
            "memory_mib": BASE_MIB["executor"] + config.sandbox.workers * config.sandbox.memory_mib,
        },
        {
            "name": "trainer",
            "what": f"{config.model.source}, fp32 weights, gradient and Adam state, {config.policy.threads} threads",
            "memory_mib": BASE_MIB["trainer"]
            + (int(n * (16 + config.policy.micro_batch_tokens * ACTIVATION_BYTES)) // MIB if n else 0),
        },
    ]
    colocated = config.weight_sync.colocated
    stepping = (
        int(n * (12 + config.policy.micro_batch_tokens * ACTIVATION_BYTES)) // MIB if n else 0
    )  # all but the weights
    generating = 0
    engines = [f"rollout-{index}" for index in range(config.rollout.count)]
    generation = config.generation
    for name in [*engines, *(["evaluator"] if config.eval.every else [])]:
        vllm = generation.engine in ("vllm", "auto")
        cache, copies = (
            (generation.kv_cache_mib, 2) if vllm else (0, 1)
        )  # vllm packs the weights for the CPU beside them
        held = cache + (copies * n * BYTES[generation.dtype] // MIB if n else 0)
        generating += held
        asleep = ", asleep while the trainer steps" if colocated else ""
        processes.append(
            {
                "name": name,
                "what": f"{generation.engine} engine, {generation.dtype}, {generation.threads} threads{asleep}",
                "memory_mib": ENGINE_MIB[generation.engine] + held,
            }
        )
    turns = min(stepping, generating) if colocated else 0  # the one who has not the device holds none of it
    total = sum(p["memory_mib"] for p in processes) + (arena * config.rollout.count + (weights or 0)) // MIB - turns
    problems: list[str] = []
    available = psutil.virtual_memory().available // MIB
    if total > available:
        problems.append(f"memory: about {total} MiB are needed, {available} MiB are available")
    if n is None:
        problems.append(
            f"model.source: {config.model.source!r} is neither smollm2-135m, nor tiny, nor a directory with *.safetensors files"
        )
    between = ""
    if config.data_plane.backend != "none":
        try:
            choice = choose_backend(config.data_plane.backend)
            between = f"; between hosts by {choice.backend} ({choice.why})"
        except NoBackend as error:
            problems.append(str(error))
    free = shutil.disk_usage(os.getcwd()).free // MIB
    checkpoint = 12 * n // MIB if n else 0
    if checkpoint * (config.checkpoint.keep + 1) > free:
        problems.append(f"disk: {config.checkpoint.keep + 1} checkpoints of {checkpoint} MiB do not fit in {free} MiB")
    return {
        "mode": config.grpo.mode,
        "steps": config.grpo.max_num_steps,
        "groups_per_step": config.grpo.num_prompts_per_step,
        "samples_per_group": config.grpo.num_generations_per_prompt,
        "max_age": config.max_age,
        "correction": config.correction.kind if config.loss.kind != "m2po" else "m2po",
        "tasks": {
            "source": tasks.source,
            "train": len(tasks.train),
            "heldout": len(tasks.heldout),
            "sha": tasks.sha[:12],
        },
        "notes": list(tasks.notes),
        "processes": processes,
        "memory_mib": {
            "total": total,
            "available": available,
            "slabs": arena * config.rollout.count // MIB,
            "weights": (weights or 0) // MIB,
            "colocated": turns,
        },
        "transports": {
            "control": "zmq over ipc",
            "data": f"memfd slab, {config.data_plane.blocks} blocks of {config.data_plane.block_bytes // 1024} KiB a rollout{between}",
            "weights": _weights_way(config),
        },
        "checkpoint_mib": checkpoint,
        "cores": os.cpu_count(),
        "problems": problems,
    }


def _weights_way(config: Config) -> str:
    """How weights will travel in a run that is started here as a whole. Roles that join from other hosts are sent theirs."""
    sync = config.weight_sync
    if sync.transport == "collective":
        return (
            f"sent from the live parameters to all engines at once (Gloo, {sync.dtype}, two buckets of {sync.bucket_mib} MiB a side), "
            "because weight_sync.transport says so"
        )
    why = "weight_sync.transport says so" if sync.transport == "shm" else "trainer and engines share this host"
    return f"shared memory, two slots of {sync.dtype}, because {why}"


def _colocated(report: dict[str, Any]) -> str:
    saved = report["memory_mib"]["colocated"]
    return f"colocated, trainer and engine by turns ({saved} MiB less than both at once), " if saved else ""


def render_plan(report: dict[str, Any]) -> str:
    lines = [
        f"{report['mode']}: {report['steps']} steps of {report['groups_per_step']} prompts × {report['samples_per_group']} samples, "
        f"age at most {report['max_age']}, correction {report['correction']}",
        f"tasks: {report['tasks']['source']}, {report['tasks']['train']} train, {report['tasks']['heldout']} held out",
        *(f"note: {note}" for note in report["notes"]),
        *([f"engine: {report['engine']}, because {report['engine_reason']}"] if "engine" in report else []),
        "processes:",
        *(f"  {p['name']:12} ~{p['memory_mib']:6} MiB  {p['what']}" for p in report["processes"]),
        "transports:",
        *(f"  {name:12} {what}" for name, what in report["transports"].items()),
        f"memory: {_colocated(report)}about {report['memory_mib']['total']} MiB of {report['memory_mib']['available']} MiB available; "
        f"a checkpoint takes {report['checkpoint_mib']} MiB; {report['cores']} cores",
        *(f"PROBLEM: {problem}" for problem in report["problems"]),
        "ok" if not report["problems"] else "not ok",
    ]
    return "\n".join(lines)
