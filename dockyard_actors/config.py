"""The one configuration tree: YAML file, then `DOCKYARD_*` environment, then `key=value` overrides, validated whole before any model loads.

Promises that an error names the key, the value, why, and the nearest valid key; and that combinations that would train wrongly are
refused with the reason. Imports no torch, so that `check` and the light roles stay quick.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dockyard_actors.algorithms.types import AdvantageConfig, CorrectionConfig, LossConfig, validate
from dockyard_actors.policy.types import ModelConfig, OptimizerConfig, PolicyConfig
from dockyard_actors.settings import (
    AsyncConfig,
    CheckpointConfig,
    DataPlaneConfig,
    EvalConfig,
    GenerationConfig,
    GroupConfig,
    GrpoConfig,
    ObserveConfig,
    RendezvousConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    SupervisionConfig,
    TasksConfig,
    WarmupConfig,
    WeightSyncConfig,
)

ENV_PREFIX = "DOCKYARD_"
# Environment names of ours that are no configuration keys.
ENV_RESERVED = {"DOCKYARD_PROCESS", "DOCKYARD_CACHE", "DOCKYARD_LOG"}


class ConfigError(ValueError):
    """The configuration cannot be used. The message lists every problem, one a line."""


class Config(BaseSettings):
    """The whole tree. Every key can be set as DOCKYARD_SECTION__KEY or as section.key=value."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    run: RunConfig = RunConfig()
    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: TasksConfig = TasksConfig()
    grpo: GrpoConfig = GrpoConfig()
    async_grpo: AsyncConfig = AsyncConfig()
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    warmup: WarmupConfig = WarmupConfig()
    generation: GenerationConfig = GenerationConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rollout: RolloutConfig = RolloutConfig()
    group: GroupConfig = GroupConfig()
    sandbox: SandboxConfig = SandboxConfig()
    data_plane: DataPlaneConfig = DataPlaneConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def max_age(self) -> int:
        """Steps a group may lag behind the trainer: 0 in sync mode."""
        return self.async_grpo.max_trajectory_age_steps if self.grpo.mode == "async" else 0

    @property
    def groups_per_batch(self) -> int:
        asked = self.rollout.groups_per_batch
        return asked or max(1, -(-self.grpo.num_prompts_per_step // self.rollout.count))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def load_config(path: Path | None, overrides: list[str] | None = None, environ: dict[str, str] | None = None) -> Config:
    """Reads and validates everything. Raises ConfigError listing every problem with its source, value and remedy."""
    problems: list[str] = []
    tree: dict[str, Any] = {}
    if path is not None:
        _merge(tree, _read_yaml(path), str(path), problems)
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX) and name not in ENV_RESERVED:
            keys = name[len(ENV_PREFIX) :].lower().split("__")
            _merge(tree, _nest(keys, _scalar(value)), f"environment {name}", problems)
    for item in overrides or []:
        key, sep, value = item.partition("=")
        if not sep or not key:
            problems.append(f"override {item!r}: not of the form section.key=value")
            continue
        _merge(tree, _nest(key.split("."), _scalar(value)), f"override {key}", problems)
    if problems:
        raise ConfigError("\n".join(problems))
    optimizer = tree.get("optimizer", {})
    if optimizer.get("schedule", "constant") != "constant" and optimizer.get("total_steps") is None:
        steps = tree.get("grpo", {}).get("max_num_steps", GrpoConfig().max_num_steps)
        if isinstance(steps, int) and steps > 0:
            optimizer["total_steps"] = steps  # a schedule ends with the run unless it says otherwise
            warmup = optimizer.get("warmup_steps", OptimizerConfig().warmup_steps)
            optimizer["warmup_steps"] = min(warmup, steps - 1) if isinstance(warmup, int) else warmup
        else:
            optimizer["schedule"] = "constant"  # no step will be taken
    try:
        config = Config(**tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None
    problems = refusals(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def from_resolved(text: str) -> Config:
    """Reads back what `resolved` wrote: complete, so neither environment nor defaults can change it. Raises ConfigError."""
    try:
        return Config(**yaml.safe_load(text))
    except ValidationError as error:
        problems = "\n".join(_explain(e) for e in error.errors())
        raise ConfigError(f"config.resolved.yaml was damaged or written by another version:\n{problems}") from None
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"config.resolved.yaml is damaged: {error}") from None


def resolved(config: Config) -> str:
    """The whole tree as YAML, every default spelt out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def refusals(config: Config) -> list[str]:
    """Combinations that would train wrongly or cannot run, each with the reason and the way out."""
    found = list(
        validate(
            config.advantage, config.loss, config.correction, config.grpo.mode, config.grpo.num_generations_per_prompt
        )
    )
    if config.grpo.mode == "async" and config.max_age == 0:
        found.append(
            "async_grpo.max_trajectory_age_steps: 0 in async mode leaves nothing to overlap; use grpo.mode: sync, or 1 or more"
        )
    if config.group.min_size > config.grpo.num_generations_per_prompt:
        found.append(
            f"group.min_size: {config.group.min_size} is more than grpo.num_generations_per_prompt "
            f"({config.grpo.num_generations_per_prompt}): no group could ever be complete"
        )
    slowest = (config.supervision.max_restarts + 1) * config.supervision.start_timeout_s
    if config.supervision.window_s < slowest:
        found.append(
            f"supervision.window_s: {config.supervision.window_s:.0f} s is shorter than max_restarts + 1 starts of "
            f"start_timeout_s ({slowest:.0f} s): a role that never comes up would be restarted for ever; raise it, or lower the others"
        )
    open_groups = (config.max_age + 1) * config.grpo.num_prompts_per_step
    if config.data_plane.blocks < open_groups + config.groups_per_batch:
        found.append(
            f"data_plane.blocks: {config.data_plane.blocks} cannot hold the {open_groups} groups that may be open at once "
            f"and a batch of {config.groups_per_batch} under way; raise it to {open_groups + config.groups_per_batch} or more"
        )
    if config.data_plane.backend == "none":
        found.append(
            "data_plane.backend: 'none' keeps tensors in the memory of one process, and every role is a process of its own; "
            "use 'auto': roles of one host share memory without a copy"
        )
    tokens = config.grpo.num_generations_per_prompt * config.generation.max_new_tokens
    if tokens * 16 > config.data_plane.block_bytes:
        found.append(
            f"data_plane.block_bytes: {config.data_plane.block_bytes} is too small for a group of {tokens} tokens; "
            f"raise it to {1 << (tokens * 24).bit_length()}"
        )
    if config.weight_sync.pause == "wait" and config.weight_sync.timeout_s <= config.group.deadline_s:
        found.append(
            f"weight_sync.timeout_s: {config.weight_sync.timeout_s:g} s with weight_sync.pause 'wait' must be above group.deadline_s "
            f"({config.group.deadline_s:g} s): an engine with one slow group would be restarted with all its groups; "
            f"set weight_sync.timeout_s={config.group.deadline_s + 60:g} or a smaller group.deadline_s"
        )
    found += _refused_servers(config)
    if config.weight_sync.colocated:
        found += _colocation_refusals(config)
    if config.warmup.steps and config.model.source != "tiny":
        found.append(
            f"warmup.steps: {config.warmup.steps} with model.source {config.model.source!r}: the warm-up corpus is written in the "
            "tiny repair language; set warmup.steps=0"
        )
    return found


def _colocation_refusals(config: Config) -> list[str]:
    why = "weight_sync.colocated: true gives one device to the trainer and to the engine in turn"
    found = []
    if config.max_age > 0:
        found.append(f"{why}, and grpo.mode 'async' wants both at once; set grpo.mode=sync")
    if config.rollout.count > 1:
        found.append(
            f"{why}, where rollout.count {config.rollout.count} would hold weights and keys as often; set rollout.count=1"
        )
    if config.eval.every:
        found.append(
            f"{why}, and eval.every: {config.eval.every} would keep an evaluator's engine there while the trainer steps; "
            "set eval.every=0 (before and after training the rollout evaluates)"
        )
    if config.weight_sync.transport == "collective":
        found.append(f"{why} on one host, where nothing has to be sent; set weight_sync.transport=auto")
    return found


def _refused_servers(config: Config) -> list[str]:
    generation, found = config.generation, []
    if generation.engine != "vllm-http":
        if generation.url or generation.api_key_file:
            found.append(
                f"generation.url: {generation.url!r} is for generation.engine 'vllm-http', which is {generation.engine!r}: leave it out"
            )
        return found
    if not re.match(r"(https?://|unix:/)[^/]", generation.url):
        found.append(
            f"generation.url: {generation.url!r} is neither http://HOST:PORT nor unix:/PATH of the server that generation.engine "
            "'vllm-http' is to use"
        )
    if not config.weight_sync.recompute_kv_cache:
        found.append(
            "weight_sync.recompute_kv_cache: false with generation.engine 'vllm-http', whose keys are always computed anew; set it to true"
        )
    if config.weight_sync.colocated:
        found.append(
            "weight_sync.colocated: true with generation.engine 'vllm-http': a server of its own keeps its memory; set it to false"
        )
    if config.rollout.count > 1 or config.eval.every:
        found.append(
            "generation.engine: 'vllm-http' is one server and serves one engine: set rollout.count=1 and eval.every=0, "
            "or use vllm, which gives each process an engine of its own"
        )
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
            if path.parent.is_dir()
            else []
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level must be sections such as `grpo:`, found {type(data).__name__}")
    return data


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _fields(kind: Any) -> dict[str, Any] | None:
    """Key → type of a section, or None when `kind` is a plain value."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return dict(typing.get_type_hints(kind))
    return None


def _all_keys(kind: Any, prefix: str = "") -> list[str]:
    fields = _fields(kind)
    if fields is None:
        return [prefix]
    return [key for name, inner in fields.items() for key in _all_keys(inner, f"{prefix}.{name}" if prefix else name)]


def _merge(
    into: dict[str, Any], new: dict[str, Any], source: str, problems: list[str], kind: Any = Config, at: str = ""
) -> None:
    """Deep-merges `new` into `into`, refusing keys that do not exist and naming the nearest one that does."""
    fields = _fields(kind) or {}
    for name, value in new.items():
        key = f"{at}.{name}" if at else str(name)
        if name not in fields:
            near = difflib.get_close_matches(str(name), list(fields), 1, 0.6)
            anywhere = [k for k in _all_keys(Config) if k.rsplit(".", 1)[-1] == name] or difflib.get_close_matches(
                key, _all_keys(Config), 1, 0.6
            )
            nearest = (f"{at}.{near[0]}" if at else near[0]) if near else anywhere[0] if anywhere else None
            valid = f"valid here: {', '.join(fields)}"
            hint = (
                f"; did you mean {nearest}? ({valid})"
                if nearest and at
                else f"; did you mean {nearest}?"
                if nearest
                else f"; {valid}"
            )
            problems.append(f"{source}: unknown key {key} (value {value!r}){hint}")
        elif _fields(fields[name]) is None:
            into[name] = value
        elif value is None:
            continue
        elif not isinstance(value, dict):
            problems.append(
                f"{source}: {key} is a section, not a value; got {value!r}; valid here: {', '.join(_fields(fields[name]) or ())}"
            )
        else:
            _merge(into.setdefault(name, {}), value, source, problems, fields[name], key)


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"] if not isinstance(part, types.GenericAlias))
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]} (value {error.get('input')!r})"
