"""Held-out families about text: kinds of bug that training shows, in expressions that it does not."""

from dockyard_actors.tasks.functions.spec import heldout, row

FAMILIES = (
    heldout(
        "both ends",
        row(
            "first_and_last(s: chars)",
            "the first plus the last character of s",
            "s[0] + s[-1]",
            "s[0] + s[1]",
            "s[-1] + s[0]",
        ),
        row(
            "same_ends(s: chars)",
            "whether the first and last character are equal",
            "s[0] == s[-1]",
            "s[0] == s[1]",
            "s[0] != s[-1]",
        ),
        row(
            "rotate_left(s: chars)",
            "s with its first character moved to the end",
            "s[1:] + s[0]",
            "s[1:] + s[1]",
            "s[0] + s[1:]",
        ),
        row(
            "rotate_right(s: chars)",
            "s with its last character moved to the start",
            "s[-1] + s[:-1]",
            "s[:-1] + s[-1]",
            "s[0] + s[:-1]",
        ),
        row(
            "initials(a: name, b: name)",
            "the first character of a and that of b",
            "a[0] + b[0]",
            "a[0] + b[1]",
            "a + b",
        ),
        row("double_last(s: chars)", "s followed by its last character", "s + s[-1]", "s + s[0]", "s + s"),
    ),
    heldout(
        "building text",
        row("exclaim(s: word)", "s followed by '!'", "s + '!'", "s + '?'", "'!' + s"),
        row("in_brackets(s: word)", "s between '(' and ')'", "'(' + s + ')'", "'(' + s", "')' + s + '('"),
        row("loud(s: word)", "s in upper case, followed by '!'", "s.upper() + '!'", "s.lower() + '!'", "s.upper()"),
        row(
            "word_and_loud(s: word)", "s followed by s in upper case", "s + s.upper()", "s + s.lower()", "s.upper() + s"
        ),
        row("dashes_after(s: word, n: count)", "s followed by n times '-'", "s + '-' * n", "s * n", "s + '-'"),
        row("repeat_plus(s: word, n: count)", "s repeated n times, followed by '.'", "s * n + '.'", "s + '.'", "s * n"),
    ),
    heldout(
        "case and comparison",
        row(
            "same_word(a: cased, b: cased)",
            "whether a and b are equal in lower case",
            "a.lower() == b.lower()",
            "a.lower() != b.lower()",
            "a == b",
        ),
        row(
            "is_shouting(s: cased)",
            "whether s equals s in upper case",
            "s == s.upper()",
            "s != s.upper()",
            "s == s.lower()",
        ),
        row(
            "starts_upper(s: chars)",
            "whether the first character is upper case",
            "s[0].isupper()",
            "s[0].islower()",
            "s.isupper()",
        ),
        row(
            "count_a_any_case(s: word)",
            "how often 'a' occurs in s in lower case",
            "s.lower().count('a')",
            "s.upper().count('a')",
            "s.lower().find('a')",
        ),
        row(
            "upper_first(s: chars)",
            "the first character in upper case, then the rest",
            "s[0].upper() + s[1:]",
            "s[0].lower() + s[1:]",
            "s[0].upper() + s",
        ),
        row(
            "title_trim(s: padded)", "s stripped, in title case", "s.strip().title()", "s.strip().lower()", "s.strip()"
        ),
    ),
    heldout(
        "membership",
        row(
            "starts_with_vowel(s: chars)",
            "whether the first character is in 'aeiou'",
            "s[0] in 'aeiou'",
            "s[0] not in 'aeiou'",
            "s[1] in 'aeiou'",
        ),
        row(
            "looks_like_email(s: email)",
            "whether '@' and '.' are in s",
            "'@' in s and '.' in s",
            "'@' in s or '.' in s",
            "'@' in s",
        ),
        row(
            "is_yes(s: answer)",
            "whether s in lower case is 'yes' or 'y'",
            "s.lower() in ('yes', 'y')",
            "s in ('yes', 'y')",
            "s.upper() in ('yes', 'y')",
        ),
        row(
            "one_in_other(a: prefix, b: word)",
            "whether a is in b or b is in a",
            "a in b or b in a",
            "a in b and b in a",
            "a in b",
        ),
        row(
            "has_both(s: word, a: letter, b: letter)",
            "whether a and b are in s",
            "a in s and b in s",
            "a in s or b in s",
            "a in s",
        ),
        row(
            "letter_after_first(s: chars, c: letter)",
            "whether c is in s after the first character",
            "c in s[1:]",
            "c in s",
            "c in s[:1]",
        ),
    ),
    heldout(
        "numbers in text",
        row(
            "add_texts(a: digits, b: digits)",
            "a as an int plus b as an int",
            "int(a) + int(b)",
            "a + b",
            "int(a) - int(b)",
        ),
        row(
            "glue_numbers(a: nat, b: nat)", "a as text followed by b as text", "str(a) + str(b)", "a + b", "str(a + b)"
        ),
        row("first_digit(n: big)", "the first digit of n as an int", "int(str(n)[0])", "int(str(n)[-1])", "str(n)[0]"),
        row(
            "reverse_number(n: big)",
            "n with its digits reversed, as an int",
            "int(str(n)[::-1])",
            "int(str(n))",
            "str(n)[::-1]",
        ),
        row(
            "same_backwards(n: big)",
            "whether n as text equals its reverse",
            "str(n) == str(n)[::-1]",
            "str(n) != str(n)[::-1]",
            "str(n) == str(n)",
        ),
        row(
            "count_ones(n: nat)",
            "how often '1' occurs in the binary of n",
            "bin(n).count('1')",
            "bin(n).count('0')",
            "str(n).count('1')",
        ),
        row("half_of_text(s: numbers)", "s as a float, divided by 2", "float(s) / 2", "float(s) * 2", "float(s)"),
    ),
    heldout(
        "formatted values",
        row("sum_text(a: nat, b: nat)", "a plus b as text", "f'{a + b}'", "f'{a}{b}'", "f'{a - b}'"),
        row(
            "point_text(x: int, y: int)",
            "x and y in brackets with ', ' between",
            "f'({x}, {y})'",
            "f'({y}, {x})'",
            "f'({x} {y})'",
        ),
        row(
            "char_count(s: word)",
            "the length of s followed by ' chars'",
            "f'{len(s)} chars'",
            "f'{s} chars'",
            "f'{len(s)}'",
        ),
        row(
            "loud_hello(name: name)",
            "'HI ' and the name in upper case",
            "f'HI {name.upper()}'",
            "f'HI {name}'",
            "f'HI {name.lower()}'",
        ),
        row(
            "three_parts(a: nat, b: nat, c: nat)",
            "a, b and c with '-' between",
            "f'{a}-{b}-{c}'",
            "f'{a}-{b}{c}'",
            "f'{c}-{b}-{a}'",
        ),
        row(
            "digits_text(n: nat)",
            "n with three digits, followed by '.'",
            "f'{n:03d}' + '.'",
            "f'{n:03d}'",
            "f'{n}' + '.'",
        ),
    ),
)
