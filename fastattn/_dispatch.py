"""Which backend runs a call.

Every op offers backends by name; the order in which they are asked is one table by device
(``backend_order``), changed by measurement. Each says ``why_not(...) -> str | None``; the first
that answers None runs. The answer depends on nothing but the arguments and the backend asked for,
so the forward and the backward of a call reach the same one.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

AUTO = "auto"
BACKENDS = ("cpu", "cuda", "triton", "torch", "reference", "emulator")


class _Request(threading.local):
    """The backend asked for in this thread; torch.compile guards on it, as on no ContextVar.

    An attribute of the instance, for torch.compile does not see one shadow the class's.
    """

    def __init__(self) -> None:
        self.name = AUTO


_request = _Request()
_explanation: ContextVar[Explanation | None] = ContextVar("fastattn_explanation", default=None)
_environment = os.environ.get("FASTATTN_BACKEND") or AUTO
_ops: dict[str, dict[str, Backend]] = {}
_warned: set[str] = set()


class BackendError(RuntimeError):
    """No backend, or not the one asked for, can run a call; the message holds every reason."""


@dataclass
class Backend:
    """An implementation of an op: ``why_not``, ``fwd`` and mostly ``bwd``, loaded on first use."""

    name: str
    module_name: str
    prefix: str = ""
    _module: ModuleType | None = field(default=None, repr=False)

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in ("why_not", "fwd", "bwd"):
            raise AttributeError(attribute)
        if self._module is None:
            self._module = import_module(self.module_name)
        function = getattr(self._module, self.prefix + attribute)
        setattr(self, attribute, function)
        return function


@dataclass
class Explanation:
    """What ``fastattn.explain`` found: the backend that runs, and why each other one does not."""

    op: str = ""
    device: str = ""
    chosen: str = ""
    reasons: dict[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}: {self.chosen or 'no backend'}"]
        for name, reason in self.reasons.items():
            says = reason or ("runs" if name == self.chosen else "could run, comes later")
            lines.append(f"  {name:<10} {says}")
        return "\n".join(lines)


class _Explained(Exception):
    """Leaves a call once its backend is known."""


def register_backends(op: str, modules: dict[str, str], prefix: str = "") -> None:
    """Say which module holds each backend of ``op``; ``prefix`` precedes its function names."""
    _ops[op] = {name: Backend(name, module, prefix) for name, module in modules.items()}


def registered_ops() -> tuple[str, ...]:
    return tuple(_ops)


def registered_backends(op: str) -> tuple[str, ...]:
    return tuple(_ops[op])


def backend_order(device: torch.device) -> tuple[str, ...]:
    """The backends asked on ``device``, first to last (docs/adr/0002 says why)."""
    if device.type == "cpu":
        return ("cpu", "torch", "reference")
    if device.type == "cuda":
        return ("triton", "cuda", "torch", "reference") if _is_ampere(device) else (
            "cuda", "torch", "reference",
        )  # fmt: skip
    return ("torch", "reference")


def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def requested() -> str:
    """The backend asked for by ``use_backend`` or ``FASTATTN_BACKEND``; "auto" if none was."""
    return _environment if _request.name == AUTO else _request.name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend for the calls in a ``with`` block (of this thread, and their backward).

    Args:
        name: one of "cpu", "cuda", "triton", "torch", "reference", "emulator", or "auto".

    Raises:
        ValueError: for any other name.
        BackendError: by a call that the backend can't run, with its reason.
    """
    _check_name(name, "use_backend: name")
    before, _request.name = _request.name, name
    try:
        yield
    finally:
        _request.name = before


def _check_name(name: str, where: str) -> None:
    if name != AUTO and name not in BACKENDS:
        raise ValueError(f"{where} is {name!r}; accepted are {', '.join((AUTO, *BACKENDS))}")


def select(op: str, device: torch.device, name: str, *arguments: Any) -> Any:
    """The backend of ``op`` that runs a call with ``arguments`` (those of its ``fwd``).

    Raises:
        BackendError: if the backend ``name`` can't run it, or ("auto") none can.
    """
    if _explanation.get() is not None:
        _explain_call(op, device, name, arguments)
    backends = _ops[op]
    if name != AUTO:
        return _forced(op, name, arguments)
    for candidate in backend_order(device):
        backend = backends.get(candidate)
        if backend is not None and backend.why_not(*arguments) is None:
            if candidate == "reference" and device.type == "cuda" and op not in _warned:
                _warn_of_reference(op, device, arguments)
            return backend
    reasons = "; ".join(
        f"{n}: {backends[n].why_not(*arguments)}" for n in backend_order(device) if n in backends
    )
    raise BackendError(f"{op}: no backend can run this call on {device} ({reasons})")


def _warn_of_reference(op: str, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """Once for each op: a GPU's owner did not come for plain PyTorch."""
    _warned.add(op)
    reasons = "; ".join(
        f"{name}: {_ops[op][name].why_not(*arguments)}"
        for name in backend_order(device)
        if name in _ops[op] and name != "reference"
    )
    warnings.warn(
        f"{op} on {device} runs as plain PyTorch, right but slow, for no kernel takes this call "
        f"({reasons}); fastattn.explain says so for any call, and this is said once",
        stacklevel=2,
    )


def _forced(op: str, name: str, arguments: tuple[Any, ...]) -> Backend:
    _check_name(name, "FASTATTN_BACKEND")
    backend = _ops[op].get(name)
    if backend is None:
        raise BackendError(f"{op} has no backend {name!r}; it has {', '.join(_ops[op])}")
    reason = backend.why_not(*arguments)
    if reason is not None:
        raise BackendError(f"{op}: backend {name!r} can't run this call: {reason}")
    return backend


def _explain_call(op: str, device: torch.device, name: str, arguments: tuple[Any, ...]) -> None:
    found = _explanation.get()
    assert found is not None
    order = [n for n in backend_order(device) if n in _ops[op]]
    order += [n for n in _ops[op] if n not in order]
    found.op, found.device = op, str(device)
    for candidate in order:
        found.reasons[candidate] = _ops[op][candidate].why_not(*arguments)
    if name == AUTO:
        able = [n for n in order if found.reasons[n] is None and n in backend_order(device)]
        found.chosen = able[0] if able else ""
    else:
        found.chosen = name if found.reasons.get(name, "absent") is None else ""
    raise _Explained


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which backend would run ``function(*args, **kwargs)``, and why each other one would not.

    The call is prepared and checked like any other, but stopped before it computes anything; the
    state of torch's default generator on the CPU is left as it was. Of a function or module that
    makes several fastattn calls, the first is explained.

    Returns:
        An ``Explanation``; ``print`` it, or read ``.chosen`` and ``.reasons``.

    Raises:
        ValueError: if no fastattn op was reached.
    """
    found = Explanation()
    token = _explanation.set(found)
    random_state = torch.get_rng_state()
    try:
        function(*args, **kwargs)
    except _Explained:
        return found
    finally:
        _explanation.reset(token)
        torch.set_rng_state(random_state)
    raise ValueError("explain: the function given called no fastattn op")
