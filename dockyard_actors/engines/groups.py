"""The life of a group inside an engine: taken in, resumed, ended. One account of it for every engine.
Whatever does not fit is refused before an output is touched. Knows no model, no tokenizer and no batch.
"""

from __future__ import annotations

from dockyard_actors.engines.base import FinishReason, GroupOutput, GroupRequest, GroupResult, SamplingConfig

SEED_MASK = (1 << 64) - 1


class LiveGroup:
    """A group between `submit` and its result.

    limit: most tokens that a completion may have. reasons[i]: None while completion i goes on. waiting: those that go on and
    that the engine has not begun. longest: positions that the engine has for prompt and completion together, None for any.
    Raises ValueError, with the output as it was, when the output, the length or what is resumed does not fit.
    """

    def __init__(
        self,
        request: GroupRequest,
        output: GroupOutput,
        sampling: SamplingConfig,
        resume: GroupResult | None = None,
        longest: int | None = None,
    ) -> None:
        self.request, self.output, self.sampling = request, output, sampling
        self.limit = sampling.max_new_tokens
        if request.max_new_tokens is not None:
            self.limit = min(self.limit, request.max_new_tokens)
        output.check(request, self.limit)
        check_length(f"group {request.key}", self.prompt_tokens, self.limit, longest)
        self.reasons: list[FinishReason | None] = [None] * request.n
        if resume is None:
            output.clear()
        else:
            self._resume(resume)
        self.waiting = [i for i, reason in enumerate(self.reasons) if reason is None]

    @property
    def prompt_tokens(self) -> int:
        return int(self.request.prompt_ids.size)

    @property
    def ended(self) -> bool:
        return None not in self.reasons

    def seed(self, i: int) -> int:
        """Of completion i, as 64 bits without sign."""
        return self.request.seeds[i] & SEED_MASK

    def result(self) -> GroupResult:
        """What there is now: a completion that goes on is CUT."""
        reasons = tuple(FinishReason.CUT if reason is None else reason for reason in self.reasons)
        return GroupResult(self.request.key, reasons, self.prompt_tokens, int(self.output.lengths.sum()))

    def _resume(self, before: GroupResult) -> None:
        """Takes up what `abort` returned; the output has the tokens still."""
        lengths, key = self.output.lengths, self.request.key
        facts = {
            "key": (before.key, key),
            "completions": (len(before.finish_reasons), self.request.n),
            "prompt tokens": (before.prompt_tokens, self.prompt_tokens),
            "new tokens": (before.new_tokens, int(lengths.sum())),
        }
        for name, (theirs, ours) in facts.items():
            if theirs != ours:
                raise ValueError(f"group {key}: resumes a result with {name} {theirs}, request and output have {ours}")
        if ((lengths < 0) | (lengths > self.output.tokens.shape[1])).any():
            raise ValueError(f"group {key}: resumes lengths {lengths.tolist()}, beyond its output")
        for i, reason in enumerate(before.finish_reasons):
            if reason is not FinishReason.CUT:
                self.reasons[i] = reason
            elif lengths[i] >= self.limit:
                self.reasons[i] = FinishReason.LENGTH


def check_length(what: str, prompt: int, new: int, longest: int | None) -> None:
    """Raises ValueError when so many tokens are more than an engine with `longest` positions takes."""
    if longest is not None and prompt + new > longest:
        raise ValueError(f"{what}: {prompt} given + {new} new tokens exceed the engine's {longest} positions")
