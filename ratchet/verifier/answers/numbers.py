"""One number, read exactly or not at all.

`read_number` takes the text where an answer must stand and returns its value, or None when the
text is anything but one number. `number_tokens` finds the numbers inside running text. Values
are `int` or `Fraction`, so equality is exact; nothing goes through floats.

Accepted: ASCII digits, a sign (U+2212 and dashes are minus), commas, `{,}` or spaces in proper
groups of three, decimals, a/b, mixed numbers, scientific notation, one \\boxed{}, `$`, `**`, a
trailing period, a percent sign, and one unit phrase after the number. Lengths and exponents are
capped. No underscores, no nan or infinity, no words for numbers, no arithmetic.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

Value = int | Fraction

MAX_CHARS = 200
MAX_EXPONENT = 400

INVISIBLE = dict.fromkeys(
    [*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF, 0xAD]
)
CHARS = str.maketrans(
    {
        **{ord(dash): "-" for dash in "−–—‒‐‑﹣－"},
        **{
            ord(space): " "
            for space in "\xa0\u2002\u2003\u2004\u2005\u2007\u2009\u200a\u202f\u3000"
        },
        **{code: None for code in INVISIBLE if code != 0x202F},
        ord("×"): "\\times ",
        ord("⁄"): "/",
        ord("½"): " 1/2",
        ord("¼"): " 1/4",
        ord("¾"): " 3/4",
    }
)

SCALE = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1_000,
    "million": 1_000_000,
    "billion": 1_000_000_000,
    "trillion": 1_000_000_000_000,
}
# Words that change the number before them, or add another one: none can be part of a unit.
QUANTITIES = set(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    dozens hundreds thousands millions billions trillions mil bil half halves third thirds quarter
    fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths squared cubed
    doubled tripled twice fold factorial choose mod modulo root sqrt log ln pi inf infinity nan
    negative plus minus divided over point recurring repeating""".split()  # noqa: SIM905
)
# Words that make the phrase after a number more than a unit.
NOT_A_UNIT = QUANTITIES | set(
    """or and to not no nor is isn't are was but if maybe than then times either otherwise wrong
    incorrect false perhaps guess cannot can't never except bn mn""".split()  # noqa: SIM905
)
LETTER_UNITS = set("mgshlLNJWV")

FAST = re.compile(r"-?[0-9]{1,18}")
GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+"
NUMBER = rf"(?:(?:{GROUPED}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
WHOLE = re.compile(
    rf"(?P<sign>[+-]?) ?(?:[€£¥₹] ?)?(?:"
    rf"(?P<mixed>[0-9]+) ?(?:\\frac|(?<= )(?=[0-9]+/))(?:\{{(?P<mn>[0-9]+)\}}\{{(?P<md>[0-9]+)\}}"
    rf"|(?P<mn2>[0-9]+)/(?P<md2>[0-9]+))"
    rf"|\\frac\{{(?P<fs>-?)(?P<fn>[0-9]+)\}}\{{(?P<fd>[0-9]+)\}}"
    rf"|(?P<num>{NUMBER}) ?/ ?(?P<den>{NUMBER})"
    rf"|(?P<mant>{NUMBER})(?:[eE](?P<exp>[+-]?[0-9]{{1,4}})"
    rf"| ?(?:\\times|\\cdot|\*|x) ?10 ?(?:\^|\*\*) ?\{{?(?P<exp2>[+-]?[0-9]{{1,4}})\}}?)?"
    rf")(?P<rest>.*)",
    re.DOTALL,
)
EMPHASIS = re.compile(r"\*\*(?![0-9])|(?<![0-9])\*\*")
EMPHASISED = re.compile(r"(\*{1,3}|_{1,2})([^*_]+)\1")
LETTER = r"[^\W\d_²³¹⁰-₟⅐-↏]"  # no superscripts, fractions or Roman numerals
UNIT_CHARS = re.compile(
    "(?:" + LETTER + r"|[°'./ \-€£¥₹¢]|(?<=[A-Za-z])(?:[²³]|\^?\{?[23]\}?(?![0-9])))*"
)
UNIT_START = re.compile(rf"{LETTER}|[°€£¥₹¢/(]")
SYMBOLS = re.compile(r"[A-Za-z]-?|[xyz]{2,3}|[xX][0-9A-Fa-f]+|[αβγθλπφ].*")
FRAC = re.compile(r"\\[dtc]?frac *(\{[^{}]*\}|[0-9]) *(\{[^{}]*\}|[0-9])")
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|textnormal|mathbf|textit) *\{([^{}]*)\}")
# Starts with a character class, which the matcher finds fast; the look-behinds come after it.
TOKEN = re.compile(
    r"[0-9.](?<![A-Za-z0-9_^][0-9.])(?:(?<=[0-9])[0-9,]*(?:\.[0-9]+)?|(?<=\.)[0-9]+)"
    r"(?:[eE][+-]?[0-9]+(?![A-Za-z0-9_]))?(?:/[0-9][0-9,.]*(?:/[0-9]+)*)?"
)
BEFORE_DIGITS = "-$€£¥₹\\"


def plain_chars(text: str) -> str:
    """`text` with look-alike minus signs and spaces made ASCII, invisible characters dropped."""
    return text if text.isascii() else text.translate(CHARS)


def decimal_value(digits: str) -> Value:
    """The value of plain digits with an optional point and proper separators."""
    digits = digits.replace(",", "").replace(" ", "")
    if "." not in digits:
        return int(digits)
    return simplest(Fraction("0" + digits if digits.startswith(".") else digits.rstrip(".")))


def simplest(value: Fraction) -> Value:
    """`value` as an int where it is one."""
    return value.numerator if value.denominator == 1 else value


