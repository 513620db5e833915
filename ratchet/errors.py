"""The one exception type that means "the user can fix this".

Raised for bad input, configuration or data, before expensive work. Every entry point (command
line, stage worker, flow) prints its message as one line and exits with code 2; any other
exception is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import traceback

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
"""After Ctrl-C, as in a shell."""


class UserError(ValueError):
    """Bad input. The message says what was wrong and what to do about it."""


def in_one_line(error: BaseException) -> str:
    """What went wrong, as the last lines of a traceback begin: 'ValueError: …'."""
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]
