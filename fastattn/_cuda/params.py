"""Packing of a kernel's one argument, a struct of csrc/<op>/<op>_params.cuh.

A test compares every ``Params`` made with the C++ struct it names.
"""

from __future__ import annotations

import struct
from typing import Any

from torch import Tensor

POINTER, INT64, INT32, UINT32, FLOAT = "P", "q", "i", "I", "f"
DROPOUT = "PIf"  # fa::DropoutParams; dropout_fields gives its values

ALL: list[Params] = []


class Params:
    """The layout of a params struct: its C++ name, and each member's name and format.

    Formats are those of the struct module: "P" pointer, "q" int64_t, "i" int32_t, "f" float, "4q"
    int64_t [4]; several letters are a struct. They are aligned as C++ does.
    """

    def __init__(self, source: str, struct_name: str, **members: str):
        self.source, self.struct_name, self.members = source, struct_name, members
        self._struct = struct.Struct("@" + "".join(members.values()) + "0q")
        ALL.append(self)

    def pack(self, *values: Any) -> bytes:
        """The struct's bytes; a tensor stands for its address, None for a null pointer."""
        return self._struct.pack(
            *(v.data_ptr() if isinstance(v, Tensor) else 0 if v is None else v for v in values)
        )

    def layout(self) -> dict[str, int]:
        """The offset of each member, and under "" the size of the whole."""
        offsets, before = {}, "@"
        for name, form in self.members.items():
            first = form.lstrip("0123456789")[0]
            offsets[name] = struct.calcsize(f"{before}0{first}")
            before += form
        return {**offsets, "": self._struct.size}


def dropout_fields(rng_state: Tensor | None, p: float) -> tuple[Any, int, float]:
    """Values for ``DROPOUT``; ``rng_state`` is contiguous int64 [2] on the kernel's device."""
    threshold = min(int(p * 2**32), 2**32 - 1)
    return rng_state, threshold, 1.0 / (1.0 - p) if p < 1.0 else 0.0
