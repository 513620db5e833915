"""The Prefect UI as a person uses it, through Playwright. Not a test module."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

WAITING = re.compile("^(Scheduled|Late|AwaitingRetry|Pending|Submitting)$")
ENDED = re.compile("^(Completed|Cached|Failed|Crashed|Cancelled)$")
TAKEN_IN_MS = 1000
"""The form takes in what was typed a while after the last key."""
RUN_SECONDS = 900
"""The longest that a run may take; some tests share the machine's two cores."""


def field(page: Page, title: str) -> Locator:
    """The part of a deployment's form that holds one parameter."""
    label = f'*[normalize-space(text())="{title} (Optional)"]'
    return page.locator(f"xpath=//{label}/ancestor::div[.//fieldset][1]")


def open_form(page: Page, deployment: str) -> None:
    """Go from the list of deployments to the form of one."""
    page.goto("/v2/deployments?limit=100")
    links = page.locator('a[href*="/deployments/deployment/"]')
    links.get_by_text(deployment, exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    expect(page.get_by_role("heading", name="Parameters")).to_be_visible()


def fill(page: Page, title: str, value: str) -> None:
    """Fill in a field; one that may be empty is given its type first."""
    part = field(page, title)
    expect(part).to_be_visible()
    if part.get_by_role("tab").count():
        part.get_by_role("tab").first.click()
    part.locator("input, textarea").fill(value)
    page.wait_for_timeout(TAKEN_IN_MS)


def submit(page: Page) -> None:
    """Start the run and open its page. The UI's own link to it stands in a notice that is gone
    after some seconds, so the address is taken from the server's answer."""
    button = page.get_by_role("button", name="Submit")
    expect(button).to_be_enabled()
    with page.expect_response(lambda answer: answer.url.endswith("/create_flow_run")) as asked:
        button.click()
    assert asked.value.ok, asked.value.text()
    page.goto(f"/v2/runs/flow-run/{asked.value.json()['id']}")
    expect(page.get_by_role("tab", name="Logs")).to_be_visible()


def state(page: Page) -> Locator:
    """The badge with the state of the flow run whose page is open."""
    return page.locator("main").get_by_text(ENDED).first


def wait_until_begun(page: Page) -> None:
    """Watch a flow run's page until the run is no longer waiting. The page of a scheduled run
    doesn't follow it: it is loaded again, as a person would."""
    for _ in range(60):
        page.wait_for_timeout(2000)
        if not page.locator("main").get_by_text(WAITING).count():
            return
        page.reload()
        expect(page.get_by_role("tab", name="Logs")).to_be_visible()
    raise AssertionError("the run isn't started")


def wait_until_ended(page: Page) -> str:
    """Watch a flow run's page until the run has ended; its state's name."""
    wait_until_begun(page)
    expect(state(page)).to_be_visible(timeout=RUN_SECONDS * 1000)
    return state(page).inner_text()


def open_tab(page: Page, name: str) -> None:
    """Open a tab of a flow run's page."""
    page.get_by_role("tab", name=name).click()


def subflow_cards(page: Page) -> list[Locator]:
    """The cards on the present page of the tab 'Subflow Runs', once they are filled."""
    items = page.get_by_role("tabpanel").get_by_role("listitem")
    cards = items.filter(has=page.get_by_role("navigation"))
    expect(cards.first).to_be_visible()
    found = cards.all()
    for card in found:
        expect(card.get_by_role("link")).to_have_count(2)  # the flow's name comes later
    return found


def subflows(page: Page) -> dict[str, str]:
    """State by flow of what the tab 'Subflow Runs' lists over all its pages, newest first: a
    stage that was tried again has the state of its last attempt."""
    open_tab(page, "Subflow Runs")
    found: dict[str, str] = {}
    for number in range(1, 10):
        for card in subflow_cards(page):
            name = card.get_by_role("link").first.inner_text()
            found.setdefault(name, card.get_by_text(ENDED).inner_text())
        further = page.get_by_role("button", name="Go to next page")
        if not further.count() or further.is_disabled():
            break
        further.click()
        expect(page.get_by_text(f"Page {number + 1} of")).to_be_visible()
        page.wait_for_timeout(TAKEN_IN_MS)
    return found


def open_subflow(page: Page, name: str) -> None:
    """From a flow run's page to that of one of its subflows."""
    open_tab(page, "Subflow Runs")
    for card in subflow_cards(page):
        if card.get_by_role("link").first.inner_text() == name:
            card.get_by_role("link").last.click()
            return
    raise AssertionError(f"no subflow {name} among the newest")


def act(page: Page, action: str) -> None:
    """Choose from the menu of a flow run's page."""
    page.locator("main").get_by_role("button").first.click()
    page.get_by_role("menuitem", name=action).click()


def open_artifact(page: Page, key: str) -> Locator:
    """From a flow run's page to the newest artifact of a key; its Markdown as it is shown."""
    open_tab(page, "Artifacts")
    page.get_by_role("heading", name=key, exact=True).click()
    page.wait_for_url(f"**/artifacts/key/{key}")
    page.locator('main a[href*="/artifacts/artifact/"]').first.click()
    shown = page.get_by_test_id("markdown-display")
    expect(shown).to_be_visible()
    return shown
