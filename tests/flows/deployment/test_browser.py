"""What a person does in the Prefect UI, in a real browser on a real server: start the pipeline from
the form, watch it, open its graph and pages, follow the lineage, run one stage again, retry.

One small pipeline is made for all tests, by the form. Needs Chromium (Debian's package will do).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratchet.store.runs import load_run
from ratchet.store.store import Store
from tests.conftest import REPO
from tests.support import prefect_pages as ui
from tests.support.served_ui import Ui

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("playwright", reason="Playwright is not installed: pip install -e .[dev]")
from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]

NAME = "browser"
NODES = {
    "model", "questions", "decontaminate", "benchmark", "presample", "score", "filter", "grpo",
    "evaluate.baseline", "evaluate.rl", "compare", "report",
}  # fmt: skip
SMALL = (
    "sampler.engine=transformers",
    'questions.train=[{kind="symbolic", count=24, seed=1}]',
    'questions.dev=[{kind="symbolic", count=8, seed=2}]',
    'questions.test=[{kind="symbolic", count=12, seed=3}]',
    'benchmark.formats=["tags_short"]',
    "warmstart.method=none",
)
REWARD = "house_rewards:short"
COMPLETED_GREEN = (34, 160, 80)
"""Of a completed run's bar in the graph, about."""


DRAWN = """address => new Promise(done => {
    const picture = new Image();
    picture.onload = () => done(picture.naturalWidth > 0);
    picture.onerror = () => done(false);
    picture.src = address;
})"""
"""Whether the browser can draw a picture."""


@dataclass(frozen=True)
class Server:
    """A `ratchet ui` for these tests."""

    address: str
    store: Store
    modules: Path
    """Folder that the runs import a user's own rewards from."""


