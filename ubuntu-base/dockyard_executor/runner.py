"""What runs inside the confined process: the program, then the tests, told over the event channel.

Delivered tests carry expressions or statements, never an expected value that the judge can compare outside. No channel
inside the program's own process is unforgeable; this one is chained with a key that arrives after the program's module
body, and the judge treats what comes over it as a claim. Ends the process itself; no exit handler of the program runs.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import resource
import struct
import sys
import types
from hashlib import blake2b
from typing import Any, NoReturn

from dockyard_executor import values

LOADED = b"loaded\n"  # asks for the tests; unsigned, since the key comes with them
WATCHED = (
    "AssertionError", "BaseException", "Exception", "__build_class__", "__import__", "abs", "all", "any", "compile", "eval", "exec",
    "getattr", "isinstance", "len", "list", "max", "min", "object", "print", "range", "repr", "round", "set", "sorted", "str", "sum", "type",
)  # fmt: skip
EXIT_BROKEN = 97  # the runner itself could not go on: closed descriptors, no memory left


def read_frame(descriptor: int, read=os.read) -> bytes:
    """One length-prefixed message. Raises EOFError when the other side ended."""
    (size,) = struct.unpack("=I", _read_exactly(descriptor, 4, read))
    return _read_exactly(descriptor, size, read)


def _read_exactly(descriptor: int, size: int, read) -> bytes:
    parts: list[bytes] = []
    while size:
        part = read(descriptor, min(size, 1 << 16))
        if not part:
            raise EOFError("the sender ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def describe(error: BaseException, limit: int = 300) -> str:
    """`Type: message` of an exception of unknown make: its own methods may raise or return nonsense."""
    name = type.__dict__["__name__"].__get__(type(error))
    try:
        message = str(error)
    except BaseException as second:
        message = f"<its message could not be made: {type.__dict__['__name__'].__get__(type(second))}>"
    return f"{name}: {message}"[:limit] if message else name


def run(commands: int, events: int, value_bytes: int) -> NoReturn:
    """Runs the program that arrives on `commands` and reports on `events`. Never returns."""
    # Everything used later is bound here, before the program can rebind it where it came from.
    read, write, exit_now, getpid = os.read, os.write, os._exit, os.getpid
    dumps, loads, mac, encode, frame = values.to_json, json.JSONDecoder().decode, blake2b, values.encode, read_frame
    not_plain, describe_error, assertion = values.NotPlain, describe, AssertionError
    compile_source, execute, evaluate, exact_type, assert_type = compile, exec, eval, type, isinstance
    setrlimit, address_space = resource.setrlimit, resource.RLIMIT_AS
    memory_error, base_exception = MemoryError, BaseException
    no_trace, no_profile = sys.settrace, sys.setprofile
    out, err = sys.stdout, sys.stderr
    hard_limit = resource.getrlimit(address_space)[1]
    identities = {name: id(getattr(builtins, name)) for name in WATCHED}
    builtin_dict = builtins.__dict__
    pid = getpid()

    def send(data: bytes) -> None:
        while data:
            data = data[write(events, data) :]

    def give_up() -> NoReturn:
        exit_now(EXIT_BROKEN)

    try:
        program = frame(commands, read)
        module = types.ModuleType("program")
        module.__dict__["__builtins__"] = builtins
        sys.modules["program"] = module
        random.seed(0)  # a verdict is a function of the program
    except base_exception:
        give_up()
    namespace = module.__dict__
    load: dict[str, Any] = {"k": "load", "ok": True}
    try:
        execute(compile_source(program, "program.py", "exec", 0, True), namespace)
    except base_exception as error:
        if assert_type(error, memory_error):
            setrlimit(address_space, (hard_limit, hard_limit))
        load = {"k": "load", "ok": False, "t": exact_type(error).__name__, "m": describe_error(error)}
        del error
    try:
        no_trace(None)
        no_profile(None)
        send(LOADED)
        delivery = loads(frame(commands, read).decode())
        key = bytes.fromhex(delivery["key"])
    except base_exception:
        give_up()
    previous = b""
    sequence = 0

    def emit(event: dict[str, Any]) -> None:
        nonlocal previous, sequence
        if getpid() != pid:
            exit_now(EXIT_BROKEN)  # a copy of this process never speaks
        event["n"] = sequence
        sequence += 1
        body = dumps(event).encode()
        previous = mac(previous + body, key=key, digest_size=16).hexdigest().encode()
        send(previous + b" " + body + b"\n")

    def one(index: int, test: dict[str, Any]) -> dict[str, Any]:
        try:
            if "leaves" in test:
                found = []
                for source in test["leaves"]:
                    value = evaluate(compile_source(source, "<test>", "eval", 0, True), namespace)
                    found.append(encode(value, value_bytes))
                return {"k": "test", "i": index, "o": "value", "v": found}
            execute(compile_source(test["statement"], "<test>", "exec", 0, True), namespace)
            return {"k": "test", "i": index, "o": "passed"}
        except not_plain as error:
            return {"k": "test", "i": index, "o": "opaque", "m": error.args[0], "foreign": error.foreign}
        except base_exception as error:
            if assert_type(error, memory_error):
                setrlimit(address_space, (hard_limit, hard_limit))
            own_failure = exact_type(error) is assertion and "leaves" not in test
            return {
                "k": "test",
                "i": index,
                "o": "failed" if own_failure else "error",
                "t": exact_type(error).__name__,
                "m": describe_error(error),
            }

    try:
        emit(load)
        if load["ok"]:
            for index, test in enumerate(delivery["tests"]):
                emit(one(index, test))
        changed = [name for name, identity in identities.items() if id(builtin_dict.get(name)) != identity]
        for stream in (out, err):
            try:
                stream.flush()
            except base_exception:
                continue  # the program closed or broke its stream; the descriptor's reader has what was written
        emit({"k": "end", "changed": changed})
    except base_exception:
        give_up()
    exit_now(0)
