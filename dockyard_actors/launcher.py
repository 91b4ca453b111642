"""Runs a node agent for `up`, `resume` and `--role`: starts role processes, shows what they do, ends the run and writes its summary.

Promises that whatever happens no process, socket or shared memory is left behind, and that the first cause of a failure is printed
last. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from pathlib import Path

import msgspec
import psutil
import uvloop
from rich.console import Console

from dockyard_actors.config import Config, from_resolved, resolved
from dockyard_actors.observe.live import LiveView, Snapshot, final_report
from dockyard_actors.observe.logs import setup_logging
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.observe.top import RUNTIME, Runtime
from dockyard_actors.report import snapshot_of, summarise
from dockyard_actors.roles.build import name_of
from dockyard_actors.roles.hosts import HostMemory
from dockyard_actors.roles.main import RUN_DESK
from dockyard_actors.roles.messages import AskRun, AskStatus, RunIs, StatusIs, StopRun
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.supervision import Failure, ProcessSpec, RestartPolicy
from dockyard_actors.transport.base import TransportError
from dockyard_actors.transport.tensors import DataPlaneError, host_id

log = logging.getLogger(__name__)

ALL_ROLES = ("controller", "buffer", "broker", "trainer", "rollout", "evaluator")
ROLE_OF = {
    "trainer": "trainer",
    "inference": "rollout",
    "sandbox": "broker",
    "buffer": "buffer",
    "controller": "controller",
    "evaluator": "evaluator",
}
# Sandboxes first, the ledger last; what stands together ends at the same time.
STOP_ORDER = (("broker",), ("evaluator", "rollout", "trainer"), ("buffer",), ("controller",))
EXIT = {"completed": 0, "failed": 1, "interrupted": 130}
JOIN_S = 30.0  # the primary may still be starting on a busy machine
RATE_AFTER_S = 2.0  # a rate over less than this is noise
STATUS_S = 2.0  # the view is redrawn without news rather than waiting longer for it


class RunDesk(Actor):
    """Tells every process that joins what the run is."""

    def __init__(self, run: RunIs):
        self.run = run

    async def ask_run(self, msg: AskRun) -> RunIs:
        return self.run


def processes_of(role: str, config: Config) -> int:
    """How many processes of a role a run has; an evaluator only when something is evaluated while it trains."""
    return {"rollout": config.rollout.count, "evaluator": int(config.eval.every > 0)}.get(role, 1)


def spec_of(role: str, index: int, config: Config, logs: Path) -> ProcessSpec:
    policy = config.supervision
    name = name_of(role, index)
    return ProcessSpec(
        name=name,
        argv=[sys.executable, "-m", "dockyard_actors.roles.main", role, str(index)],
        env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        policy=RestartPolicy(policy.max_restarts, policy.window_s, policy.backoff_s, policy.backoff_max_s),
        log_path=logs / f"{name}.log",
        stop_grace_s=policy.stop_grace_s,
        keep_running=True,
        hang_s=policy.hang_s,
        start_grace_s=policy.start_timeout_s,
    )


def launch(config: Config, run_dir: RunDir, roles: tuple[str, ...], listen: str = "") -> int:
    """Starts the primary agent with `roles` and returns the exit code when the run has ended."""
    logs = setup_logging("agent", run_dir.logs, level=config.observe.log_level)
    try:
        run_dir.write_text(run_dir.config.name, resolved(config))
        return uvloop.run(Run(config, run_dir, roles, listen).main())
    finally:
        logs.close()


class Run:
    """One run from the primary agent's side."""

    def __init__(self, config: Config, run_dir: RunDir, roles: tuple[str, ...], listen: str):
        self.config = config
        self.run_dir = run_dir
        self.roles = roles
        self.console = Console()
        self.listen = listen
        self.status: StatusIs | None = None
        self.warnings: list[str] = []
        self.signals = 0
        self.signalled = asyncio.Event()
        self.training_since: tuple[float, int] | None = None
        self.progress: tuple[float, int, str] = (
            time.monotonic(),
            -1,
            "",
        )  # when step and phase last changed, and what they were
        self.generated_since: tuple[float, int] | None = None

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        policy = self.config.supervision
        settings = AgentConfig(
            hang_s=policy.hang_s,
            start_grace_s=policy.start_timeout_s,
            listen=self.listen,
            raise_failures=False,  # `_watch` looks at them, and the processes are stopped in order
        )
        restarts: dict[str, int] = {}
        async with NodeAgent(settings) as agent, HostMemory(agent, self.config) as memory:
            runtime = self.run_dir.path / RUNTIME
            try:
                where = Runtime(agent.rendezvous, str(agent.key_file))
                self.run_dir.write_text(RUNTIME, msgspec.json.encode(where).decode())
                await agent.system.start(RunDesk(self._run_is(memory)), RUN_DESK)
                for role in self.roles:
                    for index in range(processes_of(role, self.config)):
                        await agent.spawn(spec_of(role, index, self.config, self.run_dir.logs))
                if len(self.roles) < len(ALL_ROLES):
                    self.console.print(f"rendezvous: {agent.rendezvous}", soft_wrap=True)
                    if self.listen:
                        self.console.print(f"key file: {agent.key_file}", soft_wrap=True)
                    self.console.print(f"run directory: {self.run_dir.path}", soft_wrap=True)
                outcome, cause = await self._watch(agent)
                restarts = {p.name: p.restarts for p in agent.processes()}
                await self._stop(agent, hurry=self.signals > 1)
            finally:
                runtime.unlink(missing_ok=True)
        summary, examples = summarise(self.config, self.run_dir, outcome, cause, self.status, restarts, self._wall_s())
        name = "inspect" if summary.status == "completed" else "resume"
        hint = f"Next: dockyard-launch {name} {self.run_dir.path}"
        final_report(self.console, summary, examples, run_dir=self.run_dir.path, plot=self.run_dir.plot, hint=hint)
        return EXIT[summary.status]

    def _run_is(self, memory: HostMemory) -> RunIs:
        return RunIs(
            run_id=self.run_dir.id,
            run_dir=str(self.run_dir.path),
            session=secrets.token_hex(8),
            config=self.run_dir.config.read_text(),
            fd_path=memory.fd_path,
            host_id=host_id(),
        )

    def _wall_s(self) -> float:
        return time.time() - psutil.Process().create_time()

    def _on_signal(self) -> None:
        self.signals += 1
        self.signalled.set()

    async def _watch(self, agent: NodeAgent) -> tuple[str, str | None]:
        """Draws until the run finishes, a process fails for good, or somebody interrupts. Returns (status, cause)."""
        failed = asyncio.ensure_future(agent.wait_failed())
        drain: asyncio.Task[None] | None = None
        try:
            with contextlib.ExitStack() as stack:
                view = stack.enter_context(LiveView(self.console))
                while True:
                    await self._refresh(agent)
                    shown = snapshot_of(
                        self.config, self.run_dir, self.status, agent.processes(), self._eta(), self._generated_per_s()
                    )
                    view = self._show(view, shown)
                    if failed.done():
                        return "failed", str(failed.result())
                    if (stalled := self._stalled()) is not None:
                        return "failed", stalled
                    if self.status is not None and self.status.failure:
                        return "failed", self.status.failure
                    if self.status is not None and self.status.finished:
                        cause = "stopped by a signal" if self.status.finished == "interrupted" else None
                        return self.status.finished, cause
                    if self.signals and drain is None:
                        limit = self.config.supervision.drain_s
                        self.console.print(
                            f"stopping: the step under way ends and is saved, within {limit:.0f} s; again (Ctrl-C) cuts it",
                            soft_wrap=True,
                        )
                        drain = asyncio.ensure_future(self._drain(agent))
                    if self.signals > 1:
                        return "interrupted", "stopped at once by a second signal"
                    if drain is not None and drain.done():
                        return (
                            "interrupted",
                            f"not drained within supervision.drain_s = {self.config.supervision.drain_s:.0f} s",
                        )
                    self.signalled.clear()
                    await _first(failed, self.signalled.wait(), timeout_s=self.config.observe.refresh_s)
        finally:
            failed.cancel()
            if drain is not None:
                drain.cancel()

    def _show(self, view: LiveView, shown: Snapshot) -> LiveView:
        """Draws. When whoever read our output is gone (closed pipe or terminal), the run goes on without a view."""
        try:
            view.update(shown)
            return view
        except OSError as error:
            log.warning(
                "nobody reads the output any more (%s); the run goes on, its logs are in %s", error, self.run_dir.logs
            )
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.close(null)
            self.console = Console(file=open(os.devnull, "w"))  # noqa: SIM115  # for the rest of the process
            return LiveView(self.console)

    async def _refresh(self, agent: NodeAgent) -> None:
        try:
            self.status = await agent.system.ref("controller").ask(AskStatus(), deadline_s=STATUS_S)
        except ActorError as error:
            log.debug("no status: %s", error)

    async def _drain(self, agent: NodeAgent) -> None:
        """Asks the run to stop and gives it `drain_s`; the watch loop sees when it has."""
        limit = self.config.supervision.drain_s
        try:
            await agent.system.ref("controller").ask(StopRun(reason="signal"), deadline_s=limit, retry=True)
        except ActorError as error:
            log.warning("could not ask the run to stop: %s", error)
            return
        await asyncio.sleep(limit)

    async def _stop(self, agent: NodeAgent, hurry: bool) -> None:
        """Ends the processes in order. The ledger is last, so that it sees everything end."""
        running = [process.name for process in agent.processes()]
        for roles in STOP_ORDER:
            names = [name for name in running if name.partition("-")[0] in roles]
            if names:
                self.console.print(f"stopping {', '.join(names)}", soft_wrap=True)
            await asyncio.gather(*(agent.stop(name, 0.0 if hurry else None, tell=False) for name in names))

    def _stalled(self) -> str | None:
        """Why the run counts as stalled: it is training and no step ended for `stall_s`. Names who waits for whom."""
        if self.status is None:
            return None
        since, step, phase = self.progress
        now, limit = time.monotonic(), self.config.supervision.stall_s
        if (
            (step, phase) != (self.status.step, self.status.phase)
            or phase != "training"
            or self.status.step >= self.config.grpo.max_num_steps
        ):
            self.progress = (now, self.status.step, self.status.phase)
            return None
        if now - since < limit:
            return None
        waits = [
            f"{r.role} waits {r.wait_s:.0f} s for {r.waits_for}" for r in self.status.roles.values() if r.waits_for
        ]
        doing = [f"{r.role}: {r.doing}" for r in self.status.roles.values()]
        return (
            f"no step was finished for supervision.stall_s = {limit:.0f} s after step {step}; ledger {self.status.ledger}; "
            f"{'; '.join([*doing, *waits])}"
        )

    def _generated_per_s(self) -> float | None:
        """Mean over the training so far: an engine counts a batch at its end, so shorter windows jump."""
        if self.status is None or self.status.phase != "training":
            return None
        now = (time.monotonic(), self.status.tokens_generated)
        if self.generated_since is None:
            self.generated_since = now
        (first, before), (last, after) = self.generated_since, now
        return (after - before) / (last - first) if last - first > RATE_AFTER_S else None

    def _eta(self) -> float | None:
        if self.status is None or self.status.phase != "training":
            return None
        now = time.monotonic()
        if self.training_since is None:
            self.training_since = (now, self.status.step)
        since, first = self.training_since
        done = self.status.step - first
        return (now - since) / done * (self.config.grpo.max_num_steps - self.status.step) if done > 0 else None


