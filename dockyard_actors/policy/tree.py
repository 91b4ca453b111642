"""A prompt and its completions as one tree of tokens: what completions have in common is computed once.
Promises that every completion token is predicted from exactly its own past. Knows no model and no micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenTree:
    """n tokens: the prompt's, then one for every different beginning of a completion, parents before children.

    A completion's last token is predicted but predicts nothing itself, so it stands here only where another goes on.
    ids, position, parent (n,) int64; parent -1 for the first. source: for each completion (length,) int64, the token
    that predicts each of its tokens.
    """

    ids: np.ndarray
    position: np.ndarray
    parent: np.ndarray
    source: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def sees(self) -> np.ndarray:
        """(n, n) bool: row sees column, that is column is row's ancestor or row itself."""
        seen = np.zeros((len(self), len(self)), dtype=bool)
        for i, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                seen[i, : parent + 1] = seen[parent, : parent + 1]
            seen[i, i] = True
        return seen


class TreeBuilder:
    """Grows a tree by one completion after the other. prompt (P >= 1,), completions (length >= 1,) token ids."""

    def __init__(self, prompt: np.ndarray) -> None:
        self._ids: list[int] = prompt.tolist()
        self._parent = list(range(-1, len(self._ids) - 1))
        self._position = list(range(len(self._ids)))
        self._root = len(self._ids) - 1
        self._child: dict[tuple[int, int], int] = {}
        self._source: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._ids)

    def growth(self, completion: np.ndarray) -> int:
        """Tokens that `add` would add."""
        tokens, at = completion[:-1].tolist(), self._root
        for depth, token in enumerate(tokens):
            at = self._child.get((at, token), -1)
            if at < 0:
                return len(tokens) - depth
        return 0

    def add(self, completion: np.ndarray) -> None:
        path = [self._root]
        for token in completion[:-1].tolist():
            key = (path[-1], token)
            if key not in self._child:
                self._child[key] = len(self._ids)
                self._ids.append(token)
                self._parent.append(path[-1])
                self._position.append(self._position[path[-1]] + 1)
            path.append(self._child[key])
        self._source.append(np.array(path, dtype=np.int64))

    def build(self) -> TokenTree:
        ids, position, parent = (np.array(x, dtype=np.int64) for x in (self._ids, self._position, self._parent))
        return TokenTree(ids, position, parent, tuple(self._source))


def trees_within(prompt: np.ndarray, completions: Sequence[np.ndarray], budget: int) -> list[TokenTree]:
    """One tree, or several that repeat the prompt when one would have more than `budget` tokens.

    A completion that does not fit even alone has a tree of its own. Together they hold the completions in order.
    """
    trees, builder, held = [], TreeBuilder(prompt), 0
    for completion in completions:
        if held and len(builder) + builder.growth(completion) > budget:
            trees.append(builder.build())
            builder, held = TreeBuilder(prompt), 0
        builder.add(completion)
        held += 1
    return [*trees, builder.build()]
