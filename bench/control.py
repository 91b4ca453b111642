"""Asks and tells between two processes, beside two floors and two peers; spawning, idle actors and idle connections.

The floors do what no actor runtime can do without: one message there, one back, nobody else served meanwhile. All sides run in
turn on the same two cores; whoever is not measured sleeps.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from bench.harness import Figures, Options, absent, figure, missing_peer, note
from bench.peers import at_scale, on_dockyard, on_ray, on_xoscar
from bench.peers.driven import PAYLOAD, SPAWN, Driven, p50
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.transport.base import create_keys

CORES = 2
FLOOR_WAIT_MS = 60_000  # a floor's other end that died is an error, not a benchmark that hangs
PEERS = ("ray", "xoscar")


class Calls(NamedTuple):
    """How many calls of each kind a round makes of one side."""

    ask_p50: int
    asks_per_s: int
    tells_per_s: int


class Size(NamedTuple):
    ours: Calls
    peers: Calls
    actors: int
    links: int
    idle_s: float


SIZES = {
    "full": Size(Calls(3_000, 64_000, 100_000), Calls(1_000, 6_400, 5_000), 10_000, 100, 10.0),
    "tiny": Size(Calls(50, 128, 200), Calls(20, 64, 50), 200, 4, 0.2),
}

Rounds = dict[str, list[float]]  # "side what" → a figure of each round


def run(options: Options) -> Figures:
    """Every key of the control benchmark; times and rates of each side are in the details."""
    size = SIZES[options.size]
    with _same_cores() as cores:
        rounds, notes, why = _calls(options, size)
        curve = _curve(options, size)
        spawns = [at_scale.spawned(size.actors) for _ in range(options.rounds)]
        note("  idle links")
        idle = at_scale.idle_cpu_pct(size.links, size.idle_s)

    figures = {
        "ask_p50_over_pair_floor": figure(
            _ratio(rounds["dockyard ask_p50"], rounds["pair ask_p50"]),
            "x",
            over_pipe=round(_ratio(rounds["dockyard ask_p50"], rounds["pipe ask_p50"]), 2),
            p50_us={side: _us(rounds[f"{side} ask_p50"]) for side in ("dockyard", "pair", "pipe")},
            asks_per_s_64_in_flight=round(statistics.median(rounds["dockyard asks_per_s"])),
            tells_per_s=round(statistics.median(rounds["dockyard tells_per_s"])),
            rounds=options.rounds,
            cores=cores,
        )
    }
    for what, key in (("ask_p50", "ask_p50"), ("asks_per_s", "asks64"), ("tells_per_s", "tells")):
        for peer in PEERS if key != "tells" else PEERS[:1]:
            name = f"{key}_speedup_vs_{peer}"
            if reason := why.get(peer):
                figures[name] = absent("x", reason)
            else:
                figures[name] = _speedup(rounds, what, peer, notes[peer])
    figures["curve_ask_ratio"] = figure(
        _ratio(curve["curve ask_p50"], curve["plain ask_p50"]),
        "x",
        p50_us={side: _us(curve[f"{side} ask_p50"]) for side in ("curve", "plain")},
        transport="tcp, loopback",
    )
    figures["spawn_per_s"] = figure(
        statistics.median(size.actors / spawn.seconds for spawn in spawns), "1/s", actors=size.actors
    )
    scale = 10_000 / size.actors / (1 << 20)
    figures["mb_per_10k_idle_actors"] = figure(
        statistics.median(spawn.rss for spawn in spawns) * scale,
        "MiB",
        pss=round(statistics.median(spawn.pss for spawn in spawns) * scale, 1),
        actors=size.actors,
    )
    figures["idle_cpu_pct_100_links"] = figure(idle, "%", links=size.links, seconds=size.idle_s)
    return figures


def _calls(options: Options, size: Size) -> tuple[Rounds, dict[str, dict[str, Any]], dict[str, str]]:
    """(rounds of floors, ours and peers over ipc; what is to be known of a peer; why a peer was not measured)."""
    why = {}
    for peer in PEERS:
        reason = missing_peer(peer) if options.peers == "all" else "left out: --peers none"
        if reason is not None:
            why[peer] = reason
    rounds: Rounds = {}
    with tempfile.TemporaryDirectory(prefix="dy-b-") as path, contextlib.ExitStack() as stack:
        floors = stack.enter_context(_floors(path))
        server = SystemConfig(name="server", ipc_prefix=f"{path}/s.")
        sides = {"dockyard": stack.enter_context(Driven("dockyard", on_dockyard.opened, server, {}))}
        if "xoscar" not in why:
            sides["xoscar"] = stack.enter_context(Driven("xoscar", on_xoscar.opened))
        if "ray" not in why:
            note("  starting a Ray cluster")
            sides["ray"] = stack.enter_context(Driven("ray", on_ray.opened, f"{path}/ray"))
        for number in range(options.rounds):
            for what in Calls._fields:
                for name, side in sides.items():
                    calls = size.ours if name == "dockyard" else size.peers
                    _keep(rounds, name, what, side.call(what, getattr(calls, what)))
                if what == "ask_p50":
                    for name, exchange in floors.items():
                        _keep(rounds, name, what, p50(exchange, size.ours.ask_p50))
            note(f"  round {number + 1}: " + ", ".join(f"{name} {_us(r[-1:])} µs" for name, r in _asks(rounds)))
        notes = {name: side.call("notes") for name, side in sides.items()}
    return rounds, notes, why


def _curve(options: Options, size: Size) -> Rounds:
    """Asks over loopback tcp with and without CURVE, in turn."""
    rounds: Rounds = {}
    with tempfile.TemporaryDirectory(prefix="dy-b-") as path, contextlib.ExitStack() as stack:
        keys = Path(path) / "keys"
        create_keys(keys)
        kinds: dict[str, dict[str, Any]] = {"plain": {"allow_plain_loopback": True}, "curve": {"key_file": keys}}
        sides = {}
        for name, settings in kinds.items():
            server = SystemConfig(name=name, tcp_bind="tcp://127.0.0.1:0", **settings)
            sides[name] = stack.enter_context(Driven(name, on_dockyard.opened, server, settings))
        for _ in range(options.rounds):
            for name, side in sides.items():
                _keep(rounds, name, "ask_p50", side.call("ask_p50", size.ours.ask_p50))
    return rounds


def _speedup(rounds: Rounds, what: str, peer: str, notes: dict[str, Any]) -> Any:
    ours, theirs = rounds[f"dockyard {what}"], rounds[f"{peer} {what}"]
    notes = {key: value for key, value in notes.items() if key.endswith(what) or not key.startswith("ray")}
    if what == "ask_p50":
        return figure(_ratio(theirs, ours), "x", p50_us={"dockyard": _us(ours), peer: _us(theirs)}, **notes)
    per_s = {"dockyard": round(statistics.median(ours)), peer: round(statistics.median(theirs))}
    return figure(_ratio(ours, theirs), "x", per_s=per_s, **notes)


def _keep(rounds: Rounds, side: str, what: str, value: float) -> None:
    rounds.setdefault(f"{side} {what}", []).append(value)


def _asks(rounds: Rounds) -> list[tuple[str, list[float]]]:
    return [(key.removesuffix(" ask_p50"), found) for key, found in rounds.items() if key.endswith(" ask_p50")]


def _ratio(large: list[float], small: list[float]) -> float:
    """Median over the rounds of the two figures of the same round."""
    return statistics.median(a / b for a, b in zip(large, small, strict=True))


def _us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


@contextlib.contextmanager
def _same_cores() -> Iterator[list[int]]:
    """Whatever starts within runs on these cores."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:CORES]
    os.sched_setaffinity(0, cores)
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, before)


