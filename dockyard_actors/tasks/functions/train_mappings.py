"""Training families about dicts, sets and tuples that stand for dates."""

from dockyard_actors.tasks.functions.spec import row, train

FAMILIES = (
    train(
        "reading a dict",
        row(
            "get_or_{k}(d: dict, key: key)",
            "the value of key in d, or {k}",
            "d.get(key, {k})",
            "d[key]",
            "d.get({k}, key)",
            k=(0, 9),
        ),
        row("has_key(d: dict, key: key)", "whether key is in d", "key in d", "key not in d", "key in d.values()"),
        row(
            "has_value(d: dict, x: int)",
            "whether x is in the values of d",
            "x in d.values()",
            "x in d",
            "x not in d.values()",
        ),
        row("dict_total(d: dict)", "the sum of the values of d", "sum(d.values())", "sum(d)", "len(d.values())"),
        row("keys_of(d: dict)", "the list of keys of d", "list(d)", "list(d.values())", "len(d)"),
        row("values_of(d: dict)", "the list of values of d", "list(d.values())", "list(d)", "list(d.items())"),
        row("dict_size(d: dict)", "the number of keys in d", "len(d)", "len(d) + 1", "sum(d)"),
    ),
    train(
        "building a dict",
        row(
            "squares_map(nums: list)",
            "a dict from each n to n times n",
            "{n: n * n for n in nums}",
            "{n: n + n for n in nums}",
            "{n * n: n for n in nums}",
        ),
        row(
            "length_map(words: words)",
            "a dict from each word to its length",
            "{w: len(w) for w in words}",
            "{len(w): w for w in words}",
            "{w: w for w in words}",
        ),
        row(
            "inverted(d: table)",
            "a dict from each value to its key",
            "{v: k for k, v in d.items()}",
            "{k: v for k, v in d.items()}",
            "{k: k for k, v in d.items()}",
        ),
        row("one_entry(k: key, v: int)", "a dict from k to v", "{k: v}", "{v: k}", "{k, v}"),
        row(
            "from_lists(a: words, b: bytes)",
            "a dict from the items of a to those of b",
            "dict(zip(a, b))",
            "dict(zip(b, a))",
            "list(zip(a, b))",
        ),
    ),
    train(
        "sets",
        row(
            "unique_count(items: list)", "the number of different items", "len(set(items))", "len(items)", "set(items)"
        ),
        row(
            "common(a: list, b: list)",
            "the sorted items in both a and b",
            "sorted(set(a) & set(b))",
            "sorted(set(a) | set(b))",
            "sorted(set(a))",
        ),
        row(
            "union(a: list, b: list)",
            "the sorted items in a or b",
            "sorted(set(a) | set(b))",
            "sorted(set(a) & set(b))",
            "sorted(a + b)",
        ),
        row(
            "has_repeats(items: list)",
            "whether items has more items than its set",
            "len(items) != len(set(items))",
            "len(items) == len(set(items))",
        ),
        row(
            "unique_sorted(items: list)", "the sorted set of items", "sorted(set(items))", "sorted(items)", "set(items)"
        ),
    ),
    train(
        "dates as tuples",
        row("year_of(date: date)", "the first part of the date", "date[0]", "date[1]", "date[2]"),
        row("month_of(date: date)", "the second part of the date", "date[1]", "date[0]", "date[2]"),
        row("is_before(a: date, b: date)", "whether a is before b", "a < b", "a > b", "a == b"),
        row(
            "same_year(a: date, b: date)",
            "whether a and b have the same first part",
            "a[0] == b[0]",
            "a[0] != b[0]",
            "a[1] == b[1]",
        ),
        row(
            "next_year(d: date)",
            "d with its first part plus 1",
            "(d[0] + 1, d[1], d[2])",
            "(d[0] - 1, d[1], d[2])",
            "(d[0], d[1] + 1, d[2])",
        ),
        row("month_start(d: date)", "whether the third part of d is 1", "d[2] == 1", "d[1] == 1", "d[2] != 1"),
        row("year_and_month(d: date)", "the first two parts of d", "d[:2]", "d[2:]", "d[1:]"),
    ),
    train(
        "pairs",
        row("pair_sum(p: pair)", "the sum of both items of p", "p[0] + p[1]", "p[0] - p[1]", "p[0] + p[0]"),
        row("pair_product(p: pair)", "the product of both items of p", "p[0] * p[1]", "p[0] + p[1]", "p[0] * p[0]"),
        row("pair_swap(p: pair)", "the second and the first item of p", "(p[1], p[0])", "(p[0], p[1])", "(p[1], p[1])"),
        row(
            "larger_items(pairs: pairs)",
            "the max of each pair",
            "[max(p) for p in pairs]",
            "[min(p) for p in pairs]",
            "[p for p in pairs]",
        ),
        row(
            "pair_totals(pairs: pairs)",
            "a plus b for each pair",
            "[a + b for a, b in pairs]",
            "[a - b for a, b in pairs]",
            "[a for a, b in pairs]",
        ),
    ),
    train(
        "set questions",
        row(
            "only_in_first(a: list, b: list)",
            "the sorted items in a but not in b",
            "sorted(set(a) - set(b))",
            "sorted(set(b) - set(a))",
            "sorted(set(a) & set(b))",
        ),
        row(
            "is_subset(a: list, b: list)", "whether all of a is in b", "set(a) <= set(b)", "set(a) >= set(b)", "a <= b"
        ),
        row(
            "shared_count(a: list, b: list)",
            "the number of items in both a and b",
            "len(set(a) & set(b))",
            "len(set(a) | set(b))",
            "len(a) + len(b)",
        ),
        row(
            "letter_kinds(s: cased)",
            "the number of different letters in lower case",
            "len(set(s.lower()))",
            "len(s.lower())",
            "len(set(s))",
        ),
        row(
            "same_items(a: list, b: list)",
            "whether the sets of a and b are equal",
            "set(a) == set(b)",
            "set(a) != set(b)",
            "a == b",
        ),
    ),
)
