"""Reads presets and `--set` into a `RunConfig`, and words what is wrong with them.

A preset is a TOML file laid out like `RunConfig` (`ratchet.config.presets`). `--set
path.to.field=value` changes one value; the value is read as TOML, and as plain text where it isn't
TOML, so `--set model.path=seedling` needs no quotes. A misspelt or ill-typed field is answered with
its path, the nearest right name and the allowed values.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import tomllib
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ratchet.config.presets import joined, nearest, preset_path, read_chain
from ratchet.config.run import RunConfig, SourceConfig, SourceKind
from ratchet.config.training import ALGORITHMS
from ratchet.errors import UserError

PACKAGED = ("seedling", "smollm2-135m-instruct")
UNTRUNCATED = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that RL has no settings for; the model's own are dropped."""

RENAMED_SETTINGS = {
    "evaluate.arms": "evaluate.variants",
    "filter.min_live_share": "headroom.min_live_share",
    "questions.decontaminate_words": "decontaminate.words",
}
"""Settings by the dotted path that they had, and have now. Presets, `--set` and records of earlier
runs may hold the old one."""


def _parse_value(text: str) -> Any:
    """A value as TOML reads it, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _inner_types(annotation: Any) -> list[Any]:
    """The annotation and what it is made of: unions, tuples, dicts taken apart."""
    found = [annotation]
    for inner in get_args(annotation):
        found.extend(_inner_types(inner))
    return found


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section model an annotation holds, directly or in a tuple."""
    for inner in _inner_types(annotation):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None


def _walk(path: Sequence[str | int]) -> tuple[type[BaseModel] | None, Any]:
    """The model and the annotation that `path` leads to, as far as it is known."""
    model: type[BaseModel] | None = RunConfig
    annotation: Any = RunConfig
    for part in path:
        if isinstance(part, int) or part.isdigit():
            continue
        if model is None or part not in model.model_fields:
            return model, None
        annotation = model.model_fields[part].annotation
        model = _section_of(annotation)
    return model, annotation


def _allowed(annotation: Any) -> str:
    """The values an annotation allows, for an error message; empty when they are many."""
    values: list[str] = []
    for inner in _inner_types(annotation):
        if get_origin(inner) is Literal:
            values += [repr(value) for value in get_args(inner)]
        elif isinstance(inner, type) and issubclass(inner, StrEnum):
            values += [repr(member.value) for member in inner]
    return f" (allowed: {', '.join(dict.fromkeys(values))})" if values else ""


def unknown_field(path: Sequence[str | int]) -> str:
    """What to say about a path whose last part is no field."""
    model, _ = _walk(path[:-1])
    fields = [] if model is None else list(model.model_fields)
    where = ".".join(map(str, path[:-1]))
    name = str(path[-1])
    if where == "grpo" and name in UNTRUNCATED:
        return (
            f"'grpo.{name}' is not to be set: RL samples from the policy itself, since cutting or "
            "reshaping its distribution would bias the ratio of trainer and sampler"
        )
    inside = f" in '{where}'" if where else ""
    known = f" Fields{inside}: {', '.join(fields)}" if fields else ""
    return f"there is no field '{'.'.join(map(str, path))}'{nearest(name, fields)}{known}"


def _describe(error: ErrorDetails) -> str:
    """One line for one validation error."""
    path = error["loc"]
    dotted = ".".join(map(str, path))
    if error["type"] == "extra_forbidden":
        return unknown_field(path)
    if error["type"] == "missing":
        return f"'{dotted}' must be set"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{dotted}: {message}" if dotted else message
    _, annotation = _walk(path)
    return f"'{dotted}' = {error['input']!r}: {message}{_allowed(annotation)}"


@cache
def _hint(old: str, new: str) -> None:
    """Say once that a setting has another name now."""
    print(
        f"note: '{old}' is now '{new}'; the old name still works in this release", file=sys.stderr
    )


