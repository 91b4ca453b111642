from __future__ import annotations

import numpy as np
import pytest

from dockyard_actors.engines.stops import StopTable
from dockyard_actors.policy.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def table() -> StopTable:
    tokenizer = tiny_tokenizer()
    return StopTable(tokenizer, len(tokenizer) + 5, eos=[1])  # a head wider than its tokenizer


def stops_at(table: StopTable, text: str, stop: tuple[str, ...]) -> int | None:
    """Tokens up to and with the one that completes a stop string, as the engine asks."""
    ids = np.array(table.tokenizer.encode(text))
    suspects = table.suspects(stop)
    return next((t + 1 for t in range(len(ids)) if suspects[ids[t]] and table.stopped(ids[: t + 1], stop)), None)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("a + b\nmore", ("\n",), 6),
        ("a + b", ("\n",), None),
        ("a\n\nb", ("\n\n",), 3),
        ("a\nb", ("\n\n",), None),
        ("x;y\n", ("\n", ";"), 2),
        ("def g():\n", ("\ndef", "f()"), None),
        ("1\ndef g():", ("\ndef", "\n\n"), 5),
        ("abc", (), None),
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(table, text, stop, expected):
    assert stops_at(table, text, stop) == expected


def test_only_end_tokens_end_a_completion_by_themselves(table):
    assert np.flatnonzero(table.eos).tolist() == [1]
