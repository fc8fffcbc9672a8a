"""Kimi's tokenizer: `tiktoken.model` and `tokenizer_config.json`, without remote code.

Ids 0 to n-1 are the ranks of the file, the next 256 are the control tokens: those that `added_tokens_decoder` names,
and `<|reserved_token_{id}|>` for the rest. In the release n = 163,584.

The class has the name that the released `tokenizer_config.json` gives (`tokenizer_class`), because transformers finds
tokenizers by that name. It reads every repository of this family: with Kimi K3's control tokens chats are rendered by
`chat_encoding`, otherwise by the repository's own Jinja template.

Source: the specification, section 7.2.
"""

import json
import re
import tempfile
from numbers import Integral
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizer
from transformers.tokenization_utils_base import BatchEncoding, PaddingStrategy, TruncationStrategy
from transformers.utils import logging

from ..errors import CheckpointError, KimiHfError
from .byte_pairs import BytePairEncoder, byte_characters, cut_long_runs, read_ranks, rust_tokenizer, well_formed
from .chat_encoding import CONTROL_TOKENS
from .chat_responses import RESPONSE_TEMPLATE
from .chat_template import PYTHON_TEMPLATE, ChatTemplateMixin
from .rendered_chat import RenderedChat

logger = logging.get_logger(__name__)

SPECIAL_SLOTS = 256
CONFIG_FILE = "tokenizer_config.json"
_PREPARE = {  # what `prepare_for_model` takes of the arguments of a call
    "add_special_tokens",
    "max_length",
    "stride",
    "pad_to_multiple_of",
    "padding_side",
    "return_token_type_ids",
    "return_attention_mask",
    "return_overflowing_tokens",
    "return_special_tokens_mask",
    "return_length",
    "verbose",
}
_SPELLED = (
    "A text spells control tokens, which are encoded as ordinary text. If it is a prompt that was rendered somewhere else, "
    "pass split_special_tokens=False; what apply_chat_template returns needs nothing."
)
_PADDED = {"offset_mapping": (0, 0), "assistant_masks": 0}  # what fills the columns of ours that padding lengthens


