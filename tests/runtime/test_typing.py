"""Asks are typed: a checker knows the reply from the message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_reply_type_of_an_ask_is_inferred_and_misuse_is_an_error() -> None:
    pytest.importorskip("pyright", reason="needs pyright (extra dev)")
    path = Path(__file__).with_name("typed_asks.py")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(path)]
    result = json.loads(
        subprocess.run(command, capture_output=True, text=True, cwd=path.parents[2], check=False).stdout
    )
    lines = path.read_text().splitlines()
    wrong = {lines[issue["range"]["start"]["line"]].strip() for issue in result["generalDiagnostics"]}
    assert wrong == {
        "wrong: str = await ref.ask(Add())",
        "await ref.ask(Lease(amount=1))",
        'await ref.ask("not a message")',
    }
