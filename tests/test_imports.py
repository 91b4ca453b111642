"""Imports point one way, and the light roles stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from dockyard_actors import runtime

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dockyard_actors"
MIDDLE = {"algorithms", "policy", "engines", "tasks", "sandbox", "observe"}
LOW = {"runtime", "transport"}
# config reads the torch-free config types of the rooms below it; cli and launch sit on top of everything
TYPES = {"algorithms": {"types"}, "policy": {"types"}, "engines": {"base"}}


def imported(path: Path) -> set[tuple[str, ...]]:
    """Dotted names of our own modules that a file imports, anywhere in it."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base.count(".") < 2 else [base]
        else:
            continue
        found |= {
            tuple(name.split(".")) for name in names if name.split(".")[0] in ("dockyard_actors", "dockyard_executor")
        }
    return found


def files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(MIDDLE | LOW | {"roles"}))
def test_imports_point_one_way(room: str) -> None:
    allowed = {"roles": MIDDLE | LOW | {"roles", "config"}}.get(room, {room} | (LOW if room in MIDDLE else set()))
    if room == "algorithms":
        allowed = {"algorithms"}
    if room in LOW:
        allowed = {room}
    wrong = []
    for path in files(room):
        for name in imported(path):
            if len(name) < 2:
                continue
            if name[1] not in allowed and name[:3] != ("dockyard_actors", "transport", "base"):
                wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(name)}")
            if room == "runtime" and name[1] == "transport" and name[2:3] not in ((), ("base",), ("control",)):
                wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(name)}")
    assert not wrong, "\n".join(wrong)


def test_the_executor_knows_nothing_of_the_rest() -> None:
    for path in (ROOT / "ubuntu-base" / "dockyard_executor").rglob("*.py"):
        assert not [name for name in imported(path) if name[0] == "dockyard_actors"], path


@pytest.mark.parametrize(
    "module",
    [
        "dockyard_actors.config",
        "dockyard_actors.cli",
        "dockyard_actors.roles.controller",
        "dockyard_actors.roles.buffer",
        "dockyard_actors.roles.broker",
        "dockyard_actors.runtime.agent",
        "dockyard_executor",
    ],
)
def test_light_processes_never_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_the_runtimes_public_names_are_found_in_their_modules_and_loaded_when_used() -> None:
    for name in runtime.__all__:
        assert getattr(runtime, name).__name__ == name
    tree = ast.parse(Path(runtime.__file__).read_text())
    typed = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed - {"annotations", "TYPE_CHECKING"} == set(runtime.__all__), "what type checkers see is what there is"
    with pytest.raises(AttributeError, match="no_such_name"):
        runtime.no_such_name  # noqa: B018
    code = "import sys, dockyard_actors.runtime.errors; sys.exit('zmq' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
