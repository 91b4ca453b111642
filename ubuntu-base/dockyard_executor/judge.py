"""Splits a test into what the program computes and what is judged outside of its process, and makes must-fail twins.

For `assert add(2, 3) == 5` the program's process is only asked for the value of `add(2, 3)`; the comparison happens here,
so a program that forges events, patches its interpreter or returns objects equal to everything must still deliver a 5.
Tests without such a shape run inside as statements; when everything passed they run once more as twins that must fail.
"""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from dockyard_executor import values

_FUNCTIONS: dict[str, Any] = {f.__name__: f for f in (abs, len, sorted, round, sum, min, max, set, frozenset, list, tuple, dict, float, int, isinstance, type, bool, str)}  # fmt: skip
_TYPES = {"int", "float", "str", "bytes", "bool", "list", "tuple", "dict", "set", "frozenset", "complex", "range"}
_NAMES: dict[str, Any] = {**_FUNCTIONS, "bytes": bytes, "complex": complex, "range": range}
# Functions applied here to the program's values: cheap on any plain value. Others (list, sorted, int ...) run inside, where
# generators are welcome and where a costly conversion costs the program.
_ON_VALUES = {"abs", "len", "round", "isinstance", "type", "bool"}
_ANY_NAME = re.compile(r"\b(?:" + "|".join(sorted(_NAMES)) + r")\b")
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)
_MAX_CONSTANT_WORK = 64  # nodes of a constant expression such as 10 ** 6 or [0] * 3 in a test


class BadTest(ValueError):
    """A test is no Python statement; the message says where."""


@dataclass(frozen=True)
class Outside:
    """A test judged here: the program's process computes `leaves`, `condition` decides over their values."""

    leaves: tuple[str, ...]
    condition: CodeType
    text: str  # the condition as written
    against_literal: bool  # whether the condition holds a value that only the judge knows

    def holds(self, found: list[Any]) -> bool:
        """Raises whatever the comparison raises, e.g. TypeError for `None < 3`."""
        scope = {f"_value{i}": value for i, value in enumerate(found)}
        return bool(eval(self.condition, {"__builtins__": {}, **_NAMES}, scope))


@dataclass(frozen=True)
class Inside:
    """A test run as a statement in the program's process."""

    statement: str


Plan = Outside | Inside


