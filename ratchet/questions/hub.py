"""Rows from a data set on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Collection

from ratchet.errors import UserError
from ratchet.questions.files import Table


def read_hub(
    repo: str, config: str | None, split: str, revision: str | None, wanted: Collection[str]
) -> Table:
    """The rows of one split, `wanted` columns only.

    UserError when the hub or the data set can't be reached, or has no such split.
    """
    from datasets import load_dataset

    try:
        data = load_dataset(repo, config, split=split, revision=revision)
    except OSError as error:  # no network, no such data set, offline mode: all are OSErrors
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"data set '{repo}' could not be fetched from the hub ({reason}): check the name and "
            "the network, or give a local file or folder as path"
        ) from error
    except ValueError as error:  # unknown split or configuration; the message lists the known ones
        raise UserError(f"data set '{repo}': {' '.join(str(error).split())}") from error
    columns = list(data.column_names)
    data = data.select_columns([name for name in columns if name in wanted])
    rows = data.to_list()
    where = f"{repo} ({split})"
    return Table(rows, [f"{where}: row {n}" for n in range(1, len(rows) + 1)], columns)
