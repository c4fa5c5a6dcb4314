"""What is bundled, and that a damaged bundle is refused wherever the damage is."""

import bz2
import functools
import hashlib
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlab import data
from depthlab.bundles import build_bundles
from depthlab.data import digits, files, texts

BUNDLES = Path(__file__).parents[2] / "data"
# Class counts of the complete set, from the literature.
FULL_COUNTS = {
    "train": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}
PACKED = sorted(path.relative_to(BUNDLES).as_posix() for path in BUNDLES.glob("*/*.bz2"))


addresses = functools.cache(data.addresses)  # each call verifies and unpacks 11 MB
text = functools.cache(data.text)


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and message.endswith(".") and len(message) < 500


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the bundles that the loaders read instead of the real ones."""
    for folder in ("mnist", "text"):
        shutil.copytree(BUNDLES / folder, tmp_path / folder)
    monkeypatch.setattr(files, "files", lambda package: tmp_path)
    return tmp_path


def load(packed: str) -> bytes:
    folder, name = packed.split("/")
    return files.bundle(folder, name.removesuffix(".bz2"))


def test_five_files_are_bundled_and_small():
    assert len(PACKED) == 5
    assert sum((BUNDLES / name).stat().st_size for name in PACKED if name.startswith("mnist")) < 2.5e6
    assert sum((BUNDLES / name).stat().st_size for name in PACKED if name.startswith("text")) < 3e6


@pytest.mark.parametrize("packed", PACKED)
def test_readme_states_each_file_with_its_size(packed):
    path = BUNDLES / packed
    readme = (path.parent / "README.md").read_text(encoding="utf-8")
    assert path.name in readme
    assert f"{path.stat().st_size:,}" in readme
    assert "**Licence.**" in readme and "**Origin.**" in readme


@pytest.mark.parametrize("split, count", [("train", 10_000), ("test", 2_000)])
def test_bundled_digits_have_the_shape_and_class_shares_of_the_full_set(split, count):
    images, labels, source = data.mnist(split)
    assert images.shape == (count, 28, 28) and images.dtype == torch.uint8
    assert labels.shape == (count,) and labels.dtype == torch.int64
    exact = torch.tensor(FULL_COUNTS[split], dtype=torch.float64) * count / sum(FULL_COUNTS[split])
    assert (labels.bincount(minlength=10) - exact).abs().max() < 1
    assert source == f"bundle: {count:,} of MNIST's {sum(FULL_COUNTS[split]):,} {split} digits"


def test_bundled_digits_have_the_known_mean_and_spread():
    pixels = data.mnist("train").images.double() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=0.001)
    assert pixels.std().item() == pytest.approx(0.3081, abs=0.001)


def test_every_slice_is_again_a_stratified_sample():
    labels = data.mnist("train").labels
    for part in (labels[:2000], labels[:8000], labels[8000:]):
        shares = part.bincount(minlength=10).double() / len(part)
        assert (shares - torch.tensor(FULL_COUNTS["train"]).double() / 60_000).abs().max() < 0.02


def test_no_training_digit_is_a_test_digit():
    train, test = (
        {hashlib.sha256(image.numpy().tobytes()).digest() for image in data.mnist(s).images} for s in ("train", "test")
    )
    assert len(train) == 10_000 and len(test) == 2_000
    assert not train & test


def test_two_calls_give_equal_data_that_share_no_memory():
    first = data.mnist("test")
    first.images.zero_()
    assert data.mnist("test").images.any()


def test_labels_belong_to_their_images():
    """A classifier by nearest class mean reaches its known accuracy of about 0.82; shuffled labels reach 0.1."""
    train, test = data.mnist("train"), data.mnist("test")
    means = torch.stack([train.images[train.labels == digit].float().mean(0).flatten() for digit in range(10)])
    guess = torch.cdist(test.images.flatten(1).float(), means).argmin(1)
    assert 0.78 < (guess == test.labels).float().mean().item() < 0.86


@pytest.mark.parametrize("split", ["Train", "validation", "", None, 3, ["train"]])
def test_another_split_is_refused(split):
    with pytest.raises(ValueError, match='"train" and "test"') as caught:
        data.mnist(split)
    assert is_one_sentence(str(caught.value))


def test_addresses_are_all_there_in_order_of_time():
    found = addresses()
    years = [a.year for a in found]
    assert len(found) == 233 and years == sorted(years)
    assert set(range(1790, 2022)) - set(years) == {1933}
    assert [a.speaker for a in found if a.year == 1953] == ["Harry S Truman", "Dwight D Eisenhower"]
    assert [a.speaker for a in found if a.year == 1961] == ["Dwight D Eisenhower", "John F Kennedy"]
    known = {
        1823: ("James Monroe", "the American continents"),
        1862: ("Abraham Lincoln", "we can not escape history"),
        1901: ("Theodore Roosevelt", "McKinley"),
        1941: ("Franklin D Roosevelt", "freedom from fear"),
        2002: ("George W Bush", "axis of evil"),
    }
    for year, (speaker, words) in known.items():
        address = next(a for a in found if a.year == year)
        assert address.speaker == speaker
        assert words.lower() in address.text.lower()
    assert "William McKinley" in {a.speaker for a in found}


def test_an_address_is_one_clean_paragraph():
    for address in addresses():
        assert address.text == address.text.strip() and len(address.text) > 5000
        assert not [c for c in address.text if ord(c) < 32]
        assert "&quot;" not in address.text and "&mdash;" not in address.text


def test_text_splits_hold_every_address_once_and_share_no_year():
    found, splits = addresses(), text()
    ending = {"validation": "4", "test": "9"}
    for split in ("train", "validation", "test"):
        parts = getattr(splits, split).split("\n\n")
        years = [a.year for a in found if a.text in set(parts)]
        assert len(years) == len(parts)
        assert all((str(y)[-1] == ending[split]) if split in ending else str(y)[-1] not in "49" for y in years)
    assert sum(len(getattr(splits, s).split("\n\n")) for s in ("train", "validation", "test")) == 233
    assert splits.source == "bundle: 233 State of the Union addresses, 1790 to 2021"


def test_readme_states_the_size_of_each_text_split():
    readme, splits = (BUNDLES / "text" / "README.md").read_text(encoding="utf-8"), text()
    for split in ("train", "validation", "test"):
        content = getattr(splits, split)
        assert f"| {split} | {content.count(chr(10) * 2) + 1} | {len(content):,} |" in readme


@pytest.mark.parametrize("name", ["SOTU", "wikitext", None, 1])
def test_another_text_is_refused(name):
    with pytest.raises(ValueError, match="sotu") as caught:
        data.text(name)
    assert is_one_sentence(str(caught.value))


# --- damage


@pytest.mark.parametrize("packed", PACKED)
def test_a_flipped_bit_anywhere_in_a_bundled_file_is_refused(copy, packed):
    content = (copy / packed).read_bytes()
    places = random.Random(packed)
    for position in [0, 3, len(content) - 1, *(places.randrange(len(content)) for _ in range(25))]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << places.randrange(8)
        (copy / packed).write_bytes(damaged)
        with pytest.raises(data.DataError, match="SHA-256") as caught:
            load(packed)
        assert is_one_sentence(str(caught.value))
    (copy / packed).write_bytes(content)
    load(packed)


@pytest.mark.parametrize("folder", ["mnist", "text"])
def test_a_flipped_bit_anywhere_in_the_checksum_list_never_passes_wrong_data(copy, folder):
    place = copy / folder / "SHA256SUMS"
    content = place.read_bytes()
    packed = "mnist/train-labels-idx1-ubyte.bz2" if folder == "mnist" else "text/sotu.jsonl.bz2"
    name = packed.split("/")[1].encode()
    start = content.index(name) - 66  # 64 digits and two spaces
    places = random.Random(folder)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << places.randrange(8)
        place.write_bytes(damaged)
        try:
            load(packed)
        except data.DataError as error:
            assert is_one_sentence(str(error))
        else:  # only a digest or name of another file of the list can be wrong
            assert not start <= position <= start + 66 + len(name)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("change", ["empty", "first", "half", "last", "garbage", "twice", "missing", "folder"])
def test_a_bundled_file_of_another_length_is_refused(copy, packed, change):
    place = copy / packed
    content = place.read_bytes()
    place.unlink()
    if change == "folder":
        place.mkdir()
    elif change != "missing":
        cuts = {"empty": b"", "first": content[:1], "half": content[: len(content) // 2], "last": content[:-1]}
        place.write_bytes({**cuts, "garbage": content + b"\0", "twice": content * 2}[change])
    with pytest.raises(data.DataError, match="git checkout data") as caught:
        load(packed)
    assert place.name in str(caught.value) and is_one_sentence(str(caught.value))


TWICE = (BUNDLES / "text" / "SHA256SUMS").read_bytes() * 2


@pytest.mark.parametrize("content", [None, b"", b"\n", b"sotu", b"\xff\xfe", b"0" * 64 + b"  other.bz2\n", TWICE])
def test_a_bundle_without_usable_checksum_list_is_refused(copy, content):
    place = copy / "text" / "SHA256SUMS"
    place.unlink()
    if content is not None:
        place.write_bytes(content)
    with pytest.raises(data.DataError, match="SHA256SUMS") as caught:
        data.text()
    assert is_one_sentence(str(caught.value))


def test_swapped_files_are_refused(copy):
    train, test = (copy / "mnist" / f"{prefix}-labels-idx1-ubyte.bz2" for prefix in ("train", "t10k"))
    train.write_bytes(test.read_bytes())
    with pytest.raises(data.DataError):
        data.mnist("train")
    data.mnist("test")


def test_a_list_with_line_ends_changed_by_a_checkout_is_refused(copy):
    place = copy / "mnist" / "SHA256SUMS"
    place.write_bytes(place.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(data.DataError):
        data.mnist("train")


# --- the IDX format


def idx(count: int, labels: list[int] | None = None) -> tuple[bytes, bytes]:
    labels = [i % 10 for i in range(count)] if labels is None else labels
    header = (0x803).to_bytes(4, "big") + count.to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
    pixels = bytes(i % 251 for i in range(count * 784))
    return header + pixels, (0x801).to_bytes(4, "big") + len(labels).to_bytes(4, "big") + bytes(labels)


def test_idx_files_are_read_in_order_row_by_row():
    images, labels = digits.parse_idx(*idx(13), "here")
    assert images.flatten().tolist() == [i % 251 for i in range(13 * 784)]
    assert labels.tolist() == [i % 10 for i in range(13)]


def _with(content: bytes, position: int, value: bytes) -> bytes:
    return content[:position] + value + content[position + len(value) :]


IMAGES, LABELS = idx(5)
BAD_IDX = {
    "no bytes": (b"", b""),
    "images without labels": (IMAGES, b""),
    "labels as images": (LABELS, LABELS),
    "images as labels": (IMAGES, IMAGES),
    "wrong image magic": (_with(IMAGES, 3, b"\1"), LABELS),
    "little-endian magic": (_with(IMAGES, 0, b"\3\10\0\0"), LABELS),
    "wrong label magic": (IMAGES, _with(LABELS, 3, b"\3")),
    "header only": (IMAGES[:16], LABELS),
    "half a header": (IMAGES[:10], LABELS),
    "no images announced": (_with(IMAGES[:16], 4, bytes(4)), _with(LABELS[:8], 4, bytes(4))),
    "27 rows": (_with(IMAGES, 11, b"\x1b"), LABELS),
    "28 x 28 swapped for 14 x 56": (_with(IMAGES, 8, bytes([0, 0, 0, 14, 0, 0, 0, 56])), LABELS),
    "a pixel short": (IMAGES[:-1], LABELS),
    "a pixel too many": (IMAGES + b"\0", LABELS),
    "a label short": (IMAGES, LABELS[:-1]),
    "a label too many": (IMAGES, LABELS + b"\0"),
    "fewer labels than images": (IMAGES, idx(4)[1]),
    "more labels than images": (IMAGES, idx(6)[1]),
    "label 10": (IMAGES, _with(LABELS, 8, b"\x0a")),
    "label 255": (IMAGES, _with(LABELS, 12, b"\xff")),
    "2 to the 32 - 1 images": (_with(IMAGES, 4, b"\xff" * 4), _with(LABELS, 4, b"\xff" * 4)),
}


@pytest.mark.parametrize("case", BAD_IDX)
def test_idx_files_that_are_no_pair_of_digits_are_refused(case):
    with pytest.raises(data.DataError, match="of here .*official") as caught:
        digits.parse_idx(*BAD_IDX[case], "here")
    assert is_one_sentence(str(caught.value))


@settings(deadline=None)  # a busy machine is no failure
@given(st.binary(max_size=900), st.binary(max_size=20))
def test_random_bytes_are_never_taken_for_digits(images, labels):
    with pytest.raises(data.DataError):
        digits.parse_idx(images, labels, "here")
    with pytest.raises(data.DataError):
        digits.parse_idx(IMAGES[:4] + images, LABELS[:4] + labels, "here")


# --- how the bundles were made


@pytest.mark.slow
def test_bundles_are_rebuilt_byte_for_byte_from_their_content(tmp_path):
    for folder in ("mnist", "text"):
        names = [path.name.removesuffix(".bz2") for path in (BUNDLES / folder).glob("*.bz2")]
        build_bundles.write(tmp_path / folder, {name: files.bundle(folder, name) for name in names})
        for made in (tmp_path / folder).iterdir():
            assert made.read_bytes() == (BUNDLES / folder / made.name).read_bytes(), made.name
    assert texts.to_lines(addresses()) == files.bundle("text", "sotu.jsonl")


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.data())
def test_quota_keeps_the_total_and_stays_within_one_of_the_exact_share(labels, drawn):
    total = drawn.draw(st.integers(0, len(labels)))
    quota = build_bundles.class_quota(torch.tensor(labels), total)
    assert sum(quota) == total
    for digit in range(10):
        assert abs(quota[digit] - labels.count(digit) * total / len(labels)) < 1
        assert 0 <= quota[digit] <= labels.count(digit)


def test_choice_is_without_repetition_and_does_not_depend_on_global_randomness():
    labels = torch.arange(700) % 7
    random.seed(1)
    torch.manual_seed(1)
    first = build_bundles.choose(labels, 91, "train")
    assert len(set(first)) == 91
    assert labels[first].bincount().tolist() == [13] * 7
    assert first == build_bundles.choose(labels, 91, "train") != build_bundles.choose(labels, 91, "test")
    assert first != sorted(first)


def test_rare_classes_are_not_crowded_into_the_end_of_the_order():
    labels = torch.arange(6000) % 6
    kept = labels[build_bundles.choose(labels, 3000, "train")]
    for part in kept.split(1000):
        assert (part.bincount(minlength=6) - 1000 / 6).abs().max() < 50  # 4 standard deviations


def test_every_bundled_digit_of_the_full_set_keeps_its_label(tmp_path):
    """Made from a set whose pixels spell their position, the bundle can be traced back digit by digit."""
    package = {}
    for split, count in (("train", 12_000), ("test", 3_000)):
        images, labels = idx(count)
        pixels = bytearray(images)
        for i in range(count):
            pixels[16 + i * 784 : 16 + i * 784 + 2] = i.to_bytes(2, "big")
        names = digits.file_names(split)
        package |= dict(zip(names, (bytes(pixels), labels), strict=True))
    made = build_bundles.mnist_files(package)
    for split in digits.SPLITS:
        images, labels = digits.parse_idx(*(made[name] for name in digits.file_names(split)), "here")
        position = images[:, 0, 0].long() * 256 + images[:, 0, 1]
        assert len(position.unique()) == len(labels) == build_bundles.BUNDLED_DIGITS[split]
        assert torch.equal(position % 10, labels)


def test_address_texts_are_cleaned_but_not_changed():
    package = {
        "1897_b.json": b'{"year":1897,"name":"William Mc Kinley","party":"r","text":" a &quot;b&quot; \\u0002 c "}',
        "1897_b.txt": b"not used",
    }
    line = build_bundles.sotu_files(package)["sotu.jsonl"].decode()
    assert line == '{"year": 1897, "speaker": "William McKinley", "text": "a \\"b\\" \ufffd c"}\n'


def test_sources_can_be_archives_or_folders(tmp_path):
    import tarfile

    (tmp_path / "package" / "data").mkdir(parents=True)
    (tmp_path / "package" / "data" / "a.json").write_bytes(b"{}")
    (tmp_path / "package" / "lib.js").write_bytes(b"no data")
    with tarfile.open(tmp_path / "p.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    for source in (tmp_path / "p.tgz", tmp_path, tmp_path / "package"):
        assert build_bundles.read_package(source) == {"a.json": b"{}"}


def test_reading_the_bundles_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.mnist("test")
        assert bz2.decompress((BUNDLES / "text" / "sotu.jsonl.bz2").read_bytes())[:8] == b'{"year":'
        assert len(data.prepare()) == 3
