"""From text to token ids: two tokenizers, and the training, validation and test tokens of a data source."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from depthlab import data
from depthlab.data import DataError, Text, cache_dir
from depthlab.data.files import gist, sha256
from depthlab.lm.tokens import TokenFileError, Tokens, as_tokens, read_tokens, write_tokens
from depthlab.runs import in_ci, write_atomic

_TRAIN, _VALIDATION = 0.9, 0.05  # shares of a source that brings no splits; the rest is for testing

_LONG = 2_000_000  # characters, some seconds of work


class Tokenizer(Protocol):
    """Text to ids and back. `name` differs where the ids do."""

    name: str
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Ids [N] of `text`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 come out as U+FFFD."""

    def count_bytes(self, ids: np.ndarray) -> int:
        """How many UTF-8 bytes `ids` [N] stand for."""


class ByteTokenizer:
    """Every UTF-8 byte is a token: nothing to train, and any text can be written."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """uint8 [N], one for each UTF-8 byte of `text`."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8, and ids above 255, come out as U+FFFD."""
        return bytes(min(i, 0xFF) for i in ids).decode("utf-8", errors="replace")  # 0xFF is never UTF-8

    def count_bytes(self, ids: np.ndarray) -> int:
        """One for each of `ids` [N]."""
        return len(ids)


class BPETokenizer:
    """Byte-level byte-pair encoding, as GPT-2's; `train_bpe` makes one. Any text can be written, nothing is lost."""

    def __init__(self, description: str) -> None:
        """`description`: the JSON of the `tokenizers` library, which is an optional extra (DataError without it)."""
        try:
            self._inner = _library().Tokenizer.from_str(description)
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"A tokenizer description cannot be read ({gist(error)}); train it again.") from None
        self.description = description
        self.vocab_size = int(self._inner.get_vocab_size())
        self.name = f"bpe-{self.vocab_size}-{sha256(description.encode())[:12]}"

    def encode(self, text: str) -> np.ndarray:
        """Ids [N] of `text`."""
        return np.asarray(self._inner.encode(text).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; those outside the vocabulary are left out."""
        return str(self._inner.decode([int(i) for i in ids]))

    def count_bytes(self, ids: np.ndarray) -> int:
        """How many UTF-8 bytes `ids` [N] stand for: a byte-level token has one character for each of its bytes."""
        lengths = np.array([len(self._inner.id_to_token(i)) for i in range(self.vocab_size)])
        return int(lengths[ids].sum())


def train_bpe(text: str, vocab_size: int) -> BPETokenizer:
    """A byte-level BPE of `vocab_size` tokens trained on `text`; kept in our cache, verified on every call.

    Deterministic: equal text, size and version of `tokenizers` give an equal tokenizer.

    Raises:
        DataError: `tokenizers` is missing, the cached one is damaged, or the text has too few pairs for the size.
        ValueError: fewer than the 256 bytes.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size={vocab_size} is not allowed for BPE; use at least 256, one for each byte.")
    library = _library()
    key = sha256(f"{sha256(text.encode('utf-8'))} {vocab_size} {library.__version__}".encode())[:16]
    cached = cache_dir() / "bpe" / f"{key}.json"
    if cached.exists():
        return BPETokenizer(_read_checked(cached))
    _mention_long_work(text, f"training a BPE of {vocab_size} tokens")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, initial_alphabet=alphabet)
    inner.train_from_iterator([text], trainer)
    if inner.get_vocab_size() != vocab_size:
        raise DataError(
            f"This text gives a BPE of only {inner.get_vocab_size()} tokens, not of vocab_size={vocab_size}; "
            "use a smaller size or more text."
        )
    tokenizer = BPETokenizer(inner.to_str())
    with _writing_cache():
        _write_checked(cached, tokenizer.description)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Keep what `load_tokenizer` needs at `path`, with a checksum."""
    _write_checked(path, tokenizer.description if isinstance(tokenizer, BPETokenizer) else "")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that `save_tokenizer` put at `path`. DataError: missing or damaged, or its library is missing."""
    description = _read_checked(path)
    return BPETokenizer(description) if description else ByteTokenizer()


def read_text(source: str) -> Text:
    """The text of `source`, split in training, validation and test.

    Args:
        source: "sotu"; or the path of a .txt file (UTF-8), whose first 90 % are for training, 5 % for validation, the
            rest for testing; or owner/name@commit on the hub, whose rows are split the same way.

    Raises:
        ValueError: none of these. DataError: it cannot be read or is empty, or its checksum is wrong.
    """
    if source == "sotu":
        return data.text(source)
    if re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", source):
        repo, revision = source.split("@")
        return _split("\n\n".join(data.hub_text(repo, revision=revision)), source)
    path = Path(source).expanduser()
    if path.suffix == ".txt":
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be read ({gist(error)}); check the path.") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no UTF-8 text (byte {error.start:,}); convert it first.") from None
        if not text:
            raise DataError(f"{path} is empty; give a file with text in it.")
        return _split(text, f"file {path.name}")
    raise ValueError(
        f"data={source!r} is unknown; use sotu, the path of a .txt or .tokens file, or owner/name@commit of a hub text "
        "with its full 40-digit commit."
    )


