"""Files from the web, kept whole in a cache folder and hashed.

The public homes of these corpora publish no checksums. So the SHA-256 of a file is recorded in
``checksums.json`` at its first download and compared at every later use.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import tarfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from examples.translation.data import CorpusError

STALL_SECONDS = 30
_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"
_FAILURES = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError)


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(url: str, folder: Path, name: str | None = None) -> Path:
    """The file at `url`, from `folder` if it was fetched before.

    Raises CorpusError where it can't be fetched, or isn't what was fetched the first time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or url.rsplit("/", 1)[-1])
    sums_file = folder / "checksums.json"
    sums = json.loads(sums_file.read_text("utf-8")) if sums_file.exists() else {}
    if not path.exists():
        _download(url, path)
    found, expected = sha256(path), sums.get(path.name, {}).get("sha256")
    if expected is None:
        sums[path.name] = {"url": url, "sha256": found, "bytes": path.stat().st_size}
        replace_text(sums_file, json.dumps(sums, indent=2, sort_keys=True) + "\n")
    elif found != expected:
        raise CorpusError(
            f"{path} has SHA-256 {found}, but {expected} was recorded at its first download: "
            f"delete it to fetch it again, and its entry in {sums_file} if the new file is right"
        )
    return path


def why_no_answer(url: str, seconds: float = 4) -> str | None:
    """None if `url` answers within `seconds`, else why not, in a few words."""
    reason = [f"no answer in {seconds:g} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=seconds).close()
            reason.clear()
        except _FAILURES as error:
            reason[0] = str(getattr(error, "reason", None) or error)

    # urllib's own limit leaves out the look-up of the name, which can hang much longer.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return reason[0] if reason else None


def extract(archive: Path, members: list[str], folder: Path) -> list[Path]:
    """The named members of a tar file as files in `folder`, where they are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {member: folder / Path(member).name for member in members}
    missing = {member for member, path in paths.items() if not path.exists()}
    if missing:
        with tarfile.open(archive) as tar:
            for item in tar:
                name = item.name.removeprefix("./")
                if name in missing and (content := tar.extractfile(item)) is not None:
                    part = paths[name].with_name(paths[name].name + ".part")
                    with open(part, "wb") as file:
                        while chunk := content.read(_CHUNK):
                            file.write(chunk)
                    os.replace(part, paths[name])
                    missing.discard(name)
    if missing:
        raise CorpusError(f"{archive} lacks {', '.join(sorted(missing))}")
    return [paths[member] for member in members]


def replace_text(path: Path, text: str) -> None:
    """Writes `text` to `path` so that it is there whole or not at all."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    part.write_bytes(text.encode("utf-8"))
    os.replace(part, path)


def _first_bytes(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(count)


def _download(url: str, path: Path) -> None:
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with urllib.request.urlopen(url, timeout=STALL_SECONDS) as answer, open(part, "wb") as file:
            total = int(answer.headers.get("Content-Length") or 0)
            with tqdm(total=total or None, unit="B", unit_scale=True, desc=path.name) as bar:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
        received = part.stat().st_size
        if total and received != total:
            raise CorpusError(f"{url} broke off after {received} of {total} bytes: try again")
        if path.suffix in (".gz", ".tgz") and _first_bytes(part, 2) != _GZIP:
            raise CorpusError(f"what {url} gave is no gzip file: a login page or proxy, perhaps")
        os.replace(part, path)
    except _FAILURES as error:
        if isinstance(error, CorpusError):
            raise
        reason = getattr(error, "reason", None) or error
        raise CorpusError(
            f"can't download {url} ({reason}); text files of your own go in by files:DIR"
        ) from error
    finally:
        part.unlink(missing_ok=True)
