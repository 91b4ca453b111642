"""Where a completion ends: end-of-sequence ids and stop strings in the decoded text.
A table by token makes the usual case (one character, as a newline) a lookup; longer strings are searched in the text only
after a token that holds their last character. Knows one tokenizer and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from dockyard_actors.engines.base import FinishReason


@dataclass(frozen=True)
class Stops:
    """What ends the completions of a group, for an engine that is told ids. tokens: ids that do so by themselves. suspects: (V,) bool,
    ids that may complete one of `strings`."""

    strings: tuple[str, ...]
    tokens: list[int]
    suspects: np.ndarray


class StopTable:
    """Answers for one tokenizer; tables are built once per character and kept."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.eos = np.zeros(vocabulary, dtype=bool)
        self.eos[list(eos)] = True
        self._pieces: list[str] | None = None
        self._holding: dict[str, np.ndarray] = {}
        self._stops: dict[tuple[str, ...], Stops] = {}

    def holding(self, character: str) -> np.ndarray:
        """(V,) bool: the token's text contains `character`."""
        if character not in self._holding:
            if self._pieces is None:
                known = range(min(self.vocabulary, len(self.tokenizer)))  # a head may be wider than its tokenizer
                self._pieces = self.tokenizer.batch_decode([[i] for i in known], skip_special_tokens=True)
            table = np.zeros(self.vocabulary, dtype=bool)
            table[: len(self._pieces)] = [character in piece for piece in self._pieces]
            self._holding[character] = table
        return self._holding[character]

    def suspects(self, stop: Sequence[str]) -> np.ndarray:
        """(V,) bool: a token that may complete one of the strings (for one character: that does)."""
        table = np.zeros(self.vocabulary, dtype=bool)
        for text in stop:
            table |= self.holding(text[-1])
        return table

    def stopped(self, tokens: np.ndarray, stop: Sequence[str]) -> bool:
        """Whether the text of `tokens` (T,), the last a suspect, holds one of the strings."""
        last = int(tokens[-1])
        long = [text for text in stop if len(text) > 1]
        if len(long) < len(stop) and any(self.holding(text)[last] for text in stop if len(text) == 1):
            return True
        if not long:
            return False
        decoded = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return any(text in decoded for text in long)

    def stops(self, strings: tuple[str, ...]) -> Stops:
        """For these strings and the end-of-sequence ids; kept."""
        if strings not in self._stops:
            alone = set(np.flatnonzero(self.eos).tolist())
            for text in strings:
                holding = np.logical_and.reduce([self.holding(character) for character in text])
                alone |= {i for i in np.flatnonzero(holding).tolist() if self.stopped(np.array([i]), (text,))}
            self._stops[strings] = Stops(strings, sorted(alone), self.suspects(strings))
        return self._stops[strings]

    def reason(self, tokens: np.ndarray, stops: Stops) -> FinishReason | None:
        """Why the completion `tokens` (T,) ends with its last token; None when it does not."""
        if self.eos[tokens[-1]]:
            return FinishReason.EOS
        return FinishReason.STOP if stops.suspects[tokens[-1]] and self.stopped(tokens, stops.strings) else None
