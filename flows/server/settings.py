"""Prefect's settings for a machine of one's own: loopback, no analytics, patience at start-up.

`apply()` runs before Prefect is imported, in the processes that people start (`ratchet run`,
`ratchet ui`); what these start inherits it. A setting that the user has made wins.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "true",
    # Relative, so that the UI works through a tunnel and under another host name.
    "PREFECT_UI_API_URL": "/api",
    # Leases kept in memory would be lost in a server restart, and the device slot with them.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
    # The terminal shows one line per stage, failures included; the UI gets all of the log.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
}


def prefect_home() -> Path:
    """Folder of Prefect's database and profiles."""
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


def apply() -> None:
    """Set what the user hasn't set."""
    home = prefect_home()
    home.mkdir(parents=True, exist_ok=True)
    # Prefect's own default ignores PREFECT_HOME here.
    os.environ.setdefault("PREFECT_MEMO_STORE_PATH", str(home / "memo_store.toml"))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def configured_api_url() -> str | None:
    """The Prefect server that the user chose, in the environment or in the active profile."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    profiles = prefect_home() / "profiles.toml"
    if not profiles.is_file():
        return None
    found = tomllib.loads(profiles.read_text(encoding="utf-8"))
    active = os.environ.get("PREFECT_PROFILE", found.get("active", ""))
    return found.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
