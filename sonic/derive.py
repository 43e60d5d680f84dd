"""What follows from a row and is therefore never stored: rates, sizes in GiB, G and rho. Pure functions, no torch.

All of them return None where the row lacks what they need, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

from sonic.record import Row

Clock = Literal["event_us", "device_us", "span_us", "graph_us"]
GIB = 1 << 30


def clock(row: Row) -> Clock | None:
    """The time that rates of this row are made from: `device_us`, or `event_us` where no device time was taken."""
    if row.device_us:
        return "device_us"
    return "event_us" if row.event_us else None


def samples_us(row: Row, which: Clock | None = None) -> Sequence[float] | None:
    """The samples of one of the times, by default of the row's `clock`; microseconds."""
    name = which or clock(row)
    return (getattr(row, name) or None) if name else None


def median_us(row: Row, which: Clock | None = None) -> float | None:
    """Median of one of the times, by default of the row's `clock`; microseconds."""
    samples = samples_us(row, which)
    return median(samples) if samples else None


def tflops(row: Row, which: Clock | None = None) -> float | None:
    """Model TFLOP/s (1e12 per second) at the median time; padding is never counted."""
    return _rate(row.flops_model, median_us(row, which), 1e6)


def gbps(row: Row, which: Clock | None = None) -> float | None:
    """Modelled GB/s (1e9 bytes per second) at the median time."""
    return _rate(row.bytes_model, median_us(row, which), 1e3)


def _rate(amount: int | None, us: float | None, per: float) -> float | None:
    return None if amount is None or not us else amount / us / per


def gib(size: int | None) -> float | None:
    """Bytes in GiB."""
    return None if size is None else size / GIB


def peak_bytes(row: Row) -> int | None:
    """The higher of the two peaks; bytes."""
    return max((p for p in (row.peak_fwd_bytes, row.peak_bwd_bytes) if p is not None), default=None)


def worst_error(row: Row) -> tuple[str, float] | None:
    """Name and value of the highest error ratio; NaN counts as the highest."""
    if not row.errors:
        return None
    return max(row.errors.items(), key=lambda item: (item[1] != item[1], item[1]))


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows ended in each status, in order of first sight."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.status] = found.get(row.status, 0) + 1
    return found
