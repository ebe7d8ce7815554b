"""The kernels that are held to limits, and the limits.

Attention: a product of csrc/attention/attention_product.cuh is 64 x 64 x 32 multiply-adds by 128
threads, 1024 FFMA a thread, one innermost loop. A pass of the tile loop is 64 queries by 64 keys;
a product with D columns takes D / 32 of them.
"""

from __future__ import annotations

from fastattn._cuda import Kernel, catalog
from tools.gates.table import Gate

_PIECE = 8 << 10  # bytes of shared memory


def _attention(arch: int, type_name: str, dim: int, option: str, **limits) -> list[Gate]:
    """Forward, dQ and dK/dV; ``option`` is "full", "causal", "bias" or "dropout"."""
    flags = ", ".join(
        str(on).lower() for on in (option != "full", option == "bias", option == "dropout")
    )
    kernels = {
        "forward": ("fwd", f"attention_forward<{type_name}, {dim}", 4 if dim == 64 else 2, 2),
        "dQ": ("bwd", f"attention_grad_query<{type_name}, {dim}", 2, 3),
    }
    if dim == 64:
        name = f"attention_grad_key_value<{type_name}, 64, 64"
        kernels["dK/dV"] = ("bwd", name, 2, 4)
    gates = []
    for direction, (file, name, pieces, products) in kernels.items():
        kernel = Kernel(
            f"attention/attention_{file}.cuh", f"fa::{name}, {flags}>", 128, pieces * _PIECE
        )
        own = {
            k: v[direction == "forward"] if isinstance(v, tuple) else v for k, v in limits.items()
        }
        own.setdefault("shared", pieces * _PIECE)
        gates.append(
            Gate(
                f"attention {direction}, {type_name}, D={dim}, {option}",
                kernel,
                arch,
                "FFMA",
                product=1024,
                pieces=dim // 32,
                products=products * dim // 32,
                **own,
            )  # fmt: skip
        )
    return gates


def _rows(arch: int) -> list[Gate]:
    """The default sets of the ops over rows: no spills, and other blocks while one waits.

    LayerNorm's backward holds xhat, the gradient and two sums of 32 columns a thread.
    """
    return [
        Gate(
            kernel.name.removeprefix("fa::").removesuffix(">").replace("<", " "),
            kernel,
            arch,
            blocks=2 if "layer_norm_backward" in kernel.name else 4,
        )
        for kernel in catalog.kernels(arch, ("add_layer_norm", "softmax", "linear_cross_entropy"))
    ]


def _all() -> list[Gate]:
    gates = []
    for type_name in ("float", "__half"):
        # (backward, forward). The causal forward at 128 registers has four times the clashes of
        # register banks, and shared memory allows it no third block.
        share = 0.8 if type_name == "float" else 0.79
        for option, registers in (("full", 128), ("causal", 168)):
            gates += _attention(
                60, type_name, 64, option,
                registers=(255, registers), blocks=2, share=share, math_share=0.88,
            )  # fmt: skip
        gates += _attention(60, type_name, 64, "bias", blocks=2, share=0.7)
        gates += _attention(60, type_name, 64, "dropout", blocks=2, share=(0.65, 0.55))
        gates += _attention(60, type_name, 128, "causal", blocks=(1, 2))
    return gates + _rows(60) + _rows(75)


GATES = _all()
