"""Params as Python packs them, and as C++ has them."""

from __future__ import annotations

from importlib import import_module

import pytest

from fastattn._cuda import emulator, params
from tests.test_layering import OPS, PACKAGE

for op in OPS:
    if (PACKAGE / "ops" / op / "_cuda.py").exists():
        import_module(f"fastattn.ops.{op}._cuda")


@pytest.mark.parametrize("layout", params.ALL, ids=lambda layout: layout.struct_name)
def test_layout_is_that_of_the_struct(layout):
    assert layout.layout() == emulator.layout(layout)
