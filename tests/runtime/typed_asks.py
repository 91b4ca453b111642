"""For the type checker only: what it must infer from a message's declaration. `test_typing.py` runs pyright on it."""

from typing import assert_type

from dockyard_actors.runtime.ref import Ref
from tests.runtime.actors import Add, Exhausted, Granted, Lease, Note


async def inferred(ref: Ref) -> None:
    assert_type(await ref.ask(Lease(n=1)), Granted | Exhausted)
    assert_type(await ref.ask(Add(), deadline_s=1.0), int)
    assert_type(await ref.ask(Note(n=1), retry=True), None)


async def refused(ref: Ref) -> None:
    wrong: str = await ref.ask(Add())
    await ref.ask(Lease(amount=1))
    await ref.ask("not a message")
    print(wrong)
