"""The node agent: parent of a host's role processes, and on the primary host also home of the registry.

It starts, pings, restarts and stops processes, reports deaths, and ends the run with the first cause when a process fails for
good. A secondary agent joins the primary's registry and does not outlive it. It knows nothing of what its processes do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType

from dockyard_actors.runtime import warden
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.runtime.addresses import find_keys, tcp_host
from dockyard_actors.runtime.child import Child
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.directory import CAUSE_MAX, ProcessRecord, lineage
from dockyard_actors.runtime.errors import ActorError, RunFailed
from dockyard_actors.runtime.group import Group
from dockyard_actors.runtime.pings import Pings
from dockyard_actors.runtime.process import Bootstrap
from dockyard_actors.runtime.registry import REGISTRY, DirectoryUpdate, ProcessSuspect
from dockyard_actors.runtime.rundir import RuntimeDir
from dockyard_actors.runtime.supervision import (
    Failure,
    ListProcesses,
    ProcessInfo,
    ProcessList,
    ProcessSpec,
    ReportFailure,
    RestartProcess,
    Shutdown,
    StopProcess,
)
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import Address, TransportError

log = logging.getLogger("dockyard.runtime.agent")

PRIMARY = "agent"  # name of the primary's agent actor; a secondary's is "agent/NAME"


@dataclass(frozen=True)
class AgentConfig:
    """Settings of a node agent. Without a rendezvous it is the primary and hosts the registry."""

    name: str = PRIMARY  # of a secondary: unique in the run, e.g. its role or host
    rendezvous: str = ""  # the primary's `NodeAgent.rendezvous`
    listen: str = (
        ""  # primary: "tcp://HOST:PORT" where other hosts join (a concrete address, it is what peers connect to)
    )
    key_file: str | Path | None = (
        None  # secondary: the primary's key file (None: beside an ipc rendezvous); primary: keys that outlive
    )
    # it (made when missing), so that one started again at the same ``listen`` gets its secondaries back
    runtime_parent: Path | None = (
        None  # where the private runtime directory is made (None: the system's temp directory)
    )
    allow_plain_loopback: bool = False
    ping_s: float = 0.5  # how often each process's loop is asked to answer
    suspect_s: float = 1.5  # silence after which a process is shown as unresponsive
    hang_s: float = 5.0  # silence after which it is killed and restarted: a loop that only routes never needs it
    start_grace_s: float = 60.0  # until the first answer: imports of torch and transformers from a cold disk
    agent_lost_s: float = 10.0  # silence after which another agent, and all its processes, count as dead
    registry_lost_s: float = 30.0  # secondary: how long its processes go on without a primary, until one is there again
    lease_s: float = 15.0  # primary: silence after which a process that no agent or pidfd watches counts as dead
    settle_s: float = 10.0  # primary: how long processes that others know have to come back after it was started again
    report_s: float = 10.0  # secondary: how long it tries to tell the primary of a failure, also while it ends
    secondary_stop_s: float = 30.0  # how long the primary waits at its end for secondary agents to leave
    raise_failures: bool = True  # a failure for good cancels the block and is raised at its end; False: it is only told


class _AgentActor(Actor):
    """The agent's mailbox."""

    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent

    async def shutdown(self, msg: Shutdown) -> None:
        self.agent.request_shutdown(msg)

    @concurrent
    async def stop_process(self, msg: StopProcess) -> None:
        await self.agent.stop(msg.name, msg.grace_s)

    @concurrent
    async def restart_process(self, msg: RestartProcess) -> None:
        await self.agent.restart(msg.name, msg.cause)

    async def list_processes(self, msg: ListProcesses) -> ProcessList:
        return ProcessList(tuple(self.agent.processes()))

    async def report_failure(self, msg: ReportFailure) -> None:
        self.agent.fail(msg.failure)


