"""Makes data/functions.jsonl, the task set `functions`, from the tables of the package `functions`.

    python -m dockyard_actors.tasks.make_functions            writes the file
    python -m dockyard_actors.tasks.make_functions --check    exits 1 when the file is not what the tables give

Promises the same bytes on every machine: nothing here depends on time, hash order or the standard library's generators.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from dockyard_actors.tasks.dataset import encode_tasks
from dockyard_actors.tasks.functions.cases import choose
from dockyard_actors.tasks.functions.spec import Variant, variants
from dockyard_actors.tasks.functions.tables import FAMILIES
from dockyard_actors.tasks.types import Task

DATA = Path(__file__).parent / "data" / "functions.jsonl"
MAX_NEW_TOKENS = 24
"""Tokens of an answer: right ones have at most 20 with SmolLM2's tokenizer, and the newline that ends them."""


def make_tasks() -> list[Task]:
    """The whole set, training families first. ValueError when a row cannot be judged with its pools."""
    seen: Counter[str] = Counter()
    tasks = []
    for family in FAMILIES:
        for variant in variants(family):
            seen[variant.name] += 1
            tasks.append(_task(variant, seen[variant.name]))
    return tasks


def _task(variant: Variant, number: int) -> Task:
    visible, hidden = choose(variant)
    tests = tuple(case.test(variant.name) for case in visible)
    prefix = f"{variant.header}\n    return"
    return Task(
        id=f"{variant.name}-{number}",
        split=variant.split,
        prompt=f"{prefix} {variant.wrong}\n\n" + "\n".join(tests) + f"\n\n# Fixed: return {variant.intent}\n{prefix}",
        prefix=prefix,
        stop=("\n",),
        tests=tests,
        hidden_tests=tuple(case.test(variant.name) for case in hidden),
        family=variant.family,
        target=f" {variant.right}",
        max_new_tokens=MAX_NEW_TOKENS,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the task set `functions`.")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    check = parser.parse_args(arguments).check
    tasks = make_tasks()
    made = encode_tasks(tasks)
    splits = Counter(task.split for task in tasks)
    print(f"{len(tasks)} functions: {splits['train']} train, {splits['heldout']} held out; {len(FAMILIES)} families")
    if not check:
        DATA.write_bytes(made)
        return 0
    if not DATA.exists() or DATA.read_bytes() != made:
        print(f"{DATA.name} is not what the tables give; run this module without --check", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
