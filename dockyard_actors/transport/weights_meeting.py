"""What an engine is told of a collective delivery before it begins. A plain value, so that whoever passes it on needs no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

Backend = Literal["gloo", "nccl"]


class Meeting(msgspec.Struct, frozen=True):
    """Where an engine meets the others, and as whom. Whoever knows it can take part: it travels on the authenticated control plane only."""

    host: str
    port: int
    epoch: str  # names the group; unguessable
    rank: int  # 1..world-1; the trainer is 0
    world: int
    backend: Backend
    bucket_bytes: int
    timeout_s: float  # for one version, meeting included
