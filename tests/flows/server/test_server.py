"""Which Prefect server a run uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.server import server
from ratchet.errors import UserError
from tests.support.answering import answering


@pytest.mark.parametrize("version", ["2.20.0", "3.6.9", "4.0.0"])
def test_a_server_of_another_version_is_refused_in_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with answering({"/api/health": True, "/api/admin/version": version}) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(UserError) as refused:
            server.find_server()
    assert str(refused.value).startswith(f"the Prefect server at {url} has version {version}, ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", ["3.7.7", "3.8.0", "3.7.8+2.gabc"])
def test_a_server_that_is_not_older_will_do(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with answering({"/api/health": True, "/api/admin/version": version}) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert server.find_server() == url
