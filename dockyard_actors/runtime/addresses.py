"""Where a node agent listens and where its keys are, from its settings: nothing is opened here but the key file that it makes."""

from __future__ import annotations

import socket
from pathlib import Path

from dockyard_actors.transport.base import create_keys, parse_rendezvous


def find_keys(rendezvous: str, key_file: Path | None, runtime_dir: Path) -> Path:
    """The run's key file; a primary (no rendezvous) makes it when it is missing. ValueError when a secondary cannot know where it is."""
    if not rendezvous:
        path = key_file or runtime_dir / "keys"
        if not path.exists():
            create_keys(path)
        return path
    if key_file is not None:
        return key_file
    address = parse_rendezvous(rendezvous)
    if not address.ipc:
        raise ValueError(f"joining {rendezvous} needs key_file: a copy of the primary's key file")
    return Path(address.ipc).parent / "keys"


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
