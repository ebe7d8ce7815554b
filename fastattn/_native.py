"""The door to the native kernels: the only importer of fastattn._C.

FASTATTN_CPU_ISA (generic, sse42, avx2, avx512, avx512bf16) forces an instruction-set level; it is
read when the kernels are first used. The kernels run on torch's OpenMP threads, so torch is
imported first.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

import torch

# Codes of csrc/common/dtype.h.
_DTYPE_CODES = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.bool: 5,
    torch.int32: 6,
    torch.int64: 7,
}


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from fastattn import _C  # type: ignore[attr-defined]
    except ModuleNotFoundError:
        return None, (
            "fastattn was installed without its native kernels; they need Linux (x86-64 or "
            "aarch64) and a C++17 compiler when `pip install` runs"
        )
    except ImportError as error:
        return None, f"the native kernels can't be loaded: {error}"
    wanted = os.environ.get("FASTATTN_CPU_ISA", "")
    try:
        _C.select_isa(wanted)
    except ValueError as error:
        if wanted:
            raise
        return None, str(error)
    _C.learn_torch(_DTYPE_CODES, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    _C.connect_openmp()
    return _C, None


def available() -> bool:
    """True if the native kernels can run here."""
    return _load()[0] is not None


def why_not_available() -> str | None:
    """One sentence why the native kernels can't run here, or None if they can."""
    return _load()[1]


def lib() -> ModuleType:
    """The kernels' module, fastattn._C.

    Its functions take torch tensors (or None), any strides, and `threads`, for which callers pass
    torch.get_num_threads(). They check nothing: dtypes and shapes must be right.

    Raises:
        RuntimeError: the kernels can't run here; `why_not_available()` tells without raising.
        ValueError: FASTATTN_CPU_ISA names a level that isn't built or that this CPU lacks.
    """
    module, reason = _load()
    if module is None:
        raise RuntimeError(reason)
    return module


def isa() -> str:
    """The instruction-set level in use: "generic", "sse42", "avx2", "avx512", "avx512bf16"."""
    return lib().active_isa()


def isas_built() -> list[str]:
    """The instruction-set levels in this build, ascending."""
    return lib().isas_built()


def max_threads() -> int:
    """Threads of the OpenMP pool shared with torch, as seen from the calling thread."""
    return lib().max_threads()
