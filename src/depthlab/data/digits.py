"""MNIST: 12,000 bundled digits, or the complete set from a folder, our cache or torchvision's mirrors.

LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
"""

import contextlib
import gzip
import os
import socket
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from depthlab.data.files import DataError, bundle, cache_dir, downloading, gist, sha256

SPLITS = {"train": "train", "test": "t10k"}  # our name -> the prefix of the official files
_IMAGES_MAGIC, _LABELS_MAGIC = 0x803, 0x801


class MNIST(NamedTuple):
    """Handwritten digits: images uint8 [N, 28, 28] (0 is background), labels int64 [N] in 0..9, and their origin."""

    images: torch.Tensor
    labels: torch.Tensor
    source: str


def file_names(split: str) -> tuple[str, str]:
    """Names of the official image file and label file of a split."""
    return f"{SPLITS[split]}-images-idx3-ubyte", f"{SPLITS[split]}-labels-idx1-ubyte"


def parse_idx(images: bytes, labels: bytes, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 [N, 28, 28] and labels int64 [N] from an image file and a label file in the IDX format.

    Args:
        images: magic 0x803, count, 28, 28 (big-endian 32-bit), then one byte a pixel.
        labels: magic 0x801, count, then one byte a digit.
        where: what the files are called in error messages.

    Raises:
        DataError: wrong magic number, size or label, or counts that differ.
    """
    if len(images) < 16 or struct.unpack(">I", images[:4])[0] != _IMAGES_MAGIC:
        raise DataError(f"The images of {where} do not start as an IDX image file; get the official file.")
    if len(labels) < 8 or struct.unpack(">I", labels[:4])[0] != _LABELS_MAGIC:
        raise DataError(f"The labels of {where} do not start as an IDX label file; get the official file.")
    count, rows, columns = struct.unpack(">III", images[4:16])
    (label_count,) = struct.unpack(">I", labels[4:8])
    if count == 0 or (rows, columns) != (28, 28) or len(images) != 16 + count * 28 * 28:
        raise DataError(
            f"The images of {where} announce {count} x {rows} x {columns} pixels in {len(images)} bytes, "
            "not whole 28 x 28 images; get the official file."
        )
    if len(labels) != 8 + label_count or label_count != count:
        raise DataError(
            f"The labels of {where} announce {label_count} digits in {len(labels)} bytes for {count} images; "
            "get the official pair of files."
        )
    digits = torch.frombuffer(bytearray(labels), dtype=torch.uint8, offset=8).long()
    if int(digits.max()) > 9:
        raise DataError(
            f"The labels of {where} hold the value {int(digits.max())}, not a digit; get the official file."
        )
    pixels = torch.frombuffer(bytearray(images), dtype=torch.uint8, offset=16).view(count, 28, 28)
    return pixels, digits


def bundled(split: str) -> MNIST:
    """The bundled digits of a split: 10,000 training or 2,000 test images, class shares of the full set."""
    images, labels = parse_idx(*(bundle("mnist", name) for name in file_names(split)), f"the bundled {split} digits")
    total = {"train": "60,000", "test": "10,000"}[split]
    return MNIST(images, labels, f"bundle: {len(labels):,} of MNIST's {total} {split} digits")


# The official files, uncompressed: size and SHA-256. Whatever the origin, only these bytes are the complete MNIST.
OFFICIAL = {
    "train-images-idx3-ubyte": (47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "train-labels-idx1-ubyte": (60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    "t10k-images-idx3-ubyte": (7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    "t10k-labels-idx1-ubyte": (10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
}


def read_official(path: Path, name: str, remedy: str) -> bytes:
    """Content of the official file `name` stored at `path`, plain or (suffix .gz) compressed.

    Raises:
        DataError: unreadable, another size, or another SHA-256; the sentence names `path` and ends with `remedy`.
    """
    size, digest = OFFICIAL[name]
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(size + 1)  # no more than one byte too many, whatever a damaged archive unpacks to
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"The MNIST file {path} cannot be read ({gist(error)}); {remedy}.") from None
    if len(content) != size:
        found = f"{len(content):,}" if len(content) < size else f"more than {size:,}"
        raise DataError(f"The MNIST file {path} holds {found} bytes where the official one has {size:,}; {remedy}.")
    if sha256(content) != digest:
        raise DataError(f"The MNIST file {path} does not have the SHA-256 of the official one; {remedy}.")
    return content


def _find(folder: Path, name: str) -> Path | None:
    """`name` or `name`.gz in `folder` itself or where torchvision puts it below its own root."""
    for place in (folder, folder / "MNIST" / "raw"):
        for path in (place / name, place / f"{name}.gz"):
            if os.path.lexists(path):  # also a dangling link: reading it then says what is wrong
                return path
    return None


def _from_root(root: str | os.PathLike[str], split: str) -> tuple[bytes, bytes] | None:
    try:
        folder = Path(root).expanduser() if root != "" else None
    except (TypeError, RuntimeError):
        folder = None
    if folder is None:
        raise ValueError(f"mnist(root={root!r}) is not the path of a folder; give one as a string or Path.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise DataError(f"The MNIST root {folder} is not a folder; give the folder that holds the official files.")
    names = file_names(split)
    paths = [_find(folder, name) for name in names]
    if paths == [None, None]:
        return None
    remedy = "put the official file there, or leave root out"
    for name, path in zip(names, paths, strict=True):
        if path is None:
            raise DataError(f"The MNIST root {folder} lacks {name} while it has the split's other file; {remedy}.")
    images, labels = (read_official(path, name, remedy) for name, path in zip(names, paths, strict=True) if path)
    return images, labels


def _from_cache(split: str) -> tuple[bytes, bytes] | None:
    names = file_names(split)
    paths = [cache_dir() / "mnist" / name for name in names]
    if not all(os.path.lexists(path) for path in paths):
        return None
    remedy = "delete it or run `depthlab data prepare --full`, which replaces it"
    images, labels = (read_official(path, name, remedy) for name, path in zip(names, paths, strict=True))
    return images, labels


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Sockets opened inside wait no longer than that for an answer."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def download() -> None:
    """Fetch the four complete files with torchvision's downloader, verify them, then put them into our cache.

    Each file enters the cache by one rename after its checksum held, so that neither an interruption nor a second
    process at the same time can leave a part of a file there.

    Raises:
        DataError: torchvision is missing, no mirror gave the official files, or the cache cannot be written.
    """
    otherwise = "or pass root= a folder with the official files, or leave full=True out for the bundled digits"
    try:
        from torchvision.datasets import MNIST as Downloader
    except Exception as error:  # a torchvision built for another torch raises RuntimeError here
        raise DataError(
            f"The complete MNIST is downloaded by torchvision, which cannot be imported ({gist(error)}); "
            f'install it with `pip install "depthlab[data]"`, {otherwise}.'
        ) from None
    target = cache_dir() / "mnist"
    failures = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="download-", dir=target) as scratch,
            downloading(),
            _time_limit(20),  # torchvision sets none: a silent server would hold us for ever
        ):
            for number, mirror in enumerate(Downloader.mirrors):
                # One mirror at a time in a folder of its own: older torchvision ends at the first wrong checksum.
                folder = Path(scratch) / str(number)
                try:
                    type("MNIST", (Downloader,), {"mirrors": [mirror]})(folder, download=True)
                    raw = folder / "MNIST" / "raw"
                    for name in OFFICIAL:
                        read_official(raw / name, name, "the mirror is at fault")
                except Exception as error:  # urllib, http, ssl, gzip: whatever it was, the next mirror may do
                    failures.append(gist(error, last_line=True))
                    continue
                for name in OFFICIAL:
                    os.replace(raw / name, target / name)
                return
    except OSError as error:
        raise DataError(
            f"The cache folder {target} cannot be written ({gist(error)}); "
            f"set DEPTHLAB_CACHE to a folder that can, {otherwise}."
        ) from None
    raise DataError(
        f"The complete MNIST could not be downloaded ({'; '.join(dict.fromkeys(failures)) or 'no mirror'}); "
        f"connect to the network and try again, {otherwise}."
    )


def mnist(split: str, full: bool = False, root: str | os.PathLike[str] | None = None) -> MNIST:
    """MNIST digits of one split; the same call gives the same data, wherever it comes from.

    Args:
        split: "train" or "test"; a validation set is the caller's cut of the training digits.
        full: False always takes the bundle (10,000 training or 2,000 test digits) and looks nowhere else. True takes
            the complete split (60,000 or 10,000) from `root`, else from our cache, else from torchvision's mirrors.
        root: with full=True a folder that may hold the official files, plain or .gz, directly or in MNIST/raw. One
            without them is passed over; one that has them wrong, or only one of the two, is an error.

    Raises:
        ValueError: another split, or a `root` that is no path.
        DataError: data that is missing, damaged or out of reach. Nothing but the official bytes is ever returned.
    """
    if split not in tuple(SPLITS):
        raise ValueError(f'mnist({split!r}): the splits are "train" and "test"; cut a validation set from "train".')
    if not full:
        return bundled(split)
    origin, pair = "root folder", _from_root(root, split) if root is not None else None
    if pair is None:
        origin, pair = "cache", _from_cache(split)
    if pair is None:
        download()
        origin, pair = "download", _from_cache(split)
    if pair is None:
        raise DataError("The downloaded MNIST files were deleted before they could be read; try again.")
    images, labels = parse_idx(*pair, f"the complete {split} digits")
    return MNIST(images, labels, f"{origin}: all {len(labels):,} {split} digits of MNIST")


def fill_cache() -> None:
    """Make the cache hold the complete MNIST, replacing what is damaged there; connects only if something is."""
    try:
        complete = all(_from_cache(split) for split in SPLITS)
    except DataError:
        complete = False
    if not complete:
        download()