def _split(text: str, source: str) -> Text:
    first, second = int(_TRAIN * len(text)), int((_TRAIN + _VALIDATION) * len(text))
    return Text(text[:first], text[first:second], text[second:], source)


@dataclass(frozen=True)
class Corpus:
    """Tokens of one source; a split is None where it would be empty. tokenizer: None for a file of unknown ids."""

    train: Tokens | None
    validation: Tokens | None
    test: Tokens | None
    tokenizer: Tokenizer | None

    def split(self, name: str) -> Tokens:
        """The tokens of "train", "validation" or "test". ValueError where there are none."""
        found = getattr(self, name) if name in ("train", "validation", "test") else None
        if found is None:
            raise ValueError(f"split={name!r} has no text here; use train, validation or test of a longer text.")
        return found


def corpus(source: str, tokenizer: Tokenizer | str = "bytes") -> Corpus:
    """All splits of `source` (as `read_text` takes it, or the path of a .tokens file) as tokens.

    Args:
        tokenizer: one, or "bytes", or "bpe-SIZE": trained on the training text and kept in our cache, as are its ids.
            A .tokens file knows what made its ids and takes only "bytes" or that.

    Raises:
        ValueError: an unknown source or tokenizer. DataError: as `read_text`, `read_tokens` and `train_bpe`.
    """
    if source.endswith(".tokens"):
        return _of_file(read_tokens(Path(source).expanduser()), tokenizer)
    text = read_text(source)
    if isinstance(tokenizer, str):
        tokenizer = _named(tokenizer, text.train)
    splits = {name: _encode(getattr(text, name), tokenizer, name, text.source) for name in Text._fields[:3]}
    return Corpus(**splits, tokenizer=tokenizer)


def _named(name: str, text: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if match := re.fullmatch(r"bpe-(\d{1,9})", name):
        return train_bpe(text, int(match[1]))
    raise ValueError(f"tokenizer={name!r} is unknown; use bytes or bpe-SIZE, for example bpe-4096.")


def _encode(text: str, tokenizer: Tokenizer, split: str, source: str) -> Tokens | None:
    if not text:
        return None
    raw = text.encode("utf-8")
    label = f"the {split} part of {source}"
    if tokenizer.name == "bytes":
        return as_tokens(tokenizer.encode(text), 256, tokenizer="bytes", n_bytes=len(raw), source=label)
    cached = cache_dir() / "tokens" / f"{sha256(raw)[:16]}-{tokenizer.name}.tokens"
    if not cached.exists():
        _mention_long_work(text, f"encoding {label}")
        pieces = [tokenizer.encode(text)]
        with _writing_cache():
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_tokens(cached, pieces, tokenizer.vocab_size, tokenizer=tokenizer.name, n_bytes=len(raw))
    try:
        return read_tokens(cached)
    except TokenFileError as error:
        raise DataError(f"{error} It is only our cache: delete it and call again.") from None


@contextlib.contextmanager
def _writing_cache() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"The cache {cache_dir()} cannot be written ({gist(error)}); make room there, or set DEPTHLAB_CACHE to "
            "another folder."
        ) from None


def _mention_long_work(text: str, work: str) -> None:
    if len(text) > _LONG and not in_ci():
        print(f"{work} ({len(text):,} characters; once, then it comes from the cache)", flush=True)


def _of_file(tokens: Tokens, tokenizer: Tokenizer | str) -> Corpus:
    name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
    if tokens.tokenizer and name not in (tokens.tokenizer, "bytes"):
        raise ValueError(f"tokenizer={name!r} did not make {tokens.source}; it is from {tokens.tokenizer!r}.")
    first, second = int(_TRAIN * len(tokens)), int((_TRAIN + _VALIDATION) * len(tokens))
    known = ByteTokenizer() if tokens.tokenizer == "bytes" else None
    bounds = {"train": (0, first), "validation": (first, second), "test": (second, len(tokens))}
    parts = {name: tokens.part(*bound, f"the {name} part of {tokens.source}") for name, bound in bounds.items()}
    return Corpus(**parts, tokenizer=known if isinstance(tokenizer, str) else tokenizer)


def _library():
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            'tokenizer="bpe-SIZE" needs the package tokenizers; install it with `pip install "depthlab[data]"`, or use '
            'tokenizer="bytes".'
        ) from None
    return tokenizers


def _write_checked(path: Path, description: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"sha256": sha256(description.encode()), "tokenizer": description}))


def _read_checked(path: Path) -> str:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        description = stored["tokenizer"]
        sound = sha256(description.encode()) == stored["sha256"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"The tokenizer {path} cannot be read ({gist(error)}); delete it and call again.") from None
    if not sound:
        raise DataError(f"The tokenizer {path} does not have its SHA-256; delete it and call again.")
    return description
