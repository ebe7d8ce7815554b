"""What names a kernel, and the limits of a launch."""

from __future__ import annotations

from typing import NamedTuple

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
MAX_SHARED = 227 << 10  # of the largest card; each card's own limit is checked when it launches


class Kernel(NamedTuple):
    """One instantiation of a kernel template.

    source: the file below csrc that defines it, say "dropout/dropout.cuh".
    name: its C++ name with template arguments, say "fa::dropout_forward<__half>".
    threads: per block, whole warps.
    shared: bytes of dynamic shared memory per block.
    """

    source: str
    name: str
    threads: int
    shared: int = 0

    def check(self, grid: tuple[int, int, int]) -> None:
        """Raises ValueError for a launch that no card accepts."""
        if self.threads % 32 or not 0 < self.threads <= MAX_THREADS:
            raise ValueError(
                f"{self.name}: {self.threads} threads a block; accepted are whole warps of 32, "
                f"at most {MAX_THREADS}"
            )
        if not 0 <= self.shared <= MAX_SHARED:
            raise ValueError(
                f"{self.name}: {self.shared} bytes of shared memory; accepted are at most "
                f"{MAX_SHARED}"
            )
        for size, limit in zip(grid, MAX_GRID, strict=True):
            if not 0 < size <= limit:
                raise ValueError(f"{self.name}: grid {grid}; accepted are 1 to {MAX_GRID}")
