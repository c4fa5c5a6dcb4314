"""The complete MNIST from a folder, the cache or a mirror: always the official bytes or one sentence.

Small stand-ins play the official files: their sizes and checksums replace the real ones, and a server on this machine
plays the mirrors. With DEPTHLAB_MNIST naming a folder or npm archive with the real files, those are tested too.
"""

import gzip
import hashlib
import http.server
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from depthlab import data
from depthlab.bundles import build_bundles
from depthlab.data import digits, files

COUNTS = {"train": 60, "test": 20}


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and message.endswith(".") and len(message) < 600


def official(split: str) -> tuple[bytes, bytes]:
    count, places = COUNTS[split], random.Random(split)
    pixels = bytes(places.choice(b"\0\0\0\0\0\0\x7f\xff") for _ in range(count * 784))  # compressible, like digits
    labels = bytes(places.randrange(10) for _ in range(count))
    header = b"\0\0\x08\x03" + count.to_bytes(4, "big") + b"\0\0\0\x1c" * 2
    return header + pixels, b"\0\0\x08\x01" + count.to_bytes(4, "big") + labels


FILES = {
    name: content for split in COUNTS for name, content in zip(digits.file_names(split), official(split), strict=True)
}
TABLE = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in FILES.items()}
ARCHIVES = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in FILES.items()}
RESOURCES = [(name, hashlib.md5(content).hexdigest()) for name, content in ARCHIVES.items()]


@pytest.fixture(autouse=True)
def small_world(tmp_path, monkeypatch):
    """Small official files, an empty cache, and no connection to anything but this machine."""
    monkeypatch.setattr(digits, "OFFICIAL", TABLE)
    monkeypatch.setenv("DEPTHLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CI", "1")
    connect = socket.socket.connect

    def local_only(self, address):
        if address[0] not in ("127.0.0.1", "localhost"):
            raise OSError(101, "Network is unreachable")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    monkeypatch.setattr(socket, "getaddrinfo", _only_local_names(socket.getaddrinfo))


def _only_local_names(getaddrinfo):
    def look_up(host, *args, **kwargs):
        if host not in ("127.0.0.1", "localhost"):
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return getaddrinfo(host, *args, **kwargs)

    return look_up


class Mirror(http.server.ThreadingHTTPServer):
    """Serves the archives as `answer` says: whole, cut, damaged, wrong, forbidden, or half of one and then nothing."""

    answer = "whole"
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        self.halfway = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Mirror

    def do_HEAD(self):
        self.respond(with_body=False)

    def do_GET(self):
        self.respond(with_body=True)

    def respond(self, with_body: bool):
        self.server.requests.append(self.path)
        answer, content = self.server.answer, ARCHIVES[self.path.lstrip("/")]
        if answer == "forbidden":
            self.send_error(403)
            return
        body = {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "damaged": content[:40] + b"?" + content[41:],
            "page": b"<html>moved</html>",
        }.get(answer, content)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if answer == "cut" else len(body)))
        self.end_headers()
        if with_body and answer == "stall" and "images" in self.path:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.halfway.set()
            time.sleep(400)
        elif with_body:
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(monkeypatch):
    torchvision = pytest.importorskip("torchvision")
    server = Mirror()
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", RESOURCES)
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [server.address])
    yield server
    server.shutdown()
    server.server_close()


