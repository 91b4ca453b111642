"""Foreign text made safe to show. Model output, test messages and error texts may hold escape sequences, lone surrogates,
direction overrides or backtick fences; everything that observe prints or writes as markdown passes through here first.
Promises that the result is valid UTF-8 without a control character; does not know where the text goes.
"""

from __future__ import annotations

import re
import unicodedata

_PLAIN = re.compile(r"[\x20-\x7e\n\t]*\Z")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str, *, keep: str = "\n\t") -> str:
    """`text` with every invisible or controlling character written as a Python escape (`\\x1b`, `\\u202e`, `\\ud800`).

    Characters in `keep` stay as they are. Letters and emoji of any script stay too.
    """
    if _PLAIN.match(text) and keep == "\n\t":
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _HIDDEN_CATEGORIES else _escaped(c) for c in text)


def one_line(text: str, limit: int | None = None) -> str:
    """`visible` on one line: newlines and tabs become `\\n` and `\\t`; cut to `limit` characters with an ellipsis."""
    line = visible(text, keep="")
    if limit is not None and len(line) > limit:
        return line[: max(limit - 1, 0)] + "…"
    return line


def encodable(text: str) -> str:
    """`text` with lone surrogates written as `\\udc80`, so that it can be encoded as UTF-8; all else unchanged."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text: str, limit: int) -> tuple[str, int]:
    """The first `limit` characters of `text`, and how many were cut off (0 when all of it fits)."""
    return (text, 0) if len(text) <= limit else (text[:limit], len(text) - limit)


def fenced(text: str, language: str = "") -> str:
    """A markdown code block that holds `text` whatever backticks it contains: the fence is longer than any run inside."""
    shown = visible(text)
    fence = "`" * max(3, _longest_backtick_run(shown) + 1)
    end = "" if shown.endswith("\n") or not shown else "\n"
    return f"{fence}{language}\n{shown}{end}{fence}\n"


def inline_code(text: str, limit: int = 400) -> str:
    """A markdown code span of one line that holds `text` whatever backticks it contains."""
    shown = one_line(text, limit)
    if not shown.strip():
        return f"(blank, {len(shown)} characters)" if shown else "(empty)"
    fence = "`" * (_longest_backtick_run(shown) + 1)
    pad = " " if shown.startswith(("`", " ")) or shown.endswith(("`", " ")) else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _longest_backtick_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
