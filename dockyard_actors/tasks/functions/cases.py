"""Choosing the calls that judge a function.

Promises for each variant two visible tests, at least one of which shows the bug, and one to three hidden ones, such that
no constant and no table of the visible answers passes them all, and near misses fail where the pools can tell. Depends
only on the variant itself. Executes the tables' own expressions in this process; they are part of the package.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from dockyard_actors.tasks.functions.mutants import mutants
from dockyard_actors.tasks.functions.pools import POOLS
from dockyard_actors.tasks.functions.spec import Variant

VISIBLE, HIDDEN_MIN, HIDDEN_MAX = 2, 2, 3
CANDIDATES_MAX = 120
LITERAL_MAX = 44
"""Characters of one call's arguments and result together: prompts stay short."""
INTEGER_MAX = 10**6


class _Raised:
    """Stands for an exception: equal to nothing."""


@dataclass(frozen=True)
class Case:
    """One call: its arguments as code, and the right value as code."""

    arguments: tuple[Any, ...]
    value: Any

    def test(self, name: str) -> str:
        arguments = ", ".join(literal(argument) for argument in self.arguments)
        return f"assert {name}({arguments}) == {literal(self.value)}"


def literal(value: Any) -> str:
    """`repr`, with the items of sets in order so that it is the same in every process."""
    if isinstance(value, set) and value:
        return "{" + ", ".join(sorted(literal(item) for item in value)) + "}"
    return repr(value)


def choose(variant: Variant) -> tuple[list[Case], list[Case]]:
    """(visible, hidden) for a variant. ValueError when the pools cannot judge it: give it another pool."""
    cases = _candidates(variant)
    shows_bug = _failing(variant, variant.wrong, cases)
    if not shows_bug:
        raise ValueError(f"{variant.key}: no arguments of the pools show the bug")
    near_misses = (_failing(variant, text, cases) for text in (*variant.other_wrong, *mutants(variant.right)))
    alive = [failing for failing in near_misses if failing]
    taken = [min(shows_bug, key=lambda at: (_edge(cases[at]), len(cases[at].test("f")), at))]
    while len(taken) < VISIBLE + HIDDEN_MAX:
        alive = [failing for failing in alive if not failing & {taken[-1]}]
        if len(taken) >= VISIBLE + HIDDEN_MIN and not alive:
            break
        rest = [at for at in range(len(cases)) if at not in taken]
        if len(taken) < VISIBLE:
            rest = [at for at in rest if not _same(cases[at].value, cases[taken[0]].value)]
            rest = [at for at in rest if not _edge(cases[at])] or rest
        if not rest:
            break
        taken.append(max(rest, key=lambda at: _worth(at, cases, taken, alive, shows_bug)))
    if len(taken) <= VISIBLE:
        raise ValueError(f"{variant.key}: it is constant on its pools, or they hold too few arguments")
    return [cases[at] for at in taken[:VISIBLE]], [cases[at] for at in taken[VISIBLE:]]


def _worth(
    at: int, cases: list[Case], taken: list[int], alive: list[set[int]], shows_bug: set[int]
) -> tuple[int, int, int]:
    """How much a further case adds: near misses caught, a result or an edge not seen yet, the bug; then brevity."""
    case = cases[at]
    kills = sum(at in failing for failing in alive)
    repeats = sum(_same(case.value, cases[other].value) for other in taken)
    edges = sum(_edge(cases[other]) for other in taken)
    edge = (2 if not edges else -1) if _edge(case) else 0
    bug = 2 if at in shows_bug and len(shows_bug & set(taken)) < VISIBLE else 0
    return (3 * kills - 2 * repeats + edge + bug, -len(case.test("f")), -at)


def _edge(case: Case) -> bool:
    return any(not argument and not isinstance(argument, bool) for argument in case.arguments)


def _failing(variant: Variant, expression: str, cases: list[Case]) -> set[int]:
    """The indices of the cases that `expression` gets wrong."""
    function = _function(variant, expression)
    return {at for at, case in enumerate(cases) if not _same(_call(function, case.arguments), case.value)}


def _candidates(variant: Variant) -> list[Case]:
    pools = [POOLS[name] for name in variant.pools]
    everything = sorted(itertools.product(*pools), key=lambda arguments: _draw(variant.key, arguments))
    right = _function(variant, variant.right)
    cases = []
    for arguments in everything[:CANDIDATES_MAX]:
        value = _call(right, arguments)
        if not isinstance(value, _Raised) and not _too_long(arguments, value):
            cases.append(Case(arguments, value))
    return cases


def _draw(key: str, arguments: tuple[Any, ...]) -> bytes:
    """A pseudo-random sort key that is the same in every Python version, unlike `random.shuffle`'s promise."""
    return blake2b(f"{key} {arguments!r}".encode(), digest_size=8).digest()


def _too_long(arguments: tuple[Any, ...], value: Any) -> bool:
    if isinstance(value, complex) or (isinstance(value, int | float) and abs(value) > INTEGER_MAX):
        return True
    return len(literal(value)) + sum(len(literal(argument)) + 2 for argument in arguments) > LITERAL_MAX


def _function(variant: Variant, expression: str) -> Callable[..., Any]:
    return eval(f"lambda {', '.join(variant.params)}: {expression}")


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*copy.deepcopy(arguments))
    except Exception:  # the tables' wrong expressions may raise anything; that is a wrong result like any other
        return _Raised()


def _same(a: Any, b: Any) -> bool:
    """What the tests' == says."""
    return bool(a == b)
