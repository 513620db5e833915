"""Agreement with other projects' own test cases; every disagreement has a written reason.

The rows give a gold answer and a prediction, each project in its own convention. A prediction
with a box is judged as it is; a lone formula or short answer is put in a box; prose is judged as
`plain`. `REASONS` says which policy of ours stands behind a row where we differ: none may be left.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ratchet.verifier import Verdict, verify_batch

pytestmark = pytest.mark.needs_shared

FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
PROSE = re.compile(r"[A-Za-z]{3,} [A-Za-z0-9]{2,}|[\u0900-\u0dff\u0600-\u06ff\u3000-\u9fff]")

# (policy, pattern on "gold ⟶ prediction")
REASONS: tuple[tuple[str, str], ...] = (
    ("order of a list of solutions does not matter", r"^4, (10|\.1), -?2 ⟶"),
    ("an unreduced fraction is the same value", r"⟶ \\frac\{2\}\{4\}$"),
    ("the box decides, not what is said after it", r"^\$10455\$ ⟶"),
    ("a false chain of equations is no answer", r"85 \+ \(-67\)|= 7 =11|3\+3 = 2|\\zzz|t = s \+ 5"),
    ("a false chain of equations is no answer", r"1/3 \\approx 11"),
    ("no decimal commas", r"1000,99|^1,22 ⟶|Soucis|^0,111 ⟶"),
    (
        "a gold answer is an answer, not a whole solution",
        r"^.{90,}⟶|\\{2}boxed\{W|the answer should",
    ),
    ("decimals need six significant digits", r"0\.33\\\\|2\.6667"),
    ("a bare list is no ordered pair", r"^\$\(1,3\)\$ ⟶"),
    ("an inequality does not answer a gold interval", r"^\$x \\in \[-2,7\]\$ ⟶"),
    ("a line break inside maths is white space", r"^\$9\$ ⟶ Answer (\$|\\\() \n"),
    ("a name stays that name", r"^\$f\(x\)\$ ⟶ \$f\(y\)|p=5,q=2;p=7"),
    ("the upstream case accepts a wrong sign", r"^\$1 - \\frac\{1\}\{\\mathrm\{e\}\}\$ ⟶ .*1 \+"),
    ("a box that is never closed is unreadable", r"^185\\ ⟶ 185\\$|2\} \\\$ = "),
    ("nothing is solved for", r"1\\leq\|z\|"),
    ("words between boxes make them two answers", r"for part \(a\)|\+\+\+\+"),
    ("choices stand in a box, not in prose", r"^\(?[A-D]\b.*⟶ .*[A-D]"),
    ("the choice of a gold answer is a letter or starts with one", r"Cecile|Alina|Peter"),
    (
        "prose without a box: the last number counts",
        r"⟶ (?!.*\\boxed).*(?:[a-z]{3,} [A-Za-z]{2,}|[\u3000-\u9fff])",
    ),
)


def as_case(pred: str) -> tuple[str, str]:
    """(completion, style) of a prediction."""
    if "\\boxed" in pred or "\\fbox" in pred:
        return pred, "boxed"
    formulas = [next(filter(None, groups)) for groups in FORMULA.findall(pred)]
    if formulas:
        return f"\\boxed{{{formulas[-1].strip()}}}", "boxed"
    if len(pred) <= 60 and not PROSE.search(pred.replace("\\text", "")):
        return f"\\boxed{{{pred}}}", "boxed"
    return pred, "plain"


def judged(path: Path) -> list[tuple[dict[str, Any], Verdict]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cases = [
        (str(row["pred"]), "boxed")
        if row.get("expected_parse") == "parse_failure"  # its project demands a box
        else as_case(str(row["pred"]))
        for row in rows
    ]
    golds = ["" if row["gold"] is None else str(row["gold"]) for row in rows]
    golds = [
        gold.strip("$") if style == "plain" else gold
        for gold, (_, style) in zip(golds, cases, strict=True)
    ]
    styles = [style for _, style in cases]
    verdicts = verify_batch([completion for completion, _ in cases], golds, styles)
    return list(zip(rows, verdicts, strict=True))


def reason(row: dict[str, Any]) -> str | None:
    text = f"{row['gold']} ⟶ {row['pred']}"
    return next((name for name, pattern in REASONS if re.search(pattern, text, re.DOTALL)), None)


@pytest.mark.parametrize(
    ("name", "num_rows", "at_least"),
    [
        ("hendrycks_math", 16, 14),
        ("nemo_skills", 30, 29),
        ("rl_frameworks", 42, 39),
        ("trl_openr1", 19, 19),
        ("mathverify", 269, 234),
        ("lighteval", 232, 190),
    ],
)
def test_peers(shared: Path, name: str, num_rows: int, at_least: int) -> None:
    results = judged(shared / f"cases/peers/{name}.jsonl")
    differ = [(row, v) for row, v in results if v.lenient != bool(row["expected"])]
    unexplained = [(row["gold"], row["pred"], v) for row, v in differ if reason(row) is None]
    counts = Counter(reason(row) for row, _ in differ)
    print(f"{name}: {len(results) - len(differ)} of {len(results)} agree; {dict(counts)}")
    assert len(results) == num_rows
    assert unexplained == []
    assert len(results) - len(differ) >= at_least
    assert not [v for _, v in results if v.status in ("error", "timeout")]
