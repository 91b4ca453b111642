"""A training step from groups to weights, and the checkpoints around it. A real policy with the tiny model; groups are made up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dockyard_actors.algorithms import m2po
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.policy.policy import NonFiniteGradient
from dockyard_actors.policy.types import ModelConfig
from dockyard_actors.roles import learner as module
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.learner import Learner, checkpoint_name, step_of
from dockyard_actors.transport.plane import LocalPlane, StaleRef
from tests.roles.world import config_of, meta_of

WIDTH = 6


class Bench:
    """A loaded learner and groups for it."""

    def __init__(self, path: Path, *overrides: str):
        self.config = config_of(*overrides)
        self.run_dir = RunDir(path)
        self.run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
        self.plane = LocalPlane("test", 16, 16384)
        self.leases = 0
        self.learner = self.load()

    def load(self) -> Learner:
        learner = Learner(self.config, ModelConfig("tiny"), self.plane, self.run_dir)
        learner.load()
        if learner.fresh:
            learner.begin()
        self.learner = learner
        return learner

    def group(
        self, rewards: tuple[float, ...], valid: tuple[bool, ...] | None = None, lengths: tuple[int, ...] = (3, 5), logprob: float = -4.6
    ) -> m.OpenGroup:  # fmt: skip
        rng = np.random.default_rng(self.leases)
        n = len(rewards)
        block = self.plane.try_alloc(
            {
                "prompt": ("int32", (4,)),
                "tokens": ("int32", (n, WIDTH)),
                "logprobs": ("float32", (n, WIDTH)),
                "versions": ("int32", (n, WIDTH)),
                "lengths": ("int32", (n,)),
            }
        )
        assert block is not None
        block.array("prompt")[:] = rng.integers(3, 90, 4)
        block.array("tokens")[:] = rng.integers(3, 90, (n, WIDTH))
        block.array("logprobs")[:] = logprob
        block.array("versions")[:] = 0
        block.array("lengths")[:] = lengths
        grant = m.Granted(self.leases, f"train-{self.leases}", 0, 1)
        self.leases += 1
        meta = msgspec.structs.replace(meta_of(grant, 0, rewards, valid), lengths=lengths)
        return m.OpenGroup(meta, block.seal())

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.learner.policy.parameters.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.plane.close()


def test_a_step_trains_the_groups_with_a_signal_and_names_the_others_with_their_cause(bench: Bench) -> None:
    before = bench.weights()
    groups = [bench.group((1.0, 0.0)), bench.group((1.0, 1.0)), bench.group((1.0, 0.0), (True, False))]
    outcome = bench.learner.train(groups, version=7)
    assert (outcome.step, outcome.version, bench.learner.step) == (1, 7, 1)
    assert outcome.trained == (0,)
    assert outcome.filtered == ((1, "no_signal"), (2, "too_few_valid"))
    assert outcome.tokens == 8
    assert outcome.grad_norm > 0
    assert not same(before, bench.weights())


def test_the_tensors_of_groups_without_signal_are_never_read(bench: Bench) -> None:
    signal, uniform = bench.group((1.0, 0.0)), bench.group((0.0, 0.0))
    bench.plane.release(uniform.ref)
    with pytest.raises(StaleRef):
        bench.plane.get(uniform.ref)
    assert bench.learner.train([uniform, signal], version=0).trained == (signal.meta.lease,)


def test_every_view_is_given_back_after_a_step(bench: Bench) -> None:
    group = bench.group((1.0, 0.0))
    views = []
    get = bench.plane.get
    bench.plane.get = lambda *args, **kwargs: views.append(get(*args, **kwargs)) or views[-1]  # type: ignore[method-assign]
    bench.learner.train([group], version=0)
    assert len(views) == 1
    with pytest.raises(Exception, match="released"):
        views[0]["tokens"]


def gradient(path: Path, rows: list[dict[str, Any]], *overrides: str) -> float:
    """Norm of the gradient of a first step: always the same weights, and group i always holds the same tokens."""
    made = Bench(path, "optimizer.clip_norm=0", *overrides)
    try:
        return made.learner.train([made.group(**row) for row in rows], version=0).grad_norm
    finally:
        made.plane.close()


@pytest.mark.parametrize(
    ("reduction", "share"), [("token", 8 / (8 + 12)), ("sequence", 2 / (2 + 2))], ids=["token", "sequence"]
)
def test_groups_without_signal_count_in_the_denominators(tmp_path: Path, reduction: str, share: float) -> None:
    signal: dict[str, Any] = {"rewards": (1.0, 0.0), "lengths": (3, 5)}
    uniform: dict[str, Any] = {"rewards": (1.0, 1.0), "lengths": (6, 6)}
    alone = gradient(tmp_path / "a", [signal], f"loss.reduction={reduction}")
    beside = gradient(tmp_path / "b", [signal, uniform], f"loss.reduction={reduction}")
    assert beside / alone == pytest.approx(share, rel=1e-4)


def test_a_masked_sample_counts_nowhere(tmp_path: Path) -> None:
    """Its tokens are neither trained nor in the denominator: the gradient is that of the group without it."""
    three: dict[str, Any] = {"rewards": (1.0, 0.0, 0.0), "valid": (True, True, False), "lengths": (3, 5, 6)}
    longer = three | {"lengths": (3, 5, 2)}
    assert gradient(tmp_path / "a", [three]) == pytest.approx(gradient(tmp_path / "b", [longer]), rel=1e-6)


def test_a_uniform_batch_is_a_step_that_changes_no_weight(bench: Bench) -> None:
    before = bench.weights()
    outcome = bench.learner.train([bench.group((1.0, 1.0)), bench.group((0.0, 0.0))], version=3)
    assert (outcome.step, bench.learner.step, outcome.trained, outcome.tokens) == (1, 1, (), 0)
    assert (outcome.loss, outcome.grad_norm) == (0.0, 0.0)
    assert [lease for lease, _ in outcome.filtered] == [0, 1]
    assert same(before, bench.weights())
    assert bench.learner.policy.version == 3


def test_m2po_masks_on_the_whole_batch_with_one_forward_pass_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Bench(tmp_path, "loss.kind=m2po", "correction.kind=none", "policy.micro_batch_tokens=12")
    masks = []
    monkeypatch.setattr(module, "m2po_mask", lambda *args: masks.append((args, m2po.m2po_mask(*args))) or masks[-1][1])
    scored = []
    score = made.learner.policy.score
    monkeypatch.setattr(made.learner.policy, "score", lambda *args, **kw: scored.append(kw) or score(*args, **kw))
    before = made.weights()
    outcome = made.learner.train([made.group((1.0, 0.0), logprob=-9.0) for _ in range(3)], version=1)
    (args, keep), log_ratio = masks[0], masks[0][0][0]
    assert len(masks) == len(scored) == 1, "the batch is several micro-batches and the mask is one"
    assert keep.shape[0] == 6
    assert log_ratio[args[2]].abs().min() > 0.2, "the behaviour policy was made far from ours"
    assert 0 < outcome.diagnostics["masked/m2po"] < 1
    assert 0 < keep.sum() < args[2].sum()
    assert not same(before, made.weights())
    made.plane.close()


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_an_error(bench: Bench) -> None:
    before = bench.weights()
    with pytest.raises(NonFiniteGradient):
        bench.learner.train([bench.group((1.0, 0.0), logprob=float("nan"))], version=0)
    assert same(before, bench.weights())
    assert bench.learner.step == 0


def test_when_such_steps_are_skipped_their_groups_are_filtered_with_that_cause_and_not_trained(tmp_path: Path) -> None:
    made = Bench(tmp_path, "optimizer.nonfinite=skip")
    before = made.weights()
    outcome = made.learner.train([made.group((1.0, 0.0), logprob=float("nan")), made.group((1.0, 1.0))], version=0)
    assert outcome.trained == ()
    assert outcome.filtered == ((0, "nonfinite_gradient"), (1, "no_signal"))
    assert same(before, made.weights())
    assert made.learner.step == 1
    made.plane.close()


# ---- checkpoints


def steps(bench: Bench) -> list[int]:
    return sorted(step_of(path) for path in bench.run_dir.checkpoints.glob("step-*"))


def saved_at(bench: Bench, *numbers: int) -> None:
    for number in numbers:
        bench.learner.step = number
        bench.learner.save()


def test_a_fresh_run_saves_where_it_starts(bench: Bench) -> None:
    assert bench.learner.fresh
    assert steps(bench) == [0]


def test_a_resumed_learner_goes_on_at_the_step_with_the_weights_of_its_newest_checkpoint(bench: Bench) -> None:
    bench.learner.train([bench.group((1.0, 0.0))], version=0)
    bench.learner.save()
    kept = bench.weights()
    bench.learner.train([bench.group((1.0, 0.0))], version=1)
    assert not same(kept, bench.weights())
    again = bench.load()
    assert (again.step, again.fresh, again.needs_warmup) == (1, False, False)
    assert same(kept, bench.weights())


def test_a_step_repeated_after_a_resume_gives_the_same_weights(bench: Bench) -> None:
    first, second = bench.group((1.0, 0.0)), bench.group((0.0, 1.0))
    bench.learner.train([first], version=0)
    bench.learner.save()
    bench.learner.train([second], version=1)
    kept = bench.weights()
    bench.load()
    bench.learner.train([second], version=1)
    assert same(kept, bench.weights())


def test_the_newest_checkpoints_are_kept_and_no_others(bench: Bench) -> None:
    saved_at(bench, 5, 10, 15)
    assert steps(bench) == [10, 15]
    assert bench.load().step == 15


def test_the_reference_of_the_kl_is_kept_and_frozen_again_on_resume(tmp_path: Path) -> None:
    made = Bench(tmp_path, "loss.kl_coef=0.1")
    start = made.weights()
    made.learner.train([made.group((1.0, 0.0))], version=0)
    saved_at(made, 1, 2, 3)
    assert steps(made) == [0, 2, 3]
    again = made.load()
    assert again.policy.reference is not None
    frozen = dict(again.policy.reference.named_parameters())
    assert all(torch.equal(start[name], frozen[name]) for name in start)
    assert not same(start, made.weights())
    made.plane.close()


def test_a_checkpoint_of_a_later_step_that_was_never_finished_does_not_push_the_newest_one_out(tmp_path: Path) -> None:
    """A trainer killed between the directory's rename and the pointer leaves one; it then stops before that step."""
    made = Bench(tmp_path, "checkpoint.keep=1")
    saved_at(made, 5)
    shutil.copytree(made.run_dir.checkpoints / checkpoint_name(5), made.run_dir.checkpoints / checkpoint_name(10))
    assert made.load().step == 5
    saved_at(made, 7)
    assert made.load().step == 7
    assert steps(made) == [7]
    made.plane.close()
