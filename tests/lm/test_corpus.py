"""Text becomes ids and comes back whole; what is cached is verified, and what is missing is said in one sentence."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from depthlab import data
from depthlab.data import DataError
from depthlab.lm import corpus as corpora
from depthlab.lm.corpus import BPETokenizer, ByteTokenizer, corpus, load_tokenizer, read_text, save_tokenizer, train_bpe

STRANGE = "Grüße, 日本\r\n\n\t  x\x00 \U0001f600 \ud7ff don't  "
SOME = "the cat sat on the mat and the dog sat on the cat; " * 40 + STRANGE


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_bytes((SOME * 5).encode())
    return str(path)


def test_bytes_are_the_utf_8_bytes_and_come_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(STRANGE).tobytes() == STRANGE.encode()
    assert tokenizer.decode(tokenizer.encode(STRANGE)) == STRANGE
    assert tokenizer.decode([0xE6, 0x97]) == "�"  # cut inside a character


def test_bpe_loses_nothing_and_is_shorter():
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe(SOME, 300)
    assert tokenizer.vocab_size == 300
    ids = tokenizer.encode(STRANGE + SOME)
    assert tokenizer.decode(ids) == STRANGE + SOME
    assert len(ids) < len((STRANGE + SOME).encode()) / 2
    assert ids.min() >= 0 and ids.max() < 300


@pytest.mark.parametrize("size", [0, 300])
def test_bytes_of_any_piece_are_counted_also_where_it_cuts_a_character(size):
    if size:
        pytest.importorskip("tokenizers")
    tokenizer = train_bpe(SOME, size) if size else ByteTokenizer()
    ids = tokenizer.encode(SOME)
    assert tokenizer.count_bytes(ids) == len(SOME.encode())
    for n in range(1, 60):  # over the letters of two and three bytes at the end
        assert tokenizer.count_bytes(ids[:-n]) + tokenizer.count_bytes(ids[-n:]) == len(SOME.encode())
        whole = tokenizer.decode(ids[:-n])
        if "\ufffd" not in whole:
            assert tokenizer.count_bytes(ids[:-n]) == len(whole.encode())


def test_ids_that_are_no_bytes_are_shown_as_such():
    assert ByteTokenizer().decode([104, 256, 105, 50_000]) == "h\ufffdi\ufffd"


def test_bpe_is_the_same_in_another_process_and_comes_from_the_cache(tmp_path):
    pytest.importorskip("tokenizers")
    first = train_bpe(SOME, 300)
    code = f"from depthlab.lm.corpus import train_bpe; print(train_bpe({SOME!r}, 300).name)"
    fresh = {**os.environ, "DEPTHLAB_CACHE": str(tmp_path / "other")}
    done = subprocess.run([sys.executable, "-c", code], env=fresh, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first.name == train_bpe(SOME, 300).name
    (cached,) = (tmp_path / "cache" / "bpe").iterdir()
    stored = json.loads(cached.read_text())
    stored["tokenizer"] = stored["tokenizer"].replace("the", "eht", 1)
    cached.write_text(json.dumps(stored))
    with pytest.raises(DataError, match="does not have its SHA-256; delete it"):
        train_bpe(SOME, 300)
    cached.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        train_bpe(SOME, 300)
    assert train_bpe(SOME + "!", 300).name != first.name  # another text is another entry


def test_a_size_that_the_text_cannot_fill_is_refused():
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match="not of vocab_size=4000"):
        train_bpe(SOME, 4000)
    with pytest.raises(ValueError, match="vocab_size=255"):
        train_bpe(SOME, 255)


def test_without_tokenizers_bpe_is_one_sentence_and_bytes_work(monkeypatch, story):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert len(corpus(story, "bytes").train) > 0
    with pytest.raises(DataError, match=r'install it with `pip install "depthlab\[data\]"`, or use tokenizer="bytes"'):
        corpus(story, "bpe-300")


def test_a_run_keeps_its_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    for tokenizer in (ByteTokenizer(), train_bpe(SOME, 300)):
        save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
        again = load_tokenizer(tmp_path / "tokenizer.json")
        assert (type(again), again.name) == (type(tokenizer), tokenizer.name)
    with pytest.raises(DataError, match="cannot be read"):
        BPETokenizer("{}")


def test_splits_of_a_file_are_in_order_and_leave_nothing_out(story):
    text = read_text(story)
    assert text.train + text.validation + text.test == SOME * 5
    assert len(text.train) == int(0.9 * len(SOME * 5))
    parts = corpus(story)
    assert parts.train.ids.tobytes() == text.train.encode()
    assert parts.split("test").ids.tobytes() == text.test.encode()
    assert parts.train.bytes_per_token == 1


def test_sotu_is_the_bundled_text_with_its_splits():
    parts = corpus("sotu")
    assert parts.validation.ids.tobytes() == data.text("sotu").validation.encode()
    assert parts.tokenizer.name == "bytes"


def test_bpe_ids_are_cached_as_a_checked_file(story, tmp_path):
    pytest.importorskip("tokenizers")
    first = corpus(story, "bpe-300")
    assert isinstance(first.train.ids, np.memmap)
    text = read_text(story)
    assert first.tokenizer.decode(first.train.ids) == text.train
    assert first.train.bytes_per_token == pytest.approx(len(text.train.encode()) / len(first.train))
    for path in (tmp_path / "cache" / "tokens").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="bytes where its header announces .* only our cache: delete it and call again"):
        corpus(story, "bpe-300")


def test_a_cache_that_cannot_be_written_is_one_sentence(story, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    trained = train_bpe(SOME, 300)
    monkeypatch.setenv("DEPTHLAB_CACHE", f"{story}/cache")  # below a file
    for use in (lambda: train_bpe(SOME, 300), lambda: corpus(story, trained)):
        with pytest.raises(DataError, match=r"The cache .*story.txt/cache cannot be written \(Not a directory\); make"):
            use()


def test_a_token_file_is_a_corpus_and_keeps_its_tokenizer(tmp_path):
    path = tmp_path / "a.tokens"
    corpora.write_tokens(path, [np.arange(1000) % 300], 300, tokenizer="bpe-300-0123456789ab")
    parts = corpus(str(path))
    assert [len(parts.train), len(parts.validation), len(parts.test)] == [900, 50, 50]
    assert parts.tokenizer is None and parts.train.bytes_per_token is None
    with pytest.raises(ValueError, match="did not make"):
        corpus(str(path), "bpe-299")


def test_an_empty_split_is_none_until_it_is_asked_for(tmp_path):
    (tmp_path / "tiny.txt").write_text("0123456789")
    parts = corpus(str(tmp_path / "tiny.txt"))
    assert parts.validation is None
    with pytest.raises(ValueError, match="split='validation' has no text"):
        parts.split("validation")


def test_a_hub_text_goes_through_the_pinned_helper(monkeypatch):
    asked = []
    monkeypatch.setattr(data, "hub_text", lambda repo, **how: asked.append((repo, how)) or iter(["one", "two"]))
    commit = "0123456789" * 4
    assert "".join(read_text(f"someone/texts@{commit}")[:3]) == "one\n\ntwo"
    assert asked == [("someone/texts", {"revision": commit})]


@pytest.mark.parametrize("source", ["war-and-peace", "someone/texts", "someone/texts@main", ""])
def test_an_unknown_source_says_what_there_is(source):
    with pytest.raises(
        ValueError, match="is unknown; use sotu, the path of a .txt or .tokens file, or owner/name@commit"
    ):
        read_text(source)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="none.txt cannot be read"):
        read_text(str(tmp_path / "none.txt"))
    (tmp_path / "latin.txt").write_bytes(b"abc\xe4")
    with pytest.raises(DataError, match=r"latin.txt is no UTF-8 text \(byte 3\)"):
        read_text(str(tmp_path / "latin.txt"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="empty.txt is empty; give a file with text in it"):
        read_text(str(tmp_path / "empty.txt"))
    with pytest.raises(ValueError, match="tokenizer='words' is unknown"):
        corpus("sotu", "words")
