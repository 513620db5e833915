"""P1: what goes on the wire, tensor by tensor, against what the version is.

With adapter sync that is the adapter's file, which must hold the trainer's adapter bit for bit.
With merged sync it is every tensor as it leaves for the engine, against W + s·B·A worked out apart,
in the engine's number format. After it the trainer's own frozen weights must be where they were: a
merge in place that is taken back leaves rounding behind.
"""

from __future__ import annotations

import torch

from tasks.audit.compare import Compared, Instead, compare
from tasks.audit.diagnosis import Cause, Finding, Probe
from tasks.audit.reference import Reference
from tasks.audit.rows import Report, by_group, fact, named

BASE_LIMIT = 1e-6
"""How far a sync may move the trainer's frozen weights, relative to their size. Merging and
unmerging in float32 leaves 3e-8; in bfloat16 1e-4 in the first round, and it adds up."""


class WireTap:
    """Told every tensor of one sync as it goes by."""

    def __init__(self, reference: Reference, sync: int, dtype: str, *, by_adapter: bool) -> None:
        self.reference = reference
        self.sync = sync
        self.dtype = dtype
        self.by_adapter = by_adapter
        self.adapter = reference.adapter_tensors() if by_adapter else {}
        self.compared: list[Compared] = []
        self.seen: list[str] = []
        self.wrong_dtype: list[str] = []
        self.dtypes: set[str] = set()

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor."""
        self.seen.append(name)
        if self.by_adapter:
            self._adapter_tensor(name, tensor)
        elif self.reference.knows(name):
            found = str(tensor.dtype).removeprefix("torch.")
            if found != self.dtype:
                self.wrong_dtype.append(name)
                self.dtypes.add(found)
            self.compared.append(compare(self.reference, name, tensor, self.dtype))

    def _adapter_tensor(self, name: str, tensor: torch.Tensor) -> None:
        expected = self.adapter.get(name)
        if expected is None:
            return
        same = expected.dtype == tensor.dtype and torch.equal(expected, tensor.cpu())
        self.compared.append(
            Compared(name, 0.0 if same else 1.0, 0.0, None if same else Instead.OTHER)
        )

    def report(self) -> Report:
        """What went by, after the sync."""
        expected = list(self.adapter) if self.by_adapter else self.reference.names
        missing = sorted(set(expected) - set(self.seen))
        unknown = [
            name
            for name in self.seen
            if name not in self.adapter and not self.reference.knows(name)
        ]
        names_ok = not missing and not unknown
        report = Report(
            [
                fact(
                    Probe.WIRE,
                    "names",
                    names_ok,
                    named(missing + unknown) or f"all {len(expected)}",
                    sync=self.sync,
                ),
                fact(
                    Probe.WIRE,
                    "number format",
                    not self.wrong_dtype,
                    named(self.wrong_dtype) or "the engine's",
                    sync=self.sync,
                ),
                *by_group(self.sync, Probe.WIRE, "sent against expected", self.compared),
            ]
        )
        report.findings += self._findings(missing, unknown)
        report.add(self._base_untouched())
        return report

    def _findings(self, missing: list[str], unknown: list[str]) -> list[Finding]:
        found = []
        if missing or unknown:
            parts = [f"{len(missing)} tensors were not sent ({named(missing)})"] if missing else []
            if unknown:
                parts.append(f"{len(unknown)} were sent under unknown names ({named(unknown)})")
            found.append(Finding(Probe.WIRE, Cause.NAMES, " and ".join(parts)))
        if self.wrong_dtype:
            found.append(
                Finding(
                    Probe.WIRE,
                    Cause.WIRE_DTYPE,
                    f"{len(self.wrong_dtype)} of {len(self.seen)} tensors were sent as "
                    f"{' and '.join(sorted(self.dtypes))} to an engine in {self.dtype}",
                )
            )
        wrong = [one for one in self.compared if not one.ok]
        if wrong and not self.wrong_dtype:
            found.append(self._wrong_weights(wrong))
        return found

    def _wrong_weights(self, wrong: list[Compared]) -> Finding:
        base = [one for one in wrong if one.instead is Instead.BASE]
        if len(base) == len(wrong) and not self.by_adapter and self.reference.by_adapter:
            return Finding(
                Probe.WIRE,
                Cause.UNMERGED,
                f"{len(base)} of the {len(self.reference.layers)} adapted weights were sent as "
                f"base weights, without their adapter ({named(one.name for one in base)})",
            )
        kinds = sorted({str(one.instead) for one in wrong})
        return Finding(
            Probe.WIRE,
            Cause.WRONG_ON_WIRE,
            f"{len(wrong)} of {len(self.compared)} tensors sent are not what the version holds: "
            f"{', '.join(kinds)} ({named(one.name for one in wrong)})",
        )

    def _base_untouched(self) -> Report:
        moved = self.reference.base_moved()
        if not moved:
            return Report()
        compared = [
            Compared(name, value, BASE_LIMIT, Instead.OTHER if value > BASE_LIMIT else None)
            for name, value in moved.items()
        ]
        report = Report(by_group(self.sync, Probe.WIRE, "trainer's frozen weights", compared))
        wrong = [one for one in compared if not one.ok]
        if wrong:
            worst = max(wrong, key=lambda one: one.error)
            words = (
                f"the sync has changed {len(wrong)} of the trainer's {len(compared)} frozen "
                f"weights, by up to {worst.error:.1e} of their size ({worst.name})"
            )
            report.findings.append(Finding(Probe.WIRE, Cause.MERGE_ROUNDING, words))
        return report
