"""The report of a simulated run: its numbers, its parts, and what it must never do."""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ratchet.config.load import load_config
from ratchet.config.run import EvaluateConfig, WandbConfig
from ratchet.evaluation.stats import wilson
from ratchet.pipeline.plan import make_plan
from ratchet.report import curves, plots, templates
from ratchet.report.before_after import PassRates, histogram
from ratchet.report.figures import VARIABLES, smooth
from ratchet.report.gather import gather
from ratchet.report.ledger import grpo_ledger, live_rows, presample_ledger
from ratchet.report.render import render, shortened
from ratchet.store.store import Artifact, Store
from ratchet.words import p_value, percent, points
from tasks.stages import report as stage
from tests.support.made_up import context
from tests.support.made_up_run import HOSTILE, make_run


class Page(HTMLParser):
    """Text of table cells by row, all text, and every address an element points at."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        names = ("src", "href", "xlink:href", "action", "data", "srcset", "poster")
        self.addresses += [value or "" for name, value in attributes if name in names]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            return
        self.text.append(data)
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, *starts: str) -> list[str]:
        """The first row whose cells begin so, white space squeezed."""
        for row in self.rows:
            cells = [" ".join(cell.split()) for cell in row]
            if cells[: len(starts)] == list(starts):
                return cells
        raise AssertionError(f"no row {starts}")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def html(nodes: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory) -> str:
    ctx = context(tmp_path_factory.mktemp("report"), nodes)
    result = stage.run(ctx, evaluate=EvaluateConfig(), wandb=WandbConfig())
    text = (ctx.out_dir / "report.html").read_text(encoding="utf-8")
    assert result.summary["verdict"] == nodes["compare"].manifest.summary["verdict"]
    assert result.summary["num_bytes"] == len(text.encode()) < 5_000_000
    return text


def test_the_tables_hold_the_numbers_of_the_comparison(
    html: str, nodes: dict[str, Artifact]
) -> None:
    page = Page(html)
    eval_rows = nodes["evaluate.baseline"].table("eval").to_pylist()
    mine = [row for row in eval_rows if row["benchmark"] == "symbolic"]
    right = sum(row["strict"] for row in mine)
    low, high = wilson(right, len(mine))
    shown = page.row("symbolic", "baseline")
    assert shown[2] == f"{percent(right / len(mine))} {percent(low)} to {percent(high)}"
    cut = sum(row["truncated"] for row in mine) / len(mine)
    assert shown[5] == percent(cut)

    compared = nodes["compare"].table("comparison").to_pylist()
    strict, lenient = (
        next(
            row
            for row in compared
            if (row["metric"], row["band"], row["benchmark"]) == (metric, "all", "symbolic")
            and (row["variant_a"], row["variant_b"]) == ("baseline", "rl")
        )
        for metric in ("strict", "lenient")
    )
    shown = page.row("", "baseline → after RL")
    low, high = points(strict["ci_low"]), points(strict["ci_high"])
    assert shown[3] == f"{points(strict['difference'])} {low} to {high}"
    assert shown[5:7] == [str(strict["gained"]), str(strict["lost"])]
    assert shown[7].startswith(points(lenient["difference"]))
    assert f"{percent(strict['value_a'])} → {percent(strict['value_b'])} on symbolic" in html


def test_the_head_says_the_verdict_and_every_benchmark(
    html: str, nodes: dict[str, Artifact]
) -> None:
    first, second = nodes["compare"].manifest.summary["verdicts"]
    text = " ".join(" ".join(Page(html).text).split())
    assert text.index(first["outcome"].capitalize()) < text.index("What was gained")
    for note in first["notes"]:
        assert note[1:] in text
    assert second["sentence"][1:] in text
    assert "the format costs 9 points; answers stood in \\boxed{}." in text


def test_the_bands_hold_holms_p_values(html: str, nodes: dict[str, Artifact]) -> None:
    rows = {
        (row["metric"], row["band"]): row
        for row in nodes["compare"].table("comparison").to_pylist()
        if row["benchmark"] == "symbolic-heldout"
        and (row["variant_a"], row["variant_b"]) == ("baseline", "rl")
    }
    page = Page(html[html.index("Differences by band") :])
    shown = page.row("symbolic-heldout", "1")
    strict, lenient = rows["strict", "1"], rows["lenient", "1"]
    assert strict["p_adjusted"] > strict["p_value"]
    assert shown[2:] == [
        str(strict["num_questions"]),
        f"{points(strict['difference'])} {points(strict['ci_low'])} to {points(strict['ci_high'])}",
        p_value(strict["p_adjusted"]),
        str(strict["gained"]),
        str(strict["lost"]),
        f"{points(lenient['difference'])} {points(lenient['ci_low'])} to "
        f"{points(lenient['ci_high'])}",
        p_value(lenient["p_adjusted"]),
    ]


def test_pass_rates_after_come_from_the_last_rollouts_and_say_so(
    html: str, nodes: dict[str, Artifact]
) -> None:
    last = [row for row in nodes["grpo"].table("rollouts").to_pylist() if row["step"] > 36]
    groups: dict[tuple[int, str], list[bool]] = {}
    for row in last:
        groups.setdefault((row["step"], row["question_id"]), []).append(row["strict"])
    always = sum(all(group) for group in groups.values()) / len(groups)
    rates = gather(nodes, "test-run").pass_rates
    assert rates is not None
    assert (rates.k_before, rates.k_after, len(rates.before_q), len(rates.after_q)) == (8, 8, 8, 32)
    labels, before, after = histogram(rates)
    assert labels[0] == "0/8"
    assert after[8] == pytest.approx(always)
    assert sum(before) == pytest.approx(sum(after)) == pytest.approx(1.0)
    text = " ".join(" ".join(Page(html).text).split())
    assert "In RL's rollouts (steps 37 to 40, training questions): always right from" in text
    assert f"to {always:.0%}, never from" in text


def test_bars_are_shared_where_the_two_sides_drew_differently() -> None:
    rates = PassRates(
        True, "made-up", np.array([0, 0.25, 0.5, 1.0]), np.array([0.1, 0.9, 1.0, 1.0]), 4, 10
    )
    labels, before, after = histogram(rates)
    assert labels == ["0", "to 1/4", "to 1/2", "to 3/4", "below 1", "1"]
    assert before == [0.25, 0.25, 0.25, 0, 0, 0.25]
    assert after == [0, 0.25, 0, 0, 0.25, 0.5]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    return make_run(tmp_path_factory.mktemp("sampled"), size=40, samples=4, control=True)


def test_sampled_answers_and_a_control_are_shown(sampled: dict[str, Artifact]) -> None:
    data = gather(sampled, "test-run")
    html = render(data)
    text = " ".join(" ".join(Page(html).text).split())
    assert data.variants == ["baseline", "warmstart", "format-reward", "rl"]
    assert "RL beats the control 'format-reward' by" in text

    rows = sampled["evaluate.rl"].table("eval").to_pylist()
    right: dict[str, int] = {}
    for row in rows:
        if (row["decoding"], row["benchmark"]) == ("sampled", "symbolic"):
            right[row["question_id"]] = right.get(row["question_id"], 0) + row["lenient"]
    at_4 = sum(count > 0 for count in right.values()) / len(right)
    at_2 = sum(1 - (4 - c) * (3 - c) / 12 for c in right.values()) / len(right)
    shown = Page(html[html.index("pass@k and cons@k with") :])
    cells = shown.row("", "after RL")
    heads = shown.row("benchmark", "variant")
    assert heads[2:] == ["pass@1", "pass@2", "pass@4", "cons@1", "cons@2", "cons@4"]
    assert cells[4].startswith(percent(at_4))
    assert cells[3].startswith(percent(at_2))

    strict: dict[str, int] = {}
    for row in rows:
        if (row["decoding"], row["benchmark"]) == ("sampled", "symbolic"):
            strict[row["question_id"]] = strict.get(row["question_id"], 0) + row["strict"]
    always = sum(count == 4 for count in strict.values()) / len(strict)
    assert "On held-out questions (symbolic): always right from" in text
    assert f"to {always:.0%}, never from" in text
    assert "RL's rollouts" not in text


def test_a_warning_stands_at_the_top(nodes: dict[str, Artifact]) -> None:
    from dataclasses import replace

    data = gather(nodes, "test-run")
    warned = replace(data, summary=data.summary | {"warnings": ["gsm8k gains <b>much</b>"]})
    html = render(warned, defaultdict(lambda: None))  # no figures: they take seconds
    text = " ".join(" ".join(Page(html).text).split())
    assert text.index("Possible contamination. Gsm8k gains <b>much</b>.") < text.index("What was")


def test_plots_and_tables_go_to_wandb(nodes: dict[str, Artifact], tmp_path: Path) -> None:
    ctx = context(tmp_path, nodes)
    wandb = WandbConfig(mode="offline")
    place = stage.run(ctx, evaluate=EvaluateConfig(), wandb=wandb).wandb_run
    assert place is not None
    media = Path(place) / "files" / "media"
    plots_logged = {file.name.split("_")[0] for file in (media / "html" / "plots").glob("*.html")}
    assert {"forest", "rewards", "drift", "pass"} <= plots_logged
    forest = next((media / "html" / "plots").glob("forest_*.html")).read_text()
    assert "<svg xmlns=" in forest
    assert "var(--" not in forest
    assert list((media / "html").glob("report_*.html"))
    assert list((media / "table").glob("comparison_*.json"))


def test_completions_stay_text(html: str) -> None:
    page = Page(html)
    assert not {"script", "img", "iframe", "link", "object", "embed"} & page.tags
    assert HOSTILE in "".join(page.text)  # every character, line break included
    assert "<strong>" not in html


def test_endless_completions_leave_the_page_small(nodes: dict[str, Artifact]) -> None:
    from dataclasses import replace

    data = gather(nodes, "test-run")
    endless = "<b>" * 200_000
    changed = [row | {"a": row["a"] | {"text": endless + " the end"}} for row in data.changed]
    page = render(replace(data, changed=changed), defaultdict(lambda: None))
    assert len(page.encode()) < 5_000_000
    assert "[… 588,008 characters left out …]" in page
    assert " the end</pre>" in page
    assert shortened("short") == "short"


def test_nothing_is_loaded_from_anywhere(html: str) -> None:
    page = Page(html)
    assert page.addresses
    assert all(address.startswith("#") for address in page.addresses)
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"@import|url\((?!#)", style)
    assert "http://" not in html
    assert "https://" not in html


def test_figures_follow_the_theme_and_ids_are_unique(html: str) -> None:
    assert html.count("<svg") >= 10
    assert not [colour for colour in VARIABLES if colour in html]
    assert "var(--variant-rl)" in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', html)
    assert {a or b for a, b in used} <= set(ids)


def test_the_same_tables_give_the_same_page(nodes: dict[str, Artifact], html: str) -> None:
    assert render(gather(nodes, "test-run")) == html


def test_another_style_sheet_makes_the_report_anew(tmp_path: Path) -> None:
    for name in (templates.PAGE, templates.STYLE):
        (tmp_path / name).write_bytes((templates.FOLDER / name).read_bytes())
    assert templates.fingerprint(tmp_path) == templates.fingerprint()
    (tmp_path / templates.STYLE).write_text("body { color: red }")
    assert templates.fingerprint(tmp_path) != templates.fingerprint()
    planned = make_plan(load_config("demo"), Store(tmp_path / "store")).named("report")
    assert planned.fingerprints == {"page": templates.fingerprint()}


def test_the_warm_start_says_which_checkpoint_was_kept(nodes: dict[str, Artifact]) -> None:
    chart = curves.warmstart_loss(gather(nodes, "test-run"))
    assert chart is not None
    assert chart.caption.endswith(
        "Of 3 checkpoints that of step 20 was kept, with 81.0% of the dev questions strictly right "
        "(the first: 70.0%, the last: 78.0%)."
    )


def test_a_run_without_warm_start_benchmark_or_drift(tmp_path: Path) -> None:
    nodes = make_run(tmp_path / "run", warmstart=False, benchmark=False, size=24, rl=0.75)
    data = gather(nodes, "test-run")
    assert curves.warmstart_loss(data) is None
    page = Page(render(data))
    text = " ".join(page.text)
    assert "Prompt formats" not in text
    assert "after SFT" not in text
    assert "Settings and versions" in text


def test_a_metric_that_was_never_logged_has_no_figure(nodes: dict[str, Artifact]) -> None:
    from dataclasses import replace

    bare = [{"step": step, "loss": 0.1, "frac_reward_zero_std": 0.25} for step in range(1, 11)]
    data = replace(gather(nodes, "test-run"), grpo_metrics=bare)
    assert curves.drift(data) is None
    assert curves.rewards(data) is None
    live = curves.live_groups(data)
    assert live is not None
    assert live.title == "75% of the groups are live at the start, 75% at the end"
    assert "the trainer's own weights did the sampling" in " ".join(Page(render(data)).text)


def test_drift_that_leaves_its_band_is_the_title(nodes: dict[str, Artifact]) -> None:
    from dataclasses import replace

    metrics = [{"step": s, "drift_mean": 1e-4 if s < 8 else 2e-3} for s in range(1, 11)]
    chart = curves.drift(replace(gather(nodes, "test-run"), grpo_metrics=metrics))
    assert chart is not None
    assert "3 of 10 steps leave the guard band, the first at step 8" in chart.title
    assert "ends at 5.0×10⁻⁴, measured from step 1; at 0.002 training halts" in chart.caption


def test_the_title_of_the_bands_names_those_that_moved(nodes: dict[str, Artifact]) -> None:
    from dataclasses import replace

    data = gather(nodes, "test-run")
    # Holm's p-values decide, whatever the single ones are
    found = {"1": (0.06, 0.1), "2": (0.03, 0.2), "3": (0.5, 0.0), "4": (0.004, -0.3)}
    compared = [
        row | {"p_adjusted": p, "difference": d, "ci_low": d - 0.05, "ci_high": d + 0.05}
        for row in data.compared
        if row["band"] in found
        for p, d in [found[row["band"]]]
    ]
    chart = plots.by_band(replace(data, compared=compared))
    assert chart is not None
    assert chart.title == "Bands of symbolic that move beyond the noise: 2 (+20.0), 4 (−30.0)"


def test_live_rows_are_found_per_group() -> None:
    rewards = np.array([1.0, 1.0, 0.0, 1.0, np.nan, 2.0])
    sample = np.array([0, 1, 0, 1, 0, 1])
    assert live_rows(rewards, sample).tolist() == [False, False, True, True, False, False]


def test_the_grpo_ledger_counts_every_token_once() -> None:
    rollouts = pa.table(
        {
            "step": [1, 1, 1, 1, 2, 2],
            "sample_index": [0, 1, 0, 1, 0, 1],
            "num_tokens": [10, 20, 30, 40, 50, 50],
            "reward": [1.0, 1.0, 0.0, 1.0, 0.0, 1.0],
            "finish_reason": ["stop", "length", "length", "stop", "stop", "stop"],
        }
    )
    metrics = pa.table({"step": [1, 2], "dropped_share": [0.0, 0.25]})
    entries = {entry.heading: entry for entry in grpo_ledger(rollouts, metrics, 20.0)}
    assert {heading: entry.tokens for heading, entry in entries.items()} == {
        "groups without reward variance": 30,
        "cut-off completions in live groups": 30,
        "dropped by the importance mask": 25,
        "trained on": 40 + 75,
    }
    assert sum(entry.device_seconds for entry in entries.values()) == pytest.approx(20.0)
    assert entries["trained on"].share == pytest.approx(115 / 200)


def test_a_run_that_selected_from_rollouts(tmp_path: Path) -> None:
    nodes = make_run(tmp_path, logged=True, benchmark=False, size=24)
    data = gather(nodes, "run-1")
    assert {entry.phase for entry in data.ledger} == {"GRPO rollouts"}  # nothing was sampled before
    page = Page(render(data))
    text = " ".join(" ".join(page.text).split())
    # 8 questions in groups of 8 over 40 steps, out of 24
    assert "2,560 completions of 8 of 24 training questions, logged by an earlier run" in text
    assert "judged by the verdicts that were recorded" in text
    assert "They come from 40 logged steps (1 to 40) and up to as many policies" in text
    assert page.row("pass@320")
    assert "as an earlier run logged them" in text


def test_dropped_training_questions_are_listed(nodes: dict[str, Artifact]) -> None:
    html = render(gather(nodes, "run-1"))
    page = Page(html)
    assert "1 training question gave a held-out one away" in " ".join(" ".join(page.text).split())
    row = page.row(f"What is {' '.join(HOSTILE.split())}? symbolic")
    assert row[2].startswith("marbles and finds 2 more shared words")
    assert HOSTILE not in html


def test_the_presample_ledger_follows_the_selection() -> None:
    scores = pa.table({"question_id": ["a", "b", "c", "a", "d"], "num_tokens": [1, 2, 4, 8, 16]})
    selection = pa.table(
        {
            "question_id": ["d", "c", "b", "a"],
            "bucket": ["live", "always_right", "always_wrong", "live"],
            "role": ["warmup", "rl", "warmup", "rl"],
        }
    )
    found = {e.heading: e.tokens for e in presample_ledger(scores, selection, 1.0)}
    assert found == {
        "questions always wrong": 2,
        "live questions outside the filter's bounds": 16,
        "questions that RL trains on": 13,
    }


def test_smoothing_by_hand() -> None:
    # a tenth of 30 points is 3: one neighbour on either side, fewer at the ends
    values = [float(x) for x in range(30)]
    values[1] = 4.0
    assert smooth(values)[:3] == pytest.approx([2.0, 2.0, 3.0])
