"""The kernels compiled ahead of time: each op's default set, what its usual calls need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from fastattn import _dispatch
from fastattn._cuda.kernel import Kernel

_default_sets: dict[str, Callable[[int], Iterable[Kernel]]] = {}


def register_kernels(op: str, default_set: Callable[[int], Iterable[Kernel]]) -> None:
    """Say which kernels of ``op`` to compile ahead of time for an architecture (60 for sm_60)."""
    _default_sets[op] = default_set


def ops() -> tuple[str, ...]:
    """The ops that have CUDA kernels."""
    for name in _dispatch.registered_ops():
        backend = _dispatch._ops[name].get("cuda")
        if backend is not None:
            import_module(backend.module_name)
    return tuple(_default_sets)


def kernels(arch: int, chosen: Iterable[str] | None = None) -> list[Kernel]:
    """The default set for sm_``arch``, of the ``chosen`` ops or of all.

    Raises:
        ValueError: an op has no CUDA kernels.
    """
    known = ops()
    names = known if chosen is None else tuple(chosen)
    for name in names:
        if name not in known:
            raise ValueError(f"ops: {name!r} has no CUDA kernels; accepted are {', '.join(known)}")
    return list(dict.fromkeys(k for name in names for k in _default_sets[name](arch)))
