"""Training families about truth, equality and choices."""

from dockyard_actors.tasks.functions.spec import row, train

FAMILIES = (
    train(
        "and or not",
        row("both(a: bool, b: bool)", "whether a and b are true", "a and b", "a or b", "a"),
        row("either(a: bool, b: bool)", "whether a or b is true", "a or b", "a and b", "b"),
        row("neither(a: bool, b: bool)", "whether neither a nor b is true", "not (a or b)", "not a or b", "a or b"),
        row(
            "not_both(a: bool, b: bool)", "whether a and b are not both true", "not (a and b)", "not a and b", "a and b"
        ),
        row(
            "any_of_three(a: bool, b: bool, c: bool)",
            "whether a or b or c is true",
            "a or b or c",
            "a and b and c",
            "a or b",
        ),
    ),
    train(
        "two conditions",
        row(
            "both_positive(a: int, b: int)",
            "whether a and b are greater than 0",
            "a > 0 and b > 0",
            "a > 0 or b > 0",
            "a > 0",
        ),
        row(
            "any_negative(a: int, b: int)",
            "whether a or b is less than 0",
            "a < 0 or b < 0",
            "a < 0 and b < 0",
            "a < 0",
        ),
        row(
            "both_over_{k}(a: nat, b: nat)",
            "whether a and b are greater than {k}",
            "a > {k} and b > {k}",
            "a > {k} or b > {k}",
            k=(3, 8),
        ),
        row(
            "both_even(a: nat, b: nat)",
            "whether a and b are even",
            "a % 2 == 0 and b % 2 == 0",
            "a % 2 == 0 or b % 2 == 0",
            "a % 2 == 0",
        ),
        row(
            "one_is_zero(a: small, b: small)", "whether a or b is 0", "a == 0 or b == 0", "a == 0 and b == 0", "a == 0"
        ),
    ),
    train(
        "either this or that",
        row(
            "sign_word(x: int)",
            "'neg' if x is below 0, else 'pos'",
            "'neg' if x < 0 else 'pos'",
            "'neg' if x > 0 else 'pos'",
            "'pos' if x < 0 else 'neg'",
        ),
        row(
            "parity_word(n: nat)",
            "'even' if n is even, else 'odd'",
            "'even' if n % 2 == 0 else 'odd'",
            "'odd' if n % 2 == 0 else 'even'",
        ),
        row(
            "absolute(x: int)",
            "x if x is at least 0, else minus x",
            "x if x >= 0 else -x",
            "-x if x >= 0 else x",
            "x if x >= 0 else 0",
        ),
        row(
            "pick(flag: bool, a: int, b: int)",
            "a if the flag is true, else b",
            "a if flag else b",
            "b if flag else a",
            "a if not flag else b",
        ),
        row(
            "larger_of(a: int, b: int)",
            "a if a is greater than b, else b",
            "a if a > b else b",
            "a if a < b else b",
            "b if a > b else a",
        ),
        row(
            "size_word(n: nat)",
            "'big' if n is over {k}, else 'small'",
            "'big' if n > {k} else 'small'",
            "'big' if n < {k} else 'small'",
            k=(4, 10),
        ),
        row(
            "fee(n: nat)",
            "{k} if n is over 5, else 0",
            "{k} if n > 5 else 0",
            "{k} if n < 5 else 0",
            "0 if n > 5 else {k}",
            k=(2, 10),
        ),
    ),
)
