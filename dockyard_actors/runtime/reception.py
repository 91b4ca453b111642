"""Where envelopes arrive: decodes them and hands each to who waits for it, or says why nobody does.

Nothing is dropped in silence: an ask is refused with a reason, a tell becomes its sender's dead letter. It does not know what
handlers do.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.message import Undecodable, decoder, encoder
from dockyard_actors.runtime.registry import DirectoryUpdate
from dockyard_actors.transport.base import Lane, Peer

if TYPE_CHECKING:
    from dockyard_actors.runtime.system import ActorSystem

log = logging.getLogger("dockyard.runtime.reception")


class Reception:
    """The transport's receiver for one actor system."""

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.early: dict[
            str, list[tuple[Peer, Lane, wire.Ask | wire.Tell, int]]
        ] = {}  # of names that are being registered

    # ------------------------------------------------------------------ names that are being registered

    def expect(self, name: str) -> None:
        """Keeps what arrives for ``name`` (the senders' windows bound it) until `admit` or `give_up`."""
        self.early[name] = []

    def admit(self, name: str) -> None:
        for peer, lane, message, size in self.early.pop(name):
            self._on_request(peer, lane, message, size)

    def give_up(self, name: str) -> None:
        for peer, lane, message, _ in self.early.pop(name):
            text = f"{name!r} could not be registered by process {self.system.config.name}"
            self._refuse(peer, lane, message, wire.UNKNOWN, text)

    # ------------------------------------------------------------------ what the transport calls

    def on_envelope(self, peer: Peer, lane: Lane, envelope: memoryview) -> None:
        try:
            message = wire.decode(envelope)
        except Undecodable as error:
            self.system.counts.malformed += 1
            log.warning("ignored a malformed envelope from process %s: %s", peer.uid or "?", error)
            return
        if type(message) is wire.Ask or type(message) is wire.Tell:
            cell = self.system.cells.get(message.dst)
            if cell is not None and cell.incarnation == message.incarnation:
                cell.offer(peer, lane, message, len(envelope))
            else:
                self._on_request(peer, lane, message, len(envelope))
        elif isinstance(message, wire.Reply):
            self.system.caller.on_reply(peer, message)
        elif isinstance(message, wire.Item):
            self.system.caller.on_item(peer, lane, message)
        elif isinstance(message, wire.Credit):
            self.system.caller.on_credit(peer, lane, message)
        elif isinstance(message, wire.Fail):
            self.system.caller.on_fail(peer, message)
        elif isinstance(message, wire.Ping):
            peer.send(lane, encoder.encode(wire.Pong(message.seq)))
        elif isinstance(message, wire.Pong):
            future = self.system.pongs.get(message.seq)
            if future is not None and not future.done():
                future.set_result(None)
        elif isinstance(message, wire.Lost):
            self.system.dead_letter(f"{message.kind} to {message.dst}#{message.incarnation}: {message.reason}")
        elif isinstance(message, wire.Level):
            self.system.caller.on_level(peer, lane, message)
        elif isinstance(message, (wire.Cancel, wire.More, wire.Probe)):
            cell = self.system.cells.get(message.dst)
            if cell is None:
                return  # what it was about has ended
            if isinstance(message, wire.Probe):
                if cell.incarnation == message.incarnation:
                    service = cell.serving()
                    if peer not in service.accounts and peer.uid in self.system.gone:
                        self.system.counts.fenced += 1
                    else:
                        service.level(peer, lane, message)
            elif cell.service is None:
                return  # its message was lost
            elif isinstance(message, wire.More):
                cell.service.more(peer, message)
            else:
                cell.service.cancel(peer, message.id)

    def _on_request(self, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell, size: int) -> None:
        if message.dst == wire.SYSTEM:
            if message.kind == "DirectoryUpdate":
                self._on_update(peer, lane, message)
            return
        cell = self.system.cells.get(message.dst)
        if message.dst in self.early:
            self.early[message.dst].append((peer, lane, message, size))
        elif cell is None:
            self._refuse(
                peer,
                lane,
                message,
                wire.UNKNOWN,
                f"no actor {message.dst!r} in process {self.system.config.name} (any more)",
            )
        elif message.incarnation not in (cell.incarnation, 0) and (
            message.incarnation not in self.system.former.get(message.dst, ())
        ):
            text = f"it was meant for incarnation {message.incarnation} and this is {cell.incarnation}"
            self._refuse(peer, lane, message, wire.STALE, text)
        else:
            cell.offer(peer, lane, message, size)

    def _on_update(self, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell) -> None:
        """Who lives and who is dead is for the registry to say, and for this process's node agent when the registry is lost."""
        try:
            update = decoder(DirectoryUpdate).decode(message.body)
        except Undecodable as error:
            self.system.counts.malformed += 1
            log.warning("ignored a malformed directory update from process %s: %s", peer.uid or "?", error)
            return
        membership = self.system.membership
        if lane != Lane.CONTROL or membership is None or not membership.hear(peer.uid, update):
            self.system.counts.unbidden += 1
            log.warning("ignored what process %s says of others: it is not the registry", peer.uid or "?")

    def _refuse(self, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell, code: str, text: str) -> None:
        if type(message) is wire.Ask:
            peer.send(lane, encoder.encode(wire.Fail(message.id, code, "", text)))
        else:
            peer.send(lane, encoder.encode(wire.Lost(message.dst, message.incarnation, message.kind, text)))

    def on_undeliverable(self, peer: Peer, lane: Lane, envelopes: int, reason: str) -> None:
        self.system.counts.dead_letters += envelopes
        log.info("%d envelopes to process %s will not arrive: %s", envelopes, peer.uid or "?", reason)

    def on_refused(self, peer: Peer, reason: str) -> None:
        log.error("a peer refused our hello: %s", reason)
        self.system.caller.on_refused(peer, reason)

    def on_fault(self, error: BaseException) -> None:
        self.system.crash(error, "the control transport")
