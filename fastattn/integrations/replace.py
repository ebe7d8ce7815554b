"""``replace_attention``: a model of torch's modules runs on fastattn's, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fastattn.integrations._layers import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    why_not_fused,
)
from fastattn.nn import MultiHeadAttention

_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiHeadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerDecoder: TransformerDecoder,
}
_OURS = tuple(_REPLACEMENTS.values())
_ATTENTIONS = ("self_attn", "multihead_attn")
_FUSED_PARTS = ("norm1", "norm2", "norm3", "dropout1", "dropout2", "dropout3")


class Entry(NamedTuple):
    """A module that could have been replaced: its name in the model, its class, what was done."""

    name: str
    kind: str
    replaced: bool
    note: str


@dataclass
class _Before:
    """What a module was, for ``undo``; attributes it had not are absent from ``attributes``."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    added: tuple[str, ...]


class Replacements:
    """What ``replace_attention`` did; ``print`` it for a table.

    Attributes:
        entries: one ``Entry`` (name, kind, replaced, note) per module looked at, in model order.
        dry_run: whether the model was left as it was.
    """

    def __init__(self, entries: list[Entry], before: list[_Before], dry_run: bool) -> None:
        self.entries = entries
        self.dry_run = dry_run
        self._before = before

    @property
    def replaced(self) -> list[str]:
        """Names of the modules that run on fastattn."""
        return [entry.name for entry in self.entries if entry.replaced]

    @property
    def left(self) -> dict[str, str]:
        """Names of the modules left as they were, each with the reason."""
        return {entry.name: entry.note for entry in self.entries if not entry.replaced}

    def undo(self) -> None:
        """Give every module its class back. Parameters stay as they are now, trained or loaded."""
        for before in reversed(self._before):
            before.module.__class__ = before.kind
            before.module.__dict__.update(before.attributes)
            for name in before.added:
                before.module.__dict__.pop(name, None)
        self._before = []

    def __str__(self) -> str:
        verb = "would be replaced" if self.dry_run else "replaced"
        rows = [("module", "class", verb, "note")]
        rows += [(e.name or "(model)", e.kind, "yes" if e.replaced else "no", e.note)
                 for e in self.entries]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        count = len(self.replaced)
        return "\n".join([*(line.rstrip() for line in lines),
                          f"{count} {verb}, {len(self.entries) - count} left"])  # fmt: skip


def replace_attention(model: nn.Module, *, dry_run: bool = False) -> Replacements:
    """Let the attention and Transformer layers of ``model`` run on fastattn, in place.

    Every ``torch.nn.MultiheadAttention`` becomes a ``fastattn.MultiHeadAttention``; in every
    ``TransformerEncoderLayer`` and ``TransformerDecoderLayer`` the residual sum, its dropout and
    the LayerNorm become one op, and in ``eval`` torch's kernels for a whole layer or for nested
    tensors, which would call no attention module, are not taken. The modules stay the same
    objects and change their class, so that parameters, tied ones too, buffers, hooks, dtype,
    device, training state and whatever refers to them stay as they are, and ``state_dict`` fits
    both ways. Numbers change by rounding, and where torch's are not finite; dropout draws other
    random numbers. ``help(fastattn.MultiHeadAttention)`` lists every difference.

    Left as they are, with the reason in the result: subclasses, which have code of their own
    (quantized, parametrized and sharded modules are such), scripted modules, instances whose
    ``forward`` was replaced, and layers whose attention is left. A norm or dropout with hooks or of
    another class is called itself, not fused. Models that call
    ``torch.nn.functional.scaled_dot_product_attention`` run under ``fastattn.patch_sdpa()``.

    Args:
        model: searched with all its submodules; may itself be such a module.
        dry_run: only say what would be done.

    Returns:
        ``Replacements``: ``print`` it for a table; ``.undo()`` takes everything back.

    Raises:
        TypeError: if ``model`` is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; a torch.nn.Module is accepted")
    entries = []
    chosen: dict[nn.Module, type[nn.Module]] = {}
    for name, module in model.named_modules():
        if not _is_candidate(module):
            continue
        reason = _why_not(module)
        note = _note(module) if reason is None else reason
        entries.append(Entry(name, _kind(module), reason is None, note))
        if reason is None:
            chosen[module] = _REPLACEMENTS[type(module)]
    for module in model.modules():  # an encoder that is left must not nest tensors for the others
        if isinstance(module, nn.TransformerEncoder) and not chosen.keys().isdisjoint(
            module.modules()
        ):
            chosen.setdefault(module, type(module))
    before = [] if dry_run else [_replace(module, kind) for module, kind in chosen.items()]
    return Replacements(entries, before, dry_run)


def _is_candidate(module: nn.Module) -> bool:
    scripted = isinstance(module, torch.jit.ScriptModule)
    known = {kind.__name__ for kind in _REPLACEMENTS}
    return isinstance(module, tuple(_REPLACEMENTS)) or (scripted and _kind(module) in known)


def _kind(module: nn.Module) -> str:
    return getattr(module, "original_name", type(module).__name__)


def _why_not(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    if isinstance(module, _OURS):
        return "fastattn's already"
    if type(module) not in _REPLACEMENTS:
        base = next(kind for kind in _REPLACEMENTS if isinstance(module, kind))
        return f"a subclass of {base.__name__}, whose code stays"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    for name, child in module.named_modules():
        parent, _, last = name.rpartition(".")
        if last in _ATTENTIONS if parent == "" else parent == "layers":
            if not isinstance(child, _OURS) and (not _is_candidate(child) or _why_not(child)):
                return f"{name} is left"
    return None


def _note(module: nn.Module) -> str:
    """Of a module to be replaced: which of its parts are called rather than fused."""
    notes = []
    for name in _FUSED_PARTS:
        if (part := getattr(module, name, None)) is not None:
            reason = why_not_fused(part, nn.LayerNorm if "norm" in name else nn.Dropout)
            notes += [] if reason is None else [f"{name} {reason}: not fused"]
    return "; ".join(notes)


def _replace(module: nn.Module, kind: type[nn.Module]) -> _Before:
    attributes: dict[str, Any] = {}
    if isinstance(module, nn.MultiheadAttention):
        attributes = {
            "num_kv_heads": module.num_heads,
            "v_head_dim": module.head_dim,
            "window": None,
            "causal_alignment": "top_left",
            "_qkv_same_embed_dim": False,  # torch's layers ask this before their own kernel
        }
    elif isinstance(module, nn.TransformerEncoder):
        attributes = {"use_nested_tensor": False}
    own = module.__dict__
    before = _Before(
        module,
        type(module),
        {name: own[name] for name in attributes if name in own},
        tuple(name for name in attributes if name not in own),
    )
    own.update(attributes)
    module.__class__ = kind
    return before
