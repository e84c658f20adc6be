"""What the card can reach at most, measured, and the time that a case cannot beat because of it."""

from __future__ import annotations

from dataclasses import dataclass

# An fp32 product at fp32 accuracy takes three products of 16-bit parts on tensor cores; on the H200 that is five times
# faster than the card's fp32 units, so the floor of "highest" is a third of the 16-bit rate.
SPLIT_PRODUCTS = 3


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one card: bytes per second, and floating-point operations per second by precision."""

    device: str
    copy: float
    read: float
    product: dict[str, float]
    source: str


CEILINGS = (
    Ceilings(
        device="NVIDIA H200",
        copy=4.28e12,
        read=4.36e12,
        product={"bf16": 790e12, "fp16": 790e12, "tf32": 409e12, "fp32": 790e12 / SPLIT_PRODUCTS},
        source="measured with torch 2.11.0+cu130 on random data: a device-to-device copy of 8.6 GB counting bytes read "
        "and written, a read-only sum, an 8192x8192x8192 cuBLAS product; fp32 = three 16-bit products",
    ),
)


@dataclass(frozen=True)
class Work:
    """The least that a case must move and compute: each input read once, each output written once."""

    read_bytes: int
    written_bytes: int
    flops: int = 0


def ceilings_for(device_name: str) -> Ceilings | None:
    """The ceilings of the card called `device_name`, or None where none were measured."""
    return next((ceilings for ceilings in CEILINGS if ceilings.device == device_name), None)


def floor_us(work: Work, precision: str, ceilings: Ceilings | None) -> float | None:
    """The least time in microseconds for `work` at `precision`, or None where the ceilings are not known."""
    if ceilings is None:
        return None
    # Writes share the bus with reads and cost turnarounds: the read-only rate holds only where they are negligible.
    bandwidth = ceilings.copy if work.written_bytes > 0.01 * work.read_bytes else ceilings.read
    memory = (work.read_bytes + work.written_bytes) / bandwidth
    compute = work.flops / ceilings.product[precision] if work.flops else 0.0
    return 1e6 * max(memory, compute)
