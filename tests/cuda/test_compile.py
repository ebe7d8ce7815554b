"""NVRTC, the cache of compiled kernels, and ``python -m fastattn compile``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from fastattn import __main__
from fastattn._cuda import Kernel, cubins, folder, headers, nvrtc, sources
from tests.cuda.kernels import run_python

KERNEL = Kernel("dropout/dropout.cuh", "fa::dropout_forward<float>", 256)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """A cache of its own, empty."""
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "cubin"
    forget()


def forget() -> None:
    folder.cache_folder.cache_clear()
    cubins._folder.cache_clear()
    cubins._compiled.clear()


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """The names of the kernels compiled, none of them kept from before."""
    found = []
    compile_kernel = nvrtc.Nvrtc.compile

    def noted(self, source, name, arch, *more):
        found.append(name)
        return compile_kernel(self, source, name, arch, *more)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", noted)
    return found


class Library:
    """An NVRTC that knows some architectures."""

    def __init__(self, version, *architectures):
        self.version, self.architectures = version, architectures


# ---- finding a compiler


def test_the_test_extra_s_compiler_is_found():
    library, arch = nvrtc.choose(60)
    assert (library.version[0], arch) == (12, 60)
    assert (library.headers() / "cuda_fp16.h").is_file()


def test_a_card_gets_the_newest_architecture_it_runs(monkeypatch):
    library = Library((12, 6), 60, 75, 80, 86, 90)
    monkeypatch.setattr(nvrtc, "found", lambda: (library,))
    chosen = {card: nvrtc.choose(card)[1] for card in (60, 61, 75, 80, 87, 89, 90)}
    assert chosen == {60: 60, 61: 60, 75: 75, 80: 80, 87: 86, 89: 86, 90: 90}


def test_a_compiler_that_knows_the_card_is_preferred(monkeypatch):
    new, old = Library((13, 0), 75, 80), Library((12, 9), 60, 75)
    monkeypatch.setattr(nvrtc, "found", lambda: (new, old))
    assert nvrtc.choose(60) == (old, 60) and nvrtc.choose(75) == (new, 75)


@pytest.mark.parametrize(
    ("libraries", "message"),
    [
        ((), r"no NVRTC, .*, was found: pip install 'fastattn\[cuda12\]'"),
        (
            (Library((13, 0), 75, 80),),
            r"no NVRTC here compiles for sm_60 \(NVRTC 13.0 knows sm_75 sm_80\): pip install",
        ),
    ],
)
def test_what_to_install_is_said(monkeypatch, libraries, message):
    monkeypatch.setattr(nvrtc, "found", lambda: libraries)
    with pytest.raises(nvrtc.CompileError, match=message) as raised:
        nvrtc.choose(60)
    assert "\n" not in str(raised.value)


def test_a_missing_header_is_named(monkeypatch):
    library, _ = nvrtc.choose(60)
    monkeypatch.setattr(headers, "find", lambda *_, **__: None)
    with pytest.raises(nvrtc.CompileError, match="cuda_fp16.h .*: pip install nvidia-cuda-runtime"):
        library.headers()


def test_a_compile_error_names_kernel_and_line(tmp_path):
    source = tmp_path / "broken.cuh"
    source.write_text("template <int N> __global__ void broken(const int p) { nonsense; }\n")
    library, _ = nvrtc.choose(60)
    with pytest.raises(nvrtc.CompileError, match=r"(?s)broken<3> .* sm_60:.*broken.cuh\(1\)"):
        library.compile(str(source), "broken<3>", 60)


# ---- the cache


def test_a_kernel_is_compiled_once(cache, compilations):
    first = cubins.get(KERNEL, 60)
    cubins._compiled.clear()
    assert cubins.get(KERNEL, 60) == first
    assert first.cubin.startswith(b"\x7fELF") and "dropout_forward" in first.function
    assert compilations == [KERNEL.name]
    assert len(list(cache.iterdir())) == 1


def test_what_decides_about_the_result_is_in_the_name(cache, monkeypatch):
    library, _ = nvrtc.choose(60)
    names = {
        cubins.file_of(KERNEL, 60, library),
        cubins.file_of(KERNEL, 75, library),
        cubins.file_of(KERNEL._replace(name="fa::dropout_forward<__half>"), 60, library),
    }
    monkeypatch.setattr(sources, "digest", lambda source: "changed")
    names.add(cubins.file_of(KERNEL, 60, library))
    monkeypatch.setattr(nvrtc, "_OPTIONS", ("-G",))
    names.add(cubins.file_of(KERNEL, 60, library))
    assert len(names) == 5


def test_sources_are_known_by_what_they_include(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "root", lambda: tmp_path)
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n')
    digests = []
    for text in ("int b;", "int c;"):
        (tmp_path / "b.cuh").write_text(text)
        sources.included.cache_clear()
        sources.digest.cache_clear()
        digests.append(sources.digest("a.cuh"))
    sources.included.cache_clear()
    sources.digest.cache_clear()
    assert digests[0] != digests[1]


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "head", "other"])
def test_a_damaged_file_is_compiled_again(cache, compilations, damage):
    whole = cubins.get(KERNEL, 60)
    (path,) = cache.iterdir()
    content = path.read_bytes()
    path.write_bytes({
        "cut": content[:-100],
        "bit": content[:-1] + bytes([content[-1] ^ 1]),
        "empty": b"",
        "head": b"[]\n" + content.split(b"\n", 1)[1],
        "other": b"\xff\xfe\x00",
    }[damage])  # fmt: skip
    cubins._compiled.clear()
    again = cubins.get(KERNEL, 60)
    assert again.cubin.startswith(b"\x7fELF") and again.function == whole.function
    assert len(compilations) == 2 and cubins._read(path) == again


def test_the_least_recently_used_go_first(cache, monkeypatch):
    cubins._folder()
    for age, name in enumerate("abcd"):
        path = cache / f"{name}.cubin"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(cubins, "MAX_BYTES", 250)
    cubins._trim(cache)
    assert sorted(p.stem for p in cache.iterdir()) == ["a", "b"]


def test_a_full_disk_costs_only_compiling_again(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cubins, "write_atomically", full)
    assert cubins.get(KERNEL, 60).cubin.startswith(b"\x7fELF")


def test_eight_processes_at_once(tmp_path):
    code = """