class TikTokenTokenizer(ChatTemplateMixin, PreTrainedTokenizer):
    """Byte-level BPE with 256 control tokens; pads on the left.

    Args:
        vocab_file: path of `tiktoken.model`.
        bos_token, eos_token, unk_token, pad_token, additional_special_tokens: as in `tokenizer_config.json`. No BOS is
            ever added to a text.
        added_tokens_decoder: id -> AddedToken, the names of control tokens.
        bpe_backend: "tiktoken", "tokenizers" or None (tiktoken where installed); ids do not depend on it.
        split_special_tokens: names of control tokens in a text are ordinary text. True here, unlike in the release and
            in other tokenizers: a text may be somebody else's. False gives control tokens, for the tokenizer or a call.
    Raises: CheckpointError: the vocabulary file is damaged, or a control token is given an id of the vocabulary.
    """

    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str,
        bos_token: str | AddedToken = "[BOS]",
        eos_token: str | AddedToken = "[EOS]",
        unk_token: str | AddedToken | None = "[UNK]",
        pad_token: str | AddedToken | None = "[PAD]",
        added_tokens_decoder: dict[int, AddedToken] | None = None,
        bpe_backend: str | None = None,
        **kwargs: Any,
    ):
        self._model_bytes = Path(vocab_file).read_bytes()
        self._bpe = BytePairEncoder(read_ranks(self._model_bytes, Path(vocab_file).name), bpe_backend)
        self._size = len(self._bpe.tokens)  # n, the number of ranks
        self._config_bytes: bytes | None = None  # the config file as loaded, if it was loaded from one
        self._tables: tuple[list[str], dict[str, int]] | None = None
        self._pattern: tuple[int, re.Pattern] | None = None
        self._decoding_tokenizer: Any = None
        kwargs.setdefault("split_special_tokens", True)
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            pad_token=pad_token,
            added_tokens_decoder=self._control_tokens(added_tokens_decoder or {}),
            **kwargs,
        )
        if self.chat_template is None and all(token in self._added_tokens_encoder for token in CONTROL_TOKENS):
            self.chat_template = PYTHON_TEMPLATE
            self.response_template = self.response_template or RESPONSE_TEMPLATE

    def _control_tokens(self, named: dict[int, AddedToken]) -> dict[int, AddedToken]:
        slots = {
            index: AddedToken(f"<|reserved_token_{index}|>", normalized=False, special=True)
            for index in range(self._size, self._size + SPECIAL_SLOTS)
        }
        for index, token in named.items():
            if int(index) < self._size:
                raise CheckpointError(
                    f"{CONFIG_FILE}: added_tokens_decoder names id {index} ({token.content!r}), but tiktoken.model has "
                    f"{self._size} tokens, so control tokens begin at {self._size}; the two files do not belong together"
                )
            slots[int(index)] = token
        names = [token.content for token in slots.values()]
        for name in names:
            if names.count(name) > 1:
                raise CheckpointError(f"{CONFIG_FILE}: added_tokens_decoder gives the name {name!r} to several ids")
        return slots

    def __repr__(self) -> str:
        named = {
            index: token.content
            for index, token in self.added_tokens_decoder.items()
            if token.content != f"<|reserved_token_{index}|>"
        }
        return (
            f"{type(self).__name__}(name_or_path={self.name_or_path!r}, vocab_size={self.vocab_size}, "
            f"bpe_backend={self.bpe_backend!r}, padding_side={self.padding_side!r}, "
            f"special_tokens={self.special_tokens_map}, control_tokens={named})"
        )

    # ---- sizes and tables -------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Ranks and control tokens, named or not; without tokens added later."""
        return self._size + SPECIAL_SLOTS

    @property
    def bpe_backend(self) -> str:
        return self._bpe.backend

    def _update_total_vocab_size(self) -> None:
        self.total_vocab_size = max(self.vocab_size, max(self._added_tokens_decoder, default=0) + 1)

    def _spellings(self) -> tuple[list[str], dict[str, int]]:
        """Every rank's token as a string (a character for each byte), and back. Built once, when first asked for."""
        if self._tables is None:
            table = byte_characters()
            strings = ["".join(table[byte] for byte in token) for token in self._bpe.tokens]
            self._tables = strings, {string: index for index, string in enumerate(strings)}
        return self._tables

    def get_vocab(self) -> dict[str, int]:
        return {**self._spellings()[1], **self._added_tokens_encoder}

    def _convert_token_to_id(self, token: str) -> int | None:
        index = self._spellings()[1].get(token)
        return index if index is not None or self.unk_token is None else self._added_tokens_encoder.get(self.unk_token)

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < self._size:
            self.token_bytes(index)  # raises
        return self._spellings()[0][index]

    def token_bytes(self, index: int) -> bytes:
        """The bytes that token `index` stands for; a control token stands for its name."""
        if not isinstance(index, Integral):
            raise KimiHfError(f"token id: found {index!r}, expected an integer")
        if 0 <= index < self._size:
            return self._bpe.tokens[index]
        token = self._added_tokens_decoder.get(index)
        if token is None:
            raise KimiHfError(
                f"token id: found {index}, expected 0 to {len(self) - 1}; a model with a larger vocabulary, or labels "
                "with -100 in them, cannot be decoded as they are"
            )
        return token.content.encode("utf-8")

    # ---- text to ids ------------------------------------------------------------------------------------------------

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids of `text` in which nothing is a control token."""
        ids: list[int] = []
        for piece in cut_long_runs(well_formed(text)):
            ids += self._bpe.encode(piece)
        return ids

    def encode_special(self, text: str) -> list[int]:
        """Token ids of `text` in which every name of a control token is that token. Not for text of users."""
        ids: list[int] = []
        for piece in cut_long_runs(well_formed(text)):
            at = 0
            for match in self.control_pattern.finditer(piece):
                ids += self._bpe.encode(piece[at : match.start()])
                ids.append(self._added_tokens_encoder[match.group()])
                at = match.end()
            ids += self._bpe.encode(piece[at:])
        return ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids whose bytes join to exactly `data`, UTF-8 or not; nothing is a control token."""
        return self._bpe.encode_bytes(data)

    @property
    def control_pattern(self) -> re.Pattern:
        """Finds the names of control tokens, the longest that fits."""
        names = self._added_tokens_encoder
        if self._pattern is None or self._pattern[0] != len(names):
            longest_first = sorted(names, key=len, reverse=True)
            self._pattern = len(names), re.compile("|".join(map(re.escape, longest_first)))
        return self._pattern[1]

    def _ids(self, text: str, kwargs: dict[str, Any]) -> list[int]:
        """`kwargs` may ask: allow_special_tokens, the release's name, or split_special_tokens, transformers'."""
        allow = kwargs.get("allow_special_tokens")
        if allow is None:
            split = kwargs.get("split_special_tokens")
            if not (self.split_special_tokens if split is None else split):
                return self.encode_special(text)
            if isinstance(text, RenderedChat):
                return self.encode_segments(text.segments)
            if self.control_pattern.search(text):
                logger.warning_once(_SPELLED)
        return self.encode_special(text) if allow else self.encode_ordinary(text)

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.convert_ids_to_tokens(self._ids(text, kwargs))

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.convert_ids_to_tokens(self.encode_ordinary(text))

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> BatchEncoding:
        """As the base class, straight to ids, and with offsets where `return_offsets_mapping` asks for them."""
        plain = isinstance(text, str) and (text_pair is None or isinstance(text_pair, str))
        if not plain:
            tensors = kwargs.pop("return_tensors", None)
            out = super()._encode_plus(text, text_pair, **kwargs)
            if tensors:  # these two never fit into a tensor
                out = {key: out[key] for key in out if key not in ("overflowing_tokens", "num_truncated_tokens")}
            single = len(out["input_ids"]) == 0 or not isinstance(out["input_ids"][0], (list, tuple))
            return BatchEncoding(dict(out), tensor_type=tensors, prepend_batch_axis=single)
        ids = self._ids(text, kwargs)
        pair = None if text_pair is None else self._ids(text_pair, kwargs)
        padding: PaddingStrategy = kwargs.pop("padding_strategy", PaddingStrategy.DO_NOT_PAD)
        truncation: TruncationStrategy = kwargs.pop("truncation_strategy", TruncationStrategy.DO_NOT_TRUNCATE)
        tensors = kwargs.pop("return_tensors", None)
        out = self.prepare_for_model(
            ids,
            pair,
            padding=padding.value,
            truncation=truncation.value,
            **{k: kwargs[k] for k in _PREPARE & {*kwargs}},
        )
        if kwargs.get("return_offsets_mapping"):
            spans = self._offsets(text, ids)
            pair_spans = None if pair is None else self._offsets(text_pair, pair)
            limit = kwargs.get("max_length")
            if truncation != TruncationStrategy.DO_NOT_TRUNCATE and limit:
                excess = len(ids) + len(pair or []) - limit
                spans, pair_spans, _ = self.truncate_sequences(
                    spans, pair_spans, excess, truncation, kwargs.get("stride") or 0
                )
            spans = spans + (pair_spans or [])
            filler = [(0, 0)] * (len(out["input_ids"]) - len(spans))
            left = (kwargs.get("padding_side") or self.padding_side) == "left"
            out["offset_mapping"] = filler + spans if left else spans + filler
        return BatchEncoding(dict(out), tensor_type=tensors, prepend_batch_axis=True)

    def _offsets(self, text: str, ids: list[int]) -> list[tuple[int, int]]:
        """(begin, end) in characters of each token: all characters that one of its bytes belongs to.

        Bytes of tokens join to the text's UTF-8, so nothing else is needed.
        """
        of_byte: list[int] = []
        for at, char in enumerate(text):
            size = 1 if char < "\x80" else 2 if char < "\u0800" else 3 if char < "\U00010000" else 4
            if "\ud800" <= char <= "\udbff" and "\udc00" <= text[at + 1 : at + 2] <= "\udfff":
                size = 2  # half of a pair that is encoded as one character of four bytes
            elif "\udc00" <= char <= "\udfff" and at and "\ud800" <= text[at - 1] <= "\udbff":
                size = 2
            of_byte += [at] * size
        spans, start = [], 0
        for index in ids:
            stop = start + len(self.token_bytes(index))
            spans.append((of_byte[start], of_byte[stop - 1] + 1))
            start = stop
        return spans

    def _pad(self, encoded_inputs: Any, *args: Any, **kwargs: Any) -> dict:
        before = len(encoded_inputs[self.model_input_names[0]])
        out = super()._pad(encoded_inputs, *args, **kwargs)
        extra = len(out[self.model_input_names[0]]) - before
        left = (kwargs.get("padding_side") or self.padding_side) == "left"
        for key, filler in _PADDED.items():
            if key in out and extra:
                out[key] = [filler] * extra + out[key] if left else out[key] + [filler] * extra
        return out

    # ---- ids to text ------------------------------------------------------------------------------------------------

    def decode_bytes(self, ids: list[int]) -> bytes:
        """The bytes that the tokens stand for, joined: the inverse of `encode_bytes`."""
        return b"".join(self.token_bytes(index) for index in ids)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.decode_bytes(self.convert_tokens_to_ids(tokens)).decode("utf-8", "replace")

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return self.decode_bytes([index for index in ids if index not in skipped]).decode("utf-8", "replace")

    @property
    def _tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer` that decodes as this one: what streaming servers of transformers ask for."""
        if self._decoding_tokenizer is None:
            tokenizer = rust_tokenizer(self._bpe.ranks, merges=False)
            special = set(self.all_special_tokens)
            for index, token in sorted(self._added_tokens_decoder.items()):
                name = token.content
                tokenizer.add_tokens([AddedToken(name, normalized=False, special=name in special)])
                if tokenizer.token_to_id(name) != index:
                    raise KimiHfError(f"control token {name!r} is also spelled by an ordinary token; cannot stream")
            self._decoding_tokenizer = tokenizer
        return self._decoding_tokenizer

    # ---- files ------------------------------------------------------------------------------------------------------

    @classmethod
    def _from_pretrained(cls, resolved_vocab_files: dict, name: str, *args: Any, **kwargs: Any) -> "TikTokenTokenizer":
        if resolved_vocab_files.get("vocab_file") is None:
            raise CheckpointError(f"{name}: no tiktoken.model; the tokenizer needs it beside {CONFIG_FILE}")
        config_file = resolved_vocab_files.get("tokenizer_config_file")
        tokenizer = super()._from_pretrained(resolved_vocab_files, name, *args, **kwargs)
        tokenizer._config_bytes = None if config_file is None else Path(config_file).read_bytes()
        return tokenizer

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write `tiktoken.model`, byte for byte as it was loaded."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        path = Path(save_directory) / (prefix + self.vocab_files_names["vocab_file"])
        path.write_bytes(self._model_bytes)
        return (str(path),)

    def save_pretrained(self, save_directory: Any, *args: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Write both files. The configuration is written byte for byte as it was loaded unless something in it has
        been changed since; then it is written in transformers' form."""
        repo_id = kwargs.pop("repo_id", None)
        if not self.split_special_tokens:  # chosen after loading; what was given then is written anyway
            self.init_kwargs["split_special_tokens"] = False
        files = super().save_pretrained(save_directory, *args, **kwargs)
        if files:
            path = Path(files[0])
            config = _tidy(json.loads(path.read_text(encoding="utf-8")))
            # A processor signs the tokenizers it holds; that alone is no reason to write another file.
            if self._config_bytes is not None and _unsigned(config) == _unsigned(self._config_of_loaded_file()):
                path.write_bytes(self._config_bytes)
            else:
                path.write_text(
                    json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
                )
        if push_to_hub:
            self.push_to_hub(repo_id or Path(save_directory).name, **kwargs)
        return files

    def save_chat_templates(self, save_directory: Any, tokenizer_config: dict, *args: Any) -> tuple[dict, list]:
        if self.chat_template == PYTHON_TEMPLATE:
            tokenizer_config.pop("chat_template", None)
            return tokenizer_config, []
        return super().save_chat_templates(save_directory, tokenizer_config, *args)

    def _config_of_loaded_file(self) -> dict:
        """What saving would write had nothing been changed: the files as loaded, loaded and saved again."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_vocabulary(folder)
            (Path(folder) / CONFIG_FILE).write_bytes(self._config_bytes)
            again = type(self).from_pretrained(folder, bpe_backend=self.bpe_backend)
            again.init_kwargs.pop("bpe_backend", None)
            written = super(TikTokenTokenizer, again).save_pretrained(Path(folder) / "again")
            return _tidy(json.loads(Path(written[0]).read_text(encoding="utf-8")))


def _unsigned(config: dict) -> dict:
    return {key: value for key, value in config.items() if key != "processor_class"}


def _tidy(config: dict) -> dict:
    """A saved configuration without what only says how it was loaded, and without names that follow from the ids."""
    config = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only", "backend")}
    if config.get("response_template") == RESPONSE_TEMPLATE:
        del config["response_template"]
    config["added_tokens_decoder"] = {
        index: token
        for index, token in config.get("added_tokens_decoder", {}).items()
        if token["content"] != f"<|reserved_token_{index}|>"
    }
    return config
