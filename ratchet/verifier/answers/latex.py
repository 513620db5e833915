"""One spelling for the contents of boxes, and what is refused before the symbolic engine.

`clean` rewrites LaTeX into one spelling without changing what it means: spacing, sizes, fonts,
fraction and root braces, relation names, Unicode signs. `too_complex` refuses what could hang or
blow up a computer algebra system. Both are linear passes over short text (`MAX_CHARS`).
"""

from __future__ import annotations

import re

from ratchet.verifier.answers.numbers import LETTER_UNITS, plain_chars

MAX_CHARS = 2000  # beyond this a box is compared literally or not at all
MAX_ENGINE_CHARS = 500
MAX_NESTING = 15
MAX_EXPONENT_VALUE = 10_000
MAX_COUNT_VALUE = 1_000  # factorials, binomials, bounds of sums and products

SIGNS = str.maketrans(
    {
        "√": "\\sqrt ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "≈": "\\approx ",
        "±": "\\pm ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "∅": "\\emptyset ",
        "°": "^\\circ ",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "÷": "/",
        "²": "^2",
        "³": "^3",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
        "…": "\\dots ",
        "’": "'",
        "€": "",
        "£": "",
        "¥": "",
    }
)
FONTS = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathtt|textbf|textit|textrm|textnormal|texttt|textup|mbox"
    r"|operatorname\*?|boldsymbol|bm)(?![A-Za-z]) *(?=\{)"
)
NAMED = {
    "dfrac": "frac",
    "tfrac": "frac",
    "cfrac": "frac",
    "leq": "le",
    "leqslant": "le",
    "geq": "ge",
    "geqslant": "ge",
    "neq": "ne",
    "varnothing": "emptyset",
    "ldots": "dots",
    "cdots": "dots",
    "dotsc": "dots",
    "dotsb": "dots",
    "lbrace": "{",
    "rbrace": "}",
    "lbrack": "[",
    "rbrack": "]",
    "langle": "(",
    "rangle": ")",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "degree": "^\\circ",
    "degrees": "^\\circ",
    "imath": "i",
    "lt": "<",
    "gt": ">",
    "colon": ":",
    "dbinom": "binom",
    "tbinom": "binom",
    "land": ",",
    "backslash": "",
    "left": "",
    "right": "",
    "displaystyle": "",
    "textstyle": "",
    "limits": "",
    "nolimits": "",
    "strut": "",
    "underline": "",
    "large": "",
    "Large": "",
    "small": "",
    "huge": "",
    "normalsize": "",
    "quad": " ",
    "qquad": " ",
    "rm": "",
    "bf": "",
    "it": "",
    "bigl": "",
    "bigr": "",
    "Bigl": "",
    "Bigr": "",
    "biggl": "",
    "biggr": "",
    "big": "",
    "Big": "",
    "bigg": "",
    "Bigg": "",
}
BRACES_KEPT = {"lbrace": "\\{", "rbrace": "\\}"}
COMMAND = re.compile(r"\\\\|\\(?:(left|right) *(\.)|([A-Za-z]+)|(! *)|([,;:> ])|\$|[()\[\]](?!\[))")
DOUBLED = re.compile(r"\\\\(?=[A-Za-z{}!,%$])")
PLAIN_TEXT = re.compile(r"\\text\{ *([0-9][0-9.,]*|[A-Za-z]|) *\}(?P<base> *_)?")
WHOLE_TEXT = re.compile(r"\\text\{ *([0-9][^{}\\]*)\}")
CURRENCY = re.compile(r"(-?) *(\\\$|[$€£¥]|\\text\{ *\\\$ *\}) *(-?[0-9](?:[0-9.,]*[0-9])?)[.,]?")
CURRENCY_UNIT = {"€": "euros", "£": "pounds", "¥": "yen"}
TYPED = re.compile(r"(?<![A-Za-z\\])(?:(?:sqrt|sin|cos|tan|ln|log|exp)(?= *\()|pi(?![A-Za-z]))")
GROUPS = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:(?:\{,\}|,\\!) ?[0-9]{3})+(?![0-9])")
CYCLE = re.compile(r"(?<=[0-9.])\\(?:bar|overline) *(?:\{ *([0-9]+) *\}|([0-9]))")
CHOOSE = re.compile(r"\{ *(\w+) *\\choose *(\w+) *\}")
NATURAL = re.compile(r"\\log *_ *(?:\{ *e *\}|e(?![A-Za-z]))")
PERCENT = re.compile(
    r"(?:\\?%|\\text\{ *(?:percent|percentage|pct|%) *\}|(?<=[0-9} ])(?:percentage|percent|pct)\b)"
)
RELATIONS = (
    ("...", "\\dots "),
    ("<=", "\\le "),
    (">=", "\\ge "),
    ("{,}", ","),
    ("\\text{,}", ","),
)
DECORATION = re.compile(r"\\(?:color|textcolor|label|tag|hspace|vspace)\*? *\{[^{}]*\}")
BLACKBOARD = re.compile(r"\\mathbb +([A-Z])")
PHANTOM = re.compile(r"\\[hv]?phantom *(?:\{[^{}]*\}|[^\\ ])")
PREFIX = re.compile(r"(?:the )?(?:final )?answer(?: is)?(?: ?:| (?=[-0-9])) ?", re.IGNORECASE)
EMPHASISED = re.compile(r"\*\*[^*]+\*\*")
SPACE = re.compile(r"((?<=[0-9])\s+(?=[0-9.])|(?<=[A-Za-z])\s+(?=[A-Za-z]))|\s+")
TRAILING = " .,;:\\~"


