"""Near misses of a right expression: one operator, bound, constant, order or name changed, or one part left out.

The tests of a task are chosen so that they fail for these, not only for the bug that the prompt shows.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

_SWAPS: dict[type[ast.AST], tuple[type[Any], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Pow),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Mod, ast.Div),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants(expression: str) -> list[str]:
    """Different expressions, each one change away from `expression`; some may be equivalent to it."""
    tree = ast.parse(expression, mode="eval")
    found: set[str] = set()
    for index, node in enumerate(ast.walk(tree)):
        for change, _ in enumerate(_variations(copy.deepcopy(node))):
            mutant = copy.deepcopy(tree)
            place = list(ast.walk(mutant))[index]
            replacement = list(_variations(place))[change]
            found.add(ast.unparse(_Replace(place, replacement).visit(mutant)))
    return sorted(found - {ast.unparse(tree)})


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _variations(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of `node`."""
    if isinstance(node, ast.BinOp):
        yield from (ast.BinOp(node.left, swap(), node.right) for swap in _SWAPS.get(type(node.op), ()))
        yield from (ast.BinOp(node.right, node.op, node.left), node.left, node.right)
    elif isinstance(node, ast.BoolOp):
        yield from (ast.BoolOp(swap(), node.values) for swap in _SWAPS[type(node.op)])
        yield from node.values
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for swap in _SWAPS.get(type(operator), ()):
                yield ast.Compare(node.left, [*node.ops[:index], swap(), *node.ops[index + 1 :]], node.comparators)
        if len(node.ops) > 1:
            yield ast.Compare(node.left, node.ops[:1], node.comparators[:1])
            yield ast.Compare(node.comparators[0], node.ops[1:], node.comparators[1:])
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (ast.IfExp(node.test, node.orelse, node.body), node.body, node.orelse)
    elif isinstance(node, ast.Subscript):
        yield node.value
    elif isinstance(node, ast.Slice):
        yield from (ast.Slice(None, node.upper, node.step), ast.Slice(node.lower, None, node.step))
        yield ast.Slice(node.lower, node.upper, None)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield ast.Name(_NAMES[node.id], node.ctx)
    elif isinstance(node, ast.Call):
        yield from _call_variations(node)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield ast.comprehension(node.target, node.iter, [], node.is_async)
    elif isinstance(node, ast.Tuple | ast.List):
        yield type(node)(list(reversed(node.elts)), node.ctx)


def _call_variations(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Attribute):
        yield node.func.value
    yield from node.args
    if len(node.args) > 1:
        yield ast.Call(node.func, list(reversed(node.args)), node.keywords)
    for keyword in node.keywords:
        yield ast.Call(node.func, node.args, [other for other in node.keywords if other is not keyword])
