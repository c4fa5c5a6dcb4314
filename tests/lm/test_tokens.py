"""Token files never give a byte that was not written; a stream's order follows from its seed and position alone."""

import hashlib
import json

import numpy as np
import pytest
import torch

from depthlab.lm.tokens import TokenFileError, TokenStream, as_tokens, read_tokens, write_tokens


def ids(n: int, vocab_size: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, n)


# ---- token files


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_a_token_file_gives_back_what_was_written_in_the_smallest_type(tmp_path, vocab_size, dtype):
    written = ids(1000, vocab_size)
    path = tmp_path / "a.tokens"
    pieces = [written[:1], written[1:600], written[600:]]
    tokens = write_tokens(path, pieces, vocab_size, tokenizer="mine", n_bytes=5000)
    assert isinstance(tokens.ids, np.memmap)
    assert np.array_equal(tokens.ids, written) and tokens.ids.dtype == dtype
    assert torch.equal(tokens.tensor(), torch.from_numpy(written))
    assert (tokens.vocab_size, tokens.tokenizer, tokens.n_bytes, tokens.bytes_per_token) == (
        vocab_size,
        "mine",
        5000,
        5,
    )
    assert tokens.sha256 == as_tokens(written, vocab_size).sha256 == read_tokens(path).sha256
    assert [p.name for p in tmp_path.iterdir()] == ["a.tokens"]


def test_every_flipped_byte_and_every_cut_is_refused(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [ids(200, 255)], 255, tokenizer="mine", n_bytes=712)
    good = path.read_bytes()
    header_end = good.index(b"}") + 1
    places = [*range(header_end), *range(4096, len(good))]
    for place in places:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(TokenFileError) as caught:
            read_tokens(path)
        assert str(path) in str(caught.value), place
    for cut in (0, 1, header_end, 4095, 4096, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(TokenFileError):
            read_tokens(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(TokenFileError, match=r"holds 4,297 bytes where its header announces 4,296"):
        read_tokens(path)


def test_a_header_that_lies_about_the_vocabulary_is_refused(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.array([0, 99])], 100)
    header = json.loads(path.read_bytes()[:4096]) | {"vocab_size": 99}
    del header["header_sha256"]
    header["header_sha256"] = hashlib.sha256(json.dumps(header).encode()).hexdigest()
    path.write_bytes(json.dumps(header).encode().ljust(4096) + path.read_bytes()[4096:])
    with pytest.raises(TokenFileError, match="token id 99 and a vocabulary of 99; ids run from 0 to 98"):
        read_tokens(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"{}".ljust(5000), b"[" * 4096, b"null".ljust(4096)])
def test_what_is_no_token_file_is_called_that(tmp_path, content):
    path = tmp_path / "a.tokens"
    path.write_bytes(content)
    with pytest.raises(TokenFileError, match="is no token file"):
        read_tokens(path)
    with pytest.raises(TokenFileError, match="No such file"):
        read_tokens(tmp_path / "none.tokens")


def test_a_refused_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [ids(10)], 256)
    before = path.read_bytes()
    for pieces, says in (
        ([ids(5), np.array([256])], "token id 256"),
        ([], "no ids"),
        ([np.array([-1])], "token id -1"),
    ):
        with pytest.raises(ValueError, match=says):
            write_tokens(path, pieces, 256)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.tokens"]


@pytest.mark.parametrize(
    ("given", "vocab_size", "says"),
    [
        ([0, 256], 256, "token id 256 and a vocabulary of 256"),
        ([-1, 3], 256, "token id -1"),
        ([], 256, "at least one whole number"),
        ([0.5], 256, "float64"),
        ([[1, 2]], 256, r"shape \[1, 2\]"),
        ([1], 0, "vocab_size=0"),
        ([1], True, "vocab_size=True"),
    ],
)
def test_ids_outside_the_vocabulary_or_of_no_list_are_refused(given, vocab_size, says):
    with pytest.raises(ValueError, match=says):
        as_tokens(given, vocab_size)


def test_parts_have_an_identity_of_their_own():
    tokens = as_tokens(ids(100), 256, tokenizer="bytes", n_bytes=100)
    left, right = tokens.part(0, 50, "left"), tokens.part(50, 100, "right")
    assert len({tokens.sha256, left.sha256, right.sha256}) == 3
    assert np.array_equal(np.concatenate([left.ids, right.ids]), tokens.ids)
    assert left.bytes_per_token == 1
    assert tokens.part(7, 7, "nothing") is None


# ---- the stream


def rows(batch: torch.Tensor) -> list[int]:
    """The first id of every window; ids count up, so it names the window."""
    assert (batch.diff(dim=1) == 1).all()  # neighbouring tokens stay neighbours
    return batch[:, 0].tolist()


def counting(n: int = 1000) -> TokenStream:
    return TokenStream(as_tokens(np.arange(n), n), batch_size=4, seq_len=9, seed=3)


def test_an_epoch_holds_every_window_once_in_an_order_of_its_own():
    stream = counting(100)  # 11 windows: batches run over the ends of epochs
    assert stream.n_windows == 11
    seen = [row for _ in range(11) for row in rows(stream.next_batch())]
    epochs = [seen[i * 11 : (i + 1) * 11] for i in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == [9 * i for i in range(11)]
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_targets_are_the_inputs_moved_by_one_and_no_token_is_predicted_twice():
    stream = counting(100)
    batch = torch.cat([stream.next_batch() for _ in range(11)])[:11]
    assert batch.dtype == torch.int64 and batch.shape == (11, 10)
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(1, 100))


def test_the_order_follows_from_the_seed():
    one, same = counting(), counting()
    other = TokenStream(one.tokens, batch_size=4, seq_len=9, seed=4)
    first = rows(one.next_batch())
    assert first == rows(same.next_batch())
    assert first != rows(other.next_batch())


@pytest.mark.parametrize("steps", [0, 1, 26, 27, 28, 60])
def test_a_stream_goes_on_from_its_state(steps):
    stream, resumed = counting(), counting()
    for _ in range(steps):
        stream.next_batch()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for _ in range(40):
        assert torch.equal(stream.next_batch(), resumed.next_batch())


def test_another_streams_state_is_refused_by_the_field_that_differs():
    stream = counting()
    for change, says in (
        ({"sha256": "0"}, "tokens"),
        ({"seed": 9}, "seed 3 and the state 9"),
        ({"batch_size": 1}, "batch_size"),
        ({"seq_len": 8}, "seq_len"),
    ):
        with pytest.raises(ValueError, match=says):
            stream.load_state_dict({**stream.state_dict(), **change})
    assert stream.position == 0


def test_a_window_longer_than_the_text_is_refused_and_one_that_just_fits_is_not():
    assert TokenStream(as_tokens(ids(10), 256), 1, 9).next_batch().shape == (1, 10)
    with pytest.raises(ValueError, match="seq_len=10 needs 11 tokens and given ids has 10; use shorter sequences"):
        TokenStream(as_tokens(ids(10), 256), 1, 10)
    for name in ("batch_size", "seq_len"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            TokenStream(as_tokens(ids(10), 256), **{"batch_size": 1, "seq_len": 1, name: 0})
