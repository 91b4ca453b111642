"""A TCP proxy that a test holds in its hands: delays, stalls, swallows one direction or both, cuts in the middle of a frame.

TCP itself never loses or repeats bytes of a living connection: packet loss is seen as stalls (retransmission) and, when it lasts, as a
connection that dies with what was on its way. That is what the proxy does.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

CHUNK = 1 << 14
RETRANSMIT_S = 0.2  # what a lost packet costs, as Linux's smallest retransmission timeout


@dataclass
class Weather:
    """delay_s: (least, most) for each chunk. loss: share of chunks that are stalled as if a packet was lost."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    loss: float = 0.0
    open_up: asyncio.Event = field(default_factory=asyncio.Event)  # set: bytes pass from client to server
    open_down: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open_up.set()
        self.open_down.set()


class Proxy:
    """``async with Proxy(port) as proxy``: connect to ``proxy.port`` instead."""

    def __init__(self, target: int, weather: Weather, seed: int = 0) -> None:
        self.target, self.weather = target, weather
        self.connections = 0
        self.taken = 0  # bytes from clients, passed on or not
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut_after: int | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()
        self.weather.open_up.set()
        self.weather.open_down.set()
        await self._server.wait_closed()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close in the next turn

    def cut(self) -> None:
        """Every connection dies at once (RST)."""
        for writer in list(self._writers):
            writer.transport.abort()

    def cut_after(self, size: int) -> None:
        """Connections die when so many more bytes have gone to the server."""
        self._cut_after = size

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        pumps = [
            asyncio.ensure_future(self._pump(reader, back, self.weather.open_up, True)),
            asyncio.ensure_future(self._pump(there, writer, self.weather.open_down, False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, back):
                end.transport.abort()
                self._writers.discard(end)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event, up: bool
    ) -> None:
        try:
            while data := await reader.read(CHUNK):
                self.taken += len(data) if up else 0
                await gate.wait()
                stall = RETRANSMIT_S if self._random.random() < self.weather.loss else 0.0
                if any(self.weather.delay_s) or stall:
                    await asyncio.sleep(self._random.uniform(*self.weather.delay_s) + stall)
                if up and self._cut_after is not None:
                    if len(data) >= self._cut_after:
                        writer.write(data[: self._cut_after])
                        await writer.drain()
                        self._cut_after = None
                        self.cut()
                        return
                    self._cut_after -= len(data)
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            return
