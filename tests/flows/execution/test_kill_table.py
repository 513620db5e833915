"""The kill table: whoever dies, nothing stays behind, everybody tells the truth, the rerun goes on.

Each row starts a real run of the 'questions' stage, kills or cancels while the stage works, and
then looks at four things: processes left, locks held, the states that Prefect and `ratchet runs`
show, and what the rerun does. The measured table is printed and, where RATCHET_KILL_TABLE names a
file, written there; `docs/prefect.md` shows one.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ratchet.store.lock import is_held
from ratchet.store.runs import RunRecord, RunStatus, load_run
from ratchet.store.store import Store
from tasks.runtime.supervisor import descendants
from tests.support.recorded_run import environment, record, run_arguments, start
from tests.support.served_ui import Ui, command_line, is_alive, kill, parent_of, pids_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_SECONDS = 60.0
PATIENCE_SECONDS = 240.0
"""For what is only slow on a busy machine."""
NOT_ENDED = (RunStatus.PLANNED, RunStatus.RUNNING)
HEADINGS = (
    "who", "nothing left and states true after", "Prefect: run / stage", "`ratchet runs`",
    "exit code of `ratchet run`", "rerun",
)  # fmt: skip
TABLE: list[tuple[str, ...]] = []
SEEDS = itertools.count(1000)


@dataclass(eq=False)
class Row:
    """One way to end a run, and what is expected of it."""

    who: str
    act: Callable[[Ui, Row], None]
    prefect: str
    status: RunStatus
    exit_code: int
    rerun: str = "Retry"
    here: bool = False
    """Whether the run is in its terminal's own process."""
    record: RunRecord = field(init=False)
    terminal: subprocess.Popen[str] = field(init=False)
    flow_run: str = field(init=False)
    flow: int = field(init=False)
    supervisor: int = field(init=False)
    worker: int = field(init=False)
    others: list[int] = field(init=False)
    acted_at: float = field(init=False)
    took: float = field(init=False)
    seen: str = field(init=False)
    again: RunRecord = field(init=False)

    def start(self, ui: Ui, found: RunRecord) -> None:
        """Start a run as `ratchet run` does."""
        here = ["--here"] if self.here else []
        arguments = [*run_arguments(ui.store, found), *here]
        self.record, self.terminal = (
            found,
            start("tests.support.carry_out", environment(ui.home), *arguments),
        )

    def stage_works(self, ui: Ui) -> bool:
        key = self.record.nodes["questions"].key
        return (ui.store.root / "questions" / f".work-{key}").exists()

    def look_around(self, ui: Ui) -> None:
        """Find the processes that work for the run."""
        both = pids_with(f"{self.record.run_id}/logs/questions.job.json")
        (self.worker,) = (
            pid for pid in both if "tasks.runtime.supervisor" not in command_line(pid)
        )
        self.supervisor = parent_of(self.worker)
        self.flow = parent_of(self.supervisor)
        self.others = descendants(self.flow)
        flow_run = load_run(ui.store, self.record.run_id).prefect_flow_run_id
        assert flow_run is not None
        self.flow_run = flow_run

    def is_over(self, ui: Ui) -> bool:
        """Whether nothing is left and all states are final."""
        if any(map(is_alive, [self.flow, *self.others])):
            return False
        if load_run(ui.store, self.record.run_id).status in NOT_ENDED:
            return False
        try:
            names = [ui.state(self.flow_run), *(run["state"] for run in ui.subflows(self.flow_run))]
        except OSError:
            return False  # the server is being started again
        self.seen = " / ".join(names[index]["name"] for index in (0, -1))
        final = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
        return all(state["type"] in final for state in names)

    def run_again(self, ui: Ui) -> None:
        """Retry in the UI, or the same command again."""
        if self.rerun == "Retry":
            ui.retry(self.flow_run)
            self.again = self.record
        else:
            self.again = questions_run(ui.store, int(self.record.command.split()[-1]))
            ui.run(self.again)

    def is_complete(self, ui: Ui) -> bool:
        return load_run(ui.store, self.again.run_id).status is RunStatus.COMPLETED


def questions_run(store: Store, seed: int) -> RunRecord:
    """A recorded run whose 'questions' stage takes some seconds."""
    source = f'questions.train=[{{kind="symbolic", count=3000, seed={seed}}}]'
    return record(store, ["questions"], source).model_copy(update={"command": f"seed {seed}"})


def each(ui: Ui, rows: list[Row], ready: Callable[[Row], bool], do: Callable[[Row], None]) -> None:
    """Do something with each row as soon as it is ready."""
    pending = list(rows)
    began = time.monotonic()
    while pending:
        for row in [row for row in pending if ready(row)]:
            do(row)
            pending.remove(row)
        names = ", ".join(row.who for row in pending)
        assert time.monotonic() - began < PATIENCE_SECONDS, f"not ready: {names}"
        time.sleep(0.25)


