"""Bytes that are checked before anyone sees them: bundled files, checksum lists, our cache directory."""

import bz2
import contextlib
import hashlib
import io
import os
import re
import sys
import textwrap
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from depthlab.runs.progress import in_ci

_DOWNLOADS = threading.RLock()
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00-\x1f]+)")


class DataError(ValueError):
    """Data that is missing, damaged or out of reach; the message is one sentence with the remedy."""


def sha256(content: bytes | bytearray) -> str:
    """Hexadecimal SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file of any size, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_sums(text: str) -> dict[str, str]:
    """File name -> SHA-256 from the lines of a ``SHA256SUMS`` file (the format of ``sha256sum``).

    Raises:
        ValueError: a line of another form or a name listed twice.
    """
    sums: dict[str, str] = {}
    for line in text.removesuffix("\n").split("\n"):
        match = _SUM_LINE.fullmatch(line)
        if match is None or match[2] in sums:
            raise ValueError(f"bad line {line!r}")
        sums[match[2]] = match[1]
    return sums


def bundle(folder: str, name: str) -> bytes:
    """Decompressed content of the bundled file ``data/<folder>/<name>.bz2``.

    The compressed bytes are compared with ``SHA256SUMS`` beside them before anything is decompressed.

    Raises:
        DataError: the file or its checksum is missing, or they do not agree.
    """
    place = files("depthlab.bundles") / folder
    packed = f"{name}.bz2"
    remedy = "restore it with `git checkout data` or reinstall depthlab"
    try:
        # Not read_text: its universal newlines would hide a changed line end.
        sums = parse_sums((place / "SHA256SUMS").read_bytes().decode("ascii"))
    except (OSError, ValueError) as error:
        raise DataError(f"The checksum list {place / 'SHA256SUMS'} cannot be used ({gist(error)}); {remedy}.") from None
    if packed not in sums:
        raise DataError(f"The checksum list {place / 'SHA256SUMS'} has no line for {packed}; {remedy}.")
    try:
        content = (place / packed).read_bytes()
    except OSError as error:
        raise DataError(f"The bundled file {place / packed} cannot be read ({gist(error)}); {remedy}.") from None
    if sha256(content) != sums[packed]:
        raise DataError(
            f"The bundled file {place / packed} ({len(content):,} bytes) does not have its listed SHA-256; {remedy}."
        )
    return bz2.decompress(content)


def cache_dir() -> Path:
    """Where complete downloads are kept: ``$DEPTHLAB_CACHE``, else ``depthlab`` in the platform's cache directory.

    Raises:
        DataError: the folder lies below a home directory that the system does not know.
    """
    given = os.environ.get("DEPTHLAB_CACHE")
    try:
        if given:
            return Path(given).expanduser().absolute()
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        where = f"DEPTHLAB_CACHE={given}" if given else "The default cache"
        raise DataError(
            f"{where} lies below an unknown home; set DEPTHLAB_CACHE to the full path of a folder."
        ) from None
    return base / "depthlab"


def gist(error: BaseException, last_line: bool = False) -> str:
    """What an exception says, short enough to stand inside a sentence; of a report of many lines perhaps the last."""
    text = getattr(error, "strerror", None) or str(getattr(error, "reason", "")) or str(error) or type(error).__name__
    if last_line:
        text = text.strip().split("\n")[-1]
    return textwrap.shorten(text, 120, placeholder=" ...").rstrip(".;")


@contextlib.contextmanager
def downloading() -> Iterator[None]:
    """One download at a time, because what it changes (stderr, a time limit) belongs to all threads.

    In CI it swallows other libraries' progress bars: nobody watches them there.
    """
    quiet = contextlib.redirect_stderr(io.StringIO()) if in_ci() else contextlib.nullcontext()
    with _DOWNLOADS, quiet:
        yield
