"""The byte-pair encoder: three backends, one rule."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_hf.errors import BackendError, CheckpointError
from kimi_hf.processing import byte_pairs
from kimi_hf.processing.byte_pairs import (
    BACKENDS,
    BytePairEncoder,
    byte_characters,
    cut_long_runs,
    merge_bytes,
    read_ranks,
    well_formed,
    write_ranks,
)

from .vocabulary import CORPUS, train

RANKS = train()
ENCODERS = {name: BytePairEncoder(RANKS, name) for name in BACKENDS}
BYTES = {bytes([byte]): byte for byte in range(256)}

# Letters of many scripts and cases, marks, digits, spaces of several kinds, contractions in odd cases.
OTHERS = "ǅʰſKª²½٣०๑ÀÉß\u0301\u0940\u302a〇々𠀀\U00016ff0ٱ \t\r\n\u00a0\u3000\u2028\u0085"
PIECES = [*CORPUS, *OTHERS, "'S", "'ll", "'Re", "'"]
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_backends_give_the_same_ids_on_many_scripts(text):
    ids = ENCODERS["tiktoken"].encode(text)
    assert ENCODERS["tokenizers"].encode(text) == ids
    assert ENCODERS["python"].encode(text) == ids
    assert b"".join(ENCODERS["tiktoken"].tokens[index] for index in ids).decode("utf-8") == text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc", min_size=2, max_size=5), max_size=12, unique=True), st.data())
def test_ranking_pairs_equals_ranking_joined_tokens(tokens, data):
    # Any set of tokens in any order, also ones that no merge reaches: the proof in the module does not ask for more.
    ranks = BYTES | {token.encode(): 256 + at for at, token in enumerate(tokens)}
    encoders = [BytePairEncoder(ranks, name) for name in BACKENDS]
    for text in data.draw(st.lists(st.text("abc", max_size=14), min_size=8, max_size=8)):
        first, *others = [encoder.encode(text) for encoder in encoders]
        assert others == [first, first]


def test_every_character_falls_into_the_same_piece_everywhere():
    # One string of all characters of the planes in use, so that a library with other character tables would show.
    characters = [chr(c) for c in [*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE0200)]]
    random.Random(0).shuffle(characters)
    text = "".join(characters[:60_000])
    assert ENCODERS["tokenizers"].encode(text) == ENCODERS["tiktoken"].encode(text)


def test_definition_merges_lowest_rank_first_and_leftmost_of_equals():
    ranks = BYTES | {b"bc": 256, b"ab": 257, b"abc": 258, b"aa": 259}
    assert merge_bytes(b"abc", ranks) == [258]  # the whole piece is a token
    assert merge_bytes(b"abcb", ranks) == [258, 98]  # bc, then a + bc
    assert merge_bytes(b"abb", ranks) == [257, 98]
    assert merge_bytes(b"aaa", ranks) == [259, 97]
    assert merge_bytes(b"xyz", ranks) == [120, 121, 122]


def test_long_pieces_are_no_trap():
    text = "ab" * 12_500
    assert ENCODERS["python"].encode(text) == ENCODERS["tiktoken"].encode(text)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_survive(data):
    ids = ENCODERS["tiktoken"].encode_bytes(data)
    assert b"".join(ENCODERS["tiktoken"].tokens[index] for index in ids) == data
    assert ENCODERS["tokenizers"].encode_bytes(data) == ids


def test_surrogates_are_joined_or_replaced():
    assert well_formed("\ud83c\udf8c") == "🎌"
    assert well_formed("a\ud800b\udc00") == "a\ufffdb\ufffd"
    for encoder in ENCODERS.values():
        assert encoder.encode("\ud83c\udf8c\ud800") == encoder.encode("🎌\ufffd")


def test_rank_files_read_and_write():
    data = write_ranks(RANKS)
    assert read_ranks(data) == RANKS
    assert read_ranks(data.replace(b"\n", b"\r\n") + b"\n\n") == RANKS


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:300], b"not base64! 300", *lines[301:]], "line 301"),
        (lambda lines: [*lines[:300], b"YWI=", *lines[301:]], "line 301"),
        (lambda lines: lines[:300] + lines[301:], "each once"),
        (lambda lines: [*lines, lines[-1]], "twice"),
        (lambda lines: [*lines[:65], b"d3h5eg== 65", *lines[66:]], "0x41"),
    ],
)
def test_damaged_rank_files_are_refused(damage, message):
    lines = write_ranks(RANKS).splitlines()
    with pytest.raises(CheckpointError, match=message):
        read_ranks(b"\n".join(damage(lines)))


def test_backend_is_chosen_or_refused(monkeypatch):
    assert BytePairEncoder(RANKS).backend == "tiktoken"
    monkeypatch.setattr(byte_pairs, "find_spec", lambda name: None)
    without = BytePairEncoder(RANKS)
    assert without.backend == "tokenizers"
    assert without.encode(CORPUS) == ENCODERS["tiktoken"].encode(CORPUS)
    with pytest.raises(BackendError, match="pip install tiktoken"):
        BytePairEncoder(RANKS, "tiktoken")
    with pytest.raises(BackendError, match="rust"):
        BytePairEncoder(RANKS, "rust")


def test_byte_characters_are_one_printable_character_each():
    table = byte_characters()
    assert len(set(table)) == 256 and all(char.isprintable() and not char.isspace() for char in table)
    assert table[ord("a")] == "a" and table[ord(" ")] == "Ġ" and table[0] == "Ā"


def test_cuts_of_long_texts():
    assert cut_long_runs("") == []
    assert cut_long_runs("abc") == ["abc"]
    assert cut_long_runs("a" * 450, piece=400, run=450) == ["a" * 400, "a" * 50]
    assert cut_long_runs("aaaa bb", piece=100, run=3) == ["aaa", "a bb"]
    assert cut_long_runs("aaaaaaa", piece=100, run=3) == ["aaa", "aaa", "a"]
    assert cut_long_runs("ab    cd", piece=100, run=3) == ["ab   ", " cd"]
    assert cut_long_runs("aa" * 3, piece=5, run=3) == ["aaa", "aa", "a"]  # the counter starts again with each piece
    text = CORPUS * 200
    assert "".join(cut_long_runs(text, 10_000, 7)) == text


@settings(max_examples=100, deadline=None)
@given(st.text("ab \n", max_size=40), st.integers(1, 20), st.integers(1, 6))
def test_cuts_are_those_of_the_definition(text, piece, run):
    expected = []
    for begin in range(0, len(text), piece):
        part, start, length = text[begin : begin + piece], 0, 0
        for at, char in enumerate(part):
            length = length + 1 if at and char.isspace() == part[at - 1].isspace() else 1
            if length > run:
                expected.append(part[start:at])
                start, length = at, 1
        expected.append(part[start:])
    assert cut_long_runs(text, piece, run) == expected
