"""The actor runtime. What a program needs of it can be imported from here: ``from dockyard_actors.runtime import Actor, Message``.

A name's module is loaded when the name is first used, so that a process loads no more than it needs. (`guard` is imported from its
module, which has the same name.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dockyard_actors.runtime.actor import Actor, ActorContext, Birth, Death, Unresponsive, concurrent, control
    from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
    from dockyard_actors.runtime.config import SystemConfig
    from dockyard_actors.runtime.errors import (
        ActorCrashed,
        ActorError,
        AskTimeout,
        BadReply,
        MailboxFull,
        NameTaken,
        NotUnderstood,
        OutcomeUnknown,
        PeerDied,
        PermanentError,
        ProtocolRefused,
        RegistryDown,
        RemoteError,
        RunFailed,
        StaleIncarnation,
        StreamBroken,
        SystemClosed,
        TooLarge,
        UnknownName,
        WireError,
    )
    from dockyard_actors.runtime.message import Message, MessageTypeError, Stream
    from dockyard_actors.runtime.process import main_process
    from dockyard_actors.runtime.ref import Ref, broadcast, collect
    from dockyard_actors.runtime.status import Inspect, SystemStatus
    from dockyard_actors.runtime.supervision import (
        Failure,
        ListProcesses,
        ProcessInfo,
        ProcessSpec,
        RestartPolicy,
        RestartProcess,
        Shutdown,
        StopProcess,
    )
    from dockyard_actors.runtime.system import ActorSystem
    from dockyard_actors.runtime.waits import Wait

__all__ = [
    "Actor",
    "ActorContext",
    "ActorCrashed",
    "ActorError",
    "ActorSystem",
    "AgentConfig",
    "AskTimeout",
    "BadReply",
    "Birth",
    "Death",
    "Failure",
    "Inspect",
    "ListProcesses",
    "MailboxFull",
    "Message",
    "MessageTypeError",
    "NameTaken",
    "NodeAgent",
    "NotUnderstood",
    "OutcomeUnknown",
    "PeerDied",
    "PermanentError",
    "ProcessInfo",
    "ProcessSpec",
    "ProtocolRefused",
    "Ref",
    "RegistryDown",
    "RemoteError",
    "RestartPolicy",
    "RestartProcess",
    "RunFailed",
    "Shutdown",
    "StaleIncarnation",
    "StopProcess",
    "Stream",
    "StreamBroken",
    "SystemClosed",
    "SystemConfig",
    "SystemStatus",
    "TooLarge",
    "UnknownName",
    "Unresponsive",
    "Wait",
    "WireError",
    "broadcast",
    "collect",
    "concurrent",
    "control",
    "main_process",
]

_HOMES = {
    "actor": (
        "Actor",
        "ActorContext",
        "Birth",
        "Death",
        "Unresponsive",
        "concurrent",
        "control",
    ),
    "agent": (
        "AgentConfig",
        "NodeAgent",
    ),
    "config": ("SystemConfig",),
    "errors": (
        "ActorCrashed",
        "ActorError",
        "AskTimeout",
        "BadReply",
        "MailboxFull",
        "NameTaken",
        "NotUnderstood",
        "OutcomeUnknown",
        "PeerDied",
        "PermanentError",
        "ProtocolRefused",
        "RegistryDown",
        "RemoteError",
        "RunFailed",
        "StaleIncarnation",
        "StreamBroken",
        "SystemClosed",
        "TooLarge",
        "UnknownName",
        "WireError",
    ),
    "message": (
        "Message",
        "MessageTypeError",
        "Stream",
    ),
    "process": ("main_process",),
    "ref": (
        "Ref",
        "broadcast",
        "collect",
    ),
    "status": (
        "Inspect",
        "SystemStatus",
    ),
    "supervision": (
        "Failure",
        "ListProcesses",
        "ProcessInfo",
        "ProcessSpec",
        "RestartPolicy",
        "RestartProcess",
        "Shutdown",
        "StopProcess",
    ),
    "system": ("ActorSystem",),
    "waits": ("Wait",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