def magnitude(value: Value) -> Value:
    """`value` without its sign."""
    return -value if value < 0 else value


def power_of_ten(mantissa: Value, exponent: int) -> Value | None:
    """mantissa × 10^exponent, or None beyond the cap."""
    if abs(exponent) > MAX_EXPONENT:
        return None
    return simplest(Fraction(mantissa) * Fraction(10) ** exponent)


def unwrap(text: str) -> str:
    """`text` without the dress that is no part of a number: currency, emphasis, one box."""
    text = text.strip().strip("$").strip()
    for _ in range(2):  # a nested box unwraps once
        if text.startswith("\\boxed{") and text.endswith("}"):
            text = text[7:-1].strip()
    emphasised = EMPHASISED.fullmatch(text)
    text = emphasised[2] if emphasised else EMPHASIS.sub("", text).strip("`")
    if "\\" in text:
        text = re.sub(r"\\! *", "", text).replace("\\$", "").replace("\\%", "%")
        text = re.sub(r"(?<=[0-9{])~", " ", text)
        for mark in ("\\,", "\\;", "\\:", "\\ ", "\\(", "\\)", "\\[", "\\]"):
            text = text.replace(mark, " ")
        text = FRAC.sub(
            lambda m: f"\\frac{{{m[1].strip('{}').strip()}}}{{{m[2].strip('{}').strip()}}}", text
        )
        text = TEXT.sub(r" \1", text)
        text = text.replace("^{\\circ}", "°").replace("^\\circ", "°")
    text = text.replace("{,}", ",").replace("$", "")
    return " ".join(text.split())


def matched_value(match: re.Match[str]) -> Value | None:
    """The value of a `WHOLE` match, or None (zero denominator, exponent over the cap)."""
    group = match.groupdict()
    value: Value | None
    if group["mixed"] is not None:
        top, bottom = int(group["mn"] or group["mn2"]), int(group["md"] or group["md2"])
        value = simplest(int(group["mixed"]) + Fraction(top, bottom)) if bottom else None
    elif group["fn"] is not None:
        bottom = int(group["fd"])
        value = simplest(Fraction(int(group["fs"] + group["fn"]), bottom)) if bottom else None
    elif group["den"] is not None:
        below = decimal_value(group["den"])
        value = simplest(Fraction(decimal_value(group["num"])) / below) if below else None
    else:
        exponent = int(group["exp"] or group["exp2"] or 0)
        value = power_of_ten(decimal_value(group["mant"]), exponent)
    if value is None:
        return None
    return -value if group["sign"] == "-" else value


def unit_scale(rest: str) -> int | None:
    """What the phrase after a number multiplies it by: 1 for a unit, None if it is no unit."""
    rest = rest.removeprefix("%").strip().removesuffix(".")
    if not rest:
        return 1
    if not UNIT_CHARS.fullmatch(rest) or not UNIT_START.match(rest):
        return None
    if SYMBOLS.fullmatch(rest) and rest not in LETTER_UNITS:  # 7y, 7M, 0xA, 7π
        return None
    words = re.sub(r"[./()]", " ", rest.lower()).split()
    if len(words) > 6 or any(word in NOT_A_UNIT for word in words):
        return None
    if words and words[0] in SCALE:
        return None if any(word in SCALE for word in words[1:]) else SCALE[words[0]]
    return None if any(word in SCALE for word in words) else 1


def read_number(text: str) -> Value | None:
    """The one number that `text` is, or None."""
    text = text.strip()
    if FAST.fullmatch(text):
        return int(text)
    if len(text) > MAX_CHARS:
        return None
    text = unwrap(plain_chars(text))
    match = WHOLE.fullmatch(text)
    if match is None:
        return None
    scale = unit_scale(match["rest"].strip())
    if scale is None:
        return None
    value = matched_value(match)
    return None if value is None else value * scale


def is_bare_number(text: str) -> bool:
    """Whether `text` is a number and nothing more than a sign, separators and a point."""
    return re.fullmatch(rf"\s*[+-]?(?:{NUMBER})\s*", plain_chars(text)) is not None


def is_sign(text: str, at: int) -> bool:
    """Whether the minus at `at` is a sign: "is -3" and "(-3)", but not "10-3" or "10 -3"."""
    before = text[max(0, at - 2) : at]
    if not before:
        return True
    if before[-1].isspace():
        return len(before) == 1 or not (before[-2].isdigit() or before[-2] in ")]%")
    return not (before[-1].isalnum() or before[-1] in ")]}%_.")


def number_tokens(text: str, start: int = 0) -> list[tuple[int, str]]:
    """(end, token with its sign) of every number in running text from `start`, in order."""
    found = []
    for match in TOKEN.finditer(text, start):
        begin = match.start()
        token = match[0]
        if begin and text[begin - 1] in BEFORE_DIGITS:
            mark = begin - 1
            while mark >= 0 and text[mark] in "$€£¥₹\\":
                mark -= 1
            if mark >= 0 and text[mark] == "-" and is_sign(text, mark):
                token = "-" + token
        found.append((match.end(), token))
    return found


@lru_cache(maxsize=65_536)
def token_value(token: str) -> Value | None:
    """The value of a token of running text, None where its separators are improper."""
    return read_number(token.rstrip(".,"))


def values_in(text: str) -> set[Value]:
    """The values of all numbers in running text."""
    tokens = {token for _, token in number_tokens(plain_chars(text))}
    return {value for token in tokens if (value := token_value(token)) is not None}


def count_numbers(text: str) -> int:
    """How many numbers stand in running text."""
    return len(TOKEN.findall(plain_chars(text)))
