"""Puts an nvdisasm that reads sm_60 beside this Python, for ``python -m tools.gates``.

NVIDIA's own package on PyPI begins with CUDA 13.2, which refuses cards before sm_75. Triton 3.6.0's
wheel carries that of CUDA 12.8: it is downloaded, and only the one program kept.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "triton==3.6.0"
MEMBER = "triton/backends/nvidia/bin/nvdisasm"


def main() -> int:
    target = Path(sys.executable).with_name("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            part = target.with_suffix(".part")
            part.write_bytes(archive.read(MEMBER))
    part.chmod(0o755)
    part.replace(target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
