"""Configuration: one tree, three sources, errors a person can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dockyard_actors.config import ConfigError, from_resolved, load_config, resolved

TIS = "correction.kind=tis"


def refused(*overrides: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, [TIS, *overrides], environ or {})
    return str(error.value)


def test_overrides_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("correction: {kind: tis}\nrun: {seed: 1}\noptimizer: {lr: 2e-5}\ngroup: {max_attempts: 7}\n")
    environ = {"DOCKYARD_RUN__SEED": "2", "DOCKYARD_OPTIMIZER__LR": "0.5", "UNRELATED": "x"}
    config = load_config(path, ["optimizer.lr=0.25"], environ)
    assert (config.optimizer.lr, config.run.seed, config.group.max_attempts) == (0.25, 2, 7)


def test_what_is_written_to_the_run_directory_reads_back_the_same() -> None:
    config = load_config(None, [TIS, "run.name=x", "loss.ratio_clip_high=0.3"], {})
    assert from_resolved(resolved(config)) == config


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("grpo.num_prompt_per_step=3", "did you mean grpo.num_prompts_per_step"),
        ("optimzer.lr=3", "did you mean optimizer"),
        ("optimizer.lr=-1", "-1"),
        ("grpo.mode=asink", "'sync' or 'async'"),
        ("seed=1", "did you mean run.seed"),
        ("run=3", "is a section"),
        ("nonsense", "not of the form"),
        ("generation.temperature=0", "generation.temperature"),
        ("group.min_size=99", "no group could ever be complete"),
        ("data_plane.blocks=4", "raise it to"),
        ("data_plane.block_bytes=4096", "raise it to"),
        ("data_plane.backend=none", "use 'auto'"),
        ("generation.engine=vllm-http", "neither http://HOST:PORT nor unix:/PATH"),
        ("generation.url=http://localhost:1", "leave it out"),
        ("data_plane.backend=udp", "'auto', 'ucx', 'tcp' or 'none'"),
        ("async_grpo.max_trajectory_age_steps=0", "grpo.mode: sync"),
        ("warmup.steps=3", "set warmup.steps=0"),
        ("weight_sync.pause=wait", "must be above group.deadline_s"),
    ],
)
def test_a_refusal_names_the_key_and_the_way_out(override: str, told: str) -> None:
    assert told in refused(override, *(["generation.max_new_tokens=64"] if "block_bytes" in override else []))


def test_async_without_correction_is_refused_and_m2po_is_a_way_out() -> None:
    assert "stale" in refused("correction.kind=none")
    assert load_config(None, ["correction.kind=none", "loss.kind=m2po"], {}).loss.kind == "m2po"
    assert load_config(None, ["correction.kind=none", "grpo.mode=sync"], {}).max_age == 0


def test_a_misspelt_environment_name_is_refused_with_its_source() -> None:
    told = refused(environ={"DOCKYARD_GRPO__MOD": "sync"})
    assert "environment DOCKYARD_GRPO__MOD" in told
    assert "grpo.mode" in told


def test_every_problem_is_listed_at_once() -> None:
    assert len(refused("grpo.mod=x", "run.sed=1").splitlines()) == 2


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "repair_tiny.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean .*repair_tiny\.yaml"):
        load_config(tmp_path / "repair_tin.yaml", [], {})


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "launch" / "configs").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_shipped_config_is_valid(path: Path) -> None:
    load_config(path, [], {})


def test_a_schedule_ends_with_the_run_unless_told_otherwise() -> None:
    config = load_config(None, [TIS, "optimizer.schedule=linear", "grpo.max_num_steps=37"], {})
    assert config.optimizer.total_steps == 37
    assert (
        load_config(None, [TIS, "optimizer.schedule=linear", "optimizer.total_steps=90"], {}).optimizer.total_steps
        == 90
    )


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("grpo.mode=async", "set grpo.mode=sync"),
        ("rollout.count=2", "set rollout.count=1"),
        ("eval.every=5", "set eval.every=0"),
        ("weight_sync.transport=collective", "set weight_sync.transport=auto"),
    ],
)
def test_colocation_is_refused_where_both_would_want_the_device_at_once(override: str, way_out: str) -> None:
    colocated = [TIS, "grpo.mode=sync", "weight_sync.colocated=true"]
    assert load_config(None, colocated, {}).weight_sync.colocated
    told = refused(*colocated[1:], override)
    assert way_out in told
    assert "gives one device to the trainer and to the engine in turn" in told
