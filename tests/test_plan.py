"""What `check` says before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dockyard_actors import plan as module
from dockyard_actors.config import ConfigError
from dockyard_actors.plan import MIB, parameters, plan, render_plan, with_engine
from tests.roles.world import config_of, tasks_of

TASKS = tasks_of()


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine has free at the moment is not these tests' business."""

    class Large:
        available = 1 << 40

    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: Large)


def test_the_plan_lists_every_process_that_will_run_and_nothing_else() -> None:
    report = plan(config_of("rollout.count=3"), TASKS)
    names = [process["name"] for process in report["processes"]]
    assert sorted(names) == sorted(
        ["agent", "controller", "trainer", "buffer", "broker", "executor", "rollout-0", "rollout-1", "rollout-2"]
    )


def test_an_evaluator_runs_only_when_something_is_evaluated_in_between() -> None:
    names = [process["name"] for process in plan(config_of("eval.every=5"), TASKS)["processes"]]
    assert names.count("evaluator") == 1
    assert "evaluator" not in [process["name"] for process in plan(config_of(), TASKS)["processes"]]


@pytest.mark.parametrize("asked", ["auto", "hf"])
def test_the_engine_is_decided_with_its_reason_before_anything_starts(asked: str) -> None:
    config, why = with_engine(config_of(f"generation.engine={asked}"))
    assert config.generation.engine in ("vllm", "hf")
    assert why
    assert with_engine(config)[0] == config, "what is decided stays"


def test_an_engine_that_cannot_run_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 96, "num_attention_heads": 6}')
    with pytest.raises(ConfigError, match=r"^generation\.engine=vllm: .*generation\.engine=hf$"):
        with_engine(config_of("generation.engine=vllm", f"model.source={tmp_path}"))


@pytest.mark.parametrize(
    ("backend", "installed", "told"),
    [
        ("auto", True, "between hosts by ucx (installed)"),
        ("auto", False, "between hosts by tcp (ucxx is not installed (make setup EXTRAS=ucx))"),
        ("tcp", True, "between hosts by tcp (configured)"),
    ],
)
def test_what_carries_tensors_between_hosts_is_said_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, backend: str, installed: bool, told: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    report = plan(config_of(f"data_plane.backend={backend}"), TASKS)
    assert told in report["transports"]["data"]
    assert report["problems"] == []


def test_ucx_that_is_asked_for_and_not_installed_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = plan(config_of("data_plane.backend=ucx"), TASKS)["problems"]
    assert problem.startswith("data_plane.backend is ucx, and ucxx is not installed")


def test_it_is_plain_data_and_readable_text() -> None:
    report = plan(config_of(), TASKS)
    assert json.loads(json.dumps(report)) == report
    text = render_plan(report)
    for process in report["processes"]:
        assert process["name"] in text
    assert "40 train, 2 held out" in text
    assert text.endswith("\nok") or text.endswith("\nnot ok")


def test_memory_is_the_sum_of_its_parts_and_grows_with_them() -> None:
    one, two = plan(config_of(), TASKS)["memory_mib"], plan(config_of("rollout.count=2"), TASKS)["memory_mib"]
    assert two["total"] - one["total"] >= module.ENGINE_MIB["hf"]
    slabs = plan(config_of("data_plane.blocks=512", "data_plane.block_bytes=1048576"), TASKS)["memory_mib"]["slabs"]
    assert slabs == 512
    report = plan(config_of(), TASKS)
    parts = sum(process["memory_mib"] for process in report["processes"])
    assert (
        abs(report["memory_mib"]["total"] - parts - report["memory_mib"]["slabs"] - report["memory_mib"]["weights"])
        <= 2
    )


def test_half_precision_on_the_wire_halves_the_shared_weights() -> None:
    full = plan(config_of("model.source=smollm2-135m"), TASKS)["memory_mib"]["weights"]
    half = plan(config_of("model.source=smollm2-135m", "weight_sync.dtype=bfloat16"), TASKS)["memory_mib"]["weights"]
    assert full == pytest.approx(2 * half, abs=1)


def test_a_machine_that_is_too_small_is_a_problem_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Little:
        available = 100 * MIB

    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: Little)
    report = plan(config_of(), TASKS)
    assert any("MiB are needed, 100 MiB are available" in problem for problem in report["problems"])
    assert render_plan(report).endswith("not ok")


def test_a_disk_that_cannot_hold_the_checkpoints_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 10 * MIB

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Full)
    (problem,) = plan(config_of("model.source=smollm2-135m"), TASKS)["problems"]
    assert problem.startswith("disk: 3 checkpoints of")


def test_an_unknown_model_is_a_problem_that_names_what_is_known(tmp_path: Path) -> None:
    (problem,) = plan(config_of("model.source=no-such-model"), TASKS)["problems"]
    assert "'no-such-model' is neither smollm2-135m, nor tiny" in problem
    assert parameters(str(tmp_path)) is None
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    assert parameters(str(tmp_path)) == 1000


def test_the_age_that_is_planned_is_the_one_that_is_enforced() -> None:
    assert plan(config_of("grpo.mode=sync"), TASKS)["max_age"] == 0
    assert plan(config_of("async_grpo.max_trajectory_age_steps=2"), TASKS)["max_age"] == 2


def test_colocated_trainer_and_engine_are_not_counted_at_once() -> None:
    """The largest of both counts, and what each has that it never puts away: the trainer its weights, the engine its interpreter."""
    asked = (
        "grpo.mode=sync",
        "model.source=smollm2-135m",
        "generation.dtype=bfloat16",
        "policy.micro_batch_tokens=256",
    )
    apart, by_turns = (plan(config_of(*asked, f"weight_sync.colocated={on}"), TASKS) for on in ("false", "true"))
    (engine,) = (p["memory_mib"] for p in apart["processes"] if p["name"] == "rollout-0")
    saved = apart["memory_mib"]["total"] - by_turns["memory_mib"]["total"]
    assert saved == by_turns["memory_mib"]["colocated"]
    assert 2 * parameters("smollm2-135m") // MIB == pytest.approx(saved, abs=1), "what the smaller of the two puts away"
    assert saved < engine
    assert "colocated" in render_plan(by_turns)
    assert "colocated" not in render_plan(apart)
