"""Brings new weights into every engine and proves that they arrived.

Starts stale; fresh once every member acknowledged the version with a digest of the bytes it read and a canary that came out right. A
member that does not is removed (its caller has it restarted) and joins again by asking (`CurrentWeights`); with no member left it raises
and stays stale. How weights travel is `weight_routes.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dockyard_actors.roles.messages import Applied, Canary, Invitation, NoWeights, Offer, UpdateWeights, Weights
from dockyard_actors.roles.weight_routes import Choice, Kind, Route, RouteError, choose
from dockyard_actors.roles.weight_source import digest_of
from dockyard_actors.runtime.actor import ActorContext
from dockyard_actors.runtime.errors import ActorError, PeerDied
from dockyard_actors.transport.tensors import DataPlaneError
from dockyard_actors.transport.weights_collective import CollectiveError
from dockyard_actors.transport.weights_lines import excuse

log = logging.getLogger(__name__)

Answer = Applied | Exception


class WeightSyncFailed(RuntimeError):
    """No engine took the new weights: nothing could be generated with them."""


class _MovedOn(Exception):
    """The parameters are not those of the version any more."""


@dataclass(frozen=True)
class Synced:
    """How a delivery went. failed: members that are left out now. mismatch: the largest canary mean |Δ| in nats, -1 without a canary.
    paused_s: the longest that an engine's decoding stood still."""

    failed: tuple[str, ...]
    mismatch: float
    paused_s: float


class Compute(Protocol):
    """Runs a function in the trainer's compute thread, one at a time."""

    async def __call__(self, function: Callable[..., Any], *args: object) -> Any: ...


