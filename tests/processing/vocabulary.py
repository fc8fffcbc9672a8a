"""A small tokenizer folder for tests: a vocabulary trained in tiktoken's format, with the released control tokens."""

import collections
import json
import re
from pathlib import Path

from kimi_hf.processing.byte_pairs import write_ranks

CORPUS = """The quick brown fox jumps over the lazy dog. She said: it's what they've done, isn't it? We'll see.
def encode(self, text): return [int(x) for x in text.split()]  # message role user assistant system think response
<|open|>message role="assistant"<|sep|> call tool argument key type string number index name content
Größe Straße naïve café. Привет, мир! Как дела? Γειά σου κόσμε. 漢字と仮名まじりの文、中文字符 中文 字符。
안녕하세요 세계 नमस्ते दुनिया สวัสดีชาวโลก مرحبا بالعالم שלום עולם 🎌🙂 12345 2024 3.1415
"""
OFFSETS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}  # the released names, by distance from the first control token


def train(merges: int = 200) -> dict[bytes, int]:
    """Ranks of the 256 bytes and of `merges` joined pairs, by how often a pair occurs inside the words of CORPUS."""
    words = collections.Counter(word.encode() for word in re.findall(r" ?\S+|\s+", CORPUS * 2))
    parts = {word: [bytes([byte]) for byte in word] for word in words}
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 256 + merges:
        pairs = collections.Counter()
        for word, count in words.items():
            for left, right in zip(parts[word], parts[word][1:], strict=False):
                pairs[left + right] += count
        best = max((pair for pair in pairs if pair not in ranks), key=lambda pair: (pairs[pair], pair))
        ranks[best] = len(ranks)
        for word, old in parts.items():
            new, at = [], 0
            while at < len(old):
                joined = at + 1 < len(old) and old[at] + old[at + 1] == best
                new.append(best if joined else old[at])
                at += 2 if joined else 1
            parts[word] = new
    return ranks


def write_folder(folder: Path, merges: int = 200, **changes) -> Path:
    """`tiktoken.model` and `tokenizer_config.json` as the release lays them out; `changes` go into the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = train(merges)
    first = len(ranks)
    named = {
        str(first + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in ("<|open|>", "<|close|>", "<|sep|>"),
        }
        for offset, name in OFFSETS.items()
    }
    config = {
        "added_tokens_decoder": named,
        "additional_special_tokens": ["<|end_of_msg|>"],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1048576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    config.update(changes)
    (folder / "tiktoken.model").write_bytes(write_ranks(ranks))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
    return folder
