"""The library: configuration, verifier, store, statistics; imports no torch, vLLM or Prefect."""

__version__ = "0.1.0"
