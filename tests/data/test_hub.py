"""Text through `datasets`: local files for real, the hub by a stand-in; refusals come in seconds and one sentence."""

import hashlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthlab import data
from depthlab.data import hub

datasets = pytest.importorskip("datasets")
huggingface_hub = pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LINES = [f"line {i}" for i in range(50)]


@pytest.fixture(autouse=True)
def no_network(tmp_path, monkeypatch):
    """No connection at all, an empty cache, no offline variable."""

    def blocked(*args, **kwargs):
        connections.append(args)
        raise OSError(101, "Network is unreachable")

    connections: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    monkeypatch.setenv("DEPTHLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "locks of datasets")
    for name in hub.OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return connections


def refused(*args, **kwargs) -> str:
    with pytest.raises((data.DataError, ValueError)) as caught:
        list(data.hub_text(*args, **kwargs))
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 500, message
    return message


def refused_in_time(*args, **kwargs) -> str:
    started = time.monotonic()
    message = refused(*args, **kwargs)
    assert time.monotonic() - started < 5
    return message


def write(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    elif path.suffix == ".csv":
        path.write_text("text,n\n" + "".join(f"{row},1\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": row, "n": 1}) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"n": list(range(len(rows))), "text": rows}), path)
    return path


# --- local files


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_local_file_is_read_row_by_row_without_any_connection(tmp_path, no_network, kind, streaming):
    path = write(tmp_path / f"a.{kind}", LINES)
    assert list(data.hub_text(path, streaming=streaming)) == LINES
    assert list(data.hub_text(str(path))) == LINES
    assert no_network == []


def test_a_local_folder_has_its_splits(tmp_path, no_network):
    write(tmp_path / "set" / "train-0.parquet", LINES[:9])
    write(tmp_path / "set" / "train-1.parquet", LINES[9:20])
    write(tmp_path / "set" / "validation-0.parquet", LINES[20:])
    assert list(data.hub_text(tmp_path / "set")) == LINES[:20]
    assert list(data.hub_text(tmp_path / "set", split="validation")) == LINES[20:]
    assert list(data.hub_text(tmp_path / "set", files="validation-*")) == LINES[20:]
    assert "split 'nothing'" in refused(tmp_path / "set", split="nothing")
    assert no_network == []


def test_reading_starts_at_once_and_keeps_no_copy(tmp_path):
    path = write(tmp_path / "a.jsonl", LINES * 1000)
    rows = data.hub_text(path)
    assert [next(rows) for _ in range(3)] == LINES[:3]
    assert not (tmp_path / "cache").exists()


def test_a_changed_local_file_is_read_anew(tmp_path):
    """Not from a copy that some cache made of it, even when size and time of change are the same."""
    path = write(tmp_path / "a.txt", ["old"])
    stamp = path.stat().st_mtime_ns
    assert list(data.hub_text(path)) == ["old"]
    write(path, ["new"])
    os.utime(path, ns=(stamp, stamp))
    assert list(data.hub_text(path)) == ["new"]


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    path = write(tmp_path / "a.jsonl", LINES)
    message = refused(path, column="content")
    assert "'content'" in message and "text" in message
    assert "'n'" in refused(path, column="n")


