"""What a run pays for. Public, for rewards of one's own: `text_of`."""

from ratchet.rewards.functions import text_of

__all__ = ["text_of"]
