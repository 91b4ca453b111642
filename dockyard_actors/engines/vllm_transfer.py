"""This package's weights through vLLM's weight transfer: a backend that copies into the live model, from shared memory or arrays at hand.
A manifest that does not fit changes nothing, and every entry from shared memory is proved by its checksum before it is copied. Imported
by vLLM itself as the module of its worker extension: importing it registers the backend and keeps a CPU's weights unpacked. Knows no
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from dockyard_actors.engines.base import EngineError, Manifest, WeightArrays
from dockyard_actors.engines.choose import VERSIONS
from dockyard_actors.engines.manifest import fitting
from dockyard_actors.engines.vllm_boot import BACKEND
from dockyard_actors.engines.vllm_pack import Packing
from dockyard_actors.engines.vllm_worker import WorkerExtension
from dockyard_actors.transport.fdclient import FdClient
from dockyard_actors.transport.tensors import ChecksumError, MalformedRef, checksum
from dockyard_actors.transport.torch_views import as_torch
from dockyard_actors.transport.weights_shm import WeightReader, WeightRef


@dataclass
class TransferInit(WeightTransferInitInfo):
    """shapes: of the Hugging Face model's parameters, by name."""

    shapes: dict[str, tuple[int, ...]]


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """All weights of one version: in shared memory, or at hand in the worker's process.

    ref: a WeightRef as a dictionary (`vllm_boot.ref_info`). Without it: `arrays` as `Engine.update_weights` takes them, with their `manifest`
    and `version`.
    """

    ref: dict[str, Any] | None = None
    arrays: WeightArrays | None = None
    manifest: Manifest | None = None
    version: int = -1


class SharedMemoryTransfer(WeightTransferEngine[TransferInit, TransferUpdate]):
    """Loads in place: nothing is prepared or finished around an update, and every update is a whole version.

    version: of what was loaded last, -1 before. checksums: xxh3_64 of the entries that were read from shared memory for it, in the
    manifest's order; empty when the arrays were at hand.
    """

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._reader: WeightReader | None = None
        self._packing: Packing | None = None
        self.version = -1
        self.checksums: tuple[int, ...] = ()

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        self._shapes = {name: tuple(shape) for name, shape in init_info.shapes.items()}

    def start_weight_update(self) -> None:
        if not self._shapes:
            raise EngineError(
                "the shapes of the model's parameters are unknown: call init_weight_transfer_engine first"
            )

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base's, which synchronises an accelerator even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Raises WeightsMismatch, or what WeightReader does, with nothing changed; anything else may leave half a version loaded."""
        if update_info.ref is not None:
            self._from_shared_memory(msgspec.convert(update_info.ref, WeightRef))
        elif update_info.arrays is not None and update_info.manifest is not None:
            arrays = self._fitting(update_info.arrays, update_info.manifest, update_info.version)
            self._load(arrays)
            self.version, self.checksums = update_info.version, ()
        else:
            raise EngineError("an update of weights needs a ref, or arrays with their manifest")

    @torch.no_grad()
    def pack(self) -> bool:
        """Packs the linear weights of a few more layers; whether there are more."""
        return self._packing is not None and self._packing.some()

    def unpack(self) -> None:
        """Lets go of the packed copies."""
        if self._packing is not None:
            self._packing.drop()

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _from_shared_memory(self, ref: WeightRef) -> None:
        if self._reader is None:
            self._reader = WeightReader(FdClient(ref.fd_path))
        manifest = self._reader.manifest(ref)
        if len(ref.checksums) != len(manifest.entries):
            raise MalformedRef(
                f"weights version {ref.version}: {len(ref.checksums)} checksums, {len(manifest.entries)} entries"
            )
        with self._reader.open(ref) as views:
            self._load(_proved(self._fitting(views, manifest, ref.version), ref))
            views.check()  # the slot held this version until the last byte was copied
        self.version, self.checksums = ref.version, ref.checksums

    def _fitting(self, arrays: WeightArrays, manifest: Manifest, version: int) -> Iterator[tuple[str, np.ndarray]]:
        return fitting(self._shapes, arrays, manifest, f"weights of version {version} do not fit the model")

    @torch.no_grad()
    def _load(self, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        """Copies `arrays`, named as Hugging Face does, into the live model. Raises EngineError when some were not set."""
        model: Any = self.model
        if self._packing is None:
            self._packing = Packing(model)
        self._packing.drop()
        loaded = model.load_weights((name, as_torch(array)) for name, array in arrays)
        forgotten = [name for name, _ in model.named_parameters() if name not in loaded]
        if forgotten:
            raise EngineError(f"vLLM's {type(model).__name__} was not given {', '.join(forgotten[:5])}")


class TransferExtension(WorkerExtension):
    """The worker extension, and what arrived last."""

    _weight_update_active: bool

    def dockyard_serve(self) -> dict[str, int]:
        """For a new client of a server: prepares, ends the update that a dead client may have left open and lets go of its memory.
        Returns the positions that the cache has for one request."""
        self.dockyard_prepare()
        self._weight_update_active = False
        self._transfer().shutdown()
        blocks = self.model_runner.kv_cache_config.num_blocks - 1  # one stands for 'none'
        return {"positions": blocks * self.vllm_config.cache_config.block_size}

    def dockyard_delivered(self) -> dict[str, Any]:
        """Version and checksums of the weights that were loaded last (see SharedMemoryTransfer)."""
        transfer = self._transfer()
        return {"version": transfer.version, "checksums": list(transfer.checksums)}

    def dockyard_pack(self) -> bool:
        """See `SharedMemoryTransfer.pack`."""
        return self._transfer().pack()

    def dockyard_sleep(self) -> None:
        """On the CPU, where vLLM has no sleep mode. Empties the storages of keys, values and weights; their views stay."""
        runner = self.model_runner
        held = [*runner.kv_caches, *runner.model.parameters()]
        self._emptied = {
            s.data_ptr(): (s, s.nbytes()) for s in (tensor.untyped_storage() for tensor in held) if s.nbytes()
        }
        self._transfer().unpack()
        for storage, _ in self._emptied.values():
            storage.resize_(0)
        runner.sampler.forget()

    def dockyard_wake(self) -> None:
        """Storages of the same size again. Keys and values start as zeros, as vLLM allocates them: what attention masks is multiplied."""
        for storage, size in self._emptied.values():
            storage.resize_(size)
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def _transfer(self) -> SharedMemoryTransfer:
        transfer: Any = getattr(self, "weight_transfer_engine", None)
        if not isinstance(transfer, SharedMemoryTransfer):
            raise EngineError(f"weights do not come through {BACKEND} here; set weight_transfer_config to it")
        return transfer


def _proved(arrays: Iterable[tuple[str, np.ndarray]], ref: WeightRef) -> Iterator[tuple[str, np.ndarray]]:
    for (name, array), expected in zip(arrays, ref.checksums, strict=True):
        if (found := checksum(array)) != expected:
            raise ChecksumError(
                f"weights version {ref.version}: {name} has xxh3 {found:016x}, {expected:016x} was published"
            )
        yield name, array


def _keep_weights_plain() -> None:
    """vLLM packs linear weights for oneDNN or AMX when it loads them; packed ones could not be updated in place."""
    import vllm._custom_ops as operations  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]

    for module, name in ((operations, "_supports_onednn"), (utils, "check_cpu_sgl_kernel")):
        if not hasattr(module, name):
            raise EngineError(f"{module.__name__} has no {name} to switch off; {VERSIONS} is needed")
    operations._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *shape: False


if current_platform.is_cpu():
    _keep_weights_plain()
WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
