"""docs/actors.md says what happens: its blocks run in order in one session, and print what stands below them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
import sys
import types
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "actors.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")  # a block that begins so is a file of its own


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(PAGE.read_text())


async def _run(code: str, namespace: dict[str, object]) -> None:
    compiled = compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = types.FunctionType(compiled, namespace)()
    if inspect.isawaitable(result):
        await result


async def test_every_block_runs_and_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(blocks()) >= 9
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parents[1]))
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where the messages of the page are looked up
    before = asyncio.all_tasks()
    for code, expected in blocks():
        if named := FILE.match(code):
            (tmp_path / named[1]).write_text(code)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            await _run(code, vars(module))
        assert printed.getvalue() == expected, code
    assert asyncio.all_tasks() == before
