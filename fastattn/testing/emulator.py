"""What the emulator of CUDA threads has run."""

from __future__ import annotations

from collections import Counter

from fastattn._cuda import emulator


def emulator_launches() -> Counter[str]:
    """How often each kernel, by its C++ name, has been launched in this process so far."""
    return Counter(emulator.launches())
