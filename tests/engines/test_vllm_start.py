"""What starting a vLLM engine leaves of the process as it was, and what it says when there is no engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dockyard_actors.engines import vllm_boot
from dockyard_actors.engines.base import EngineError
from dockyard_actors.policy.tiny import tiny_config
from tests.engines.vllm_bench import NEEDS_VLLM

pytestmark = NEEDS_VLLM

OPEN = """
from dockyard_actors.engines import vllm_boot
from dockyard_actors.policy.tiny import tiny_config
vllm_boot.open_engine(tiny_config(), dtype="float32", rows=4, kv_cache_bytes=8 << 20, max_model_len={longest}, threads=1)
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


def open_tiny(scratch: Path | None = None) -> object:
    where = None if scratch is None else str(scratch)
    return vllm_boot.open_engine(
        tiny_config(), dtype="float32", rows=4, kv_cache_bytes=8 << 20, max_model_len=None, threads=1, scratch=where
    )


def error_of(longest: int | None, **environment: str) -> str:
    """Last line of a process that opens an engine for the tiny model and cannot."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN.format(longest=longest)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return next(line for line in reversed(done.stderr.splitlines()) if "EngineError" in line)


@pytest.mark.parametrize("own", [False, True], ids=["no directory", "a directory"])
@pytest.mark.parametrize("fails", [False, True], ids=["opens", "fails"])
def test_temporary_files_go_to_the_given_directory_while_an_engine_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, fails: bool
) -> None:
    system, variable = tempfile.gettempdir(), os.environ.get("TMPDIR")
    expected = str(tmp_path) if own else system
    seen = []

    def opened(found: str, directory: str, *_: object) -> None:
        assert Path(directory, "config.json").exists()
        seen.append((str(Path(directory).parent), tempfile.gettempdir(), os.environ.get("TMPDIR")))
        if fails:
            raise RuntimeError("no room")

    monkeypatch.setattr(vllm_boot, "_open", opened)
    if fails:
        with pytest.raises(EngineError, match="could not start: RuntimeError: no room"):
            open_tiny(tmp_path if own else None)
    else:
        open_tiny(tmp_path if own else None)
    assert seen == [(expected, expected, str(tmp_path) if own else variable)]
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == (system, variable)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("value", "kept"), [(None, "ERROR"), ("", "ERROR"), ("INFO", "INFO")])
def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch, value: str | None, kept: str) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    else:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", value)
    monkeypatch.setattr(vllm_boot, "_open", lambda *_: os.environ["VLLM_LOGGING_LEVEL"])
    assert open_tiny() == kept


def test_an_error_of_the_environment_is_no_error_of_the_model_and_tells_its_cause() -> None:
    line = error_of(None, VLLM_LOGGING_LEVEL="NONSENSE")
    assert "could not start: ValueError: " in line
    assert "caused by ValueError: Unknown level: 'NONSENSE'" in line


def test_an_error_of_the_model_says_so() -> None:
    assert "cannot run this model: ValidationError: " in error_of(100_000)
