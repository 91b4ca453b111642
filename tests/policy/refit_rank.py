"""One rank of a sharded model, started by test_refit: rank 0 writes what the refit seam hands out."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dockyard_actors.policy.refit import Refit
from tests.policy.models import grouped_config, sharp_model


def main(rank: int, world: int, meeting: str, out: str) -> None:
    store = dist.FileStore(meeting, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    model = sharp_model(grouped_config())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    refit = Refit(model)
    handed = {name: tensor.clone() for name, tensor in refit.stream()}
    assert {name: tuple(tensor.shape) for name, tensor in handed.items()} == refit.shapes
    if rank == 0:
        torch.save(handed, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], str(Path(sys.argv[4])))
