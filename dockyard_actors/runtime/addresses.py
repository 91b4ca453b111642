"""Where a node agent listens and where its keys are, from its settings: nothing is opened here but the key file that it makes."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from dockyard_actors.transport.base import create_keys, parse_rendezvous

log = logging.getLogger("dockyard.runtime.agent")


def find_keys(rendezvous: str, key_file: str | Path | None, runtime_dir: Path) -> Path:
    """The run's key file; a primary (no rendezvous) makes it when it is missing. ValueError when a secondary has none."""
    if not rendezvous:
        path = Path(key_file) if key_file else runtime_dir / "keys"
        if not path.exists():
            create_keys(path)
            log.info("made the run's key file %s: who joins from another host needs a copy of it (mode 0600)", path)
        return path
    if key_file is not None:
        path = Path(key_file)
    elif not (address := parse_rendezvous(rendezvous)).ipc:
        raise ValueError(f"joining {rendezvous} needs key_file: a copy of the primary's key file")
    else:
        path = Path(address.ipc).parent / "keys"
    if not path.exists():
        raise ValueError(
            f"there is no key file {path}, which joining {rendezvous} needs: "
            "copy the primary's (`NodeAgent.key_file`) there, or is that primary not running?"
        )
    return path


def tcp_host(listen: str, rendezvous: str) -> str:
    """The address of this host that peers on other hosts connect to; empty when the run stays on ipc."""
    text = listen or rendezvous
    if not text.startswith("tcp://"):
        return ""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not rendezvous:
        return host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # sends nothing; picks the interface that leads there
        return probe.getsockname()[0]
