"""CUDA's language on emulated threads, and the helpers of csrc/common, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastattn._cuda import DROPOUT, Kernel, Params, dropout_fields, emulator
from fastattn.testing import philox
from tests.cuda.kernels import FOLDER

SOURCE = str(FOLDER / "language.cuh")
PARAMS = Params(
    SOURCE, "LanguageParams", out="P", x="P", a="P", b="P", dropout=DROPOUT, count="q", width="i"
)
X = torch.arange(64, dtype=torch.float32)


def arguments(out=None, x=X, a=None, b=None, dropout=(None, 0, 1.0), count=0, width=32) -> bytes:
    return PARAMS.pack(out, x, a, b, *dropout, count, width)


def run(name: str, threads: int = 32, size: int = 128, shared: int = 0, **values) -> torch.Tensor:
    out = torch.full((size,), float("nan"))
    kernel = Kernel(SOURCE, name, threads, shared)
    emulator.launch(kernel, (1, 1, 1), arguments(out, **values))
    return out


@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(width):
    out = run("shuffles", width=width).view(4, 32)
    lane = torch.arange(32)
    first = lane // width * width
    sources = [
        first + 5,
        lane ^ 6,
        torch.where(lane - 3 >= first, lane - 3, lane),
        torch.where(lane + 3 < first + width, lane + 3, lane),
    ]
    assert torch.equal(out, X[torch.stack(sources)])


def test_votes_of_parts_of_a_warp():
    assert run("votes", size=32).tolist() == [1 + 2 + 4] * 16 + [4] * 16


@pytest.mark.parametrize("threads", [32, 64, 256])
def test_reductions(threads):
    out = run(f"reductions<{threads}>", threads, shared=1024)
    x = X.repeat(4)[:threads]
    assert out[0] == x.sum() and out[1] == 0
    assert torch.equal(out[32:64], X[:32].view(4, 8).sum(1).repeat_interleave(8))


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float"), (torch.float16, "__half")])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64])
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_of_any_length_and_alignment(dtype, name, count, offset):
    x = torch.arange(80, dtype=dtype)
    out = torch.full((80,), -1.0, dtype=dtype)
    kernel = Kernel(SOURCE, f"move_row<{name}, 8>", 32)
    emulator.launch(kernel, (1, 1, 1), arguments(out, x, count=count, width=1 - offset))
    expected = torch.full_like(out, -1)
    expected[offset : offset + count] = x[offset : offset + count]
    assert torch.equal(out, expected)


def test_philox_of_kernels_is_the_specification_s():
    rng = torch.tensor([0x0123456789ABCDEF, 0xFFFF00000005])
    out = run("random_words", dropout=dropout_fields(rng, 0.5)).view(torch.int32).view(32, 4)
    for group in range(32):
        counter = np.array([group, 7, 0xFFFFFFFE, 5], dtype=np.uint32)
        words = philox.philox4x32(counter, (0x89ABCDEF, 0x01234567))
        assert [int(w) & 0xFFFFFFFF for w in out[group]] == [int(w) for w in words]


@pytest.mark.parametrize(("depth", "arch"), [(8, "750"), (16, "800")])
def test_tensor_cores_multiply(monkeypatch, depth, arch):
    monkeypatch.setenv("FASTATTN_EMULATOR_ARCH", arch)
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).half(), torch.randn(16, 8).half()
    out = run(f"multiply<{depth}>", shared=768, a=a, b=b).view(16, 8)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=0, atol=1e-5)


def test_asynchronous_copies(monkeypatch):
    monkeypatch.setenv("FASTATTN_EMULATOR_ARCH", "800")
    assert torch.equal(run("copies", shared=512), torch.cat([X, torch.zeros(64)]))


def banks(name: str, width: int) -> list[int]:
    """Accesses, wavefronts and wavefronts without conflict of the kernel's one access."""
    kernel = Kernel(SOURCE, name, 32, 4608)
    out = torch.empty(64)
    with emulator.counting_banks() as counts:
        emulator.launch(kernel, (1, 1, 1), arguments(out, width=width))
    ((place, *what),) = counts[name]
    assert place.startswith("language.cuh:")
    assert what[:2] == (["store", 4] if "store" in name else ["load", 16])
    return what[2:]


def test_bank_counts_add_up():
    with emulator.counting_banks() as counts:
        for _ in range(3):
            run("strided_load", shared=4608, width=8)
    assert [use[3:] for use in counts["strided_load"]] == [(3, 24, 12)]


@pytest.mark.parametrize(
    ("stride", "wavefronts"), [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (0, 1)]
)
def test_bank_conflicts_of_floats(stride, wavefronts):
    if stride == 0:
        pytest.raises(emulator.EmulatorError, banks, "strided_store", 0)  # all store one word
    else:
        assert banks("strided_store", stride) == [1, wavefronts, 1]


@pytest.mark.parametrize(
    ("stride", "wavefronts"), [(4, 4), (8, 8), (32, 32), (36, 4), (0, 4), (12, 4)]
)
def test_bank_conflicts_of_vectors(stride, wavefronts):
    """Quarters of a warp: 8 lanes of 16 bytes fill the 32 banks once."""
    assert banks("strided_load", stride) == [1, wavefronts, 4]
