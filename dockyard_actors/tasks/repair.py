"""The tiny repair language: one-line functions with a bug, an intent in words, and a two-line hunk as the answer.

Small enough for a character model of 0.3 M parameters trained from scratch: 16 function families × ordered pairs of five
names × constants 2-9. Promises the same tasks for the same seed on every machine. A fifth of all combinations (family,
names, and the constant where the right expression has one) is held out: no training prompt or warm-up pair asks for them.
The set is made in memory, not shipped as a file: it is a few lines of rules, and any number of tasks can be drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from dockyard_actors.tasks.types import Split, Task

NAMES = "abnxy"
CONSTANTS = range(2, 10)
HELDOUT_EVERY = 5
"""One combination in five is held out."""
TESTS_SHOWN, TESTS_HIDDEN = 2, 4
"""Neither kind stands in the prompt, whose comment says what is wanted; the split only keeps the task's shape."""
MAX_NEW_TOKENS = 46
"""Characters of an answer: the longest hunk has 36, then its end token."""
ARGUMENT_MAX = 30
WARMUP_RIGHT, WARMUP_UNCHANGED = 0.45, 0.30
"""Shares of warm-up answers that are right and that leave the bug in; the rest is a random family's expression."""
REPEATS_MAX = 1000
"""Draws in a row that gave a known prompt, after which the split counts as used up."""
SHIPPED_SEED, SHIPPED_TRAIN, SHIPPED_HELDOUT = 7, 2400, 128


@dataclass(frozen=True)
class Family:
    """Templates in A, B (names) and K (constant): what is wanted, and the expression that does it."""

    intent: str
    right: str


FAMILIES = (
    Family("sum of A and B", "A+B"),
    Family("A less B", "A-B"),
    Family("B less A", "B-A"),
    Family("product of A and B", "A*B"),
    Family("greater of A and B", "max(A,B)"),
    Family("lesser of A and B", "min(A,B)"),
    Family("distance of A and B", "abs(A-B)"),
    Family("A raised by K", "A+K"),
    Family("B lowered by K", "B-K"),
    Family("A taken K times", "A*K"),
    Family("rest of A by K", "A%K"),
    Family("A split by K", "A//K"),
    Family("A times B, then K more", "A*B+K"),
    Family("B squared", "B*B"),
    Family("A above K", "A>K"),
    Family("A same as B", "A==B"),
)


@dataclass(frozen=True)
class Combination:
    """One function to be repaired, without its bug."""

    family: int
    a: str
    b: str
    k: int

    def fill(self, template: str) -> str:
        values = {"A": self.a, "B": self.b, "K": str(self.k)}
        return "".join(values.get(char, char) for char in template)

    @property
    def intent(self) -> str:
        return self.fill(FAMILIES[self.family].intent)

    @property
    def right(self) -> str:
        return self.fill(FAMILIES[self.family].right)

    @property
    def split(self) -> Split:
        """A Latin-square rule: every family, name and constant is seen in training, a fifth of their combinations is not."""
        k = self.k if "K" in FAMILIES[self.family].right else 0
        index = self.family * 2 + NAMES.index(self.a) + 2 * NAMES.index(self.b) + k
        return "heldout" if index % HELDOUT_EVERY == 0 else "train"


def source(combination: Combination, expression: str) -> str:
    """The two-line program whose second line the answer replaces."""
    return f"def f({combination.a},{combination.b}): # {combination.intent}\n return {expression}\n"


def hunk(old: str, new: str) -> str:
    """The answer: a line to remove and a line to put in its place."""
    return f"- return {old}\n+ return {new}\n"


def make_tasks(seed: int, n_train: int, n_heldout: int) -> tuple[Task, ...]:
    """`n_train` training tasks, then `n_heldout` held-out ones, with different prompts. ValueError when there are not enough."""
    rng = random.Random(f"repair {seed}")
    tasks: list[Task] = []
    prompts: set[str] = set()
    wanted: tuple[tuple[Split, int], ...] = (("train", n_train), ("heldout", n_heldout))
    for split, count in wanted:
        made = repeats = 0
        while made < count:
            if repeats == REPEATS_MAX:
                raise ValueError(f"repair.make_tasks: no {count} different {split} tasks exist, only about {made}")
            combination, wrong = _draw(rng, split)
            task = _task(combination, wrong, f"{split}-{made:04d}")
            if task.prompt in prompts:
                repeats += 1
                continue
            prompts.add(task.prompt)
            tasks.append(task)
            made, repeats = made + 1, 0
    return tuple(tasks)


@cache
def shipped_tasks() -> tuple[Task, ...]:
    """What `load_tasks("repair")` gives."""
    return make_tasks(SHIPPED_SEED, SHIPPED_TRAIN, SHIPPED_HELDOUT)


def warmup_pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs for the supervised warm-up, from training combinations only.

    Noisy on purpose: the model learns the form and some of the meaning, and leaves the rest for its rewards to teach.
    """
    while True:
        combination, wrong = _draw(rng, "train")
        luck = rng.random()
        if luck < WARMUP_RIGHT:
            new = combination.right
        elif luck < WARMUP_RIGHT + WARMUP_UNCHANGED:
            new = wrong
        else:
            new = combination.fill(rng.choice(FAMILIES).right)
        yield source(combination, wrong) + "@@\n", hunk(wrong, new)


def _draw(rng: random.Random, split: Split) -> tuple[Combination, str]:
    """A combination of this split and a wrong expression for it, which is another family's right one."""
    while True:
        family = rng.randrange(len(FAMILIES))
        a, b = rng.sample(NAMES, 2)
        combination = Combination(family, a, b, rng.choice(CONSTANTS))
        if combination.split == split:
            other = rng.choice([i for i in range(len(FAMILIES)) if i != family])
            return combination, combination.fill(FAMILIES[other].right)


def _task(combination: Combination, wrong: str, name: str) -> Task:
    code = source(combination, wrong)
    tests = [f"assert f({a},{b}) == {value}" for (a, b), value in _cases(combination.family, combination.k)]
    return Task(
        id=f"repair-{name}",
        split=combination.split,
        prompt=code + "@@\n",
        prefix=code,
        tests=tuple(tests[:TESTS_SHOWN]),
        hidden_tests=tuple(tests[TESTS_SHOWN:]),
        family=FAMILIES[combination.family].intent,
        answer="patch",
        target=hunk(wrong, combination.right),
        max_new_tokens=MAX_NEW_TOKENS,
    )


@cache
def _cases(family: int, k: int) -> tuple[tuple[tuple[int, int], int | bool], ...]:
    """Six argument pairs with the right values, such that each other family's expression is wrong on at least one."""
    functions = [_function(index, k) for index in range(len(FAMILIES))]
    others = [function for index, function in enumerate(functions) if index != family]
    rng = random.Random(f"repair cases {family} {k}")
    while True:
        pairs = [
            (rng.randint(1, ARGUMENT_MAX), rng.randint(1, ARGUMENT_MAX)) for _ in range(TESTS_SHOWN + TESTS_HIDDEN)
        ]
        pairs[rng.randrange(len(pairs))] = (pairs[0][1], pairs[0][1])  # equal arguments: an edge of == and of max, min
        values = [functions[family](a, b) for a, b in pairs]
        if len(set(pairs)) == len(pairs) and all([f(a, b) for a, b in pairs] != values for f in others):
            return tuple(zip(pairs, values, strict=True))


def _function(family: int, k: int) -> Callable[[int, int], int | bool]:
    expression = Combination(family, "a", "b", k).right
    return eval(f"lambda a, b: {expression}", {"__builtins__": {"max": max, "min": min, "abs": abs}})
