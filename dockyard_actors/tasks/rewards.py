"""From a verdict to a reward.

Promises a number in [0, 1], or None for a sample that must be masked because the machinery failed, not the answer. It
takes the verdict's plain values, so that it depends on no sandbox.
"""

from __future__ import annotations

ZERO_STATES = ("timeout", "untrusted", "integrity_failure")
"""States that say the answer is at fault or cannot be believed."""
STATES = ("ok", *ZERO_STATES, "infra")
PARTIAL = 0.3
"""Default worth of passing all tests but one, in the limit. Below 1 so that a whole solution is always worth much more."""


def reward_of(
    state: str | None, passed: int = 0, total: int = 0, *, malformed: bool = False, partial: float = PARTIAL
) -> float | None:
    """The reward of one answer.

    `malformed`: no program could be built (a patch that does not apply): 0, nothing was executed and `state` is ignored.
    `ok`: 1.0 when all tests passed, else partial × passed / total. `timeout`, `untrusted`, `integrity_failure`: 0.0.
    `infra`: None, the sample is retried or masked and never trained as 0.

    Raises ValueError for an unknown state, impossible counts or `partial` outside [0, 1].
    """
    if not 0.0 <= partial <= 1.0:
        raise ValueError(f"reward_of: partial is a share of the full reward, in [0, 1], not {partial}")
    if malformed:
        return 0.0
    if state == "infra":
        return None
    if state in ZERO_STATES:
        return 0.0
    if state != "ok":
        raise ValueError(f"reward_of: unknown verdict state {state!r}; known states: {', '.join(STATES)}")
    if total < 1 or not 0 <= passed <= total:
        raise ValueError(f"reward_of: an ok verdict needs 0 <= passed <= total and total >= 1, not {passed} of {total}")
    return 1.0 if passed == total else partial * passed / total
