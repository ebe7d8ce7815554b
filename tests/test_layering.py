"""Who may import whom. The rules are those of docs and design: layers only look downwards.

examples, benchmarks -> the public names; nn -> functional -> ops; ops never -> each other;
references -> torch alone; _cpu and _cuda -> _native -> _C; triton only in files of kernels, which
are imported inside functions; csrc: bindings -> ops -> common, and nothing of torch.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fastattn"
OPS = sorted(p.name for p in (PACKAGE / "ops").iterdir() if (p / "_op.py").exists())
# Words, randomness and dtypes: what any layer may use.
SUPPORT = {"fastattn._checks", "fastattn._autocast", "fastattn._philox"}
NATIVE_USERS = re.compile(r"/(_(\w+_)?(cpu|cuda)|_status|__main__|_cuda/driver)\.py$")
KERNELS = re.compile(r"_\w*triton_\w*kernels\.py|philox\.py")  # of Triton


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Full names of the modules that a file imports, ``from a import b`` as both a and a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if top_level and node in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def sources(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in found if "__pycache__" not in p.parts]


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] == "fastattn"}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def assert_no(path: Path, forbidden: set[str]) -> None:
    assert not forbidden, f"{path.relative_to(ROOT)} imports {', '.join(sorted(forbidden))}"


@pytest.mark.parametrize("path", sources("examples", "benchmarks"), ids=lambda p: p.name)
def test_examples_and_benchmarks_use_public_names(path):
    hidden = {n for n in ours(path) if "._" in n or within(n, "fastattn.ops")}
    if path == ROOT / "benchmarks/machine.py":  # which says what CPU the kernels found
        hidden = {n for n in hidden if not within(n, "fastattn._native")}
    assert_no(path, hidden)


@pytest.mark.parametrize("path", sources("examples"), ids=lambda p: p.name)
def test_examples_need_no_testing_kit(path):
    assert_no(path, {n for n in ours(path) if within(n, "fastattn.testing")})


def test_the_library_never_imports_its_testing_kit():
    for path in sources("fastattn"):
        if PACKAGE / "testing" not in path.parents:
            assert_no(path, {n for n in ours(path) if within(n, "fastattn.testing")})


def test_modules_stand_on_functions():
    allowed = {"fastattn", "fastattn.functional", *SUPPORT}
    for path in sources("fastattn/nn"):
        assert_no(path, {
            n for n in ours(path)
            if n not in allowed and not within(n, "fastattn.nn")
            and not any(within(n, a) for a in allowed - {"fastattn"})
        })  # fmt: skip


def test_integrations_stand_on_modules_and_functions():
    allowed = ("fastattn.nn", "fastattn.functional", "fastattn.integrations")
    for path in sources("fastattn/integrations"):
        assert_no(
            path, {n for n in ours(path) - {"fastattn"} if not any(within(n, a) for a in allowed)}
        )


def test_functions_stand_on_ops():
    below = ("fastattn.ops", "fastattn._dispatch", *SUPPORT)
    path = PACKAGE / "functional.py"
    assert_no(path, {n for n in ours(path) - {"fastattn"} if not any(within(n, b) for b in below)})


@pytest.mark.parametrize("op", OPS)
def test_ops_do_not_know_each_other_or_what_stands_on_them(op):
    above = ("fastattn.nn", "fastattn.functional", "fastattn.integrations")
    others = tuple(f"fastattn.ops.{other}" for other in OPS if other != op)
    for path in sources(f"fastattn/ops/{op}"):
        assert_no(path, {n for n in ours(path) if any(within(n, a) for a in (*above, *others))})


def test_references_are_plain_torch():
    found = [p for p in sources("fastattn/ops") if p.name.endswith("reference.py")]
    assert len(found) >= len(OPS)
    for path in found:
        own = f"fastattn.ops.{path.parent.name}"
        assert_no(path, {
            n for n in imports(path)
            if n.split(".")[0] not in {"torch", *sys.stdlib_module_names}
            and not within(n, "fastattn._philox")
            and not (n == own or within(n, f"{own}.reference"))
        })  # fmt: skip


def test_only_native_imports_the_extension():
    for path in sources("fastattn", "examples", "benchmarks"):
        if path.name != "_native.py":
            assert_no(path, {n for n in imports(path) if within(n, "fastattn._C")})


def test_only_native_backends_and_the_report_import_native():
    for path in sources("fastattn"):
        if not NATIVE_USERS.search(str(path)):
            assert_no(path, {n for n in ours(path) if within(n, "fastattn._native")})


@pytest.mark.parametrize("optional", ["triton", "numpy", "transformers"])
def test_optional_packages_are_imported_late(optional):
    for path in sources("fastattn"):
        is_kernel = optional == "triton" and KERNELS.fullmatch(path.name)
        if PACKAGE / "testing" not in path.parents and not is_kernel:
            late = imports(path, top_level=True)
            assert_no(path, {n for n in late if within(n, optional)})


def test_files_of_triton_kernels_are_imported_late():
    found = [p for p in sources("fastattn/ops", "fastattn/_triton") if KERNELS.fullmatch(p.name)]
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in found}
    assert len(modules) > 3
    for path in sources("fastattn"):
        if path not in found:
            assert_no(path, imports(path, top_level=True) & modules)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.M)


def native_sources() -> list[Path]:
    kinds = {".h", ".cpp", ".cu", ".cuh"}
    return [p for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in kinds]


def test_native_code_knows_no_torch():
    assert native_sources()
    for path in native_sources():
        theirs = [n for n in includes(path) if re.match(r"(torch|ATen|c10|caffe2)/", n)]
        assert_no(path, set(theirs))


def test_native_layers_look_downwards():
    layers = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()}
    for path in native_sources():
        layer = path.relative_to(ROOT / "csrc").parts[0]
        if layer == "bindings":
            continue
        allowed = {"common"} if layer in ("common", *OPS) else {"common", *OPS}
        named = {n for n in includes(path) if n.split("/")[0] in layers - {layer} - allowed}
        assert_no(path, named)
        assert_no(path, {n for n in includes(path) if n.startswith(("pybind11", "Python.h"))})


def test_import_touches_no_gpu_no_kernel_and_no_optional_package():
    code = (
        "import sys, fastattn, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "named = ['triton', 'fastattn._C', 'fastattn.testing', 'transformers', 'matplotlib']\n"
        "named += ['torch._dynamo']  # seconds\n"
        "print([name for name in named if name in sys.modules])\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
