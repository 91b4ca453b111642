"""Seeds and orders that depend on names and counters only, never on time, process or Python version.

Promises that the same run seed draws the same prompts in the same order with the same sampling seeds whichever rollout
process takes them. Built on BLAKE2b (RFC 7693) because `random` guarantees its streams across Python versions only for
`random()`, and because `hash()` of a string differs from process to process.
"""

from __future__ import annotations

from hashlib import blake2b


def _digest(purpose: bytes, *fields: int | str) -> int:
    """64 bits from a purpose and fields; each field is tagged and length-prefixed, so no two field lists collide by joining."""
    hasher = blake2b(digest_size=8, person=purpose)
    for field in fields:
        raw = field.encode("utf-8") if isinstance(field, str) else str(field).encode("ascii")
        hasher.update(b"s" if isinstance(field, str) else b"i")
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return int.from_bytes(hasher.digest(), "little")


def sample_seed(run_seed: int, prompt_id: str, epoch: int, sample_index: int) -> int:
    """The sampling seed of one completion, in [0, 2**64).

    A re-issued prompt gets the same seeds again. `torch.Generator.manual_seed` takes the whole range.
    """
    return _digest(b"dockyard-sample", run_seed, prompt_id, epoch, sample_index)


def epoch_order(seed: int, epoch: int, n: int) -> list[int]:
    """A permutation of range(n) for this epoch: the indices sorted by a 64-bit digest of (seed, epoch, index).

    Raises ValueError when n is negative.
    """
    if n < 0:
        raise ValueError(f"epoch_order: n is the number of tasks and cannot be {n}")
    return sorted(range(n), key=lambda index: (_digest(b"dockyard-epoch", seed, epoch, index), index))
