"""Extract an answer, decide equivalence, survive hostile input. See docs/verifier.md."""

from ratchet.verifier.types import (
    DEFAULT_DEADLINE_SECONDS,
    VERIFIER_VERSION,
    Status,
    Style,
    Verdict,
    as_style,
    status_rates,
)
from ratchet.verifier.verify import close_shared_pool, verify, verify_batch

__all__ = [
    "DEFAULT_DEADLINE_SECONDS",
    "VERIFIER_VERSION",
    "Status",
    "Style",
    "Verdict",
    "as_style",
    "close_shared_pool",
    "status_rates",
    "verify",
    "verify_batch",
]