@lru_cache(maxsize=4096)
def parse(source: str) -> ast.stmt | None:
    """The one statement that a test is, or None for several statements. Raises BadTest."""
    try:
        body = ast.parse(source).body
        compile(source, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTest(f"not a Python statement: {error}") from error
    if not body:
        raise BadTest("empty")
    return body[0] if len(body) == 1 else None


@lru_cache(maxsize=4096)
def plan(source: str, shadowed: frozenset[str]) -> Plan:
    """How to run one test, given the built-in names that program or tests bind themselves. Raises BadTest."""
    statement = parse(source)
    if isinstance(statement, ast.Assert):
        lifted = _Lifter(shadowed).test(statement.test)
        if lifted is not None:
            return lifted
    return Inside(source)


def shadowed_names(program: str, tests: list[str]) -> frozenset[str]:
    """The judge's built-in names that program or tests may mean otherwise.

    By text: a name too many only moves its call into the program's process, where the real built-in answers as well.
    """
    found: set[str] = set()
    for text in (program, *tests):
        for match in _ANY_NAME.finditer(text):
            before = text[max(0, match.start() - 12) : match.start()].rstrip()
            after = text[match.end() : match.end() + 4].lstrip()
            if before.endswith(("def", "class", "import", "as", "for", ",")) or (
                after[:1] in ("=", ",", ":") and after[:2] != "=="
            ):
                found.add(match[0])
    return frozenset(found)


class _Lifter:
    """Moves an expression out of the program's process, replacing what only the program can compute by names."""

    def __init__(self, shadowed: frozenset[str]) -> None:
        self._shadowed = shadowed
        self._leaves: list[str] = []

    def test(self, expression: ast.expr) -> Outside | None:
        lifted = self._condition(expression)
        if lifted is None or not self._leaves:
            return None
        tree = ast.fix_missing_locations(ast.Expression(lifted))
        return Outside(
            tuple(self._leaves), compile(tree, "<judge>", "eval"), ast.unparse(expression), _has_literal(tree)
        )

    def _condition(self, node: ast.expr) -> ast.expr | None:
        """`and` of comparisons, negations and plain truth values; None when a leaf would hide a comparison."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            parts = [self._condition(value) for value in node.values]
            return None if None in parts else ast.BoolOp(ast.And(), [part for part in parts if part is not None])
        lifted = self._lift(node)
        return None if lifted is None else lifted[0]

    def _lift(self, node: ast.expr) -> tuple[ast.expr, bool] | None:
        """The expression as judged here and whether it needs a value; None when it must run inside."""
        match node:
            case ast.Constant():
                return node, False
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items) if not _starred(items):
                return self._children(node, "elts", items)
            case ast.Dict(keys=keys) if None not in keys:
                lifted_keys = self._children(node, "keys", [key for key in keys if key is not None])
                lifted = None if lifted_keys is None else self._children(lifted_keys[0], "values", node.values)
                return None if lifted is None or lifted_keys is None else (lifted[0], lifted[1] or lifted_keys[1])
            case ast.UnaryOp():
                return self._children(node, "operand", node.operand)
            case ast.BinOp() if _constant(node):
                return node, False
            case ast.BinOp(op=ast.Add() | ast.Sub()) if not _has_comparison(node):
                left = self._children(node, "left", node.left)
                both = None if left is None else self._children(left[0], "right", node.right)
                return None if left is None or both is None else (both[0], left[1] or both[1])
            case ast.Compare() if all(_comparable(node, i) for i in range(len(node.ops))):
                left = self._children(node, "left", node.left)
                both = None if left is None else self._children(left[0], "comparators", node.comparators)
                return None if left is None or both is None else (both[0], left[1] or both[1])
            case ast.Call(func=ast.Name(id=name), keywords=[]) if self._is_builtin(name) and not _starred(node.args):
                return self._call(node, name)
            case ast.Name(id=name) if name in _TYPES and name not in self._shadowed:
                return node, False
        return self._leaf(node)

    def _call(self, node: ast.Call, name: str) -> tuple[ast.expr, bool] | None:
        mark = len(self._leaves)
        lifted = self._children(node, "args", node.args)
        if lifted is None:
            return None
        if lifted[1] and (
            name not in _ON_VALUES or not all(_constant(argument) or name != "round" for argument in node.args[1:])
        ):
            del self._leaves[mark:]
            return self._leaf(node)
        return lifted

    def _is_builtin(self, name: str) -> bool:
        return name in _FUNCTIONS and name not in self._shadowed

    def _leaf(self, node: ast.expr) -> tuple[ast.expr, bool] | None:
        if _has_comparison(node):
            return None  # the program's process would judge itself: a statement with a twin is the stronger form
        self._leaves.append(ast.unparse(node))
        return ast.Name(f"_value{len(self._leaves) - 1}", ast.Load()), True

    def _children(self, node: ast.expr, field: str, children: Any) -> tuple[ast.expr, bool] | None:
        single = not isinstance(children, list)
        lifted = [self._lift(child) for child in ([children] if single else children)]
        kept = [item for item in lifted if item is not None]
        if len(kept) != len(lifted):
            return None
        copied = {name: getattr(node, name) for name in node._fields}
        copied[field] = kept[0][0] if single else [item[0] for item in kept]
        return type(node)(**copied), any(item[1] for item in kept)


def _has_literal(tree: ast.AST) -> bool:
    return any(isinstance(node, (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set)) for node in ast.walk(tree))


def _starred(items: list[ast.expr]) -> bool:
    return any(isinstance(item, ast.Starred) for item in items)


def _has_comparison(node: ast.AST) -> bool:
    return any(
        isinstance(child, (ast.Compare, ast.BoolOp, ast.NamedExpr, ast.Await, ast.IfExp)) for child in ast.walk(node)
    )


def _constant(node: ast.expr) -> bool:
    """A small expression of literals alone, as a test's author writes it: cheap enough to compute here."""
    nodes = list(ast.walk(node))
    if len(nodes) > _MAX_CONSTANT_WORK:
        return False
    for child in nodes:
        if isinstance(child, ast.Constant) and isinstance(child.value, int) and abs(child.value) > 10**9:
            return False
        if not isinstance(
            child,
            (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context, ast.List, ast.Tuple),
        ):
            return False
    powers = sum(isinstance(child, (ast.Pow, ast.LShift, ast.Mult)) for child in nodes)
    return powers <= 1 and not _large_growth(node)


def _large_growth(node: ast.expr) -> bool:
    for child in ast.walk(node):
        if isinstance(child, ast.BinOp) and isinstance(child.op, (ast.Pow, ast.LShift, ast.Mult)):
            right = child.right.value if isinstance(child.right, ast.Constant) else None
            left = child.left.value if isinstance(child.left, ast.Constant) else None
            if isinstance(child.op, ast.Mult) and isinstance(left, (int, float)) and isinstance(right, (int, float)):
                continue
            if not isinstance(right, int) or right > 10_000:
                return True
    return False


def _comparable(node: ast.Compare, index: int) -> bool:
    operator = node.ops[index]
    if isinstance(operator, (ast.Is, ast.IsNot)):
        left = node.left if index == 0 else node.comparators[index - 1]
        return any(
            isinstance(side, ast.Constant) and (side.value is None or isinstance(side.value, bool))
            for side in (left, node.comparators[index])
        )
    return isinstance(operator, _COMPARISONS)


def judge(test: Outside, encoded: list[str]) -> tuple[str, str]:
    """(outcome, message) of one test from the values that the program's process sent.

    Raises ValueError when they are not what `values.encode` writes (the channel was used by someone else).
    """
    if len(encoded) != len(test.leaves):
        raise ValueError(f"{len(encoded)} values where {len(test.leaves)} were asked for")
    found = [values.decode(text) for text in encoded]
    try:
        if test.holds(found):
            return "passed", ""
    except (TypeError, ValueError, OverflowError, RecursionError, ArithmeticError, MemoryError) as error:
        return "error", f"{type(error).__name__}: {error}"
    shown = ", ".join(f"{leaf} was {values.preview(value)}" for leaf, value in zip(test.leaves, found, strict=True))
    return "failed", f"{shown}; expected {test.text}"


def twin(source: str, random_int: Callable[[int], int] = secrets.randbelow) -> str | None:
    """A statement that must fail where the assert `source` holds; None where no such statement can be made.

    Equalities are compared with a perturbed literal (an object equal to everything then passes and is caught);
    asserts without one are negated.
    """
    statement = parse(source)
    if not isinstance(statement, ast.Assert):
        return None
    test = _sentinel(statement.test, random_int)
    if test is None:
        if any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement.test)):
            return None
        test = ast.UnaryOp(ast.Not(), statement.test)
    return ast.unparse(ast.fix_missing_locations(ast.Assert(test, None)))


