from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dockyard_actors.policy import checkpoint
from dockyard_actors.policy.batch import TrainBatch
from dockyard_actors.policy.checkpoint import MODEL, STATE, STATE_TENSORS, CheckpointError, latest
from dockyard_actors.policy.policy import Policy
from dockyard_actors.policy.tiny import tiny_tokenizer
from dockyard_actors.policy.types import OptimizerConfig
from tests.policy.models import grouped_config, policy_of, random_group, reinforce, sharp_model


def new_policy(seed: int = 0) -> Policy:
    return policy_of(sharp_model(seed=seed), optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2))


def step(policy: Policy, seed: int) -> None:
    batch = TrainBatch.build([random_group(8, [6] * 4, [1.0, -1.0, 0.5, -0.5], seed=seed)], 1000)
    policy.train_step(batch, reinforce(batch))
    policy.version += 1


def test_a_restored_policy_goes_on_bit_by_bit_as_if_it_had_never_stopped(tmp_path: Path):
    whole, first = new_policy(), new_policy()
    for seed in range(2):
        step(whole, seed)
        step(first, seed)
    torch.manual_seed(5)
    first.save(tmp_path / "step-2")
    drawn = torch.rand(3)
    resumed = new_policy(seed=9)
    resumed.load(tmp_path / "step-2")
    assert (resumed.step, resumed.version) == (2, 2)
    assert torch.equal(torch.rand(3), drawn)
    for seed in range(2, 4):
        step(whole, seed)
        step(resumed, seed)
    assert all(torch.equal(p, resumed.parameters[name]) for name, p in whole.parameters.items())


def test_a_checkpoint_is_a_plain_hugging_face_directory(tmp_path: Path):
    policy = new_policy()
    policy.save(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", attn_implementation="sdpa")
    assert all(torch.equal(p, policy.parameters[name]) for name, p in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    text = "def f(a,b): # sum\n return a-b\n@@\n"
    assert tokenizer.encode(text) == tiny_tokenizer().encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert "dockyard" not in json.dumps(config)
    assert not [path.name for path in (tmp_path / "first").iterdir() if path.suffix in (".pt", ".bin", ".pkl")]


def test_latest_follows_the_newest_and_saving_twice_replaces(tmp_path: Path):
    policy = new_policy()
    assert latest(tmp_path) is None
    policy.save(tmp_path / "a")
    step(policy, 0)
    policy.save(tmp_path / "b")
    assert latest(tmp_path) == tmp_path / "b"
    step(policy, 1)
    policy.save(tmp_path / "b")
    assert json.loads((tmp_path / "b" / STATE).read_text())["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]
    (tmp_path / "latest").write_text("gone\n")
    with pytest.raises(CheckpointError, match="gone"):
        latest(tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (STATE, Path.unlink, "does not exist"),
        (STATE, lambda path: path.write_text("{"), "not readable JSON"),
        (STATE, lambda path: path.write_text('{"format": 99}'), "format 99"),
        (STATE, lambda path: path.write_text('{"format": 1}'), "lacks"),
        (MODEL, truncate, "damaged"),
        (MODEL, Path.unlink, "does not exist"),
        (STATE_TENSORS, truncate, "damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(tmp_path: Path, name: str, damage, reason: str):
    policy = new_policy()
    step(policy, 0)
    policy.save(tmp_path / "c")
    damage(tmp_path / "c" / name)
    other = new_policy(seed=4)
    before = {n: p.clone() for n, p in other.parameters.items()}
    with pytest.raises(CheckpointError, match=reason) as caught:
        other.load(tmp_path / "c")
    assert name in str(caught.value)
    assert other.step == 0
    assert all(torch.equal(p, before[n]) for n, p in other.parameters.items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    new_policy().save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="another model"):
        policy_of(sharp_model(grouped_config())).load(tmp_path / "c")


def killed_while_saving(policy: Policy, directory: Path, call: str, count: int) -> None:
    """Saves in a child process that kills itself (SIGKILL) in the `count`-th call of checkpoint.os.<call>."""
    child = os.fork()
    if child == 0:
        real, left = getattr(os, call), [count]

        def dying(*args: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        checkpoint.os = SimpleNamespace(**{**vars(os), call: dying})  # type: ignore[assignment]
        policy.save(directory)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the save ended before it was killed"


@pytest.mark.parametrize(
    ("target", "call", "count", "survivor"),
    [
        ("next", "fsync", 3, 0),
        ("next", "rename", 1, 0),
        ("next", "replace", 1, 0),  # the new one is whole, but nobody was told yet
        ("good", "fsync", 3, 0),
        ("good", "rename", 1, 0),
        ("good", "rename", 2, 0),  # the old one is set aside, the new one not yet in its place
        ("good", "replace", 1, 1),
    ],
)
def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(
    tmp_path: Path, target: str, call: str, count: int, survivor: int
):
    policy = new_policy()
    policy.save(tmp_path / "good")
    step(policy, 0)
    killed_while_saving(policy, tmp_path / target, call, count)
    assert latest(tmp_path) == tmp_path / "good"
    found = new_policy(seed=3)
    found.load(tmp_path / "good")
    assert found.step == survivor
    policy.save(tmp_path / "next")
    assert latest(tmp_path) == tmp_path / "next"
    assert not list(tmp_path.glob(".*.tmp"))
