"""The optimizer's moments leave memory and come back as they were."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from dockyard_actors.policy.offload import offload, onload
from dockyard_actors.runtime import memory

MIB = 1 << 20


def trained(*shapes: tuple[int, ...], steps: int = 2) -> torch.optim.AdamW:
    """AdamW after a few steps with random gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for _ in range(steps):
        step(optimizer, generator)
    return optimizer


def step(optimizer: torch.optim.AdamW, generator: torch.Generator) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def state_of(optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def test_the_moments_come_back_bit_for_bit_and_can_be_read_meanwhile(tmp_path: Path) -> None:
    optimizer = trained((3, 5), (7,), (1,), (2, 2, 2))
    before = state_of(optimizer)
    assert any(bool(value.any()) for value in before)
    offload(optimizer, tmp_path)
    away = state_of(optimizer)
    onload(optimizer)
    back = state_of(optimizer)
    for was, there, here in zip(before, away, back, strict=True):
        assert was.dtype == here.dtype
        assert torch.equal(was, there)
        assert torch.equal(was, here)
    assert not list(tmp_path.iterdir()), "the file has a name"


def test_training_goes_on_as_if_nothing_had_been_moved(tmp_path: Path) -> None:
    moved, stayed = trained((16, 4)), trained((16, 4))
    for seed in range(3):
        offload(moved, tmp_path)
        assert moved.param_groups[0]["params"][0].grad is None
        onload(moved)
        for optimizer in (moved, stayed):
            step(optimizer, torch.Generator().manual_seed(seed))
    assert torch.equal(moved.param_groups[0]["params"][0], stayed.param_groups[0]["params"][0])


def test_memory_falls_by_moments_and_gradients(tmp_path: Path) -> None:
    optimizer, process = trained((4096, 2048), (2048, 4096), steps=1), psutil.Process()
    size = sum(parameter.nbytes for parameter in optimizer.param_groups[0]["params"])
    assert size >= 64 * MIB
    before, all_before = memory.resident(), process.memory_info().rss
    offload(optimizer, tmp_path)
    away, all_away = memory.resident(), process.memory_info().rss
    onload(optimizer)
    assert all_before - all_away > 0.95 * 3 * size, "pages of the file stay mapped"
    assert before - away > 0.95 * 3 * size
    assert 0.95 * 2 * size < memory.resident() - away < 1.1 * 2 * size


def test_state_that_was_never_made_is_no_obstacle(tmp_path: Path) -> None:
    optimizer = trained((3, 3), steps=0)
    offload(optimizer, tmp_path)
    onload(optimizer)
    assert not optimizer.state
