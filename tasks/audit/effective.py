"""P2: the weights that the engine computes with, layer by layer, against the version's.

They are read back out of the engine (`tasks.sync.readback`), so this sees what became of what was
sent: an update that was accepted and not carried out, a second copy of a tied weight that was not
renewed, a layer that was rounded on the way in. Weights that the engine keeps in a form that can't
be read back under the trainer's names are counted and named; P3 has to speak for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tasks.audit.compare import Compared, Instead, compare
from tasks.audit.diagnosis import Cause, Finding, Probe
from tasks.audit.reference import HEAD, TIED_TO, UPDATE_SHARE, Reference
from tasks.audit.rows import Report, by_group, fact, named

READ = "weights read back"
"""The check that says how many weights could be compared."""


def check_effective(
    reference: Reference,
    sync: int,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: str,
) -> Report:
    """Compare every weight that comes out of the engine; `dtype` is the engine's."""
    every = [
        compare(reference, name, value, dtype) for name, value in weights if reference.knows(name)
    ]
    compared = [one for one in every if one.instead is not Instead.SHAPE]
    seen = {one.name for one in compared}
    absent = [name for name in reference.names if name not in seen]
    told = f"all {len(reference.names)} weights"
    if absent:
        told = f"{len(absent)} of {len(reference.names)} weights can't be read: {named(absent)}"
    report = Report(
        [
            fact(Probe.WEIGHTS, READ, True, told, sync=sync),
            *by_group(sync, Probe.WEIGHTS, "engine against expected", compared),
        ]
    )
    wrong = [one for one in compared if not one.ok]
    if wrong:
        changing = [one for one in compared if reference.changing(one.name)]
        report.findings.append(_finding(reference, wrong, len(changing)))
    return report


def _finding(reference: Reference, wrong: list[Compared], num_changing: int) -> Finding:
    kinds = {one.instead for one in wrong}
    shown = named(one.name for one in wrong)
    if HEAD not in reference.base and {one.name for one in wrong} <= {HEAD, TIED_TO}:
        words = f"of the embedding and the head that is tied to it, the engine's {shown} is stale"
        return Finding(Probe.WEIGHTS, Cause.TIED, words)
    unmarked = reference.mark is not None and reference.mark in {one.name for one in wrong}
    if kinds == {Instead.BASE} and reference.by_adapter and not unmarked:
        words = (
            f"the engine holds {len(wrong)} of {len(reference.layers)} adapted weights without "
            "their adapter"
        )
        return Finding(Probe.WEIGHTS, Cause.UNMERGED, f"{words} ({shown})")
    if kinds <= {Instead.PREVIOUS, Instead.BASE}:
        words = f"the engine holds {len(wrong)} of {num_changing} weights as they were before"
        cause = Cause.NOT_LOADED if len(wrong) == num_changing else Cause.WEIGHTS
        return Finding(Probe.WEIGHTS, cause, f"{words} the sync ({shown})")
    if kinds <= {Instead.BFLOAT16, Instead.ROUNDED}:
        off = max(
            one.error * (UPDATE_SHARE if reference.changing(one.name) else 1) for one in wrong
        )
        words = (
            f"{len(wrong)} of the engine's weights are rounded, off by up to {off:.1%} of their "
            f"size ({shown})"
        )
        return Finding(Probe.WEIGHTS, Cause.ROUNDED, words)
    words = f"{len(wrong)} of the engine's weights are {', '.join(sorted(map(str, kinds)))}"
    return Finding(Probe.WEIGHTS, Cause.WEIGHTS, f"{words} ({shown})")