def put(folder: Path, names=tuple(FILES), packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if packed:
            (folder / f"{name}.gz").write_bytes(ARCHIVES[f"{name}.gz"])
        else:
            (folder / name).write_bytes(FILES[name])
    return folder


def assert_official(found: data.MNIST, split: str) -> None:
    images, labels = official(split)
    assert found.images.shape == (COUNTS[split], 28, 28)
    assert found.images.numpy().tobytes() == images[16:]
    assert bytes(found.labels.tolist()) == labels[8:]


def cached() -> list[str]:
    folder = data.cache_dir() / "mnist"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def refused(split="train", **kwargs) -> str:
    with pytest.raises(data.DataError) as caught:
        data.mnist(split, full=True, **kwargs)
    assert is_one_sentence(str(caught.value))
    return str(caught.value)


# --- where the data comes from


@pytest.mark.parametrize("below", ["", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_root_may_be_plain_or_packed_and_laid_out_like_torchvision(tmp_path, below, packed, split):
    put(tmp_path / "root" / below, packed=packed)
    found = data.mnist(split, full=True, root=tmp_path / "root")
    assert_official(found, split)
    assert found.source == f"root folder: all {COUNTS[split]} {split} digits of MNIST"


def test_root_is_a_string_a_path_below_home_or_a_link(tmp_path, monkeypatch):
    put(tmp_path / "home" / "digits")
    (tmp_path / "link").symlink_to(tmp_path / "home" / "digits", target_is_directory=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    for root in ("~/digits", Path("~/digits"), str(tmp_path / "home" / "digits"), tmp_path / "link", "digits"):
        assert_official(data.mnist("test", full=True, root=root), "test")


def test_quick_data_is_the_bundle_even_beside_a_root_and_a_cache(tmp_path):
    put(tmp_path / "cache" / "mnist")
    assert len(data.mnist("train", root=put(tmp_path / "root")).labels) == 10_000


def test_root_cache_and_mirror_give_the_same_data_and_say_where_from(tmp_path, mirror):
    root = put(tmp_path / "root")
    by_root = data.mnist("train", full=True, root=root)
    by_mirror = data.mnist("train", full=True, root=tmp_path / "no files there")
    count = len(mirror.requests)
    by_cache = data.mnist("train", full=True)
    assert len(mirror.requests) == count > 0
    for found in (by_root, by_mirror, by_cache):
        assert_official(found, "train")
    assert [f.source.split(":")[0] for f in (by_root, by_mirror, by_cache)] == ["root folder", "download", "cache"]


def test_nothing_is_connected_to_when_a_valid_copy_exists(tmp_path, mirror):
    put(tmp_path / "cache" / "mnist")
    data.mnist("train", full=True)
    data.mnist("test", full=True, root=put(tmp_path / "root", packed=True))
    assert data.prepare(full=True)[3:] == [
        "verified  cache: all 60 train digits of MNIST",
        "verified  cache: all 20 test digits of MNIST",
    ]
    assert mirror.requests == []


def test_the_second_mirror_is_asked_whatever_was_wrong_with_the_first(mirror, monkeypatch):
    import torchvision

    for answer in ("forbidden", "damaged", "cut", "empty", "page"):
        bad = Mirror()
        bad.answer = answer
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [bad.address, mirror.address])
        monkeypatch.setenv("DEPTHLAB_CACHE", f"{data.cache_dir()}-{answer}")
        assert_official(data.mnist("test", full=True), "test")
        assert bad.requests and cached() == sorted(FILES)
        bad.shutdown()
        bad.server_close()


# --- damage, and what is not there


@pytest.mark.parametrize("answer", ["forbidden", "damaged", "cut", "empty", "page"])
def test_a_failed_download_leaves_no_cache_entry_and_says_what_to_do(mirror, answer):
    mirror.answer = answer
    message = refused()
    assert "could not be downloaded" in message and "root=" in message
    assert cached() == []
    assert socket.getdefaulttimeout() is None
    mirror.answer = "whole"
    assert_official(data.mnist("train", full=True), "train")


def test_mirrors_that_agree_on_wrong_files_are_not_believed(mirror, monkeypatch):
    """torchvision is content with them; our own checksum is not."""
    monkeypatch.setattr(digits, "OFFICIAL", {**TABLE, "t10k-labels-idx1-ubyte": (28, "0" * 64)})
    assert "could not be downloaded" in refused("train")
    assert cached() == []


def test_without_network_it_fails_in_one_sentence(tmp_path):
    pytest.importorskip("torchvision")
    started = time.monotonic()
    message = refused(root=tmp_path)
    assert time.monotonic() - started < 20
    assert "network" in message and cached() == []


def test_without_torchvision_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    assert 'pip install "depthlab[data]"' in refused()


@pytest.mark.parametrize("place", ["root", "cache/mnist"])
@pytest.mark.parametrize("name", digits.file_names("train"))
@pytest.mark.parametrize("change", ["bit", "empty", "cut", "longer", "other", "folder", "dangling"])
def test_a_damaged_file_is_refused_by_name_and_nothing_replaces_it_silently(tmp_path, mirror, place, name, change):
    path = put(tmp_path / place) / name
    content = path.read_bytes()
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        flipped = content[:-5] + bytes([content[-5] ^ 16]) + content[-4:]
        other = FILES[name.replace("train", "t10k")]
        new = {"bit": flipped, "empty": b"", "cut": content[:-1], "longer": content + b"\0", "other": other}[change]
        path.write_bytes(new)
    message = refused(root=tmp_path / "root")
    assert str(path) in message
    assert mirror.requests == []
    if place == "root":
        put(tmp_path / "cache" / "mnist")
        assert str(path) in refused(root=tmp_path / "root")
    elif change != "folder":
        assert "depthlab data prepare --full" in message
        digits.fill_cache()  # what `depthlab data prepare --full` does
        assert_official(data.mnist("train", full=True), "train")


def test_any_flipped_bit_is_refused(tmp_path):
    root, places = put(tmp_path / "root"), random.Random(0)
    for name in digits.file_names("train"):
        content = FILES[name]
        for position in [0, 3, 7, 15, *(places.randrange(len(content)) for _ in range(60))]:
            damaged = bytearray(content)
            damaged[position] ^= 1 << places.randrange(8)
            (root / name).write_bytes(damaged)
            assert name in refused(root=root)
        (root / name).write_bytes(content)
    assert_official(data.mnist("train", full=True, root=root), "train")


def test_damaged_archives_are_refused(tmp_path):
    name = "train-images-idx3-ubyte"
    root = put(tmp_path / "root", packed=True)
    packed = ARCHIVES[f"{name}.gz"]
    bomb = gzip.compress(FILES[name] + bytes(30_000_000))
    cuts = [0, 1, 5, 9, 10, 11, len(packed) // 2, len(packed) - 9, len(packed) - 8, len(packed) - 4, len(packed) - 1]
    for content in [
        *(packed[:cut] for cut in cuts),
        packed + b"garbage",
        packed * 2,
        FILES[name],
        bomb,
        b"PK" + packed,
    ]:
        (root / f"{name}.gz").write_bytes(content)
        assert name in refused(root=root)
    (root / f"{name}.gz").write_bytes(packed)
    assert_official(data.mnist("train", full=True, root=root), "train")


def test_a_flipped_bit_in_an_archive_never_gives_other_data(tmp_path):
    name, places, reasons = "train-images-idx3-ubyte", random.Random(1), set()
    root = put(tmp_path / "root", packed=True)
    for _ in range(150):
        damaged = bytearray(ARCHIVES[f"{name}.gz"])
        damaged[places.randrange(len(damaged))] ^= 1 << places.randrange(8)
        (root / f"{name}.gz").write_bytes(damaged)
        try:
            found = data.mnist("train", full=True, root=root)
        except data.DataError as error:
            assert is_one_sentence(str(error))
            reasons.add(str(error).partition("(")[2][:8])
        else:  # the time of packing in the header, say
            assert_official(found, "train")
    assert {"CRC chec", "Error -3"} <= reasons  # gzip's checksum, and zlib's own complaint


def test_an_archive_that_unpacks_to_far_too_much_is_not_unpacked(tmp_path):
    import tracemalloc

    name = "train-labels-idx1-ubyte"
    root = put(tmp_path / "root", packed=True)
    (root / f"{name}.gz").write_bytes(gzip.compress(bytes(200_000_000)))
    tracemalloc.start()
    assert "more than" in refused(root=root)
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_half_a_pair_in_the_root_is_refused_and_in_the_cache_completed(tmp_path, mirror):
    images, labels = digits.file_names("train")
    assert labels in refused(root=put(tmp_path / "root", [images]))
    assert images in refused(root=put(tmp_path / "root2", [labels]))
    put(tmp_path / "cache" / "mnist", [images])
    assert_official(data.mnist("train", full=True), "train")


def test_a_root_with_the_other_split_only_is_passed_over(tmp_path, mirror):
    root = put(tmp_path / "root", digits.file_names("test"))
    assert data.mnist("train", full=True, root=root).source.startswith("download")


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "not a folder" in refused(root=tmp_path / "file")


@pytest.mark.parametrize("root", [5, 1.5, b"bytes", "", "~no-such-user-here/x"])
def test_a_root_that_is_no_path_is_refused(root):
    with pytest.raises(ValueError, match="root=") as caught:
        data.mnist("train", full=True, root=root)
    assert is_one_sentence(str(caught.value))


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path, mirror, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DEPTHLAB_CACHE", str(tmp_path / "file" / "cache"))
    assert "DEPTHLAB_CACHE" in refused()
    read_only = tmp_path / "read only"
    (read_only / "mnist").mkdir(parents=True)
    (read_only / "mnist").chmod(0o500)
    monkeypatch.setenv("DEPTHLAB_CACHE", str(read_only))
    if os.geteuid() != 0:  # nothing is forbidden to root
        assert "DEPTHLAB_CACHE" in refused()
    (read_only / "mnist").chmod(0o700)


def test_a_valid_cache_that_is_read_only_is_enough(tmp_path):
    folder = put(tmp_path / "cache" / "mnist")
    folder.chmod(0o500)
    assert_official(data.mnist("test", full=True), "test")
    folder.chmod(0o700)


@pytest.mark.parametrize("value", ["", None])
def test_without_a_given_cache_the_platform_names_one(monkeypatch, tmp_path, value):
    monkeypatch.delenv("DEPTHLAB_CACHE")
    if value is not None:
        monkeypatch.setenv("DEPTHLAB_CACHE", value)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert data.cache_dir() == tmp_path / "x" / "depthlab"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert data.cache_dir().parts[-3:] == ("Library", "Caches", "depthlab")
    monkeypatch.setenv("DEPTHLAB_CACHE", "~/there")
    assert data.cache_dir() == Path.home() / "there"


def test_a_cache_below_an_unknown_home_is_refused(monkeypatch):
    monkeypatch.setenv("DEPTHLAB_CACHE", "~no-such-user-here/x")
    assert "DEPTHLAB_CACHE" in refused()


# --- more than one thread


def test_threads_that_download_at_once_get_the_data_and_leave_the_process_as_it_was(mirror):
    before, got = (sys.stderr, socket.getdefaulttimeout()), []
    threads = [threading.Thread(target=lambda: got.append(data.mnist("test", full=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sys.stderr, socket.getdefaulttimeout()) == before
    assert len(got) == 4
    for digits_ in got:
        assert_official(digits_, "test")


@pytest.mark.parametrize(("ci", "quiet"), [("1", True), ("yes", True), ("0", False), ("false", False), ("", False)])
def test_the_progress_of_downloads_hides_exactly_where_ci_is_on(monkeypatch, ci, quiet):
    monkeypatch.setenv("CI", ci)
    before = sys.stderr
    with files.downloading():
        assert (sys.stderr is not before) == quiet
    assert sys.stderr is before


# --- more than one process

SCRIPT = textwrap.dedent("""
    import hashlib, json, sys
    import torchvision
    from depthlab import data
    from depthlab.data import digits
    world = json.loads(sys.argv[1])
    digits.OFFICIAL = {name: tuple(row) for name, row in world["official"].items()}
    torchvision.datasets.MNIST.resources = [tuple(row) for row in world["resources"]]
    torchvision.datasets.MNIST.mirrors = [world["mirror"]]
    print("ready", flush=True)
    sys.stdin.readline()
    found = data.mnist("train", full=True)
    print(hashlib.sha256(found.images.numpy().tobytes()).hexdigest(), flush=True)
""")


def start(mirror: Mirror) -> subprocess.Popen:
    world = json.dumps({"official": TABLE, "resources": RESOURCES, "mirror": mirror.address})
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, world], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process


@pytest.mark.slow
def test_two_processes_that_download_at_once_both_get_the_data(mirror):
    both = [start(mirror), start(mirror)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=300)[0].strip() for process in both}
    assert answers == {hashlib.sha256(official("train")[0][16:]).hexdigest()}
    assert [process.returncode for process in both] == [0, 0]
    assert cached() == sorted(FILES)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 is a matter of POSIX systems")
def test_a_download_killed_halfway_never_becomes_a_cache_entry(mirror):
    mirror.answer = "stall"
    process = start(mirror)
    process.stdin.write("\n")
    process.stdin.flush()
    assert mirror.halfway.wait(300)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdin.close()
    process.stdout.close()
    assert not set(cached()) & set(FILES)
    mirror.answer = "whole"
    assert_official(data.mnist("train", full=True), "train")
    assert set(FILES) <= set(cached())


# --- the real files, where there are any

REAL = os.environ.get("DEPTHLAB_MNIST")


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="DEPTHLAB_MNIST does not name the npm package or folder with the real files")
def test_the_real_files_have_the_checksums_we_state_and_give_the_committed_bundle(tmp_path, monkeypatch):
    monkeypatch.undo()
    package = build_bundles.read_package(Path(REAL).expanduser())
    for name in digits.OFFICIAL:
        (tmp_path / name).write_bytes(package[name])
    made = build_bundles.mnist_files(package)
    for split, count in (("train", 60_000), ("test", 10_000)):
        full = data.mnist(split, full=True, root=tmp_path)
        assert len(full.labels) == count
        images, labels = digits.parse_idx(*(made[name] for name in digits.file_names(split)), "here")
        bundled = data.mnist(split)
        assert torch.equal(bundled.images, images) and torch.equal(bundled.labels, labels)
