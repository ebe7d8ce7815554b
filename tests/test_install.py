"""What gets installed, from where, and what is said when something is missing."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

import fastattn
from fastattn import _gpus

ROOT = Path(__file__).parents[1]
SOURCES = (
    "csrc fastattn docs tools tests/test_install.py setup.py pyproject.toml MANIFEST.in Makefile "
    "README.md LICENSE CHANGELOG.md CONTRIBUTING.md .clang-format"
).split()
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install_torch = load_tool("install_torch")


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources without anything built."""
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in SOURCES:
        source, target = ROOT / name, tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=built)
        else:
            shutil.copy(source, target)
    return tmp_path / "tree"


def build(tree, hook, **environment):
    """The archive that ``hook``, "build_sdist" or "build_wheel", makes of ``tree``."""
    out = tree.parent / "dist"
    out.mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(out)],
        cwd=tree, env={**os.environ, **environment}, check=True, capture_output=True,
    )  # fmt: skip
    (archive,) = out.iterdir()
    return archive


def test_the_source_archive_can_be_built_from(tree):
    archive = build(tree, "build_sdist")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[-1] for name in tar.getnames()}
    sources = {str(p.relative_to(tree)) for p in (tree / "csrc").rglob("*") if p.is_file()}
    assert sources and sources <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "fastattn/py.typed"} <= names
    assert "tests/test_install.py" in names


def test_a_wheel_without_compiler_is_pure_python(tree):
    archive = build(tree, "build_wheel", CXX="/nonexistent/c++")
    assert archive.name == f"fastattn-{fastattn.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(archive).namelist()
    assert not [name for name in names if re.search(r"\.so$|^(tests|examples|csrc|tools)/", name)]
    assert {name.split("/")[0] for name in names} == {
        "fastattn", f"fastattn-{fastattn.__version__}.dist-info"
    }  # fmt: skip
    assert any(name.endswith("licenses/LICENSE") for name in names)
    packaged = {name for name in names if name.startswith("fastattn/")}
    written = {str(p.relative_to(tree)) for p in (tree / "fastattn").rglob("*.py")}
    kernels = {f"fastattn/{p.relative_to(tree)}" for p in (tree / "csrc").rglob("*.cuh")}
    assert packaged == written | kernels | {"fastattn/py.typed"}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="native kernels need Linux")
def test_a_wheel_with_native_code_works_elsewhere(tree, tmp_path):
    archive = build(tree, "build_wheel", FASTATTN_BUILD_ISA="generic")
    assert "-linux_" in archive.name
    elsewhere = tmp_path / "elsewhere"
    zipfile.ZipFile(archive).extractall(elsewhere)
    assert len(list(elsewhere.rglob("*.so"))) == 1
    program = (
        "import torch, fastattn; x = torch.randn(3, 4, requires_grad=True)\n"
        "print(fastattn.__file__, fastattn.explain(fastattn.softmax, x).chosen)\n"
        "fastattn.softmax(x).sum().backward(); assert x.grad.abs().max() < 1e-6"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(elsewhere)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.split() == [str(elsewhere / "fastattn" / "__init__.py"), "cpu"]
    result = subprocess.run(
        [sys.executable, "-m", "fastattn", "compile", "--arch=sm_60", "--ops=dropout"],
        cwd=elsewhere, env={**os.environ, "FASTATTN_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "3 kernels, 3 of them compiled now" in result.stdout


def test_versions_agree():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared.group(1) == fastattn.__version__
    assert f"## {fastattn.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_nothing_of_torch_or_cuda_is_needed_to_build():
    (requires,) = re.findall(r"^requires = .*$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert not re.search("torch|nvidia|cuda", requires)


def test_without_torch_one_sentence_says_what_to_install():
    program = "import sys; sys.modules['torch'] = None; import fastattn"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.count("Traceback") == 1
    assert result.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: fastattn needs PyTorch 2.7 or newer, which is not installed: "
        "pip install torch"
    )


@pytest.mark.parametrize(
    ("gpus", "system", "online", "index", "says"),
    [
        (None, "Linux", True, install_torch.CPU, "CPU build"),
        (None, "Linux", False, None, "can't be reached"),
        (None, "Darwin", True, None, "CPU build"),
        (None, "Windows", False, None, "CPU build"),
        ([((6, 0), 570)], "Linux", True, install_torch.CUDA_12_6, "6.0"),
        ([((8, 0), 580), ((6, 1), 580)], "Linux", True, install_torch.CUDA_12_6, "6.1"),
        ([((8, 0), 535)], "Linux", True, install_torch.CUDA_12_6, "driver 535"),
        ([((9, 0), 580)], "Linux", True, None, "CUDA build"),
        ([], "Linux", True, None, "CUDA build"),
    ],
)
def test_the_index_that_make_takes_torch_from(gpus, system, online, index, says):
    chosen, why = install_torch.choose_index(gpus, system, lambda url: online)
    assert chosen == index
    assert says in why


@pytest.mark.parametrize("driver", [535, 580])
@pytest.mark.parametrize("capability", [(5, 2), (6, 0), (7, 0), (7, 5), (8, 6), (9, 0), (12, 0)])
def test_make_and_the_status_give_the_same_advice(capability, driver):
    index, _ = install_torch.choose_index([(capability, driver)], "Linux", lambda url: True)
    command = _gpus.install_command(capability, driver)
    assert command.endswith("torch" if index is None else f"torch --index-url {index}")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("6.0, 570.86.15\n8.0, 570.86.15", [((6, 0), 570), ((8, 0), 570)]),
        ("NVIDIA-SMI has failed because it could not talk to the driver", None),
        ("", None),
    ],
)
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="the machine has a GPU of its own")
def test_finding_gpus_without_torch(monkeypatch, tmp_path, answer, found):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert install_torch.find_gpus() == found


def test_an_index_is_reached_or_not():
    class Home(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path == "/whl/torch/" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Home)
    Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}"
    assert install_torch.reaches(f"{home}/whl")
    assert not install_torch.reaches(f"{home}/elsewhere")
    server.shutdown()
    server.server_close()
    assert not install_torch.reaches(f"{home}/whl")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("version", ["(3, 9)", "(3, 14)"])
def test_make_refuses_a_python_it_cannot_use(tmp_path, version):
    python = tmp_path / "python"
    lie = f"import sys; sys.version_info = {version}; exec(sys.argv[2])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{lie}" "$@"\n')
    python.chmod(0o755)
    result = subprocess.run(
        ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode != 0 and not (tmp_path / "venv").exists()
    assert "fastattn needs Python 3.10 to 3.13, and " in result.stderr
    assert version.strip("()").replace(", ", ".") in result.stderr