class NodeAgent:
    """``async with NodeAgent(config) as agent``: leaving the block stops every process and removes everything it made.

    When a process fails for good (or a secondary's primary is lost) the block is cancelled and RunFailed is raised at its end. With
    ``raise_failures=False`` the block goes on, and `wait_failed` is the only one to tell.
    """

    def __init__(self, config: AgentConfig | None = None, random: Random | None = None) -> None:
        """``random``: where the jitter of restarts comes from."""
        self.config = config or AgentConfig()
        self.random = random or Random()
        self.primary = not self.config.rendezvous
        self.children: dict[str, Child] = {}
        self._groups: dict[str, Group] = {}
        self._reports: set[asyncio.Task[None]] = set()  # of failures, to the primary
        self._pings = Pings(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._warden: subprocess.Popen[bytes] | None = None
        self._told_to_end = False
        self._block: asyncio.Task[None] | None = None  # runs the block
        self._cancelling = 0  # requests to cancel it that were there before
        self._cancelled = False  # by us

    async def __aenter__(self) -> NodeAgent:
        config = self.config
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[Failure] = loop.create_future()
        self._shutdown: asyncio.Future[Shutdown] = loop.create_future()
        self._dir = RuntimeDir(config.runtime_parent)
        self.runtime_dir = self._dir.path
        try:
            self.key_file = find_keys(config.rendezvous, config.key_file, self.runtime_dir)
            self.host = tcp_host(config.listen, config.rendezvous)  # what other hosts connect to; empty: there are none
            tcp = config.listen or (f"tcp://{self.host}:0" if self.host else "")
            self.uid = secrets.token_hex(8)
            self.system = ActorSystem(
                SystemConfig(
                    name=config.name,
                    uid=self.uid,
                    rendezvous=config.rendezvous,
                    ipc_prefix=f"{self.runtime_dir}/agent.",
                    tcp_bind=tcp,
                    key_file=self.key_file,
                    allow_plain_loopback=config.allow_plain_loopback,
                    registry_lost_s=config.registry_lost_s,
                    lease_s=config.lease_s,
                    settle_s=config.settle_s,
                ),
                is_agent=True,
            )
            await self.system.__aenter__()
        except BaseException:
            self._dir.close()
            raise
        try:
            self.rendezvous = self._rendezvous()
            self.system.on_update = self._pings.directory_changed
            if self.system.registry is not None:
                self.system.registry.on_join = self._pings.joined
                self.system.registry.on_gone = self._pings.gone
            elif self.system.membership is not None:
                self.system.membership.children = self._living
                self.system.membership.on_rejoin = self._new_primary
                self._pings.joined(self.system.primary)
            self.actor_name = PRIMARY if self.primary else f"{PRIMARY}/{config.name}"
            await self.system.start(_AgentActor(self), self.actor_name)
            self.own(self._pings.run(), "pings")
            self.own(self._own_end(), "watch the own actor system")
        except BaseException:
            await self.close()
            raise
        if config.raise_failures:
            self._block = asyncio.current_task()
            assert self._block is not None
            self._cancelling = self._block.cancelling()
            if self._failed.done():
                self._cancel_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        try:
            ours = block is not None and self._cancelled and await self._uncancel(block)
        finally:
            await self.close()
        if block is None or not self._failed.done():
            return
        failure = self._failed.result()
        if error is None or (ours and isinstance(error, asyncio.CancelledError)):
            raise RunFailed(f"{self.config.name} ends the run: {failure}", failure) from None
        error.add_note(str(failure))

    def _cancel_block(self) -> None:
        if self._block is not None and not self._cancelled:
            self._cancelled = True
            self._block.cancel()

    async def _uncancel(self, block: asyncio.Task[None]) -> bool:
        """Takes our request back, as `asyncio.timeout` does; False when somebody else wants the block cancelled too."""
        try:
            await asyncio.sleep(0)  # a block that ended at this very moment has not seen the request yet
        except asyncio.CancelledError:
            if block.uncancel() > self._cancelling:
                raise
            return True
        return block.uncancel() <= self._cancelling

    async def close(self) -> None:
        """Stops every process with its own grace, those of a group one after another, the last one first; the primary also sends the
        secondary agents home."""
        try:
            for child in self.children.values():
                child.retire()
            rows: dict[str, list[str]] = {}
            for name, child in self.children.items():
                rows.setdefault(f"group {child.spec.group}" if child.spec.group else name, []).insert(0, name)
            await asyncio.gather(*(self._stop_row(names) for names in rows.values()))
            if self._reports:
                await asyncio.wait(self._reports, timeout=self.config.report_s)
            if self.primary:
                await self._send_home()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._warden is not None:
                self._warden.kill()
                self._warden.wait()
            try:
                await self.system.close()
            finally:
                self._dir.close()

    async def _stop_row(self, names: list[str]) -> None:
        for name in names:
            try:
                await self.stop(name)
            except Exception:  # the others are stopped all the same
                log.exception("stopping %s failed", name)

    # ------------------------------------------------------------------ processes

    async def spawn(self, spec: ProcessSpec) -> ProcessInfo:
        """Starts a process and supervises it. ValueError when one of this name is supervised already (and has not ended)."""
        old = self.children.get(spec.name)
        if old is not None and old.state not in ("stopped", "exited", "failed"):
            raise ValueError(f"{self.config.name} runs a process called {spec.name!r} already ({old.state})")
        if self._warden is None:
            self._warden = warden.start(f'"agent_uid":"{self.uid}"')
        group = self._groups.setdefault(spec.group, Group()) if spec.group else None
        child = self.children[spec.name] = Child(self, spec, self.runtime_dir, group)
        if group is not None:
            group.add(child)
        if old is not None:
            child.starts = old.starts
        child.start()
        return child.info()

    async def stop(self, name: str, grace_s: float | None = None, *, tell: bool = True) -> None:
        """SIGTERM, and after the grace SIGKILL for its group; returns when it is gone. KeyError for an unknown name.

        Asks with ``retry=True`` fail then: it does not come back. Without ``tell`` they wait, for who stops the askers as well.
        """
        child = self.children[name]
        await child.stop(child.spec.stop_grace_s if grace_s is None else grace_s, tell)

    async def restart(self, name: str, cause: str = "") -> None:
        """Stops and starts a process: with a cause this counts as a crash (see `RestartProcess`). KeyError for an unknown name."""
        await self.children[name].restart(cause)

    def processes(self) -> list[ProcessInfo]:
        return [child.info() for child in self.children.values()]

    async def wait_exited(self, name: str) -> ProcessInfo:
        """Resolves when the process is gone and will not be restarted: stopped, exited or failed."""
        child = self.children[name]
        while child.state not in ("stopped", "exited", "failed"):
            await child.next_change()
        return child.info()

    async def wait_failed(self) -> Failure:
        """Resolves when a process, here or under a secondary agent, failed for good, or when the primary is lost. For a block with
        ``raise_failures=False``: any other is cancelled then."""
        return await asyncio.shield(self._failed)

    async def wait_shutdown(self) -> Shutdown:
        """Resolves when somebody asked this agent to end the run (message `Shutdown`)."""
        return await asyncio.shield(self._shutdown)

    def request_shutdown(self, request: Shutdown) -> None:
        self._told_to_end = True
        if not self._shutdown.done():
            self._shutdown.set_result(request)

    def fail(self, failure: Failure) -> None:
        """Records the failure that ends the run; only the first counts, later ones are logged."""
        log.error("%s", failure)
        if not self._failed.done():
            self._failed.set_result(failure)
            self._cancel_block()

    # ------------------------------------------------------------------ what children need

    def bootstrap(self, name: str, uid: str, socket_dir: Path) -> Bootstrap:
        return Bootstrap(
            name=name,
            uid=uid,
            agent_uid=self.uid,
            agent_pid=os.getpid(),
            rendezvous=self.config.rendezvous or f"ipc://{self.runtime_dir}/agent.",
            runtime_dir=str(self.runtime_dir),
            socket_dir=str(socket_dir),
            key_file=str(self.key_file),
            tcp_bind=f"tcp://{self.host}:0" if self.host else "",
            allow_plain_loopback=self.config.allow_plain_loopback,
            registry_lost_s=self.config.registry_lost_s,
        )

    async def child_died(self, uid: str, socket_dir: Path, cause: str, clean: bool) -> None:
        cause = cause[:CAUSE_MAX]
        self._pings.forget(uid, Address(self.system.transport.address.host, f"{socket_dir}/"))
        if self.system.registry is not None:
            self.system.registry.declare_dead(uid, cause, clean)
        elif self.system.membership is not None:
            updates = self.system.membership.report_death(uid, cause, clean)
            for (
                child
            ) in self.children.values():  # whoever is beside it hears of it from here, whatever the registry is doing
                if child.pid and child.uid != uid:
                    self._tell_child(child, updates)

    def _tell_child(self, child: Child, updates: list[DirectoryUpdate]) -> None:
        try:
            for update in updates:
                self.system.push(self.address_of(child), update)
        except TransportError as error:  # the registry will tell it
            log.warning("could not tell %s of a death: %s", child.spec.name, error)

    def child_ended(self, name: str, cause: str) -> None:
        """A child is not started again (no cause: it is): whoever would wait for it need not."""
        process = lineage(self.uid, name)
        if self.system.registry is not None:
            self.system.registry.end(process, cause)
        elif self.system.membership is not None:
            self.system.directory.end(process, cause)
            self._report_to_primary(self.system.membership.report_end(process, cause), f"report the end of {name}")

    def child_silent(self, uid: str, silent_s: float) -> None:
        """A child's loop does not answer (0: answers again): watchers of its names hear of it."""
        if self.system.registry is not None:
            self.system.registry.suspect(uid, silent_s)
        else:
            self.own(self._report_silence(ProcessSuspect(uid=uid, silent_s=silent_s)), "report a silence")

    async def _report_silence(self, silence: ProcessSuspect) -> None:
        try:
            await self.system.ref(REGISTRY).ask(silence)
        except ActorError as error:  # a view only: what follows from a hang does not depend on it
            log.info("could not report that a process is silent: %s", error)

    def child_failed(self, failure: Failure) -> None:
        self.fail(failure)
        if not self.primary:
            self._report_to_primary(self._report(failure), "report a failure")

    def _report_to_primary(self, work: Coroutine[None, None, None], name: str) -> None:
        report = self.own(work, name)
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report(self, failure: Failure) -> None:
        try:
            await self.system.ref(PRIMARY).ask(
                ReportFailure(failure=failure), deadline_s=self.config.report_s, retry=True
            )
        except ActorError as error:
            log.error("could not report the failure of %s to the primary: %s", failure.name, error)

    # ------------------------------------------------------------------ other agents

    def own(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Every task of the agent has it as its owner: an error in one is a failure of the run."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            cause = f"{task.get_name()}: {type(error).__name__}: {error}"
            self.fail(Failure(self.config.name, cause, "".join(traceback.format_exception(error)), cause, 0, "", ()))

    def address_of(self, child: Child) -> Address:
        return Address(self.system.transport.address.host, f"{child.socket_dir}/")

    def agent_lost(self, process: ProcessRecord, cause: str) -> None:
        """Another agent is silent: the primary buries it with its processes, a secondary looks for the next primary."""
        if self.system.registry is not None:
            self.system.registry.declare_dead(process.uid, cause)
        elif self.system.membership is not None:
            self.system.membership.lost(cause)

    def _living(self) -> list[str]:
        return [child.uid for child in self.children.values() if child.pid]

    def _new_primary(self, before: ProcessRecord, primary: ProcessRecord) -> None:
        """The registry is back: the same primary after a silence, or one that was started anew."""
        self._pings.gone(before, "the registry is back")
        if before.address != primary.address:
            self.system.hang_up(before.address)
        self._pings.joined(primary)

    def _primary_lost(self, cause: str) -> None:
        if self._told_to_end or self._failed.done():
            return
        gone = DirectoryUpdate(entries=(), gone={self.system.primary.uid: cause})
        self.system.take(gone)  # nobody waits for the registry any more, here or in the children
        for child in self.children.values():
            if child.pid:
                self.system.push(self.address_of(child), gone)
            self.own(child.stop(child.spec.stop_grace_s), f"stop {child.spec.name}")
        self.fail(Failure(self.actor_name, f"{cause}; its processes are stopped", "", cause, 0, "", ()))

    async def _own_end(self) -> None:
        """The registry may declare this agent dead (it was silent too long): then its processes are nobody's."""
        stop = await self.system.wait_stop()
        cause = f"{stop.reason}: {stop.cause}"
        if self.primary:
            self.fail(Failure(self.actor_name, cause, "", cause, 0, "", ()))
        else:
            self._primary_lost(cause)

    async def _send_home(self) -> None:
        """Asks the secondary agents to end, and waits until they have left."""
        registry = self.system.registry
        assert registry is not None
        names = [
            entry.name for entry in registry.entries.values() if entry.alive and entry.name.startswith(f"{PRIMARY}/")
        ]
        for name in names:
            try:
                await self.system.ref(name).ask(Shutdown(reason="the primary node agent ends"))
            except ActorError as error:
                log.warning("could not tell %s to end: %s", name, error)
        try:
            async with asyncio.timeout(self.config.secondary_stop_s):
                while any(process.is_agent and process.uid != self.uid for process in registry.processes.values()):
                    await registry.next_change()
        except TimeoutError:
            log.error(
                "secondary agents did not leave within secondary_stop_s=%s: %s", self.config.secondary_stop_s, names
            )

    def _rendezvous(self) -> str:
        if not self.primary:
            return self.config.rendezvous
        return self.system.transport.address.tcp[1] or f"ipc://{self.runtime_dir}/agent."
