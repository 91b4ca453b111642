"""The table of faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tests.faults.runtime as table

ROOT = Path(__file__).parents[3]
NAMED = re.findall(r"(tests/[\w/]+\.py)::(\w+)", table.__doc__ or "")


def test_every_fault_of_the_table_is_there() -> None:
    assert len(NAMED) >= 25


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
