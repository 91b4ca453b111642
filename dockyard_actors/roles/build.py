"""Puts roles together from the configuration: which class gets which engine, plane and client. Imports torch only for the roles that compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard_actors.config import Config, ConfigError
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles.hosts import Hosts
from dockyard_actors.roles.messages import RunIs
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.sandbox.child import ExecutorProcess, ExecutorProcessConfig
from dockyard_actors.sandbox.client import ExecutorClient
from dockyard_actors.tasks.dataset import load_tasks
from dockyard_actors.transport.fdclient import FdClient
from dockyard_actors.transport.weights_shm import WeightReader

if TYPE_CHECKING:
    from dockyard_actors.engines.base import Engine
    from dockyard_actors.engines.hf import HFEngine


def make_engine(config: Config, scratch: str | None = None, fd_path: str = "") -> Engine:
    """The engine that generation.engine names; it waits for the trainer's weights. scratch: directory for temporary files, which
    whoever made it removes; None: the system's. fd_path: of the run's shared memory on this host, for an engine that is a server."""
    source, generation = config.model.source, config.generation
    if generation.engine == "hf":
        return make_hf_engine(config, source)
    if generation.engine not in ("vllm", "vllm-http"):
        raise ConfigError(f"generation.engine: {generation.engine!r} is not resolved; `with_engine` comes first")
    from dockyard_actors.engines.vllm import VLLMEngine, VLLMEngineConfig
    from dockyard_actors.policy.model import eos_ids, load_tokenizer, read_config

    def load():
        tokenizer = load_tokenizer(source)
        structure, ending = read_config(source)
        return structure, tokenizer, eos_ids(ending, tokenizer)

    if generation.engine == "vllm-http":
        from dockyard_actors.engines.vllm_client import VLLMHTTPConfig
        from dockyard_actors.engines.vllm_http import VLLMHTTPEngine

        server = VLLMHTTPConfig(
            url=generation.url,
            fd_path=fd_path,
            api_key_file=generation.api_key_file or None,
            max_batch_rows=generation.max_batch_rows,
            connect_s=config.supervision.start_timeout_s,
            update_s=config.weight_sync.timeout_s,
        )
        return VLLMHTTPEngine(load, server)
    settings = VLLMEngineConfig(
        max_batch_rows=generation.max_batch_rows,
        kv_cache_bytes=generation.kv_cache_mib << 20,
        dtype=generation.dtype,
        threads=generation.threads,
        scratch=scratch,
        sleeps=config.weight_sync.colocated,
    )
    return VLLMEngine(load, settings)


def make_hf_engine(config: Config, source: str, own_weights: int | None = None) -> HFEngine:
    """An HF engine for the model at `source`. Without `own_weights` (their version) it waits for the trainer's weights."""
    from dockyard_actors.engines.hf import HFEngine, HFEngineConfig
    from dockyard_actors.policy.model import build_empty, eos_ids, load_model, load_tokenizer

    def load():
        import torch

        torch.set_num_threads(config.generation.threads)
        tokenizer = load_tokenizer(source)
        build = build_empty if own_weights is None else load_model
        model = build(source, dtype=config.generation.dtype)
        return model, tokenizer, eos_ids(model.generation_config, tokenizer)

    return HFEngine(load, HFEngineConfig(max_batch_rows=config.generation.max_batch_rows), version=own_weights)


def make_executor(config: Config, sockets: Path, logs: Path) -> tuple[ExecutorProcess, ExecutorClient]:
    """The child executor on a unix socket in `sockets` (a private directory), and its client."""
    socket = sockets / "executor.sock"
    child = ExecutorProcessConfig(
        socket_path=socket,
        log_path=logs / "executor.log",
        workers=config.sandbox.workers,
        memory_bytes=config.sandbox.memory_mib << 20,
        allow_weak=config.sandbox.allow_weak,
        start_s=config.sandbox.start_timeout_s,
    )
    return ExecutorProcess(child), ExecutorClient(socket_path=socket)


def name_of(role: str, index: int) -> str:
    """Rollouts are numbered; of every other role there is one."""
    return f"{role}-{index}" if role == "rollout" else role


def build_role(role: str, index: int, config: Config, run: RunIs, socket_dir: str, hosts: Hosts) -> Actor:
    """The actor of a role process. Loads no model: that happens in the role's compute thread."""
    run_dir, name = RunDir(run.run_dir), name_of(role, index)
    if role == "buffer":
        from dockyard_actors.roles.buffer import Buffer

        return Buffer(config, hosts.plane(config, name))
    if role == "broker":
        from dockyard_actors.roles.broker import Broker

        executor, client = make_executor(config, Path(socket_dir), run_dir.logs)
        return Broker(config, executor, client)
    tasks = load_tasks(config.tasks.path)
    if role == "controller":
        from dockyard_actors.roles.controller import Controller

        return Controller(config, tasks, run_dir, run.session)
    if role == "rollout":
        from dockyard_actors.roles.rollout import Rollout
        from dockyard_actors.roles.weight_source import WeightSource

        weights = WeightSource(WeightReader(FdClient(run.fd_path)))
        return Rollout(config, tasks, make_engine(config, socket_dir, run.fd_path), hosts.plane(config, name), weights)
    if role == "evaluator":
        from dockyard_actors.roles.evaluator import Evaluator
        from dockyard_actors.roles.weight_source import WeightSource

        return Evaluator(
            config, tasks, make_engine(config, socket_dir), WeightSource(WeightReader(FdClient(run.fd_path)))
        )
    if role == "trainer":
        from dockyard_actors.roles.learner import Learner
        from dockyard_actors.roles.trainer import Trainer

        model = dataclasses.replace(config.model, seed=config.model.seed + config.run.seed)
        learner = Learner(config, model, hosts.plane(config, name, copies=True), run_dir)
        return Trainer(config, tasks, learner, FdClient(run.fd_path), run_dir)
    raise ValueError(f"unknown role {role!r}")
