"""MNIST: 12,000 bundled digits, or the complete set from a folder, our cache or torchvision's mirrors.

LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
"""

import struct
from typing import NamedTuple

import torch

from depthlab.data.files import DataError, bundle

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


def mnist(split: str) -> MNIST:
    """The bundled MNIST digits of one split.

    Args:
        split: "train" or "test"; a validation set is the caller's cut of the training digits.

    Raises:
        ValueError: another split.
        DataError: the data is missing or damaged.
    """
    if split not in SPLITS:
        raise ValueError(f'mnist({split!r}): the splits are "train" and "test"; cut a validation set from "train".')
    return bundled(split)