def play(ui: Ui, rows: list[Row], restart: Callable[[], None] = lambda: None) -> None:
    """Run, end and rerun the rows side by side, and check what they show."""

    def act(row: Row) -> None:
        row.look_around(ui)
        row.acted_at = time.monotonic()
        row.act(ui, row)

    def note(row: Row) -> None:
        row.took = time.monotonic() - row.acted_at

    for row in rows:
        row.start(ui, questions_run(ui.store, next(SEEDS)))
    each(ui, rows, lambda row: row.stage_works(ui), act)
    restart()
    each(ui, rows, lambda row: row.is_over(ui), note)
    for row in rows:
        code = row.terminal.wait(timeout=LIMIT_SECONDS)
        status = load_run(ui.store, row.record.run_id).status
        assert (row.seen, status, code) == (row.prefect, row.status, row.exit_code), row.who
        assert row.took <= LIMIT_SECONDS, row.who
    assert [path.name for path in (ui.store.root / ".locks").glob("*.lock") if is_held(path)] == []
    assert ui.open_runs() == []
    for row in rows:
        row.run_again(ui)
    each(ui, rows, lambda row: row.is_complete(ui), lambda row: None)
    for row in rows:
        after = load_run(ui.store, row.again.run_id)
        became = after.nodes["questions"].state.value
        assert became == ("reused" if row.status is RunStatus.COMPLETED else "done"), row.who
        TABLE.append(
            (row.who, f"{row.took:.0f} s", row.seen, row.status.value, str(row.exit_code),
             f"{row.rerun}: completed, 'questions' {became}")
        )  # fmt: skip


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    folder = tmp_path_factory.mktemp("kills")
    running = Ui.start(folder / "home", Store(folder / "store"))
    try:
        yield running
        output = running.stop()
        assert running.process.returncode == 0 and "stopped" in output, output
        assert pids_with(str(folder)) == []
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(timeout=60)
        for pid in pids_with(str(folder)):
            kill(pid)
        write_table()


def write_table() -> None:
    """Print the table, and write it where RATCHET_KILL_TABLE says."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *TABLE]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    print("\n" + text)
    if "RATCHET_KILL_TABLE" in os.environ:
        Path(os.environ["RATCHET_KILL_TABLE"]).write_text(text, encoding="utf-8")


def test_people_who_stop_a_run(ui: Ui) -> None:
    play(
        ui,
        [
            Row("Cancel in the UI", lambda ui, row: ui.cancel(row.flow_run),
                "Cancelled / Cancelled", RunStatus.CANCELLED, 130),
            Row("Ctrl-C in the terminal",
                lambda ui, row: row.terminal.send_signal(signal.SIGINT),
                "Cancelled / Cancelled", RunStatus.CANCELLED, 130, "same command"),
            Row("kill -9 of `ratchet run` in the terminal (the run goes on)",
                lambda ui, row: row.terminal.kill(),
                "Completed / Completed", RunStatus.COMPLETED, -9, "same command"),
        ],
    )  # fmt: skip


def test_processes_of_a_run(ui: Ui) -> None:
    play(
        ui,
        [
            Row("kill -9 of the flow", lambda ui, row: kill(row.flow),
                "Crashed / Crashed", RunStatus.DIED, 1),
            Row("kill -9 of the worker", lambda ui, row: kill(row.worker),
                "Crashed / Crashed", RunStatus.FAILED, 1),
            Row("kill -9 of the worker's supervisor", lambda ui, row: kill(row.supervisor),
                "Crashed / Crashed", RunStatus.FAILED, 1, "same command"),
        ],
    )  # fmt: skip


def test_runs_in_their_terminal(ui: Ui) -> None:
    play(
        ui,
        [
            Row("`--here`: kill -9 of the flow", lambda ui, row: kill(row.flow),
                "Crashed / Crashed", RunStatus.DIED, -9, "same command", here=True),
            Row("`--here`: Cancel in the UI", lambda ui, row: ui.cancel(row.flow_run),
                "Cancelled / Cancelled", RunStatus.CANCELLED, 130, "same command", here=True),
        ],
    )  # fmt: skip


def test_the_server(ui: Ui) -> None:
    play(
        ui,
        [
            Row("kill -9 of the server (`ratchet ui` starts it again)",
                lambda ui, row: kill(ui.pid_of("flows.server.server")),
                "Completed / Completed", RunStatus.COMPLETED, 0, "same command"),
        ],
    )  # fmt: skip


def test_the_runner(ui: Ui) -> None:
    play(
        ui,
        [
            Row("kill -9 of the runner (`ratchet ui` starts it again)",
                lambda ui, row: kill(ui.pid_of("flows.deployment.serve")),
                "Crashed / Crashed", RunStatus.DIED, 1),
        ],
    )  # fmt: skip


def test_ratchet_ui_itself(ui: Ui) -> None:
    deployment = ui.call("/deployments/name/full/full")["id"]
    yearly = {"schedule": {"cron": "0 0 1 1 *"}, "active": True}
    (schedule,) = ui.call(f"/deployments/{deployment}/schedules", [yearly])

    def restart() -> None:
        ui.process.wait(timeout=30)
        ui.process.communicate()
        ui.process = Ui.start(ui.home, ui.store, ui.port).process

    play(
        ui,
        [
            Row("kill -9 of `ratchet ui`, then started again",
                lambda ui, row: ui.process.kill(), "Crashed / Crashed", RunStatus.DIED, 1),
        ],
        restart,
    )  # fmt: skip
    (kept,) = ui.call(f"/deployments/{deployment}/schedules")
    assert kept["id"] == schedule["id"] and kept["active"]
    (automation,) = ui.call("/automations/filter", {})
    assert automation["trigger"]["within"] == 540 and automation["enabled"]
