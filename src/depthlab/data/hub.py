"""Text and files from local folders or the Hugging Face hub; no other part of the project calls the hub.

Every call names a full commit, obeys the offline variables and gives up in seconds.
"""

import fnmatch
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from depthlab.data.files import DataError, cache_dir, downloading, gist, parse_sums, sha256_of_file

HUB_SECONDS = 4.0  # how long the hub may take to answer before we say that it is out of reach
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def hub_text(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    split: str = "train",
    column: str = "text",
    config: str | None = None,
    files: str | None = None,
    streaming: bool = False,
) -> Iterator[str]:
    """Strings of one text column, row by row, in file order; memory does not grow with the data set.

    Args:
        source: a local file (.txt: a row is a line; .jsonl, .csv, .parquet) or folder, or a hub id ``owner/name``.
            What exists locally is local: no connection is made for it, and its bytes are used as they are.
        revision: required for a hub id: the full 40-digit commit, because branches and tags move.
        split, config: which part of the data set, as `datasets.load_dataset` names them.
        column: the column that holds the text.
        files: a pattern of file names; only these are downloaded or read.
        streaming: False downloads a hub data set into our cache once, verifies every file against the hub's own
            checksums, and afterwards connects to nothing. True reads over the network as it goes and keeps
            nothing; rows then have no checksum.

    Raises:
        ValueError: a hub id without a full commit, a local source with one, or a source that is neither.
        DataError: `datasets` is missing, the hub is out of reach (at once when an offline variable is set, after
            `HUB_SECONDS` otherwise), bytes differ from their checksum, or there is no such split or column.
    """
    datasets = _import("datasets")
    path = Path(os.path.expanduser(source))
    if str(source) and os.path.exists(path):
        if revision is not None:
            raise ValueError(f"{source} exists here, where revision={revision!r} means nothing; leave revision out.")
        where, pinned = path, {}
    else:
        repo, commit = _pinned(source, revision)
        if streaming:
            _ask_hub(repo, commit, "dataset")
            where, pinned = repo, {"revision": commit}
        else:
            where, pinned = hub_folder(repo, revision=commit, files=files), {}
    if isinstance(where, Path) and where.is_file():
        where, files = where.parent, where.name
    try:
        rows = datasets.load_dataset(str(where), config, data_files=files, split=split, streaming=True, **pinned)
        rows = iter(rows)
        first = next(rows, None)
    except Exception as error:  # datasets raises a dozen kinds, none of them documented
        raise DataError(
            f"{source} cannot be read as split {split!r} ({gist(error)}); check the path, split, config and files."
        ) from None
    if first is None:
        raise DataError(f"{source} has no row in split {split!r}; give a file or split with text.")
    if column not in first or not isinstance(first[column], str):
        known = ", ".join(name for name, value in first.items() if isinstance(value, str)) or "none"
        raise DataError(f"{source} has no text column {column!r}; columns with text: {known}.")
    return _strings(first, rows, column, source)


def _strings(first: dict[str, Any], rows: Iterator[dict[str, Any]], column: str, source: object) -> Iterator[str]:
    row: dict[str, Any] | None = first
    number = 0
    while row is not None:
        if not isinstance(row[column], str):
            raise DataError(f"Row {number} of {source} has no text in column {column!r}; remove the row or fix it.")
        yield row[column]
        number += 1
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(
                f"{source} breaks off after {number} rows ({gist(error)}); replace it by a whole copy."
            ) from None


def is_offline() -> bool:
    """Whether one of `OFFLINE_VARIABLES` is set to 1, on, yes or true, now and not when some library was imported."""
    return any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in OFFLINE_VARIABLES)


def _pinned(source: object, revision: str | None) -> tuple[str, str]:
    """A checked hub id and commit."""
    repo = str(source)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", repo):
        raise ValueError(
            f"{repo!r} is neither a file or folder nor a hub id of the form owner/name; check its spelling."
        )
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ValueError(f"{repo} with revision={revision!r} is not pinned; give the full 40-digit commit.")
    return repo, str(revision)