async def _first(future: asyncio.Future[Failure], *others: object, timeout_s: float) -> None:
    """Returns when any is done or the time is up; the others are cancelled, `future` is not."""
    tasks = [asyncio.ensure_future(other) for other in others]  # type: ignore[call-overload]
    try:
        await asyncio.wait([future, *tasks], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def join(role: str, index: int, rendezvous: str, key_file: Path | None = None) -> int:
    """Starts a secondary agent with one role, which joins the run at `rendezvous`. Returns the exit code when it has ended."""
    setup_logging(f"agent-{role}-{index}", None, stderr=True)
    return uvloop.run(_join(ROLE_OF[role], index, rendezvous, key_file))


async def _join(role: str, index: int, rendezvous: str, key_file: Path | None) -> int:
    name = name_of(role, index)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        settings = AgentConfig(name=name, rendezvous=rendezvous, key_file=key_file, raise_failures=False)
        async with NodeAgent(settings) as agent:
            run = await agent.system.ref(RUN_DESK).ask(AskRun(), deadline_s=JOIN_S, retry=True)
            config = from_resolved(run.config)
            if role == "rollout" and index >= config.rollout.count:
                log.error(
                    "--index %d: the run has rollout.count = %d, so rollouts are numbered 0 to %d and nobody would know this one",
                    index,
                    config.rollout.count,
                    config.rollout.count - 1,
                )
                return 2
            async with HostMemory(agent, config):
                await agent.spawn(spec_of(role, index, config, Path(run.run_dir) / "logs"))
                log.info("%s joined run %s", name, run.run_id)
                waits = [asyncio.ensure_future(w) for w in (agent.wait_failed(), agent.wait_shutdown(), stop.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                failure = waits[0].result() if waits[0].done() else None
                for wait in waits:
                    wait.cancel()
                for process in agent.processes():  # the memory goes after whoever uses it
                    await agent.stop(process.name)
            if failure is None:
                return 0
    except (ActorError, TransportError, DataPlaneError, OSError, ValueError) as error:
        log.error(
            "could not join %s: %s. The controller prints the address when it starts; it ends with its run",
            rendezvous,
            error,
        )
        return 1
    print(failure, file=sys.stderr)
    return 1