class WeightSynchronizer:
    """Trainer's side. Call `prepare`, then `sync_weights`; the parameters may change again once `sent` is set.

    members: rollout names. make: builds the route of a kind, in the compute thread. live: whether the parameters are those of a
    version, asked in the compute thread. always: routes that are wanted for others than members.
    """

    def __init__(
        self,
        ctx: ActorContext,
        members: Sequence[str],
        make: Callable[[Kind], Route],
        compute: Compute,
        live: Callable[[int], bool],
        timeout_s: float,
        transport: Literal["auto", "shm", "collective"] = "auto",
        always: Sequence[Kind] = (),
    ):
        self._ctx = ctx
        self.members = list(members)
        self._make = make
        self._compute = compute
        self._live = live
        self._timeout_s = timeout_s
        self._transport: Literal["auto", "shm", "collective"] = transport
        self._always = tuple(always)
        self._routes: dict[Kind, Route] = {}
        self._choices: dict[str, Choice] = {}
        self._current: tuple[int, Canary | None] | None = None
        self._prepared: dict[Kind, int] = {}
        self._stale = True
        self._gathering = asyncio.Lock()  # one collective delivery at a time
        self.sent = asyncio.Event()

    @property
    def is_stale(self) -> bool:
        return self._stale

    def mark_stale(self) -> None:
        self._stale = True

    @property
    def choices(self) -> Mapping[str, Choice]:
        """The way that was chosen for each member, and why."""
        return self._choices

    # ------------------------------------------------------------------ a new version

    async def prepare(self, version: int) -> None:
        """Chooses the way to each member and does what can be done before they are told. Waits, up to the timeout, for members of whom
        it is not known yet where they are. Raises RouteError."""
        until = asyncio.get_running_loop().time() + self._timeout_s
        await asyncio.gather(*(self._locate(name, until) for name in self.members))
        used: set[Kind] = {self._choices[name].kind for name in self.members if name in self._choices}
        if not used and self._transport != "collective":
            used = {"shm"}  # for one who comes later
        for kind in used | set(self._always):
            if kind not in self._routes:
                self._routes[kind] = await self._compute(self._make, kind)
            await self._compute(self._routes[kind].prepare, version)
            self._prepared[kind] = version
        self.sent.clear()

    async def _locate(self, name: str, until: float) -> None:
        loop = asyncio.get_running_loop()
        ref = self._ctx.ref(name)
        if (host := ref.host) is None and name not in self._choices:
            with contextlib.suppress(ActorError):  # it never came: nobody asks it, and it is left out
                host = (await ref.ready(max(until - loop.time(), 0.001))).host
        if host is None:
            return
        choice = choose(self._transport, name, host, ref.here)
        if self._choices.get(name) != choice:
            log.info("weights go to %s by %s, because %s", name, choice.kind, choice.reason)
            self._choices[name] = choice

    async def sync_weights(self, version: int, canary: Canary | None = None) -> Synced:
        """Delivers the prepared version. Raises WeightSyncFailed when no member acknowledged it within the timeout."""
        self._current = (version, canary)
        members = list(self.members)
        until = asyncio.get_running_loop().time() + self._timeout_s
        answers: dict[str, Answer] = {name: LookupError("it never came up") for name in members}
        by_kind: dict[Kind, list[str]] = {}
        for name in members:
            if name in self._choices:
                by_kind.setdefault(self._choices[name].kind, []).append(name)
        together = by_kind.pop("collective", [])
        if not together:
            self.sent.set()
        try:
            each = [self._each(kind, names, version, canary, until) for kind, names in by_kind.items()]
            for answered in await asyncio.gather(
                *each, self._together(together, version, canary, until, needed=not each)
            ):
                answers |= answered
        finally:
            self.sent.set()
        failed: list[str] = []
        applied: list[Applied] = []
        for name, answer in answers.items():
            if isinstance(answer, Applied):
                applied.append(answer)
            else:
                log.warning("%s did not take weights version %d: %s", name, version, answer)
                failed.append(name)
        if not applied:
            raise WeightSyncFailed(
                f"none of {', '.join(members)} took weights version {version} within {self._timeout_s:g} s "
                f"(last answer: {str(answers[members[-1]]).splitlines()[0]}); their logs say why. weight_sync.timeout_s is the limit"
            )
        for route in self._routes.values():
            route.settle(version)
        self.members = [name for name in self.members if name not in failed]
        self._stale = False
        return Synced(tuple(failed), max(a.mismatch for a in applied), max(a.paused_s for a in applied))

    async def _each(
        self, kind: Kind, names: list[str], version: int, canary: Canary | None, until: float
    ) -> dict[str, Answer]:
        """Tells each for itself: what is offered stays where it is, so one that restarts meanwhile may take it later."""
        route = self._routes[kind]
        offers, digest = route.offers(version, names), digest_of(route.transfer(version))
        answers = await asyncio.gather(
            *(self._ask(name, offers[name], canary, until, digest, retry=True) for name in names)
        )
        return dict(zip(names, answers, strict=True))

    async def _together(
        self, names: list[str], version: int, canary: Canary | None, until: float, needed: bool = False
    ) -> dict[str, Answer]:
        """Sends to all of them at once. When it breaks off, those who were not to blame meet again without the others. needed: somebody
        has to take it; when nobody is left it waits for one who is restarted."""
        answers: dict[str, Answer] = {}
        async with self._gathering:
            left = [name for name in names if self._ctx.ref(name).host is not None]
            answers |= {name: PeerDied("it is not up; it joins when it is") for name in names if name not in left}
            while left or needed:
                if left:
                    answers |= await self._meet(left, version, canary, until)
                in_time = asyncio.get_running_loop().time() < until
                left = [name for name in left if name not in answers] if in_time else []
                if not left and needed:
                    if any(isinstance(answer, Applied) for answer in answers.values()):
                        break
                    died = [name for name in names if isinstance(answers[name], PeerDied)]
                    if not (left := await self._back(died, until)):
                        break
                    for name in left:
                        del answers[name]
        return answers

    async def _meet(self, names: list[str], version: int, canary: Canary | None, until: float) -> dict[str, Answer]:
        """One delivery to all of ``names``. Whoever is not in the answers was not to blame that it broke off."""
        route = self._routes["collective"]
        offers = await self._compute(self._if_live, version, route.offers, version, names)
        asked = {
            name: asyncio.ensure_future(self._ask(name, offers[name], canary, until, None, retry=False))
            for name in names
        }
        for name, asking in asked.items():
            asking.add_done_callback(lambda asking, offer=offers[name]: self._excuse(asking, offer))
        try:
            checksums = await self._compute(self._if_live, version, route.transfer, version)
        except DataPlaneError as error:
            replies = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
            blamed = set(error.who) & set(names) if isinstance(error, CollectiveError) else set()
            log.warning("%s", error)
            return {name: error if isinstance(replies[name], Applied) else replies[name] for name in blamed or names}
        except BaseException:
            for asking in asked.values():
                asking.cancel()
            raise
        self.sent.set()
        digest = digest_of(checksums)
        replies = await asyncio.gather(*asked.values())
        return {name: _judged(reply, version, digest) for name, reply in zip(asked, replies, strict=True)}

    async def _back(self, names: list[str], until: float) -> list[str]:
        """Those who are up, as soon as there is one; none at the deadline."""
        loop = asyncio.get_running_loop()
        seconds = max(until - loop.time(), 0.001)
        coming = [asyncio.ensure_future(self._ctx.ref(name).ready(seconds)) for name in names]
        try:
            while coming and not [name for name in names if self._ctx.ref(name).host is not None]:
                await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                coming = [one for one in coming if not one.done()]
        finally:
            for one in coming:
                one.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
        return [name for name in names if self._ctx.ref(name).host is not None]

    async def _ask(
        self, name: str, offer: Offer, canary: Canary | None, until: float, digest: int | None, retry: bool
    ) -> Answer:
        seconds = max(until - asyncio.get_running_loop().time(), 0.001)
        try:
            reply = await self._ctx.ref(name).ask(
                UpdateWeights(offer=offer, canary=canary), deadline_s=seconds, retry=retry
            )
        except ActorError as error:
            return error
        return reply if digest is None else _judged(reply, offer.version, digest)

    def _excuse(self, asking: asyncio.Future[Answer], offer: Offer) -> None:
        """Who refused at once, or died, will not come to the meeting: nobody there should wait for it."""
        if (
            not asking.cancelled()
            and isinstance(answer := asking.result(), Exception)
            and isinstance(offer, Invitation)
        ):
            asyncio.get_running_loop().run_in_executor(None, excuse, offer.meeting, str(answer))

    def _if_live(self, version: int, function: Callable[..., Any], *args: object) -> Any:
        """In the compute thread. Training may have begun since the version was prepared, or ended: nothing newer goes under its number."""
        if not self._live(version):
            raise _MovedOn
        return function(*args)

    # ------------------------------------------------------------------ who joins

    async def current(self, member: str) -> Weights | NoWeights:
        """What an engine that starts now has to load. From the next version on it is a member. By a collective route the version is pushed
        to it as soon as the parameters are those of the version, unless a newer one is delivered first."""
        if member not in self.members:
            self.members.append(member)
        if self._current is None:
            return NoWeights()
        version, canary = self._current
        try:
            await self._locate(member, 0.0)
        except RouteError as error:
            log.error("%s", error)
        choice = self._choices.get(member)
        if choice is None or self._prepared.get(choice.kind) != version:
            return NoWeights()
        if choice.kind == "collective":
            if not self._gathering.locked():
                self._ctx.spawn(self._catch_up(member, version, canary), name=f"weights {version} for {member}")
            return NoWeights()
        return Weights(self._routes[choice.kind].offers(version, [member])[member], canary)

    def offer_to(self, name: str, version: int) -> Offer | None:
        """Of a version that stays where it is, for an engine on this host that is no member; None when it has gone. Raises RouteError for
        one on another host."""
        ref = self._ctx.ref(name)
        if ref.host not in (None, ref.here):
            raise RouteError(f"{name} is on another host than the trainer, from whose memory it takes its weights")
        route = self._routes.get("shm")
        if route is None or self._prepared.get("shm") != version:
            return None
        return route.offers(version, [name])[name]

    async def _catch_up(self, member: str, version: int, canary: Canary | None) -> None:
        until = asyncio.get_running_loop().time() + self._timeout_s
        try:
            answers = await self._together([member], version, canary, until)
        except _MovedOn:
            log.info("%s joins with the next version: version %d is being trained on", member, version)
        else:
            if not isinstance(answers[member], Applied):
                log.warning("%s did not take weights version %d: %s", member, version, answers[member])

    def shutdown(self) -> None:
        for route in self._routes.values():
            route.close()


def _judged(answer: Answer, version: int, digest: int) -> Answer:
    if isinstance(answer, Applied) and (answer.version, answer.digest) != (version, digest):
        return ValueError(
            f"it says version {answer.version} with digest {answer.digest:016x}; it was sent {version} with {digest:016x}"
        )
    return answer