def with_present_names(tree: dict[str, Any], *, hint: bool = True) -> dict[str, Any]:
    """A copy of a tree of plain values with renamed settings under the names that they have now."""
    tree = copy.deepcopy(tree)
    for old, new in RENAMED_SETTINGS.items():
        *sections, name = old.split(".")
        here: Any = tree
        for section in sections:
            here = here.get(section) if isinstance(here, dict) else None
        if not isinstance(here, dict) or name not in here:
            continue
        if hint:
            _hint(old, new)
        *sections, new_name = new.split(".")
        there: Any = tree
        for section in sections:
            there = there.setdefault(section, {}) if isinstance(there, dict) else there
        if not isinstance(there, dict):
            continue  # validation says what is wrong
        if new_name in there:
            raise UserError(f"'{old}' is now '{new}', and both are set: leave out '{old}'")
        there[new_name] = here.pop(name)
    return tree


def _present_name(assignment: str) -> str:
    """A `--set` assignment with the name that its setting has now."""
    path, equals, value = assignment.partition("=")
    for old, new in RENAMED_SETTINGS.items():
        if path.strip() == old or path.strip().startswith(f"{old}."):
            _hint(old, new)
            return f"{new}{path.strip().removeprefix(old)}{equals}{value}"
    return assignment


def _set_value(tree: dict[str, Any], assignment: str) -> None:
    """Apply one `path=value` to the tree of plain values."""
    path_text, equals, text = assignment.partition("=")
    if not equals:
        raise UserError(f"--set {assignment}: write --set path.to.field=value")
    parts = path_text.strip().split(".")
    for end in range(1, len(parts) + 1):
        model, _ = _walk(parts[: end - 1])
        part = parts[end - 1]
        if model is not None and not part.isdigit() and part not in model.model_fields:
            raise UserError(f"--set {path_text}: {unknown_field(parts[:end])}")
    here: Any = tree
    for end, part in enumerate(parts[:-1], start=1):
        here = _step_into(here, part, ".".join(parts[:end]))
    last = parts[-1]
    if isinstance(here, list):
        _step_into(here, last, path_text)
        here[int(last)] = _parse_value(text)
    else:
        here[last] = _parse_value(text)


def _step_into(here: Any, part: str, dotted: str) -> Any:
    """The value below `here` at `part`, made where it is missing."""
    if isinstance(here, list):
        if not part.isdigit() or int(part) >= len(here):
            raise UserError(
                f"--set {dotted}: '{part}' is no index into a list of {len(here)} (0 is the first)"
            )
        return here[int(part)]
    if not isinstance(here, dict):
        raise UserError(f"--set {dotted}: there is nothing below '{part}', it holds a value")
    return here.setdefault(part, {})


def _apply_algorithm(tree: dict[str, Any], assignments: Sequence[str]) -> None:
    """Fill in what `grpo.algorithm` stands for. One that is newly assigned replaces what the
    algorithm before it stood for; one in a preset gives way to the preset's other settings."""
    grpo = tree.get("grpo", {})
    if not isinstance(grpo, dict):
        return  # validation says what is wrong
    before = grpo.get("algorithm")
    wanted = [text for text in assignments if text.partition("=")[0].strip() == "grpo.algorithm"]
    if wanted:
        algorithm = _parse_value(wanted[-1].partition("=")[2])
        tree["grpo"] = _without_algorithm(grpo) | ALGORITHMS.get(algorithm, {})
    elif before in ALGORITHMS:
        tree["grpo"] = ALGORITHMS[before] | grpo


def _without_algorithm(grpo: dict[str, Any]) -> dict[str, Any]:
    """Settings of GRPO but those that an algorithm stands for."""
    stood_for = {name for settings in ALGORITHMS.values() for name in settings}
    return {name: value for name, value in grpo.items() if name not in stood_for}


def _preset_tree(path: Path) -> dict[str, Any]:
    """What a preset and those it extends say, as one tree. An algorithm that a preset names
    replaces what its base set of what an algorithm stands for, as `--set` does."""
    tree: dict[str, Any] = {}
    for part in map(with_present_names, read_chain(path)):
        ours, its = tree.get("grpo"), part.get("grpo")
        if isinstance(ours, dict) and isinstance(its, dict) and "algorithm" in its:
            tree["grpo"] = _without_algorithm(ours)
        tree = joined(tree, part)
    return tree


