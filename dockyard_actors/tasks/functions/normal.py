"""The shape of an expression: what is left of it when names and constants do not count.

Two functions with equal shapes are the same behaviour up to renaming; the hold-out rule is written with it. Built-in
names, methods, operators and the kinds of constants are part of the shape.
"""

from __future__ import annotations

import ast
import builtins


class _Anonymous(ast.NodeTransformer):
    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def _name(self, name: str) -> str:
        return name if hasattr(builtins, name) else self.names.setdefault(name, f"v{len(self.names)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self._name(node.id), node.ctx), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.copy_location(ast.arg(self._name(node.arg)), node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        kind = type(node.value).__name__
        return ast.copy_location(ast.Constant(kind), node)


def shape(expression: str) -> str:
    """Equal for expressions that differ only in names and constants. Names are numbered by first appearance."""
    return ast.dump(_Anonymous().visit(ast.parse(expression, mode="eval")))


def shape_of_pair(right: str, wrong: str) -> str:
    """The shape of a right expression and its bug together, names numbered through both."""
    return shape(f"({right}, {wrong})")
