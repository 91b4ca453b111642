"""Checkpoints: a plain Hugging Face directory with the trainer's state beside it, whole or absent.
Tensors are safetensors, the rest is JSON; nothing is pickled. Written to a temporary directory, synced, renamed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar

from dockyard_actors.runtime.errors import PermanentError

if TYPE_CHECKING:
    from dockyard_actors.policy.policy import Policy

LATEST = "latest"
MODEL, STATE_TENSORS, STATE = "model.safetensors", "trainer_state.safetensors", "trainer_state.json"
FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTERS = ("step", "version", "skipped_steps", "optimizer_steps")


class CheckpointError(PermanentError, RuntimeError):
    """The checkpoint cannot be read or does not fit; names the file and the way out."""


def save(policy: Policy, directory: Path) -> None:
    """Writes `directory` (which must not exist as a checkpoint of another step) and points `latest` beside it at it."""
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    for torn in directory.parent.glob(".*.tmp"):  # left by a killed save
        shutil.rmtree(torn) if torn.is_dir() else torn.unlink()
    scratch = directory.parent / f".{directory.name}.tmp"
    scratch.mkdir()
    try:
        _write(policy, scratch)
        for path in scratch.iterdir():
            _sync(path)
        _sync(scratch)
        old = _set_aside(directory)
        if old.exists():
            shutil.rmtree(old)
        if directory.exists():  # a directory cannot be replaced in one step: `latest` puts it back if we die in between
            os.rename(directory, old)
        os.rename(scratch, directory)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    _point_latest(directory)


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, or None. Raises CheckpointError when `latest` points nowhere."""
    pointer = Path(root) / LATEST
    if not pointer.is_file():
        return None
    target = Path(root) / pointer.read_text().strip()
    if not target.exists() and (old := _set_aside(target)).exists():
        os.rename(old, target)
    if not (target / STATE).is_file():
        raise CheckpointError(
            f"{pointer} names {target.name!r}, which is no checkpoint; remove the pointer or restore it"
        )
    return target


def _set_aside(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.old"


def load(policy: Policy, directory: Path) -> None:
    """Everything is read and compared before the first value changes."""
    directory = Path(directory)
    state = _read_json(directory / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{directory / STATE}: format {state.get('format')!r}, this version reads {FORMAT}")
    if absent := [key for key in COUNTERS if not isinstance(state.get(key), int)]:
        raise CheckpointError(f"{directory / STATE} lacks {', '.join(absent)}; take an earlier checkpoint")
    weights = _read_tensors(directory / MODEL)
    moments = _read_tensors(directory / STATE_TENSORS)
    random_state = moments.pop("rng", None)
    if random_state is None:
        raise CheckpointError(f"{directory / STATE_TENSORS} lacks the random state; take an earlier checkpoint")
    _compare(weights, policy.parameters, directory / MODEL)
    expected = {f"{kind}.{name}": p for name, p in policy.parameters.items() for kind in MOMENTS}
    if state["optimizer_steps"]:
        _compare(moments, expected, directory / STATE_TENSORS)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(weights[name])
    policy.optimizer.state.clear()
    if state["optimizer_steps"]:
        for name, parameter in policy.parameters.items():
            policy.optimizer.state[parameter] = {
                "step": torch.tensor(float(state["optimizer_steps"])),
                **{kind: moments[f"{kind}.{name}"].contiguous() for kind in MOMENTS},
            }
    policy.step, policy.version, policy.skipped_steps = state["step"], state["version"], state["skipped_steps"]
    torch.set_rng_state(random_state)


def _write(policy: Policy, scratch: Path) -> None:
    disable_progress_bar()  # a bar per shard would only garble the trainer's log
    policy.model.save_pretrained(scratch)
    policy.tokenizer.save_pretrained(scratch)
    tensors: dict[str, torch.Tensor] = {"rng": torch.get_rng_state()}
    taken = 0
    for name, parameter in policy.parameters.items():
        moments = policy.optimizer.state.get(parameter)
        if moments:
            taken = int(moments["step"])
            tensors |= {f"{kind}.{name}": moments[kind] for kind in MOMENTS}
    save_file(tensors, scratch / STATE_TENSORS)
    state = {
        "format": FORMAT,
        "step": policy.step,
        "version": policy.version,
        "skipped_steps": policy.skipped_steps,
        "optimizer_steps": taken,
        "temperature": policy.temperature,
        "policy": dataclasses.asdict(policy.config),
        "optimizer": dataclasses.asdict(policy.optimizer_config),
        "torch": torch.__version__,
    }
    (scratch / STATE).write_text(json.dumps(state, indent=2) + "\n")


def _compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], path: Path) -> None:
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    shapes = [n for n in expected.keys() & found.keys() if found[n].shape != expected[n].shape]
    for what, names in (("lacks", missing), ("has unknown", unknown), ("has another shape of", shapes)):
        if names:
            raise CheckpointError(f"{path} {what} {sorted(names)[0]} ({len(names)} in all): it is of another model")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: {path.parent} is no checkpoint of a trainer") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); take an earlier checkpoint") from error


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; take an earlier checkpoint") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); take an earlier checkpoint") from error


def _point_latest(directory: Path) -> None:
    scratch = directory.parent / f".{LATEST}.tmp"
    scratch.write_text(directory.name + "\n")
    _sync(scratch)
    os.replace(scratch, directory.parent / LATEST)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    """Contents of a file, or entries of a directory, reach the disk before what follows."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
