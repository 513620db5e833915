"""The engines that generate. Public: `open_sampler`, `Sampler`, `Sample`, `OnProgress`."""

from tasks.sampler.base import OnProgress, Sample, Sampler
from tasks.sampler.opening import open_sampler

__all__ = ["OnProgress", "Sample", "Sampler", "open_sampler"]
