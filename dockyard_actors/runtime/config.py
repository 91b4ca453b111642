"""Settings of an actor system: where it listens, whom it joins, how much it queues and how long it waits, with the reasons."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from dockyard_actors.transport.base import ControlConfig, RunKeys


@dataclass(frozen=True)
class SystemConfig:
    """One process's actor system. The default is a system on its own: no sockets, its own registry, actors in one process."""

    name: str = "main"  # of the process, in logs, errors and waits
    uid: str = field(default_factory=lambda: secrets.token_hex(8))  # unique for every start of a process
    agent: str = ""  # uid of the node agent that is this process's parent; empty: nobody's child
    rendezvous: str = ""  # registry to join: "ipc:///PREFIX" or "tcp://HOST:PORT"; empty: host the registry here
    ipc_prefix: str = (
        ""  # path prefix of this process's sockets, in a private directory; empty with a rendezvous: a new one
    )
    tcp_bind: str = ""  # "tcp://HOST:PORT" to be reachable from other hosts (a concrete address; port 0: any)
    key_file: str | Path | None = None  # the run's keys; every process of the run reads the same file
    allow_plain_loopback: bool = False
    handshake_s: float = 5.0  # strangers at the tcp port who say nothing are cut after this
    max_frame_bytes: int = 16 << 20  # a control message larger than this is bulk, which has its own plane

    mailbox_capacity: int = 1024  # messages an actor's lane holds; beyond it, reading stops and senders stay queued
    window: int = (
        256  # messages of one sender that an actor lets wait: bounds memory, lets 64 asks in flight pass freely
    )
    window_bytes: int = 4 << 20  # ... and how many bytes; one message larger than what is left still goes
    probe_s: float = 1.0  # a sender that waits for room asks so often what the receiver has: credit may have been lost
    mailbox_bytes: int = 64 << 20  # as mailbox_capacity, in bytes of envelopes
    concurrency: int = 1024  # @concurrent handlers of one actor running at once; each is one waiting task
    dedup_capacity: int = 4096  # replies remembered for asks that may be repeated
    dedup_bytes: int = 64 << 20  # ... and how many bytes they may take
    fairness: int = 64  # messages handled without a pause before the loop may do something else

    ask_s: float = 10.0  # deadline of an ask that names none: control work takes ms, this allows for a busy 2-core host
    tell_s: float = 10.0  # how long a tell waits for room before MailboxFull
    retry_every_s: float = (
        5.0  # ask(retry=True) is sent again to the same incarnation after this: a frame lost with its TCP connection
    )
    join_s: float = 30.0  # the registry must answer a new process within this; the primary may still be starting
    registry_s: float = 5.0  # lookups and registrations: one round trip to a loop that never blocks
    lease_s: float = (
        15.0  # a process whose end nobody sees counts as dead after this silence; it renews three times as often
    )
    registry_lost_s: float = 30.0  # a process whose registry is gone goes on for so long and looks for the next one
    rejoin_s: float = 2.0  # one try to join the next registry; each dials anew
    settle_s: float = (
        10.0  # a registry just started waits so long for processes that others know, then they count as dead
    )
    slow_handler_s: float = 1.0  # a handler at work for longer is named in the log: messages behind it wait
    stop_s: float = 5.0  # an actor's on_stop and its running handlers at close

    def control(self, keys: RunKeys | None) -> ControlConfig:
        return ControlConfig(
            uid=self.uid,
            process=self.name,
            ipc_prefix=self.ipc_prefix,
            tcp_bind=self.tcp_bind,
            keys=keys,
            allow_plain_loopback=self.allow_plain_loopback,
            max_frame_bytes=self.max_frame_bytes,
            handshake_s=self.handshake_s,
        )
