"""Units after an answer: which phrases are units, and which two units are the same.

A unit on one side only is dropped. On both sides, two units of the table that differ make the
answers differ (5 cents is not 5 dollars); a unit outside the table only has to be there.
"""

from __future__ import annotations

import re

from ratchet.verifier.answers.numbers import QUANTITIES

CANONICAL = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "oz": "oz ounce ounces",
    "lb": "lb lbs pound pounds",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "l": "l liter liters litre litres",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "cent": "cent cents penny pennies",
    "dollar": "dollar dollars usd bucks",
    "euro": "euro euros eur",
    "degree": "degree degrees deg ^\\circ",
    "radian": "radian radians rad",
    "mph": "mph",
    "km / h": "kph kmh",
    "celsius": "celsius °c",
    "fahrenheit": "fahrenheit °f",
    "percent": "%",
    "am": "am",
    "pm": "pm",
}
NAME = {word: name for name, words in CANONICAL.items() for word in words.split()}
FURTHER = set(
    """unit units point points people person persons students apples oranges books pages items
    times square sq cubic cu acre acres gallon gallons quart quarts pint pints cup cups mph kph
    quarters dimes nickels coins marbles tickets cards boxes bags bottles cookies children kids
    men women boys girls dogs cats cars houses rooms seats steps meals games ways per rupees yuan
    yen pesos edges sides faces vertices values solutions integers triangles squares digits trips
    sandwiches eggs candies flowers trees birds fish stamps toys balls tiles chairs tables pencils
    pens shirts teams members players workers""".split()  # noqa: SIM905
)
# In \\text{} these make the phrase part of the answer, not a unit.
NOT_UNITS = QUANTITIES | set(
    """or and to not no nor than more less fewer least most if when only remainder between through
    thousand million billion hundred dozen is isn't are aren't was be cannot can't never wrong
    incorrect false maybe perhaps guess error unknown except""".split()  # noqa: SIM905
)
RATES = {"mi / h": "mph"}
TEMPERATURE = re.compile(r"\^\\circ *(?:\\text\{ *)?([CF])\b *\}?$")
PRIME = re.compile(r"(?<=[0-9}]) *(\'\'|\'|\")$")
POWER = r"(?:\^\{?([23])\}?)?"
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
TEXT_UNIT = re.compile(rf"(?<=[0-9A-Za-z}})]) *\\text\{{([^{{}}]*)\}} *{POWER}\.?$")
WORD_UNIT = re.compile(rf"(?<=[0-9}})]) *([A-Za-z][A-Za-z/. ]*) *{POWER}\.?$")


def unit_name(words: list[str], power: str | None) -> str:
    """One name for a unit phrase: "square cm", "cm^2" and "sq. centimeters" are the same."""
    words = [word.strip(".,") for word in words]
    if words and words[0] in ("square", "sq"):
        words, power = words[1:], "2"
    elif words and words[0] in ("cubic", "cu"):
        words, power = words[1:], "3"
    name = " ".join(NAME.get(word, "/" if word == "per" else word) for word in words)
    name = RATES.get(name, name)
    return f"{name}^{power}" if power else name


def split_unit(text: str) -> tuple[str, str | None]:
    """(cleaned text without its unit, name of the unit or None)."""
    if text.endswith("%"):
        return text[:-1].rstrip(" \\"), "percent"
    if text.endswith("^\\circ") and len(text) > 6 and not TRIGONOMETRIC.search(text):
        return text[:-6].rstrip(), "degree"
    temperature = TEMPERATURE.search(text)
    if temperature:
        scale = "celsius" if temperature[1] == "C" else "fahrenheit"
        return text[: temperature.start()].rstrip(), scale
    prime = PRIME.search(text)
    if prime:
        return text[: prime.start()], "ft" if prime[1] == "'" else "in"
    match = TEXT_UNIT.search(text)
    if match:
        phrase = match[1].lower().replace("a.m.", "am").replace("p.m.", "pm")
        words = phrase.replace(".", " ").replace("/", " / ").split()
        if not any(word in NOT_UNITS or any(c.isdigit() for c in word) for word in words):
            return text[: match.start()].rstrip(), unit_name(words, match[2])
        return text, None
    match = WORD_UNIT.search(text)
    if match:
        words = match[1].lower().replace(".", " ").split()
        known = len(words) <= 4 and all(w in NAME or w in FURTHER or w == "^" for w in words)
        if words and known and not (len(words) == 1 and len(words[0]) == 1):
            return text[: match.start()].rstrip(), unit_name(words, match[2])
    return text, None


def units_conflict(one: str | None, other: str | None) -> bool:
    """Whether both units are of the table and differ."""
    if one is None or other is None or one == other:
        return False
    if "degree" in (one, other) and {one, other} & {"celsius", "fahrenheit"}:
        return False
    return known(one) and known(other)


def known(name: str) -> bool:
    """Whether a unit is of the table, or a rate of two such units."""
    base = name.partition("^")[0]
    return base in CANONICAL or all(part in CANONICAL for part in base.split(" / "))