# ---------------------------------------------------------------------- floors


@contextlib.contextmanager
def _floors(path: str) -> Iterator[dict[str, Callable[[], None]]]:
    """Blocking exchanges with a process that does nothing but answer."""
    pipe, pipe_end = SPAWN.Pipe()
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.setsockopt(zmq.LINGER, 0)
        pair.setsockopt(zmq.RCVTIMEO, FLOOR_WAIT_MS)
        pair.bind(f"ipc://{path}/pair")
        servers = [
            SPAWN.Process(target=_echo_pipe, args=(pipe_end,)),
            SPAWN.Process(target=_echo_pair, args=(f"ipc://{path}/pair",)),
        ]
        for server in servers:
            server.start()

        def over_pipe() -> None:
            pipe.send_bytes(PAYLOAD)
            pipe.recv_bytes()

        def over_pair() -> None:
            pair.send(PAYLOAD)
            pair.recv()

        try:
            over_pipe()
            over_pair()
            yield {"pair": over_pair, "pipe": over_pipe}
            pipe.send_bytes(b"end")
            pair.send(b"end")
            for server in servers:
                server.join()
        finally:
            for server in servers:
                server.kill()
                server.join()


def _echo_pipe(pipe: Connection) -> None:
    while (data := pipe.recv_bytes()) != b"end":
        pipe.send_bytes(data)


def _echo_pair(path: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(path)
        while (data := socket.recv()) != b"end":
            socket.send(data)
