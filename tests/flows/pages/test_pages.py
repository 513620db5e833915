"""What the Prefect UI is given to show: Markdown, pictures, tables, links. No server."""

from __future__ import annotations

import base64
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.execution.executor import NodeOutcome, RunExecutor
from flows.pages.charts import HAVE_CHARTS, MERMAID_CHARACTERS, WIDTH, charts, in_markdown
from flows.pages.markdown import bar, code, without_code_blocks
from flows.pages.run_page import run_page, summary_line, what_it_does
from flows.pages.stage_page import Links, node_page, plots, verdict
from flows.pages.tables import MAX_STEPS, stage_table
from ratchet.config.load import load_config
from ratchet.report.figures import Chart
from ratchet.report.headlines import headline, label
from ratchet.store.runs import NodeState, log_file
from ratchet.store.store import Artifact, Store
from tasks.runtime.launch import WorkerState
from tests.support.made_up import artifact
from tests.support.made_up_run import make_run
from tests.support.recorded_run import record

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Artifact]]:
    """The artifacts of a whole run."""
    yield make_run(tmp_path_factory.mktemp("run"))


def pictures(lines: list[str]) -> list[tuple[int, int, ElementTree.Element]]:
    """Width, height and content of the pictures in Markdown."""
    found = re.findall(
        r'img: "data:image/svg\+xml;base64,([^"]+)", label: "", w: (\d+), h: (\d+)',
        "\n".join(lines),
    )
    return [
        (int(width), int(height), ElementTree.fromstring(base64.b64decode(data)))
        for data, width, height in found
    ]


@pytest.mark.parametrize(
    ("node", "stage", "number"),
    [("filter", "filter", 1), ("warmstart", "warmstart_sft", 1), ("grpo", "grpo", 4),
     ("compare", "compare", 2)],
)  # fmt: skip
def test_plots_stand_on_their_own(
    nodes: dict[str, Artifact], node: str, stage: str, number: int
) -> None:
    inputs = {node: nodes[node]} | ({"warmstart": nodes["warmstart"]} if node == "compare" else {})
    found = charts(stage, inputs)
    assert len(found) == number
    for chart in found:
        lines = in_markdown(chart)
        assert lines[0] == f"**{chart.title}**" and f"*{chart.caption}*" in lines
        ((width, height, picture),) = pictures(lines)
        _, _, wide, high = map(float, picture.attrib["viewBox"].split())
        assert width == WIDTH and height == round(WIDTH * high / wide)
        assert picture.tag == f"{SVG}svg" and picture.find(f".//{SVG}text") is not None
        text = ElementTree.tostring(picture, encoding="unicode")
        assert "var(" not in text and "#010a0" not in text  # colours and fonts are filled in


def test_the_comparison_names_the_warm_start_by_what_it_is(nodes: dict[str, Artifact]) -> None:
    inputs = {name: nodes[name] for name in ("compare", "warmstart")}
    _, by_band = charts("compare", inputs)
    assert "after SFT" in by_band.svg


def test_stages_without_plots_draw_none(nodes: dict[str, Artifact]) -> None:
    for name, found in nodes.items():
        stage = found.manifest.stage
        assert (charts(stage, {name: found}) == []) == (stage not in HAVE_CHARTS)


def test_a_plot_too_large_for_the_page_is_only_named() -> None:
    head = '<svg viewBox="0 0 10 10">'
    lines = in_markdown(Chart("Finding", f"{head}{'x' * MERMAID_CHARACTERS}</svg>", "caption"))
    assert pictures(lines) == [] and "Finding" in lines[0] and "too large" in lines[0]


def test_code_becomes_lines_that_keep_their_spaces() -> None:
    markdown = "before\n\n````\nif x:\n    `y`\n````\n\nafter"
    space = "\u00a0"
    assert without_code_blocks(markdown) == (
        f"before\n\n`if{space}x:`  \n`` {space * 4}`y` ``\n\nafter"
    )
    assert without_code_blocks("a `b` c") == "a `b` c"
    assert code(["one", "", "two"]) == "`one`  \n  \n`two`"