def test_a_row_without_text_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": null}\n{"text": "y"}\n')
    assert "Row 1" in refused(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_cut_short_is_refused(tmp_path, kind):
    path = write(tmp_path / f"a.{kind}", LINES)
    path.write_bytes(path.read_bytes()[:-7])
    assert str(path) in refused(path)


def test_an_empty_or_unknown_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    assert "a.txt" in refused(tmp_path / "a.txt")
    (tmp_path / "a.unknown").write_bytes(b"text")
    assert "a.unknown" in refused(tmp_path / "a.unknown")
    (tmp_path / "folder").mkdir()
    assert "folder" in refused(tmp_path / "folder")


# --- refusals


def test_a_local_source_takes_no_revision(tmp_path, monkeypatch):
    """Otherwise a folder that happens to be called owner/name would stand in for the pinned data set."""
    write(tmp_path / "owner" / "name" / "train.txt", LINES)
    monkeypatch.chdir(tmp_path)
    assert "leave revision out" in refused("owner/name", revision=COMMIT)
    assert list(data.hub_text("owner/name")) == LINES


@pytest.mark.parametrize("revision", [None, "", "main", "v1.0", "refs/pr/1", COMMIT[:12], COMMIT.upper(), COMMIT + "0"])
def test_a_hub_id_needs_a_full_commit(revision, no_network):
    assert "40-digit commit" in refused("owner/name", revision=revision)
    assert no_network == []


@pytest.mark.parametrize("source", ["wikitext", "no/such/file.txt", "../a/b", "https://host/a", "", "a b/c", "/a/b"])
def test_what_is_neither_file_nor_hub_id_is_refused(source, no_network):
    assert "neither a file or folder" in refused(source, revision=COMMIT)
    assert no_network == []


@pytest.mark.parametrize("streaming", [False, True])
def test_without_network_it_fails_at_once_and_without_retries(streaming, no_network):
    message = refused_in_time("owner/name", revision=COMMIT, streaming=streaming)
    assert "network" in message and 'text("sotu")' in message
    assert 1 <= len(no_network) <= 3


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", hub.OFFLINE_VARIABLES)
@pytest.mark.parametrize("value", ["1", "on", "YES", "True"])
def test_an_offline_variable_is_obeyed_also_when_set_late(streaming, name, value, no_network, monkeypatch):
    monkeypatch.setenv(name, value)
    assert "offline variable" in refused_in_time("owner/name", revision=COMMIT, streaming=streaming)
    assert no_network == []


@pytest.mark.parametrize("value", ["0", "", "no", "false"])
def test_an_offline_variable_that_says_no_is_none(value, no_network, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert "offline" not in refused_in_time("owner/name", revision=COMMIT)
    assert no_network


def test_a_hub_that_never_answers_is_given_up_in_time(monkeypatch):
    """A name look-up has no time limit of its own."""
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(30))
    assert "no answer in 0.5 s" in refused_in_time("owner/name", revision=COMMIT)


def test_without_datasets_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert 'pip install "depthlab[data]"' in refused(write(tmp_path / "a.txt", LINES))


# --- a hub that is there: files of a folder, with the checksums that a hub states


def test_the_stand_in_below_is_called_as_the_real_hub_would_be():
    api = huggingface_hub.HfApi
    inspect.signature(api.dataset_info).bind(None, "a/b", revision=COMMIT, timeout=4.0)
    inspect.signature(api.model_info).bind(None, "a/b", revision=COMMIT, timeout=4.0)
    inspect.signature(api.get_paths_info).bind(None, "a/b", ["f"], repo_type="dataset", revision=COMMIT)
    inspect.signature(huggingface_hub.snapshot_download).bind(
        "a/b", repo_type="dataset", revision=COMMIT, allow_patterns=["f"], local_dir="d", max_workers=2
    )
    large = huggingface_hub.hf_api.RepoFile(path="f", size=3, oid="0f", lfs={"size": 3, "oid": "ab", "pointerSize": 1})
    small = huggingface_hub.hf_api.RepoFile(path="f", size=3, oid="0f")
    assert (large.path, large.lfs.sha256, small.lfs, small.blob_id) == ("f", "ab", None, "0f")


class StandIn:
    """Plays the three calls we make; `damage` changes what arrives."""

    repo_type = "dataset"

    def __init__(self, folder: Path):
        self.folder, self.calls, self.damage = folder, [], None

    def names(self) -> list[str]:
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())

    def dataset_info(self, repo, revision, timeout):
        self.calls.append("info")
        assert (repo, revision) == ("owner/name", COMMIT)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.names()])

    def get_paths_info(self, repo, names, repo_type, revision):
        assert (repo, repo_type, revision) == ("owner/name", self.repo_type, COMMIT)
        stated = []
        for name in names:
            content = (self.folder / name).read_bytes()
            lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if name.endswith(".parquet") else None
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            stated.append(SimpleNamespace(path=name, lfs=lfs, blob_id="lfs pointer" if lfs else blob))
        return stated

    def snapshot_download(self, repo, repo_type, revision, allow_patterns, local_dir, max_workers):
        self.calls.append("download")
        assert (repo, repo_type, revision) == ("owner/name", self.repo_type, COMMIT)
        for name in allow_patterns:
            target = Path(local_dir) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((self.folder / name).read_bytes())
            if self.damage:
                self.damage(target)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    folder = tmp_path / "remote"
    write(folder / "data" / "train-0.parquet", LINES)
    write(folder / "data" / "test-0.parquet", LINES[:4])
    (folder / "README.md").write_text("# A data set\n")
    playing = StandIn(folder)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: playing)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", playing.snapshot_download)
    return playing