def _sentinel(node: ast.expr, random_int: Callable[[int], int]) -> ast.expr | None:
    """The expression with each equality in positive position replaced by one that cannot hold; None without any."""
    match node:
        case ast.Compare(ops=[ast.Eq()], comparators=[right]):
            wrong = _perturbed(right, random_int)
            if wrong is not None:
                return ast.Compare(node.left, [ast.Eq()], [wrong])
            wrong = _perturbed(node.left, random_int)
            return ast.Compare(wrong or node.left, [ast.Eq()], [right if wrong is not None else _stranger()])
        case ast.BoolOp(op=ast.And()):
            parts = [_sentinel(value, random_int) or ast.UnaryOp(ast.Not(), value) for value in node.values]
            return ast.BoolOp(ast.Or(), parts)
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp() as generator], keywords=[]):
            element = _sentinel(generator.elt, random_int)
            if element is None:
                return None
            # all of them wrong at once must not hold; any() would be stronger but is empty where all() was vacuous
            changed = ast.GeneratorExp(element, generator.generators)
            return ast.Call(ast.Name("any", ast.Load()), [changed], [])
    return None


def _perturbed(node: ast.expr, random_int: Callable[[int], int]) -> ast.expr | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    extra = 1 + random_int(1_000_000)
    match value:
        case bool() | None:
            return _stranger()
        case int() | float() | complex():
            return ast.BinOp(node, ast.Add(), ast.Constant(extra + abs(value) if isinstance(value, float) else extra))
        case str():
            return ast.Constant(value + f"{extra:x}")
        case bytes():
            return ast.Constant(value + f"{extra:x}".encode())
        case list():
            return ast.BinOp(node, ast.Add(), ast.List([ast.Constant(extra)], ast.Load()))
        case tuple():
            return ast.BinOp(node, ast.Add(), ast.Tuple([ast.Constant(extra)], ast.Load()))
    return _stranger()


def _stranger() -> ast.expr:
    """An expression whose value equals nothing but itself and whose meaning no program can rebind."""
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), ast.Constant(None))