def test_the_verdict_is_a_list_of_benchmarks(nodes: dict[str, Artifact]) -> None:
    manifest = nodes["compare"].manifest
    first, second = manifest.summary["verdicts"]
    assert verdict(manifest, notes=False) == [
        f"- **{first['sentence']}**",
        f"- **{second['sentence']}**",
        "",
    ]
    lines = verdict(manifest)
    assert lines[1 : 1 + len(first["notes"])] == [f"  - {note}" for note in first["notes"]]
    assert len(lines) == 3 + len(first["notes"]) + len(second["notes"])


def test_a_bar_is_as_long_as_its_share() -> None:
    assert bar(0.351) == f"`{'█' * 7}{'░' * 13}` 35.1%"
    assert bar(0.0) == f"`{'░' * 20}` 0.0%" and bar(1.0) == f"`{'█' * 20}` 100.0%"


def test_tables_show_the_stored_figures_or_the_whole_summary(nodes: dict[str, Artifact]) -> None:
    rows = stage_table(nodes["compare"])
    assert rows == [
        {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in row.items()}
        for row in nodes["compare"].table("comparison").to_pylist()
    ]
    rows = stage_table(nodes["filter"])
    share = nodes["filter"].manifest.summary["headroom"]["pass_at_1_lenient"]
    assert {"figure": "headroom / pass at 1 lenient", "value": float(f"{share:.4g}")} in rows
    steps = stage_table(nodes["grpo"])
    assert [row["step"] for row in steps] == list(range(1, 41))
    assert list(steps[0])[:5] == ["step", "loss", "reward", "strict", "lenient"]
    assert "rewards/exact_check/mean" in steps[0]


def test_long_training_is_thinned_evenly(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 1001)]
    shown = stage_table(artifact(tmp_path, "warmstart_sft", {"metrics": rows}))
    assert [row["step"] for row in shown] == list(range(1, 1001, 5)) and len(shown) == MAX_STEPS
    assert shown[2] == {"step": 11, "loss": 0.09091}


def test_figures_that_are_missing_are_left_out() -> None:
    assert headline("presample", {}) == "" and label("grpo", {"strict_first": None}) == ""
    summary = {"num_completions": 3184, "tokens_per_second": None}
    assert headline("presample", summary) == "3,184 completions"
    assert label("presample", summary) == "3,184 completions"
    formats = {"tags": {"strict": 0.25}, "boxed": {"strict": 0.5}}
    assert headline("benchmark", {"formats": formats}) == "strict tags 25.0%, boxed 50.0%"
    assert label("benchmark", {"formats": formats}) == "boxed 50.0%"
    many = formats | {f"tags + {word}": {"strict": 0.1} for word in ("a", "b", "c")}
    assert headline("benchmark", {"formats": many}) == "strict boxed 50.0%, the best of 5"


def test_links_lead_to_the_maker_that_the_server_knows(tmp_path: Path) -> None:
    made = artifact(tmp_path, "filter", {}, prefect={"flow_run_id": "maker"})
    assert Links().of("filter", made) is None
    assert Links(here={"filter": "finder"}).of("filter", made) == "finder"
    links = Links(known=frozenset({"maker"}), here={"filter": "finder"})
    assert links.of("filter", made) == "maker"
    elsewhere = artifact(tmp_path, "filter", {})  # made without Prefect
    assert links.of("filter", elsewhere) == "finder" and links.maker(elsewhere) is None


def test_a_form_is_linked_with_its_values_where_it_is_served() -> None:
    assert Links().form("Again", "stage/filter", run="latest") == []
    assert Links(forms={"stage/filter": "id"}).form("Again", "stage/filter", run="a-1")[0] == (
        "[Again](/v2/deployments/deployment/id/run?parameters=%7B%22run%22%3A+%22a-1%22%7D)"
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "grpo on seedling after sft"),
        (["grpo.algorithm=gspo", "warmstart.method=none"], "gspo on seedling"),
        (["grpo.algorithm=dapo", "model.path=Qwen/Qwen3-0.6B"], "dapo on Qwen3-0.6B after sft"),
    ],
)
def test_a_run_is_named_by_what_it_does(settings: list[str], name: str) -> None:
    config = load_config("demo", settings)
    assert what_it_does(config) == name


