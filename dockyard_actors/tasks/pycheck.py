"""Static checks of the Python code in a task: does it compile, can it still become a program, is it a test.

Promises a reason in words or None, never an exception, for any text. Nothing is executed. It is for task files, which are
the user's own; a model's answers are compiled inside the sandbox only.
"""

from __future__ import annotations

import ast
import codeop
import keyword
import re
import warnings

_COMPILE_ERRORS = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)
"""Everything `compile` raises: bad syntax, NUL bytes or lone surrogates, huge literals, nesting too deep for the parser."""
_STRING_ENDS = ("", '"', "'", '}"', "}'")
"""Ends of a string that the prefix may leave open; the answer may be its rest."""
_STATEMENT_ENDS = tuple(
    ending.replace("_", " ")
    for ending in (
        *("", "_x", ":", "_x:", "_else_x", "_x_else_x", "_in_x", "_in_x:", "_x_in_x:", "_import_x", "():", "_x():"),
        *("_x:_x", "1", "=_x", "\n_x", "_def_x():", "_as_x", "_as_x:"),
    )
)
"""What may follow the beginning of any statement so that it is a whole one (blanks written as _)."""


def _parse(code: str) -> ast.Module | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning such as `x is 3`: allowed, and not for the terminal
        try:
            tree = ast.parse(code)
            compile(
                tree, "<code>", "exec", dont_inherit=True
            )  # finds what a parse does not: `return` outside a function
        except _COMPILE_ERRORS as error:
            return _reason(error)
    return tree


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{error.msg} (line {error.lineno} of the code)"
    return str(error) or type(error).__name__


def program_problem(code: str) -> str | None:
    """Why `code` is not a Python program, or None."""
    tree = _parse(code)
    return tree if isinstance(tree, str) else None


def test_problem(code: str) -> str | None:
    """Why `code` is not a test, or None. A test is one or more statements, the last of them an `assert`."""
    tree = _parse(code)
    if isinstance(tree, str):
        return f"it does not compile: {tree}"
    if not tree.body or not isinstance(tree.body[-1], ast.Assert):
        return "its last statement is not an assert"
    return None


def prefix_problem(prefix: str) -> str | None:
    """Why `prefix` cannot be the beginning of a Python program, or None.

    The prefix may end anywhere: inside brackets, a block, a string, an expression or a keyword. It is refused when no
    known ending (rest of a keyword, end of a string, rest of a statement) makes its last statement a whole one.
    """
    problem = _beginning_problem(prefix)
    if problem is None:
        return None
    last_word = re.search(r"[a-z]*\Z", prefix)
    word = last_word.group() if last_word else ""
    keyword_rests = [name[len(word) :] for name in keyword.kwlist if word and name.startswith(word)]
    for rest in dict.fromkeys([*_STRING_ENDS, *keyword_rests]):
        if any(_beginning_problem(prefix + rest + ending) is None for ending in _STATEMENT_ENDS):
            return None
    return problem


def _beginning_problem(code: str) -> str | None:
    try:
        codeop.compile_command(code, "<prefix>", "exec")  # None or code: incomplete or complete, both fine
    except _COMPILE_ERRORS as error:
        return _reason(error)
    return None
