"""Opens a model and its tokenizer from a source name: `smollm2-135m`, `tiny`, or a Hugging Face directory.
Nothing is downloaded; a source that is not here is an error that says what would be. Knows nothing of training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from dockyard_actors.policy.smollm2 import smollm2_directory
from dockyard_actors.policy.tiny import tiny_config, tiny_tokenizer
from dockyard_actors.runtime.errors import PermanentError

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
TINY = "tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Progress = Callable[[str], None]


class ModelSourceError(PermanentError, ValueError):
    """The model source cannot be opened: names the source, the reason and the way out."""


def load_tokenizer(source: str, progress: Progress = logger.info) -> PreTrainedTokenizerBase:
    """The tokenizer of `source`, with pad and eos set. Raises ModelSourceError, WeightsMissing."""
    if source == TINY:
        return tiny_tokenizer()
    directory = _directory(source, progress)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ModelSourceError(f"model source {source!r}: its tokenizer has no eos token, so no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(source: str, dtype: str = "float32", seed: int = 0, progress: Progress = logger.info) -> PreTrainedModel:
    """The model with its weights in `dtype`, in eval mode. `tiny` has none: it is initialised from `seed`.

    Raises ModelSourceError, WeightsMissing.
    """
    if source == TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(tiny_config(), dtype=_dtype(dtype))
        return model.eval()
    directory = _directory(source, progress)
    disable_progress_bar()  # a bar per role process would only garble their logs
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=_dtype(dtype), local_files_only=True)
    return model.eval()


def build_empty(source: str, dtype: str = "float32", progress: Progress = logger.info) -> PreTrainedModel:
    """The model's structure without meaningful weights: for an engine that gets them from the trainer.

    Raises ModelSourceError, WeightsMissing.
    """
    config, generation = read_config(source, progress)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype))
    if generation is not None:
        model.generation_config = generation
    return model.eval()


def read_config(source: str, progress: Progress = logger.info) -> tuple[PreTrainedConfig, GenerationConfig | None]:
    """The structure of `source` and how it says that text ends. Raises ModelSourceError, WeightsMissing."""
    if source == TINY:
        return tiny_config(), None
    directory = _directory(source, progress)
    has_generation = (directory / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(directory, local_files_only=True) if has_generation else None
    return AutoConfig.from_pretrained(directory, local_files_only=True), generation


def eos_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token id that ends a completion: the tokenizer's and those of the model's generation config, ascending."""
    declared = generation.eos_token_id if generation is not None else None
    listed = declared if isinstance(declared, (list, tuple)) else [declared]
    return tuple(sorted({i for i in [tokenizer.eos_token_id, *listed] if isinstance(i, int)}))


def _directory(source: str, progress: Progress) -> Path:
    if source == SMOLLM2:
        return smollm2_directory(progress)
    path = Path(source).expanduser()
    if not path.is_dir():
        raise ModelSourceError(
            f"model source {source!r}: no such directory; use {SMOLLM2!r}, {TINY!r} or the path of a Hugging Face model "
            "directory (nothing is downloaded)"
        )
    if not (path / "config.json").is_file():
        raise ModelSourceError(f"model source {source!r}: has no config.json, so it is not a Hugging Face directory")
    return path


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelSourceError(f"model dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
