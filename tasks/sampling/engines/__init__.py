"""The engines that generate. Public: `open_sampler`, `Sampler`, `Sample`, `Shaping`, `PLAIN`,
`OnProgress`."""

from tasks.sampling.engines.base import PLAIN, OnProgress, Sample, Sampler, Shaping
from tasks.sampling.engines.opening import open_sampler

__all__ = ["PLAIN", "OnProgress", "Sample", "Sampler", "Shaping", "open_sampler"]
