"""The key file of a run: a CURVE key pair and a hello cookie that every process of the run reads from disk.

It is written once with mode 0600 and refused when others could read it; keys never travel in argv, environment or messages.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import msgspec
import zmq

from dockyard_actors.transport.base import RunKeys, TransportError


def create(path: Path) -> RunKeys:
    public, secret = zmq.curve_keypair()
    keys = RunKeys(public=public.decode(), secret=secret.decode(), cookie=secrets.token_hex(16))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(keys))
    return keys


def load(path: Path) -> RunKeys:
    try:
        info = path.stat()
        text = path.read_bytes()
    except OSError as error:
        raise TransportError(
            f"run key file {path}: {error.strerror}; copy it from the primary's runtime directory"
        ) from error
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise TransportError(
            f"run key file {path} is readable by others (mode {stat.S_IMODE(info.st_mode):o}); chmod 600 it"
        )
    try:
        return msgspec.json.decode(text, type=RunKeys)
    except msgspec.MsgspecError as error:
        raise TransportError(f"run key file {path} is malformed: {error}") from error