import os
from fastattn._cuda import Kernel, cubins
def child():
    kernel = Kernel("dropout/dropout.cuh", "fa::dropout_forward<float>", 256)
    os._exit(0 if cubins.get(kernel, 60).cubin.startswith(b"\\x7fELF") else 1)
children = []
for _ in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        child()
assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in children)
"""
    result = run_python(code, FASTATTN_CACHE_DIR=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    assert [p.suffix for p in (tmp_path / "cache" / "cubin").iterdir()] == [".cubin"]


# ---- its folder


def test_the_folder_is_private(cache):
    made = folder.cache_folder()
    assert made == cache.parent and made.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_refused(cache):
    cache.parent.mkdir()
    cache.parent.chmod(0o770)
    with pytest.raises(ValueError, match=f"{folder.VARIABLE}: .*other users; chmod 700"):
        folder.cache_folder()


def test_a_folder_of_somebody_else_is_refused(cache, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=f"{folder.VARIABLE}: .*belongs to another user"):
        folder.cache_folder()


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", folder.VARIABLE])
def test_a_home_that_cannot_be_written_costs_the_cache_only(cache, monkeypatch, variable):
    monkeypatch.delenv(folder.VARIABLE)
    monkeypatch.setenv(variable, "/dev/null/home")
    with pytest.warns(UserWarning, match="kept for this process only.*/dev/null/home.*be written"):
        made = folder.cache_folder()
    assert made.stat().st_mode & 0o777 == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.cache_folder() == made  # said once
    assert cubins.get(KERNEL, 60).cubin.startswith(b"\x7fELF")


# ---- the command


def run_compile(*arguments: str) -> int:
    return __main__.main(["compile", *arguments])


def test_the_command_compiles_the_default_sets(cache, capsys):
    assert run_compile("--arch", "sm_60,sm_75", "--ops", "dropout", "--jobs", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 3 + 1
    assert lines[0].startswith("sm_60 ") and lines[0].endswith(" s  fa::dropout_forward<float>")
    assert lines[-1].startswith("6 kernels, 6 of them compiled now, in ")
    assert run_compile("--arch", "sm_60", "--ops", "dropout", "--jobs", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("kept" in line for line in lines[:3])
    assert lines[-1].startswith("3 kernels, 0 of them compiled now, in ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arch=60", "--arch: '60' is no architecture such as sm_60"),
        ("--arch=sm_60 --jobs=0", "--jobs: '0' is no positive number"),
        ("--arch=sm_60 --ops=x --jobs=1", "ops: 'x' has no CUDA kernels; accepted are "),
        ("--arch=sm_20 --jobs=1", "no NVRTC here compiles for sm_20 (NVRTC 12."),
        ("", "the following arguments are required: --arch"),
    ],
)
def test_bad_arguments_get_one_line(cache, capsys, arguments, message):
    try:
        code = run_compile(*arguments.split())
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert message in said.err and said.err.count("\n") == 1