def build_config(tree: dict[str, Any], assignments: Sequence[str] = ()) -> RunConfig:
    """Validate a tree of plain values after applying `--set` assignments.

    UserError with one line per mistake.
    """
    assignments = [_present_name(assignment) for assignment in assignments]
    _apply_algorithm(tree, assignments)
    for assignment in assignments:
        _set_value(tree, assignment)
    try:
        return RunConfig.model_validate(with_present_names(tree))
    except ValidationError as error:
        raise UserError("; ".join(_describe(item) for item in error.errors())) from error


def _resolve_engine(config: RunConfig) -> RunConfig:
    """Replace `sampler.engine = 'auto'` by what this machine has.

    UserError when 'vllm' is demanded and not installed.
    """
    have_vllm = importlib.util.find_spec("vllm") is not None
    engine = config.sampler.engine
    if engine == "vllm" and not have_vllm:
        raise UserError(
            "sampler.engine = 'vllm' but vLLM is not installed: install the extra 'gpu', or set "
            "sampler.engine = 'auto'"
        )
    if engine == "auto":
        engine = "vllm" if have_vllm else "transformers"
    sampler = config.sampler.model_copy(update={"engine": engine})
    return config.model_copy(update={"sampler": sampler})


def _resolve_source(source: SourceConfig, data: Path | None) -> SourceConfig:
    """Make a local path absolute; find a data set in the folder of local copies."""
    path = source.path
    if path is None and data is not None and (data / source.kind.value).exists():
        path = str((data / source.kind.value).resolve())
    elif path is not None and (source.kind == SourceKind.FILE or Path(path).exists()):
        path = str(Path(path).expanduser().resolve())
    return source.model_copy(update={"path": path})


def _resolve_paths(config: RunConfig, data: Path | None) -> RunConfig:
    """Absolute local paths, so that a worker in another folder finds the same files."""
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data} is no folder: name the folder that holds the data sets")
    roles = {
        role: tuple(_resolve_source(source, data) for source in getattr(config.questions, role))
        for role in ("train", "warmup", "dev", "test")
    }
    updates: dict[str, Any] = {"questions": config.questions.model_copy(update=roles)}
    if Path(config.model.path).is_dir() and config.model.path not in PACKAGED:
        path = str(Path(config.model.path).resolve())
        updates["model"] = config.model.model_copy(update={"path": path})
    variants = [
        variant.model_copy(update={"path": str(Path(variant.path).resolve())})
        if Path(variant.path).is_dir() and variant.path not in PACKAGED
        else variant
        for variant in config.evaluate.variants
    ]
    updates["evaluate"] = config.evaluate.model_copy(update={"variants": tuple(variants)})
    teacher = config.opd.teacher
    if teacher is not None and Path(teacher).is_dir():
        updates["opd"] = config.opd.model_copy(update={"teacher": str(Path(teacher).resolve())})
    return config.model_copy(update=updates)


def load_config(
    preset: str, assignments: Sequence[str] = (), data: Path | None = None
) -> RunConfig:
    """The resolved configuration of a preset (name or TOML path) with `--set` applied.

    A preset without a name of its own takes its file's. `data` is a folder with local copies of
    data sets, by kind; they stand in for the hub.
    """
    path = preset_path(preset)
    tree = _preset_tree(path)
    tree.setdefault("name", path.stem)
    return _resolve_engine(_resolve_paths(build_config(tree, assignments), data))


def from_record(
    config: dict[str, Any], assignments: Sequence[str] = (), data: Path | None = None
) -> RunConfig:
    """The resolved configuration of an earlier run with `--set` applied."""
    tree = with_present_names(config, hint=False)
    return _resolve_engine(_resolve_paths(build_config(tree, assignments), data))
