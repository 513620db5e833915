"""The engines that generate. Public: `open_sampler`, `Sampler`, `Sample`, `Shaping`, `PLAIN`,
`OnProgress`."""

from tasks.sampler.base import PLAIN, OnProgress, Sample, Sampler, Shaping
from tasks.sampler.opening import open_sampler

__all__ = ["PLAIN", "OnProgress", "Sample", "Sampler", "Shaping", "open_sampler"]
