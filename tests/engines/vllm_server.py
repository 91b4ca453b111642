"""One vLLM server for a module of tests: tiny model, unix socket, API key, and a process group that is killed as one."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from dockyard_actors.engines import vllm_boot
from dockyard_actors.engines.vllm_client import SERVER_ENVIRONMENT, SERVER_FLAGS, VLLMHTTPConfig
from dockyard_actors.engines.vllm_http import VLLMHTTPEngine
from dockyard_actors.policy.tiny import tiny_config, tiny_tokenizer
from tests.engines.vllm_bench import BLOCK, CACHE_BYTES, Bench
from tests.policy.models import sharp_model

START_S, END_S = 120.0, 20.0
ROWS = 40
NAME = "tiny"


class Server:
    """A server that may be killed, and the engine of whoever asks it."""

    def __init__(self, fd_path: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="vllm-"))  # short: a socket's path has about a hundred bytes
        self._fd_path = fd_path
        self._process: subprocess.Popen | None = None
        self.key = secrets.token_hex(16)
        self.key_file = self._directory / "key"
        self.key_file.write_text(self.key + "\n")
        (self._directory / "model").mkdir()
        vllm_boot.write_config(tiny_config(), self._directory / "model")

    @property
    def url(self) -> str:
        return f"unix:{self._directory / 'server'}"

    def config(self, **changes: object) -> VLLMHTTPConfig:
        known = {
            "url": self.url,
            "fd_path": self._fd_path,
            "api_key_file": str(self.key_file),
            "max_batch_rows": ROWS,
            "connect_s": START_S,
        }
        return VLLMHTTPConfig(**{**known, **changes})  # pyright: ignore[reportArgumentType]

    def engine(self, eos: Sequence[int] = (), **changes: object) -> VLLMHTTPEngine:
        return VLLMHTTPEngine(lambda: (tiny_config(), tiny_tokenizer(), eos), self.config(**changes))

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def run(self) -> None:
        """Starts it unless it runs."""
        if self.runs:
            return
        (self._directory / "server").unlink(missing_ok=True)
        quick = vllm_boot.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
        own = {"VLLM_API_KEY": self.key, "TMPDIR": str(self._directory), "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *SERVER_FLAGS]
        command += ["--model", str(self._directory / "model"), "--served-model-name", NAME, "--load-format", "dummy"]
        command += ["--uds", str(self._directory / "server"), "--skip-tokenizer-init", "--dtype", "float32"]
        command += ["--enforce-eager", "--max-num-seqs", str(ROWS), "--block-size", str(BLOCK)]
        command += ["--kv-cache-memory-bytes", str(4 * CACHE_BYTES), "--disable-log-stats"]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **quick, **SERVER_ENVIRONMENT, **own},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """To every process of the server."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """All of it but those who take its shared memory away afterwards."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        everyone = [first, *first.children(recursive=True)]
        trackers = [process for process in everyone if "resource_tracker" in " ".join(process.cmdline())]
        for process in everyone:
            if process not in trackers:
                process.kill()
        self._process.wait(END_S)
        assert not psutil.wait_procs(everyone, END_S)[1]

    def close(self) -> None:
        if self._process is not None and self.runs:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self._directory)


class ServedBench(Bench):
    """The tests' weights by seed, in an engine over HTTP for which no token ends a completion, so that a test can count on its going on."""

    def __init__(self, server: Server) -> None:
        self.config = tiny_config
        self.server = server
        self.engine = server.engine()
        self.version = -1
        self._models: dict[int, PreTrainedModel] = {}

    def distribution(self, seed: int, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        if seed not in self._models:
            self._models[seed] = sharp_model(self.config(), seed)
        with torch.no_grad():
            logits = self._models[seed](torch.from_numpy(ids).long()[None]).logits[0]
        return torch.log_softmax(logits.double() / temperature, -1).numpy()

    def reopen(self, eos: Sequence[int] = (), **changes: object) -> VLLMHTTPEngine:
        """Another engine for the same server, with the weights of seed 0."""
        self.engine.close()
        self.server.run()
        self.engine = self.server.engine(eos, **changes)
        self.open()
        self.put(0)
        return self.engine
