"""UCX workers live as long as their process. A session of tests that had one ends it, so that its sockets do not look forgotten."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import psutil
import pytest

from dockyard_actors.transport.ucx import UcxEngine


@pytest.fixture(scope="session", autouse=True)
def ucx_ends() -> Iterator[None]:
    create, its = UcxEngine.__init__, set[int]()

    def recording(engine: UcxEngine, interface: str) -> None:
        before = _listening()
        create(engine, interface)
        its.update(_listening() - before)

    UcxEngine.__init__ = recording
    yield
    UcxEngine.__init__ = create
    UcxEngine.end()
    gc.collect()
    for fd in its & _listening():  # UCXX keeps a worker of which a peer was killed; nothing touches it any more
        os.close(fd)


def _listening() -> set[int]:
    return {socket.fd for socket in psutil.Process().net_connections("tcp") if socket.status == psutil.CONN_LISTEN}