def rewritten(match: re.Match[str]) -> str:
    """The one spelling of a command that `COMMAND` found."""
    if match[2]:  # \left. and \right.
        return ""
    name = match[3]
    if match[0] == "\\\\":  # a line break, as between the rows of a matrix
        return match[0]
    if name is None:
        if match[4]:
            return ""
        return " " if match[5] else ""  # spaces; \$ and maths delimiters go
    if name in BRACES_KEPT:
        return BRACES_KEPT[name]
    new = NAMED.get(name)
    if new is None:
        return match[0]
    return f"\\{new}" if new.isalpha() else new


def braced(text: str, command: str, count: int) -> str:
    """`text` with the first `count` arguments of `command` in braces: \\frac12 → \\frac{1}{2}."""
    out = []
    at = 0
    for match in re.finditer(re.escape(command) + r"(?![A-Za-z])", text):
        if match.start() < at:
            continue
        out.append(text[at : match.end()])
        at = match.end()
        if command == "\\sqrt" and (root := re.compile(r" *(\[[^\[\]]*\]) *").match(text, at)):
            out.append(root[1])
            at = root.end()
        for _ in range(count):
            taken = taken_argument(text, at, round_brackets=command == "\\sqrt")
            if taken is None:
                break
            inner, at = taken
            out.append("{" + braced(inner, command, count) + "}")
    out.append(text[at:])
    return "".join(out)


def braced_powers(text: str) -> str:
    """`text` with exponents in round brackets in braces: x^(n+1) → x^{n+1}."""
    at = 0
    while (at := text.find("^(", at)) >= 0:
        end = closing(text, at + 1, "(", ")")
        if end >= 0 and text[end + 1 : end + 2] != "^":
            text = f"{text[: at + 1]}{{{text[at + 2 : end]}}}{text[end + 1 :]}"
        at += 1
    return text


def taken_argument(text: str, at: int, round_brackets: bool) -> tuple[str, int] | None:
    """What stands inside the argument that starts at `at`, and where the argument ends."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at == len(text):
        return None
    opening = text[at]
    if opening == "{" or (opening == "(" and round_brackets):
        end = closing(text, at, opening, "}" if opening == "{" else ")")
        return None if end < 0 else (text[at + 1 : end], end + 1)
    if opening.isalnum():
        return opening, at + 1
    name = re.compile(r"\\[A-Za-z]+").match(text, at)
    if name is None or name[0] in ("\\frac", "\\sqrt"):
        return None
    return name[0], name.end()


def closing(text: str, start: int, opening: str, close: str) -> int:
    """Index of the bracket that closes the one at `start`, or -1. Escaped brackets don't count."""
    depth = 0
    at = start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        if text[at] == opening:
            depth += 1
        elif text[at] == close:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1


def unwrapped(match: re.Match[str]) -> str:
    """A number or letter out of its \\text{}, unless it is a unit after a number: 5\\text{ m}."""
    before = match.string[: match.start()].rstrip()[-1:]
    if match[1] in LETTER_UNITS and (before.isdigit() or before == "}") and not match["base"]:
        return f"\\text{{{match[1]}}}"
    return match[1] + (match["base"] or "")


def spelled_out(text: str) -> str:
    """`text` with an amount of money as a number and its unit, separators inside braces dropped,
    and functions typed as plain words made commands."""
    inside = text[1:-1] if len(text) > 2 and text[0] == text[-1] == "$" else text
    money = CURRENCY.fullmatch(inside)
    if money:
        unit = CURRENCY_UNIT.get(money[2], "dollars")
        return f"{money[1]}{money[3]}\\text{{ {unit}}}"
    text = GROUPS.sub(lambda match: re.sub(r"[^0-9]", "", match[0]), text)
    if "\\text" not in text:
        text = TYPED.sub(r"\\\g<0> ", text)
    return NATURAL.sub(r"\\ln ", CHOOSE.sub(r"\\binom{\1}{\2}", text))