@dataclass(frozen=True)
class Made:
    """The pipeline that was started from the form."""

    path: str
    """Of its flow run's page."""
    run_id: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The UI with its deployments, ended by Ctrl-C."""
    folder = tmp_path_factory.mktemp("browser")
    modules = folder / "modules"
    modules.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(REPO), str(modules))))
        started = Ui.start(folder / "home", Store(folder / "store"))
    try:
        yield Server(f"http://127.0.0.1:{started.port}", started.store, modules)
    finally:
        started.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=30_000)
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


def new_page(browser: Browser, server: Server) -> Page:
    context = browser.new_context(base_url=server.address, viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(30_000)
    return context.new_page()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """A page in a fresh window."""
    opened = new_page(browser, server)
    yield opened
    opened.context.close()


@pytest.fixture(scope="module")
def made(browser: Browser, server: Server) -> Made:
    """The small pipeline, started from the form and watched until it has ended."""
    page = new_page(browser, server)
    ui.open_form(page, "full")
    expect(ui.field(page, "Preset").get_by_role("button", name="Select Preset")).to_have_text(
        "demo"
    )
    ui.fill(page, "Name", NAME)
    ui.fill(page, "GRPO steps", "2")
    ui.fill(page, "Settings", "\n".join(SMALL))
    ui.submit(page)
    path = page.url.removeprefix(server.address).partition("?")[0]
    ui.wait_until_begun(page)
    expect(page.locator("main").get_by_text("Running", exact=True).first).to_be_visible()
    ended = ui.wait_until_ended(page)
    record = load_run(server.store, NAME)
    assert ended == "Completed", record.message
    page.context.close()
    return Made(path, record.run_id)


def test_the_form_starts_the_pipeline_and_its_page_tells_what_ran(
    made: Made, page: Page, server: Server
) -> None:
    page.goto(made.path)
    title = f"{made.run_id} grpo on seedling"
    expect(page.get_by_role("navigation", name="breadcrumb").get_by_text(title)).to_be_visible()
    assert ui.subflows(page) == dict.fromkeys(NODES, "Completed")
    config = load_run(server.store, made.run_id).config
    assert (config["grpo"]["steps"], config["sampler"]["engine"]) == (2, "transformers")


def test_a_person_finds_the_run_by_what_it_does(made: Made, page: Page) -> None:
    page.goto("/v2/runs?hide-subflows=true")
    run = page.get_by_role("link", name=made.run_id)
    search = page.get_by_placeholder("Search by flow run name")
    search.fill("GRPO on seedling")
    expect(run).to_be_visible()
    search.fill("gspo on seedling")
    expect(run).to_be_hidden()
    search.fill("")
    tags = page.get_by_placeholder("All tags")
    for tag in ("model:seedling", "warmstart:none"):
        tags.fill(tag)
        tags.press("Enter")
    expect(run).to_be_visible()


def test_the_graph_draws_a_bar_per_stage(made: Made, page: Page) -> None:
    from PIL import Image

    page.goto(made.path)
    canvas = page.locator("canvas").first
    expect(canvas).to_be_visible()
    page.wait_for_timeout(3000)  # drawn on the canvas, which tells nothing of it
    picture = Image.open(BytesIO(canvas.screenshot())).convert("RGB")
    rows = set()
    for y in range(picture.height):
        green = [x for x in range(picture.width) if near(picture.getpixel((x, y)), COMPLETED_GREEN)]
        if len(green) > 5:
            rows.add(y)
    assert sum(y - 1 not in rows for y in rows) > 3, "bars on few heights: no graph of a pipeline"


def near(colour: tuple[int, ...], wanted: tuple[int, int, int]) -> bool:
    return all(abs(a - b) < 16 for a, b in zip(colour, wanted, strict=True))


def test_a_stage_shows_figures_plots_and_its_inputs(made: Made, page: Page) -> None:
    page.goto(made.path)
    ui.open_subflow(page, "grpo")
    shown = ui.open_artifact(page, f"{NAME}-grpo")
    first = shown.get_by_role("heading", level=2).first
    expect(first).to_have_text(re.compile(r"^reward -?\d.* → .*, strict .*%"))
    plots = shown.locator("svg image")
    expect(plots).to_have_count(3)  # reward, accuracy, live groups; one copy has no drift
    box = plots.first.bounding_box()
    assert box is not None and box["width"] > 300
    assert page.evaluate(DRAWN, plots.first.get_attribute("href"))
    expect(shown.get_by_text("can't be drawn")).to_have_count(0)
    for role in ("model", "questions", "selection"):
        row = shown.get_by_role("row", name=role)
        expect(row.get_by_role("link", name="this run")).to_be_visible()
    expect(shown.get_by_text("grpo.steps: 100 → 2")).to_be_visible()


def test_the_run_page_has_the_verdict_and_a_lineage_to_follow(made: Made, page: Page) -> None:
    page.goto(made.path)
    shown = ui.open_artifact(page, f"{NAME}-run")
    expect(shown.get_by_text("Verdict", exact=True)).to_be_visible()
    expect(shown.get_by_role("listitem").first).to_contain_text("strict")
    picture = shown.locator("svg").first
    for name in NODES:
        expect(picture.get_by_text(name, exact=True)).to_be_visible()
        expect(shown.get_by_role("row").get_by_role("link", name=name, exact=True)).to_be_visible()
    picture.get_by_text("filter", exact=True).click()
    page.wait_for_url("**/runs/flow-run/**")
    assert made.path not in page.url
    ui.open_artifact(page, f"{NAME}-filter")


def test_one_stage_runs_again_from_its_form_and_the_others_are_cached(
    made: Made, page: Page, server: Server
) -> None:
    page.goto(made.path)
    ui.open_subflow(page, "report")
    ui.open_artifact(page, f"{NAME}-report").get_by_role("link", name="Run this stage").click()
    expect(ui.field(page, "Run").locator("textarea")).to_have_value(made.run_id)

    ui.open_form(page, "filter")
    ui.fill(page, "Run", made.run_id)
    ui.fill(page, "Settings", "filter.keep_below=0.95")
    ui.submit(page)
    assert ui.wait_until_ended(page) == "Completed"
    above = dict.fromkeys(("model", "questions", "decontaminate", "presample", "score"), "Cached")
    assert ui.subflows(page) == above | {"filter": "Completed"}
    shown = ui.open_artifact(page, f"{NAME}-run")
    expect(shown.get_by_text("Stale until they run again")).to_contain_text("grpo")
    stage = page.get_by_role("link", name="presample", exact=True)
    row = shown.get_by_role("row").filter(has=stage)
    row.get_by_role("link", name=made.run_id).click()
    page.wait_for_url("**/runs/flow-run/**")
    expect(ui.state(page)).to_have_text("Completed")  # made by the first run, not found by this


def test_a_failed_run_is_mended_by_retry(made: Made, page: Page, server: Server) -> None:
    reward = server.modules / "house_rewards.py"
    reward.write_text(
        "def short(completions, **columns):\n    return [1 / 0 for _ in completions]\n"
    )
    ui.open_form(page, "score")
    ui.fill(page, "Run", made.run_id)
    ui.fill(page, "Settings", f'rewards.weights={{"{REWARD}"=1.0}}')
    ui.submit(page)
    assert ui.wait_until_ended(page) in ("Failed", "Crashed")
    assert ui.subflows(page)["score"] in ("Failed", "Crashed")
    path = page.url.partition("?")[0]
    shown = ui.open_artifact(page, f"{NAME}-run")
    expect(shown.locator("p", has_text="score failed:")).to_contain_text("division by zero")

    reward.write_text("def short(completions, **columns):\n    return [1.0 for _ in completions]\n")
    page.goto(path)
    ui.act(page, "Retry")
    page.get_by_role("alertdialog").get_by_role("button", name="Retry").click()
    expect(ui.state(page)).to_be_hidden()
    assert ui.wait_until_ended(page) == "Completed"
    assert ui.subflows(page)["score"] == "Completed"