def test_the_run_page_before_and_while_a_stage_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    executor = RunExecutor(store, record(store, ["filter"], "sampler.engine=vllm").run_id)
    page = run_page(executor, Links())
    assert [planned.node.name for planned in executor.needed] == [
        "model", "questions", "decontaminate", "presample", "score", "filter",
    ]  # fmt: skip
    assert page.count(":::pending") == 6 and "click" not in page
    assert "0 of 6 stages are there." in page
    assert "**Stale** until they run again: benchmark, warmstart, audit, grpo" in page
    links = Links(here={"model": "some-id"})
    page = run_page(executor, links)
    assert page.count(":::running") == 1 and page.count(":::pending") == 5
    assert 'click n0 "/v2/runs/flow-run/some-id?tab=Artifacts"' in page
    assert summary_line(executor, links) == "model is running; 0 of 6 stages are there"


def test_a_control_has_the_plots_of_its_stage(tmp_path: Path, nodes: dict[str, Artifact]) -> None:
    store = Store(tmp_path / "store")
    settings = ("sampler.engine=vllm", 'evaluate.controls=["random-reward"]')
    executor = RunExecutor(store, record(store, [], *settings).run_id)
    planned = executor.plan.named("grpo.random-reward")
    assert plots(executor, planned) == []
    with store.build("grpo", planned.key) as build:
        shutil.copy(nodes["grpo"].path("metrics.parquet"), build.out_dir)
        made = nodes["grpo"].manifest.model_copy(update={"key": planned.key})
        store.commit(build, made)
    assert len(pictures(plots(executor, planned))) == 4


def test_a_refused_stage_shows_what_it_found_and_a_failed_one_its_log(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    executor = RunExecutor(store, record(store, ["audit"], "sampler.engine=vllm").run_id)
    planned = executor.plan.named("audit")
    summary = {"refused": "they differ", "passed": False, "cause": "stale weights"}
    made = artifact(tmp_path, "audit", {}, key=planned.key, summary=summary, markdown="Probes.")
    with store.build("audit", planned.key) as build:
        store.commit(build, made.manifest)

    def page(outcome_summary: dict[str, object]) -> str:
        outcome = NodeOutcome(
            "audit", "audit", planned.key, NodeState.FAILED, WorkerState.USER_ERROR,
            "they differ", summary=outcome_summary,
        )  # fmt: skip
        return node_page(executor, planned, outcome, Links())

    assert "**failed**: they differ" in page(summary) and "Probes." in page(summary)
    log = log_file(store, executor.record.run_id, "audit")
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    failed = page({})
    assert "**failed**: they differ" in failed and "Probes." not in failed
    assert "`line\u00a075`" in failed and "`line\u00a099`" in failed
    assert "`line\u00a074`" not in failed


def test_the_lineage_draws_every_stage_and_each_line_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    executor = RunExecutor(store, record(store, [], "sampler.engine=vllm").run_id)
    page = run_page(executor, Links())
    names = [planned.node.name for planned in executor.needed]
    lines = re.findall(r"  n(\d+) --> n(\d+)", page)
    drawn = sorted((names[int(a)], names[int(b)]) for a, b in lines)
    assert drawn == [
        ("audit", "grpo"),
        ("compare", "report"),
        ("decontaminate", "presample"),
        ("evaluate.baseline", "compare"),
        ("evaluate.rl", "compare"),
        ("evaluate.warmstart", "compare"),
        ("filter", "grpo"),
        ("filter", "warmstart"),
        ("grpo", "evaluate.rl"),
        ("model", "benchmark"),
        ("model", "evaluate.baseline"),
        ("model", "presample"),
        ("model", "questions"),
        ("model", "warmstart"),
        ("presample", "score"),
        ("questions", "benchmark"),
        ("questions", "decontaminate"),
        ("questions", "evaluate.baseline"),
        ("score", "filter"),
        ("warmstart", "audit"),
        ("warmstart", "evaluate.warmstart"),
        ("warmstart", "grpo"),
    ]


def test_a_page_that_lacks_a_figure_is_told_and_a_fault_of_ours_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flows.pages import publish

    told: list[str] = []

    class Ears:
        """Stands where the run's logger does."""

        def error(self, message: str, *values: str, exc_info: bool) -> None:
            assert exc_info
            told.append(message % values)

    monkeypatch.setattr(publish, "get_run_logger", Ears)
    with publish.tolerant("page of grpo"):
        raise KeyError("a figure that older tables lack")
    assert told == ["page of grpo could not be drawn"]
    with pytest.raises(AttributeError), publish.tolerant("page of grpo"):
        raise AttributeError("a fault of ours")
    assert len(told) == 1
