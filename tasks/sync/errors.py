"""What can go wrong with a sampler that isn't this process's own. Imports nothing heavy."""


class ServerError(RuntimeError):
    """The vLLM server ended, does not answer or refused; the first line says which, then follows
    the end of its log."""