def _ask_hub(repo: str, revision: str, kind: str) -> Any:
    """The first call of everything that needs the hub: what a repository holds at a commit, or an error in seconds."""
    if is_offline():
        raise DataError(
            f"{repo} is not in our cache and an offline variable ({', '.join(OFFLINE_VARIABLES)}) is set; "
            'unset it, give a local path, or use text("sotu"), which is bundled.'
        )
    hub = _import("huggingface_hub")
    try:
        # Asked once and without the retries that `datasets` would make (23 s on a machine without network).
        ask = hub.HfApi().dataset_info if kind == "dataset" else hub.HfApi().model_info
        return _within(HUB_SECONDS, lambda: ask(repo, revision=revision, timeout=HUB_SECONDS))
    except Exception as error:
        raise DataError(
            f"The hub did not describe {repo} at {revision[:12]} ({gist(error)}); check the network, id and commit, "
            'give a local path, or use text("sotu"), which is bundled.'
        ) from None


def hub_folder(
    repo: str, *, revision: str, files: str | None = None, kind: Literal["dataset", "model"] = "dataset"
) -> Path:
    """Folder in our cache with a hub repository's files at one commit; downloaded if need be, verified on every call.

    Args:
        repo: hub id ``owner/name``.
        revision: the full 40-digit commit.
        files: a pattern of file names (``*`` also matches ``/``); None takes all files.
        kind: which of the hub's two kinds of repository it is.

    Raises:
        ValueError: no hub id, no full commit, another kind.
        DataError: the hub is out of reach, or bytes differ from their checksum.
    """
    repo, revision = _pinned(repo, revision)
    if kind not in ("dataset", "model"):
        raise ValueError(f'hub_folder(kind={kind!r}): use "dataset" or "model".')
    key = hashlib.sha256(f"{kind} {repo}@{revision}/{files}".encode()).hexdigest()[:12]
    target = cache_dir() / "hub" / f"{repo.replace('/', '--')}-{key}"
    if not target.is_dir():
        listed = [f.rfilename for f in _ask_hub(repo, revision, kind).siblings]
        names = [name for name in listed if files is None or fnmatch.fnmatch(name, files)]
        if not names:
            raise DataError(f"{repo} has no file that matches {files!r}; leave files out or give another pattern.")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as scratch, downloading():
                _download(repo, revision, kind, names, Path(scratch) / "entry")
                _rename(Path(scratch) / "entry", target)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{repo} could not be downloaded into {target.parent} ({gist(error)}); check network and disk and "
                "call again, or set DEPTHLAB_CACHE to a folder that can be written."
            ) from None
    _verify(target)
    return target / "data"


def _download(repo: str, revision: str, kind: str, names: list[str], entry: Path) -> None:
    """Fetch the named files into ``entry/data``, compare them with the hub's checksums, list their SHA-256."""
    hub = _import("huggingface_hub")
    stated = hub.HfApi().get_paths_info(repo, names, repo_type=kind, revision=revision)
    hub.snapshot_download(
        repo, repo_type=kind, revision=revision, allow_patterns=names, local_dir=entry / "data", max_workers=2
    )
    lines = []
    for file in stated:
        path = entry / "data" / file.path
        digest = sha256_of_file(path)
        if file.lfs is not None:
            right = digest == file.lfs.sha256
        else:  # small files have git's checksum
            content = path.read_bytes()
            blob = b"blob %d\0" % len(content) + content
            right = hashlib.sha1(blob, usedforsecurity=False).hexdigest() == file.blob_id
        if not right:
            raise DataError(f"{file.path} of {repo} arrived with another checksum than the hub states; call again.")
        lines.append(f"{digest}  {file.path}\n")
    if len(lines) != len(names):
        raise DataError(f"The hub stated {len(lines)} checksums for {len(names)} files of {repo}; call again.")
    (entry / "SHA256SUMS").write_bytes("".join(lines).encode())


def _rename(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError:
        if not target.is_dir():  # otherwise another process was first, with the same files
            raise


def _verify(entry: Path) -> None:
    remedy = f"delete the folder {entry} and call again"
    try:
        sums = parse_sums((entry / "SHA256SUMS").read_bytes().decode())
        wrong = [name for name, digest in sums.items() if sha256_of_file(entry / "data" / name) != digest]
    except (OSError, ValueError) as error:
        raise DataError(f"The cached data set {entry.name} cannot be used ({gist(error)}); {remedy}.") from None
    if wrong:
        raise DataError(f"The cached file {wrong[0]} of {entry.name} does not have its listed SHA-256; {remedy}.")


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except Exception as error:
        raise DataError(
            f'{name} cannot be imported ({gist(error)}); install it with `pip install "depthlab[data]"`, '
            'or use text("sotu"), which is bundled.'
        ) from None


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Result of `call`, or TimeoutError after `seconds`: a name look-up knows no time limit of its own."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = call()
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "result" not in outcome:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return outcome["result"]
