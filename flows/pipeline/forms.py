"""What a person fills in on a deployment's form, and what that asks for.

A form's fields are a flow's parameters. Their descriptions are the flow's docstring, their titles
`title` makes from their names. A stage's form starts with that stage's own settings, every one of
them empty: empty means "as in the run", so only what was filled in changes. All other settings go
through a text of `FIELD=VALUE` lines, which is what `--set` takes.
"""

from __future__ import annotations

import json
import os
import shlex
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model

from ratchet.config.presets import preset_names
from ratchet.config.run import RunConfig, Section
from ratchet.pipeline.request import Request
from ratchet.pipeline.stages import STAGES

Preset = StrEnum("Preset", {name: name for name in preset_names()})  # type: ignore[misc]
"""The shipped presets, as a choice."""
DEMO = Preset("demo")

StageName = StrEnum("StageName", {name: name for name in STAGES})  # type: ignore[misc]
"""The stages, as a choice."""

ACRONYMS = {"grpo": "GRPO", "opd": "OPD", "sft": "SFT", "k": "k", "kl": "KL"}
PLAIN = (str, int, float, bool)


class Change(BaseModel):
    """Settings to change; what is left empty stays as it is in the run."""

    model_config = ConfigDict(frozen=True)


def title(name: str) -> str:
    """A field's name for people: 'grpo_steps' → 'GRPO steps'."""
    words = [ACRONYMS.get(word, word) for word in name.split("_")]
    return words[0][:1].upper() + words[0][1:] + "".join(f" {word}" for word in words[1:])


def _is_plain(annotation: Any) -> bool:
    """Whether the form has a simple field for it: text, number, switch or choice, or none."""
    if get_origin(annotation) in (Union, UnionType):
        return all(inner is type(None) or _is_plain(inner) for inner in get_args(annotation))
    if get_origin(annotation) is Literal:
        return True
    return isinstance(annotation, type) and (annotation in PLAIN or issubclass(annotation, StrEnum))


def change_model(stage: str) -> type[Change] | None:
    """The stage's own settings, each optional and empty; None when it has none that a form can
    show."""
    own = STAGES[stage].own_section
    if own is None:
        return None
    section = RunConfig.model_fields[own].annotation
    assert isinstance(section, type) and issubclass(section, Section)
    fields: dict[str, Any] = {}
    for position, (name, field) in enumerate(section.model_fields.items()):
        if not _is_plain(field.annotation):
            continue
        kind: Any = field.annotation
        for constraint in field.metadata:
            kind = Annotated[kind, constraint]
        fields[name] = (
            kind | None,
            Field(
                None,
                title=title(name),
                description=field.description,
                json_schema_extra={"position": position},
            ),
        )
    if not fields:
        return None
    made = create_model(f"Change_{stage}", __base__=Change, **fields)
    made.model_config["title"] = f"Settings of '{own}'"
    return made


def assignments(stage: str, change: Change | None) -> list[str]:
    """What was filled in, as `--set` takes it."""
    values = {} if change is None else change.model_dump(mode="json")
    return [
        *STAGES[stage].implied,
        *(
            f"{STAGES[stage].own_section}.{name}={json.dumps(value)}"
            for name, value in values.items()
            if value not in (None, "")
        ),
    ]


def data_folder() -> Path | None:
    """Folder with local copies of the data sets, as the command line's `--data` names it."""
    named = os.environ.get("RATCHET_DATA")
    return Path(named) if named else None


def _lines(settings: str) -> list[str]:
    """The settings of a form's text, one a line.

    Text and not a list of fields: the form of Prefect 3.7 forgets what is typed into a list until
    another item is added.
    """
    return [line.strip() for line in settings.splitlines() if line.strip()]


def full_request(
    store: str,
    preset: str,
    start_from: str | None,
    settings: str,
    **shortcuts: str | int | float | None,
) -> tuple[Request, str]:
    """The request that the full pipeline's form makes, and the command line that says the same.

    `shortcuts` are fields by dotted path with '__' for the dot.
    """
    sets = [
        f"{path.replace('__', '.')}={json.dumps(value)}"
        for path, value in shortcuts.items()
        if value not in (None, "")
    ]
    sets += _lines(settings)
    source = ["--run", start_from] if start_from else ["--preset", preset]
    request = Request(
        preset=None if start_from else preset,
        from_run=start_from or None,
        assignments=sets,
        name=None,
        data=data_folder(),
        store=Path(store),
    )
    return request, _command(["run", *source], sets)


def stage_request(
    store: str, stage: str, run: str, change: Change | None, settings: str
) -> tuple[Request, str]:
    """The request that a stage's form makes, and the command line that says the same."""
    sets = assignments(stage, change)
    sets += _lines(settings)
    request = Request(None, run.strip() or "latest", sets, None, data_folder(), Path(store))
    return request, _command(["stage", stage, "--run", run], sets)


def _command(words: list[str], sets: list[str]) -> str:
    return shlex.join(["ratchet", *words, *(word for item in sets for word in ("--set", item))])