def read(**kwargs) -> list[str]:
    return list(data.hub_text("owner/name", revision=COMMIT, **kwargs))


def entries() -> list[Path]:
    folder = data.cache_dir() / "hub"
    return list(folder.iterdir()) if folder.exists() else []


def test_a_download_is_used_again_without_asking_the_hub(stand_in, no_network, monkeypatch):
    assert read() == LINES
    assert stand_in.calls == ["info", "download"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read() == LINES and read(split="test") == LINES[:4]
    assert stand_in.calls == ["info", "download"] and no_network == []
    assert len(entries()) == 1


def test_only_the_wanted_files_are_downloaded(stand_in):
    assert read(files="data/test-*") == LINES[:4]
    assert [p.name for p in entries()[0].rglob("*") if p.is_file() and p.suffix == ".parquet"] == ["test-0.parquet"]
    assert "no file that matches" in refused("owner/name", revision=COMMIT, files="*.zip")
    assert read() == LINES  # another choice of files is another entry


@pytest.mark.parametrize("which", ["train-0.parquet", "README.md"])
def test_bytes_that_arrive_damaged_never_become_a_cache_entry(stand_in, which):
    def flip(path: Path):
        if path.name == which:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

    stand_in.damage = flip
    assert "another checksum" in refused("owner/name", revision=COMMIT)
    assert entries() == []
    stand_in.damage = None
    assert read() == LINES


def test_an_interrupted_download_never_becomes_a_cache_entry(stand_in):
    def interrupt(path: Path):
        if path.name == "test-0.parquet":
            raise KeyboardInterrupt

    stand_in.damage = interrupt
    with pytest.raises(KeyboardInterrupt):
        read()
    assert entries() == []

    def fail(path: Path):
        raise huggingface_hub.errors.LocalEntryNotFoundError("connection lost")

    stand_in.damage = fail
    assert "could not be downloaded" in refused("owner/name", revision=COMMIT)
    assert entries() == []


@pytest.mark.parametrize("change", ["flip", "cut", "missing", "list", "no list"])
def test_a_damaged_cache_entry_is_refused_with_the_remedy(stand_in, change):
    read()
    entry = entries()[0]
    path = entry / "data" / "data" / "train-0.parquet"
    content = path.read_bytes()
    if change == "flip":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif change == "cut":
        path.write_bytes(content[:-1])
    elif change == "missing":
        path.unlink()
    elif change == "list":
        (entry / "SHA256SUMS").write_text("nothing")
    else:
        (entry / "SHA256SUMS").unlink()
    message = refused("owner/name", revision=COMMIT)
    assert f"delete the folder {entry}" in message
    assert stand_in.calls == ["info", "download"]


def test_the_second_of_two_downloads_at_once_uses_the_first(stand_in):
    def other_process(path: Path):
        stand_in.damage = None
        assert read() == LINES

    stand_in.damage = other_process
    assert read() == LINES
    assert stand_in.calls.count("download") == 2 and len(entries()) == 1


def test_a_model_is_asked_for_as_a_model(stand_in, monkeypatch):
    asked = []
    monkeypatch.setattr(
        stand_in, "model_info", lambda *a, **k: asked.append(a) or stand_in.dataset_info(*a, **k), False
    )
    monkeypatch.setattr(stand_in, "repo_type", "model")
    folder = data.hub_folder("owner/name", revision=COMMIT, files="README*", kind="model")
    assert (folder / "README.md").read_text() == "# A data set\n" and len(asked) == 1
    with pytest.raises(ValueError, match="kind='space'"):
        data.hub_folder("owner/name", revision=COMMIT, kind="space")


def test_nothing_but_the_hub_module_names_the_hub():
    root = Path(__file__).parents[2]
    calls = re.compile(r"huggingface_hub|snapshot_download|load_dataset|hf_hub_download|trust_remote_code|HfApi")
    named = {p.name for part in ("src", "kernels") for p in (root / part).rglob("*.py") if calls.search(p.read_text())}
    assert named == {"hub.py"}


def test_importing_our_data_package_imports_no_data_library():
    code = textwrap.dedent("""
        import sys, depthlab.data
        heavy = {"datasets", "torchvision", "huggingface_hub", "tokenizers", "transformers"} & set(sys.modules)
        sys.exit(str(heavy) if heavy else 0)
    """)
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
