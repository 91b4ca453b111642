"""One process that cannot be told anything is its own trouble alone: it may not join, or is declared dead, and everybody else goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.directory import Entry, ProcessRecord
from dockyard_actors.runtime.errors import ProtocolRefused
from dockyard_actors.runtime.registry import DirectoryUpdate, Join, Joined, Refused, Register, Registered, Registry
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport import control
from dockyard_actors.transport.base import Address, TransportError, create_keys
from tests.runtime.actors import Add, Counter


def record(uid: str) -> ProcessRecord:
    return ProcessRecord(uid, f"process-{uid}", 1, "elsewhere", Address("elsewhere", tcp=("tcp://1", "tcp://2")))


class Town:
    """A registry, and what it told whom. Nothing can be sent to those in ``mute``."""

    def __init__(self) -> None:
        own = ProcessRecord("own", "home", 1, "here", Address(), is_agent=True)
        self.registry = Registry(own, self.push, epoch=7)
        self.told: dict[str, list[DirectoryUpdate | None]] = {}
        self.mute: set[str] = set()

    def push(self, process: ProcessRecord, update: DirectoryUpdate | None, last: bool) -> None:
        if process.uid in self.mute:
            raise TransportError(f"no way to {process.uid}")
        self.told.setdefault(process.uid, []).append(update)

    def entries(self, uid: str) -> dict[str, Entry]:
        return {e.name: e for update in self.told[uid] if update is not None for e in update.entries}

    async def register(self, name: str, uid: str) -> Registered | Refused:
        return await self.registry.register(Register(name=name, uid=uid, window=1, control=(), meta={}))


async def test_whoever_cannot_be_told_is_declared_dead_and_the_others_hear_everything() -> None:
    town = Town()
    for uid in ("first", "mute", "last"):
        assert isinstance(await town.registry.join(Join(process=record(uid))), Joined)
    assert await town.register("of the mute", "mute") == Registered(1)
    town.mute = {"mute"}
    assert await town.register("x", "first") == Registered(1)
    for uid in ("own", "first", "last"):
        assert town.entries(uid)["x"].alive
        assert not town.entries(uid)["of the mute"].alive
    assert "mute" not in town.registry.processes
    assert "it cannot be told anything: no way to mute" in town.registry.gone["mute"]


async def test_a_death_is_told_to_everybody_else_whoever_cannot_be_told() -> None:
    town = Town()
    gone: list[str] = []
    town.registry.on_gone = lambda process, cause: gone.append(process.uid)
    for uid in ("first", "dying", "mute", "last"):
        await town.registry.join(Join(process=record(uid)))
    town.mute = {"mute", "dying"}
    town.registry.declare_dead("dying", "killed")
    for uid in ("own", "first", "last"):
        heard = {uid: cause for update in town.told[uid] if update is not None for uid, cause in update.gone.items()}
        assert heard.keys() == {"dying", "mute"}
    assert sorted(gone) == ["dying", "mute"]
    assert set(town.registry.processes) == {"own", "first", "last"}


async def test_a_process_of_another_host_that_listens_nowhere_else_may_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    create_keys(keys)
    home_config = SystemConfig(ipc_prefix=f"{tmp_path}/r", tcp_bind="tcp://127.0.0.1:0", key_file=keys)
    async with ActorSystem(home_config) as home:
        far = SystemConfig(name="far", rendezvous=home.transport.address.tcp[1], key_file=keys)
        with monkeypatch.context() as patch:
            patch.setattr(control, "host_id", lambda: "elsewhere")
            with pytest.raises(ProtocolRefused, match="process far could not be reached: no way from host"):
                await ActorSystem(far).__aenter__()
        async with ActorSystem(SystemConfig(rendezvous=f"ipc://{tmp_path}/r", key_file=keys)) as worker:
            await worker.start(Counter(), "c")
            assert await home.ref("c").ask(Add()) == 1


async def test_an_endpoint_that_is_none_is_an_error_of_the_transport(tmp_path: Path) -> None:
    async with ActorSystem(SystemConfig(ipc_prefix=f"{tmp_path}/r")) as home:
        assert home.registry is not None
        nowhere = ProcessRecord("nowhere", "nowhere", 1, "elsewhere", Address(ipc=f"{tmp_path}/{'x' * 200}"))
        assert isinstance(await home.registry.join(Join(process=nowhere)), Joined)
        await home.start(Counter(), "c")
        assert await home.ref("c").ask(Add()) == 1
        assert "cannot connect to ipc://" in home.registry.gone["nowhere"]
