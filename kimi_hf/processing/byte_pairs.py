"""Byte-level BPE over a rank file: the encoder behind the tokenizer.

The rule (Sennrich et al. 2016, in tiktoken's form): a text is cut into pieces by one regular expression; a piece
whose bytes are a token is that token; otherwise it starts as single bytes, and the adjacent pair whose joined bytes
have the lowest rank (the leftmost of equals) is joined until no pair is a token. `merge_bytes` is that definition.

Three backends give the same ids: "tiktoken" where it is installed, else "tokenizers" (always there with
transformers), and "python", the definition on the pieces, slow, for tests.

Why `tokenizers`, which ranks *pairs* and not joined bytes, is exactly equal. Look at any stretch of a piece that
spells a token t and whose two ends no merge has crossed. Which pairs are joined inside depends on nothing outside, so
its states are those of t encoded alone, one part fewer at each step, and only one of them has two parts. Every pair
that ever spells t is therefore the same pair: two pairs with one joined token never meet, ranking pairs in the order
of their joined tokens is ranking joined tokens, and ties are broken by position in both. Listing further pairs of t
changes nothing, because they never come up.
"""

import base64
import binascii
import heapq
import re
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ..errors import BackendError, CheckpointError, KimiHfError

# The released pattern: eight alternatives tried in this order; `&&` intersects character classes.
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read_ranks(data: bytes, name: str = "tiktoken.model") -> dict[bytes, int]:
    """The ranks of a tiktoken file: lines of `base64(token bytes) rank`.

    Args: data: the file's bytes. name: what to call it in errors.
    Returns: token bytes -> rank, ranks 0 .. n-1 each once, all 256 single bytes among them.
    Raises: CheckpointError: a line does not parse, a rank or token repeats or is missing.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            key, value = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{name}, line {number}: found {line[:60]!r}, expected `base64 rank`; the file is damaged, fetch it again"
            ) from error
        if key in ranks:
            raise CheckpointError(f"{name}, line {number}: token {key!r} is listed twice; fetch the file again")
        ranks[key] = value
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(
            f"{name}: {len(ranks)} tokens, but their ranks are not 0 to {len(ranks) - 1}, each once; "
            "the file is cut short or was edited, fetch it again"
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{name}: no token for the byte {missing[0]:#04x} ({len(missing)} of 256 missing); "
            "a byte-level vocabulary needs them all"
        )
    return ranks


def write_ranks(ranks: dict[bytes, int]) -> bytes:
    """The inverse of `read_ranks`: a tiktoken file, one line per rank in order."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in ordered)