def clean(text: str) -> str:
    """`text` in the one spelling that all comparisons use."""
    text = spelled_out(" ".join(plain_chars(text).split()))
    text = " ".join(text.translate(SIGNS).split())
    if "\\begin" not in text:
        text = DOUBLED.sub(r"\\", text)
    text = text.replace("$", "") if "\\$" not in text else text.replace("\\$", "").replace("$", "")
    text = COMMAND.sub(rewritten, text)
    text = FONTS.sub(r"\\text", text).replace("~", " ")
    text = text.replace("\\text {", "\\text{")
    text = DECORATION.sub("", PHANTOM.sub("", text))
    text = BLACKBOARD.sub(r"\\mathbb{\1}", text)
    text = re.sub(r"(?<![0-9)])!=", r"\\ne ", text)  # but 3!=6 is a factorial
    for old, new in RELATIONS:
        text = text.replace(old, new)
    text = text.replace("^{\\circ}", "^\\circ").replace("^ \\circ", "^\\circ")
    text = CYCLE.sub(lambda match: f"\\overline{{{match[1] or match[2]}}}", text)
    text = PERCENT.sub("%", PLAIN_TEXT.sub(unwrapped, text))
    whole = WHOLE_TEXT.fullmatch(text)
    text = whole[1] if whole else text
    text = braced(braced(braced(text, "\\frac", 2), "\\sqrt", 1), "\\binom", 2)
    text = braced_powers(text.replace("**", "^") if not EMPHASISED.fullmatch(text) else text[2:-2])
    prefix = PREFIX.match(text)
    text = text[prefix.end() :] if prefix else text
    return " ".join(text.split()).rstrip(TRAILING)


def squashed(text: str) -> str:
    """`text` without white space where it says nothing, the form in which literal equality is
    tested. It stays between two digits and after a command that a letter follows."""
    return SPACE.sub(lambda match: " " if match[1] else "", text)


def nesting(text: str) -> int:
    """The deepest bracket nesting, of any kind."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def balanced(text: str) -> bool:
    """Whether the unescaped braces of `text` match."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (token == "{") - (token == "}")
        if depth < 0:
            return False
    return depth == 0


def exponent_trouble(text: str) -> bool:
    """Whether an exponent is a tower of three or a number beyond the cap."""
    for match in re.finditer(r"\^ *", text):
        exponent, _ = argument(text, match.end())
        inner = exponent.count("^")
        if inner >= 2 or (inner and re.fullmatch(r"[-+0-9^{}()*/. ]*", exponent)):
            return True
        if re.match(r" *\^", text[match.end() + len(exponent) :]):
            return True
        digits = re.findall(r"[0-9]+", exponent)
        if any(len(run) > 5 or int(run) > MAX_EXPONENT_VALUE for run in digits):
            return True
        if "!" in exponent:
            return True
    return False


def argument(text: str, at: int) -> tuple[str, int]:
    """The argument that starts at `at` (a braced or bracketed group, or a run without brackets),
    and where it ends."""
    if at < len(text) and text[at] in "{(":
        close = closing(text, at, text[at], "}" if text[at] == "{" else ")")
        end = close + 1 if close >= 0 else len(text)
        return text[at:end], end
    match = re.compile(r"-?(?:\\?[A-Za-z]+|[0-9.]+|.)?").match(text, at)
    assert match is not None  # the pattern matches the empty string
    return match[0], match.end()


def counting_trouble(text: str) -> bool:
    """Whether a factorial, binomial, sum or product would be too long to work out."""
    if re.search(r"! *!|! *[)}\]] *!", text) or re.search(r"![^()]*\) *!", text):
        return True
    limit = r"[0-9]{4,}"
    if re.search(rf"{limit} *!|{limit} *[)}}] *!|\([^()]*{limit}[^()]*\) *!", text):
        return True
    if "\\binom" in text and re.search(r"\\binom *\{[^{}]*[0-9]{4,}", text):
        return True
    if re.search(r"\\(?:sum|prod)(?![A-Za-z])", text):
        return (
            re.search(r"\\(?:sum|prod)[^A-Za-z]*?(?:_\{[^{}]*\})? *\^ *\{?[^{}]*[0-9]{4,}", text)
            is not None
        )
    return False


def too_complex(text: str) -> str | None:
    """Why the symbolic engine must not see `text`, or None."""
    if len(text) > MAX_ENGINE_CHARS:
        return f"longer than {MAX_ENGINE_CHARS} characters"
    if nesting(text) > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING}"
    if "__" in text or any(ord(char) < 32 for char in text):
        return "holds characters that are no mathematics"
    if re.search(r"[0-9]{101}", text.replace(",", "")):
        return "a number of more than 100 digits"
    if re.search(r"\\(?:int|iint|oint|lim|limsup|liminf)(?![A-Za-z])", text):
        return "an integral or limit that is not worked out"
    if re.search(r"\\(?:mod|bmod|pmod|equiv)(?![A-Za-z])", text):
        return "a remainder or congruence, which is only compared literally"
    if exponent_trouble(text):
        return "an exponent tower or a huge exponent"
    if re.search(r"[0-9][eE][-+]?[0-9]", text):
        return "scientific notation beyond the cap or inside an expression"
    if counting_trouble(text):
        return "a huge factorial, binomial, sum or product"
    if re.search(r"[-+] *[-+] *[-+]", text):
        return "a run of signs"
    return None
