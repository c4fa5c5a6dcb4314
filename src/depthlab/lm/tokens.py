"""Token ids: in memory or in a checked, memory-mapped file, and the stream of shuffled windows that training reads.

A token file is one block of 4,096 bytes, a JSON header padded with spaces, then the ids, little-endian. The header
holds their checksum and, last, its own.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthlab.data import DataError
from depthlab.data.files import gist

_MAGIC = "depthlab-tokens-2"
_HEADER_BYTES = 4096
_CHUNK = 1 << 22  # ids that are looked at in one go
_DTYPES = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32}


class TokenFileError(DataError):
    """A token file that is damaged, cut short, or none at all."""


@dataclass(frozen=True)
class Tokens:
    """Token ids [N] (unsigned, all below `vocab_size`) and what they mean; made by `as_tokens` and `read_tokens`.

    Attributes:
        tokenizer: name of what made the ids ("bytes", "bpe-1024-3f.."), empty where unknown.
        n_bytes: length of their text in UTF-8 bytes; None where unknown.
        source: their origin, in words.
        sha256: of the ids as stored, or of that and the bounds for a part of them.
    """

    ids: np.ndarray
    vocab_size: int
    tokenizer: str
    n_bytes: int | None
    source: str
    sha256: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bytes_per_token(self) -> float | None:
        """Mean number of UTF-8 bytes a token stands for; None where unknown."""
        return self.n_bytes / len(self.ids) if self.n_bytes and len(self.ids) else None

    def part(self, start: int, stop: int, source: str) -> "Tokens | None":
        """The ids from `start` to before `stop`, without a copy; None where that is empty."""
        ids = self.ids[start:stop]
        if not len(ids):
            return None
        n_bytes = len(ids) if self.tokenizer == "bytes" else None
        digest = hashlib.sha256(f"{self.sha256} {start} {stop}".encode()).hexdigest()
        return Tokens(ids, self.vocab_size, self.tokenizer, n_bytes, source, digest)

    def tensor(self) -> Tensor:
        """All ids, int64 [N]."""
        return torch.from_numpy(self.ids.astype(np.int64))


def as_tokens(
    ids: np.ndarray | Tensor | list[int],
    vocab_size: int,
    *,
    tokenizer: str = "",
    n_bytes: int | None = None,
    source: str = "given ids",
) -> Tokens:
    """Ids [N] as checked `Tokens`, stored in the smallest unsigned type that holds the vocabulary.

    Raises:
        ValueError: ids of another shape, none at all, or one outside 0 .. vocab_size - 1.
    """
    dtype = _dtype(vocab_size)
    array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"{source} has shape {list(array.shape)} of {array.dtype}; give at least one whole number.")
    _need_ids_below(array, vocab_size, source)
    stored = np.ascontiguousarray(array, dtype=dtype)
    return Tokens(stored, vocab_size, tokenizer, n_bytes, source, hashlib.sha256(stored.data).hexdigest())


def write_tokens(
    path: str | Path,
    pieces: Iterable[np.ndarray],
    vocab_size: int,
    *,
    tokenizer: str = "",
    n_bytes: int | None = None,
) -> Tokens:
    """Write pieces of ids [n] one after the other as a token file, never holding more than one, and read it back.

    The file appears whole or not at all. Raises ValueError for ids outside the vocabulary, OSError for a full disk.
    """
    path, dtype, digest, count = Path(path), _dtype(vocab_size), hashlib.sha256(), 0
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(b" " * _HEADER_BYTES)
            for piece in pieces:
                _need_ids_below(piece, vocab_size, f"A piece for {path.name}")
                block = np.ascontiguousarray(piece, dtype=dtype).tobytes()
                digest.update(block)
                count += len(piece)
                file.write(block)
            if not count:
                raise ValueError(f"There are no ids for {path.name}; give at least one.")
            header = {"format": _MAGIC, "dtype": dtype.name, "vocab_size": vocab_size, "count": count}
            header |= {"sha256": digest.hexdigest(), "tokenizer": tokenizer, "n_bytes": n_bytes}
            file.seek(0)
            file.write(json.dumps(header | {"header_sha256": _header_sum(header)}).encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return read_tokens(path)


def read_tokens(path: str | Path) -> Tokens:
    """A token file, memory-mapped after every byte of it was compared with its checksum.

    Raises:
        TokenFileError: unreadable, no token file, cut short, a wrong checksum, or an id outside its vocabulary.
    """
    path = Path(path)
    header = _read_header(path)
    dtype = np.dtype(header["dtype"]).newbyteorder("<")
    expected, found = _HEADER_BYTES + header["count"] * dtype.itemsize, path.stat().st_size
    if found != expected:
        raise TokenFileError(
            f"The token file {path} holds {found:,} bytes where its header announces {expected:,}; write it again."
        )
    ids = np.memmap(path, dtype, "r", _HEADER_BYTES, (header["count"],))
    digest = hashlib.sha256()
    for start in range(0, len(ids), _CHUNK):
        digest.update(ids[start : start + _CHUNK].data)
    if digest.hexdigest() != header["sha256"]:
        raise TokenFileError(f"The token file {path} does not have the SHA-256 of its header; write it again.")
    try:
        _need_ids_below(ids, header["vocab_size"], f"The token file {path}")
    except ValueError as error:
        raise TokenFileError(str(error)) from None
    source = f"{path.name}: {len(ids):,} tokens"
    return Tokens(ids, header["vocab_size"], header["tokenizer"], header["n_bytes"], source, header["sha256"])


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            block = file.read(_HEADER_BYTES)
    except OSError as error:
        raise TokenFileError(f"The token file {path} cannot be read ({gist(error)}); check the path.") from None
    try:
        header = json.loads(block)
        sound = header.pop("header_sha256") == _header_sum(header) and header["format"] == _MAGIC
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        sound = False
    if len(block) < _HEADER_BYTES or not sound:
        raise TokenFileError(
            f"{path} is no token file or its header is damaged; write one with depthlab.lm.write_tokens."
        )
    return header


def _header_sum(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header).encode("ascii")).hexdigest()


def _dtype(vocab_size: int) -> np.dtype:
    if isinstance(vocab_size, int) and not isinstance(vocab_size, bool) and vocab_size >= 1:
        for name, most in _DTYPES.items():
            if vocab_size <= most:
                return np.dtype(name).newbyteorder("<")
    raise ValueError(f"vocab_size={vocab_size!r} is not allowed; give a whole number from 1 to 2**32.")


def _need_ids_below(ids: np.ndarray, vocab_size: int, source: str) -> None:
    for start in range(0, len(ids), _CHUNK):
        piece = ids[start : start + _CHUNK]
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{source} has the token id {low if low < 0 else high} and a vocabulary of {vocab_size}; "
                f"ids run from 0 to {vocab_size - 1}."
            )


class TokenStream:
    """Endless batches of windows of tokens, in an order that only the seed decides, and a position to go on from.

    The tokens are cut into windows of `seq_len` inputs and the same shifted by one as targets; what is left at the end,
    fewer than `seq_len` tokens, is not read. Every epoch shuffles all windows anew, and none comes twice in it; a batch
    may end one epoch and begin the next.
    """

    def __init__(self, tokens: Tokens, batch_size: int, seq_len: int, seed: int = 0) -> None:
        """Raises ValueError: batch_size or seq_len below 1, or a window longer than the tokens."""
        for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not allowed; give a whole number from 1 on.")
        self.tokens, self.batch_size, self.seq_len, self.seed = tokens, batch_size, seq_len, seed
        self.n_windows = (len(tokens) - 1) // seq_len
        if self.n_windows < 1:
            raise ValueError(
                f"seq_len={seq_len} needs {seq_len + 1:,} tokens and {tokens.source} has {len(tokens):,}; "
                "use shorter sequences or more text."
            )
        self.position = 0  # windows given out so far
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def next_batch(self) -> Tensor:
        """int64 [B, T + 1]: inputs are [:, :-1], targets [:, 1:]."""
        starts = [self._window(self.position + i) * self.seq_len for i in range(self.batch_size)]
        self.position += self.batch_size
        rows = np.stack([self.tokens.ids[start : start + self.seq_len + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.next_batch()

    def _window(self, position: int) -> int:
        epoch, place = divmod(position, self.n_windows)
        if epoch != self._epoch:
            # One seed an epoch, so that going on from a position needs no earlier epoch.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.n_windows, generator=generator).numpy()
        return int(self._order[place])

    def identity(self) -> dict[str, Any]:
        """What decides which windows come: two streams that agree here and in position give the same batches."""
        return {
            "sha256": self.tokens.sha256,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Position and identity, ready for JSON."""
        return {"position": self.position, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the position of `state`. ValueError names what differs where it is another stream's."""
        for name, own in self.identity().items():
            if state.get(name) != own:
                what = "tokens" if name == "sha256" else name
                raise ValueError(
                    f"This stream has {what} {own!r} and the state {state.get(name)!r}; go on with the same data and "
                    "settings."
                )
        self.position = state["position"]