def merge_bytes(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Token ids of one piece: join the lowest-ranked adjacent pair, leftmost first, until none is left.

    A heap holds every pair that is a token as (rank, start, middle, end); entries whose parts have been joined
    meanwhile are skipped. O(n log n) for n bytes, so a piece of 25,000 characters is no trap.
    """
    whole = ranks.get(piece)
    if whole is not None:
        return [whole]
    size = len(piece)
    end = list(range(1, size + 1))  # end[i]: where the part that starts at i ends; 0 once i is inside another part
    before = list(range(-1, size))  # before[i]: start of the part to the left of i
    heap: list[tuple[int, int, int, int]] = []

    def offer(start: int) -> None:
        middle = end[start]
        if middle < size:
            stop = end[middle]
            rank = ranks.get(piece[start:stop])
            if rank is not None:
                heapq.heappush(heap, (rank, start, middle, stop))

    for start in range(size - 1):
        offer(start)
    while heap:
        _, start, middle, stop = heapq.heappop(heap)
        if end[start] != middle or end[middle] != stop:
            continue
        end[start], end[middle] = stop, 0
        if stop < size:
            before[stop] = start
        offer(start)
        if before[start] >= 0:
            offer(before[start])
    ids, start = [], 0
    while start < size:
        ids.append(ranks[piece[start : end[start]]])
        start = end[start]
    return ids


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates as U+FFFD: what UTF-8 can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class BytePairEncoder:
    """Text to token ids by ranks, without special tokens.

    Args:
        ranks: token bytes -> id, as `read_ranks` returns them.
        backend: "tiktoken", "tokenizers", "python", or None: tiktoken where it is installed, else tokenizers. Ids do
            not depend on it.
    Raises: BackendError: the named backend is unknown or not installed.
    """

    def __init__(self, ranks: dict[bytes, int], backend: str | None = None):
        if backend not in (None, *BACKENDS):
            raise BackendError(f"tokenizer backend: found {backend!r}, expected one of {BACKENDS} or None")
        self.ranks = ranks
        self.tokens: list[bytes] = sorted(ranks, key=ranks.__getitem__)
        installed = find_spec("tiktoken") is not None
        if backend == "tiktoken" and not installed:
            raise BackendError('tokenizer backend "tiktoken": not installed; `pip install tiktoken`')
        self.backend = backend or ("tiktoken" if installed else "tokenizers")

    @cached_property
    def _encode(self) -> Callable[[str], list[int]]:  # built on first use: seconds for a large vocabulary
        return BACKENDS[self.backend](self.ranks)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; every character counts as ordinary. Lone surrogates are encoded as U+FFFD."""
        return self._encode(well_formed(text))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids whose token bytes join to exactly `data`; bytes that are not UTF-8 become single-byte tokens."""
        ids: list[int] = []
        for run in re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape")):
            if run and "\udc80" <= run[0] <= "\udcff":
                ids += [self.ranks[bytes([ord(char) - 0xDC00])] for char in run]
            else:
                ids += self.encode(run)
        return ids

    # Nothing in here changes after construction, so a copy is the object itself, and a pickle is its ingredients.
    def __deepcopy__(self, memo) -> "BytePairEncoder":
        return self

    def __reduce__(self):
        return BytePairEncoder, (self.ranks, self.backend)


def _tiktoken_backend(ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    import tiktoken

    encoding = tiktoken.Encoding(name="kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return encoding.encode_ordinary


def _tokenizers_backend(ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    tokenizer = rust_tokenizer(ranks)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _python_backend(ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    splitter = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    return lambda text: [
        token for piece, _ in splitter.pre_tokenize_str(text) for token in merge_bytes(piece.encode("utf-8"), ranks)
    ]


BACKENDS = {"tiktoken": _tiktoken_backend, "tokenizers": _tokenizers_backend, "python": _python_backend}


def rust_tokenizer(ranks: dict[bytes, int], *, merges: bool = True) -> Tokenizer:
    """The `tokenizers` form of a rank file, without special tokens.

    `merges=False` leaves the pairs out, which is enough to decode (and much quicker to build).
    """
    spelling = byte_characters()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    pairs = []
    if merges:
        for token in sorted(ranks, key=ranks.__getitem__):
            for cut in range(1, len(token)):
                left, right = spelled.get(token[:cut]), spelled.get(token[cut:])
                if left is not None and right is not None:
                    pairs.append((left, right))
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_characters() -> list[str]:
    """One printable character for each byte, as GPT-2 spells tokens: printable Latin-1 stays, the rest is 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {byte: 256 + at for at, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


def cut_long_runs(text: str, piece: int = 400_000, run: int = 25_000) -> list[str]:
    """Cut a text as the release does before encoding, so that no regular expression sees an endless run.

    First into pieces of `piece` characters, then before each character that would make a run of whitespace, or of
    anything else, longer than `run`. The cuts change ids only where they fall.
    """
    if piece < 1 or run < 1:
        raise KimiHfError(f"cut_long_runs: piece {piece} and run {run} must be positive")
    pieces: list[str] = []
    for begin in range(0, len(text), piece):
        part = text[begin : begin + piece]
        if len(part) <= run or not re.search(rf"\s{{{run + 1}}}|\S{{{run + 1}}}", part):
            pieces.append(part)  # nearly always; Python's \s is str.isspace
            continue
        start, length, space = 0, 0, False
        for at, char in enumerate(part):
            is_space = char.isspace()
            length = length + 1 if at and is_space == space else 1
            space = is_space
            if length > run:
                pieces.append(part[start:at])
                start, length = at, 1
        pieces.append(part[start:])
    return pieces
