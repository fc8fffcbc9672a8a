"""`KimiK3Processor`: chats or texts with images, to what the model takes.

A prompt shows an image as `<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>`, with the
image's original size. The one `<|media_pad|>` stands for all feature rows of the image; it is written once per row
here by default (what `generate()` and label masks want), or left single, as the release does, for the model to expand.

Source: K3 specification 7.1.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import MultiModalData, ProcessorMixin

from ..errors import MediaError, ShapeError
from .chat_encoding import IMAGE_PLACEHOLDER, Segment
from .chat_template import truncation_limit
from .image_processing_kimi_k3 import KimiK3ImagesKwargs, KimiK3VisionProcessor
from .media_text import (
    check_counts,
    conversation_images,
    is_conversation,
    is_placeholder,
    opened_before,
    text_segments,
)
from .rendered_chat import RenderedChat

if TYPE_CHECKING:
    from .tokenization_kimi import TikTokenTokenizer

MEDIA_PAD, MEDIA_BEGIN, MEDIA_END = "<|media_pad|>", "<|media_begin|>", "<|media_end|>"
IMAGE_PROMPT = f"{MEDIA_BEGIN}image {{width}}x{{height}}<|media_content|>{MEDIA_PAD}{MEDIA_END}"

_PADDING = ("padding", "max_length", "pad_to_multiple_of", "padding_side", "truncation")
_TEXT = ("allow_special_tokens", "split_special_tokens")
# Asked for by callers that serve many models; the answer here is always the same.
_IGNORED = ("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose", "return_dict")


class _Prepared(NamedTuple):
    """Processed images: their features, and one prompt and one token count each."""

    features: Mapping[str, Any]
    prompts: list[str]
    counts: list[int]


class KimiK3Processor(ProcessorMixin):
    """Image processor and tokenizer of Kimi K3 behind one call.

    Args:
        image_processor, tokenizer: the parts.
        chat_template: a Jinja template to use instead of the model's chat format; images need the format, not this.
        expand_placeholders: write one `<|media_pad|>` per feature row instead of one per image.

    Saved as the tokenizer's files, `preprocessor_config.json` in the released schema, and `processor_config.json`
    with what belongs to neither.
    """

    def __init__(
        self,
        image_processor: KimiK3VisionProcessor,
        tokenizer: "TikTokenTokenizer",
        chat_template: str | None = None,
        expand_placeholders: bool = True,
    ):
        if chat_template is None:
            chat_template = getattr(tokenizer, "chat_template", None)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.expand_placeholders = expand_placeholders

    @property
    def image_token(self) -> str:
        """The token that stands for feature rows."""
        return MEDIA_PAD

    @property
    def image_token_id(self) -> int:
        """Its id: `media_placeholder_token_id` of the model's configuration."""
        index = self.tokenizer.added_tokens_encoder.get(MEDIA_PAD)
        if index is None:
            raise MediaError(f"the tokenizer has no token {MEDIA_PAD}; images need the tokenizer of Kimi K3")
        return index

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "pixel_values", "grid_thws"]

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: None = None,
        audio: None = None,
        *,
        messages: Sequence[Any] | None = None,
        medias: Any = None,
        expand_placeholders: bool | None = None,
        return_tensors: str | None = "pt",
        **kwargs,
    ) -> BatchFeature:
        """Process `messages`, or `text` with images.

        Args:
            images: images for the placeholders of `text`, in order: flat, or one list per text. Any form that the
                image processor takes. A conversation given here, as the release does, is taken as `messages`.
            text: one text or several, with `<|kimi_image_placeholder|>` for each image; what `apply_chat_template`
                returned keeps its markup. Other texts have none: names of control tokens in them become control tokens
                only with `split_special_tokens=False`, as prompts rendered elsewhere (with `<|media_pad|>`) need it.
            messages: one conversation or several. Images are parts of type "image" or "image_url" in list contents of
                user messages. User text never becomes control tokens.
            medias: the released name of `images`.
            expand_placeholders: for this call; None is what the processor was built with.
            return_tensors: "pt" (as the release), "np", or None for lists.
            kwargs: `padding` (default: to the longest row), `max_length` and `truncation` (never through an image),
                `padding_side`, `pad_to_multiple_of`; with messages the options of the tokenizer's
                `apply_chat_template` (`tools`, `thinking`, `thinking_effort`, `add_generation_prompt`,
                `return_assistant_tokens_mask`, ...); settings of the image processor for this call.

        Returns: `input_ids`, `attention_mask` (B, T), `assistant_masks` (B, T) if asked for, and if there are images
            `pixel_values` (patches, 3, 14, 14), `grid_thws` (images, 3). There is always a batch dimension.

        Raises: MediaError: images and placeholders do not match, an image cannot be read, or is cut; it says which.
            ChatError: a conversation that cannot be rendered.
        """
        if videos is not None or audio is not None:
            raise MediaError("the processor takes images only; give the frames of a video as images")
        if messages is None and is_conversation(images):
            messages, images = images, None
        medias = images if medias is None else medias
        options = _collect(kwargs)
        return_tensors = options.pop("return_tensors", return_tensors)
        if messages is not None:
            if text is not None or medias is not None:
                raise MediaError("give either messages, which carry their images, or text with medias, not both")
            rows, prepared = self._encode_messages(messages, options)
        elif text is not None:
            rows, prepared = self._encode_texts(text, medias, options)
        elif medias is not None:
            prepared = self._prepare(medias, options)
            _refuse_leftovers(options)
            return BatchFeature(dict(prepared.features), tensor_type=return_tensors)
        else:
            raise MediaError("nothing to process: give messages, text or images")
        _refuse_leftovers(options)
        expand = self.expand_placeholders if expand_placeholders is None else expand_placeholders
        counts = self._match(rows, prepared.counts, expand) if prepared.counts else []
        columns = self._pad(rows, counts, options, return_tensors)
        return BatchFeature({**columns, **(prepared.features if counts else {})}, tensor_type=return_tensors)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        documents: Any = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool | None = None,
        tokenize: bool = False,
        return_tensors: str | None = None,
        return_dict: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        **kwargs,
    ) -> Any:
        """The tokenizer's `apply_chat_template`, with the images of the conversation.

        Without `tokenize` the text, in which images are `<|kimi_image_placeholder|>`: what `__call__` takes as `text`.
        With it, `input_ids`, or everything that `__call__` returns with `return_dict`. `processor_kwargs` go to
        `__call__`.
        """
        options = dict(
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            **kwargs,
        )
        if chat_template is not None:
            options["chat_template"] = chat_template
        if not tokenize:
            return self.tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        options.update(processor_kwargs or {})
        # "auto" is how the base class spells: as each part does by itself.
        tensors = None if return_tensors == "auto" else return_tensors
        out = self(messages=conversation, return_tensors=options.pop("return_tensors", tensors), **options)
        return out if return_dict else out["input_ids"]

    def post_process_image_text_to_text(
        self, generated_outputs: Any, skip_special_tokens: bool = True, **kwargs
    ) -> list[str]:
        """Text of each generated row."""
        return self.tokenizer.batch_decode(generated_outputs, skip_special_tokens=skip_special_tokens, **kwargs)

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **kwargs) -> MultiModalData:
        """What servers ask before they have an image: tokens and patches of images of (height, width)."""
        if image_sizes is None:
            return MultiModalData()
        settings = {k: v for k, v in kwargs.items() if k in KimiK3ImagesKwargs.__annotations__}
        return MultiModalData(
            num_image_tokens=[self.image_processor.num_image_tokens(w, h, **settings) for h, w in image_sizes],
            num_image_patches=[
                self.image_processor.get_number_of_image_patches(h, w, settings) for h, w in image_sizes
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """The contents of `processor_config.json`; the image processor has a file of its own."""
        return {key: value for key, value in super().to_dict().items() if key != "image_processor"}

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs) -> list[str]:
        """Write the files of all parts."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        written = list(self.image_processor.save_pretrained(folder))
        template = self.chat_template
        try:
            if template == getattr(self.tokenizer, "chat_template", None):
                self.chat_template = None  # the tokenizer writes it, if it is one that can be written
            return written + list(super().save_pretrained(folder, push_to_hub=push_to_hub, **kwargs))
        finally:
            self.chat_template = template

    # ---- the parts of a call ----------------------------------------------------------------------------------------

    def _prepare(self, medias: Any, options: dict[str, Any]) -> _Prepared:
        settings = {key: options.pop(key) for key in KimiK3ImagesKwargs.__annotations__.keys() & options.keys()}
        loaded = self.image_processor.load(medias, **settings)
        features = self.image_processor(loaded, return_tensors="np", **settings)
        prompts = [IMAGE_PROMPT.format(width=image.width, height=image.height) for image in loaded]
        counts = [self.image_processor.num_image_tokens(*image.size, **settings) for image in loaded]
        return _Prepared(features, prompts, counts)

    def _encode_messages(self, messages: Sequence[Any], options: dict[str, Any]) -> tuple[list[dict], _Prepared]:
        batched = len(messages) > 0 and not isinstance(messages[0], Mapping)
        chats = [getattr(chat, "messages", chat) for chat in (messages if batched else [messages])]
        images = [conversation_images(chat) for chat in chats]
        prepared = self._prepare(images, options)
        template_options = {key: options.pop(key) for key in list(options) if key not in _PADDING}
        prompts, rows = iter(prepared.prompts), []
        for chat, own in zip(chats, images, strict=True):
            given = dict(template_options)
            if own:  # placeholders that somebody spells are not among these images
                given.update(image_prompts=[next(prompts) for _ in own], placeholders_in_text=False)
            out = self.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **given)
            rows.append({key: list(out[key]) for key in ("input_ids", "assistant_masks") if key in out})
        return rows, prepared

    def _encode_texts(
        self, text: str | Sequence[str], medias: Any, options: dict[str, Any]
    ) -> tuple[list[dict], _Prepared]:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, (list, tuple)) or not all(isinstance(row, str) for row in texts) or not texts:
            found = [type(row).__name__ for row in texts] if isinstance(texts, (list, tuple)) else type(text).__name__
            raise MediaError(f"text: found {found}, expected a text or a list of texts")
        prepared = self._prepare(medias, options)
        asked = {key: options.pop(key) for key in _TEXT if options.get(key) is not None}
        special = not asked.get("split_special_tokens", self.tokenizer.split_special_tokens)
        special = asked.get("allow_special_tokens", special)
        rows_of_segments = [text_segments(row, special) for row in texts]
        wanted = [sum(map(is_placeholder, segments)) for segments in rows_of_segments]
        if any(wanted):
            check_counts(wanted, medias, len(prepared.prompts))
        prompts, rows = iter(prepared.prompts), []
        for row, segments in zip(texts, rows_of_segments, strict=True):
            filled = [Segment(next(prompts), True) if is_placeholder(part) else part for part in segments]
            if special:  # one text, so that very long ones are cut where the release cuts them
                ids = self.tokenizer.encode_special("".join(part.text for part in filled))
            elif isinstance(row, RenderedChat):
                ids = self.tokenizer.encode_segments(filled)
            else:
                encoded = [
                    self.tokenizer.encode(part.text, allow_special_tokens=part.special or None) for part in filled
                ]
                ids = [token for run in encoded for token in run]
            rows.append({"input_ids": ids})
        return rows, prepared

    def _match(self, rows: list[dict], counts: list[int], expand: bool) -> list[int]:
        """Check `<|media_pad|>` against images, and expand it in place: how many each image has in the rows now."""
        pad = self.image_token_id
        found = sum(row["input_ids"].count(pad) for row in rows)
        if found == sum(counts):  # the text came expanded
            return counts
        if found != len(counts):
            which = f": image {found + 1} of {len(counts)} has none" if found < len(counts) else ""
            raise MediaError(
                f"the text holds {found} {MEDIA_PAD} for {len(counts)} images{which}; write {IMAGE_PLACEHOLDER} once "
                "for each image"
            )
        if not expand:
            return [1] * len(counts)
        remaining = iter(counts)
        for row in rows:
            repeats = [next(remaining) if token == pad else 1 for token in row["input_ids"]]
            for key, values in row.items():
                row[key] = [value for value, n in zip(values, repeats, strict=True) for _ in range(n)]
        return counts

    def _pad(
        self, rows: list[dict], counts: list[int], options: dict[str, Any], return_tensors: str | None
    ) -> dict[str, Any]:
        limit, truncation = options.get("max_length"), options.pop("truncation", False)
        if truncation not in (False, None, "do_not_truncate"):
            self._truncate(rows, counts, truncation_limit(self.tokenizer, limit))
        padding = options.get("padding")
        padding = return_tensors is not None if padding is None else padding
        lengths = {len(row["input_ids"]) for row in rows}
        if padding in (False, "do_not_pad") and return_tensors is not None and len(lengths) > 1:
            raise ShapeError(
                f"rows of {sorted(lengths)} tokens do not fit into one tensor; pass padding=True or return_tensors=None"
            )
        columns = {key: [row[key] for row in rows] for key in (rows[0] if rows else ("input_ids",))}
        keywords = {key: options[key] for key in ("pad_to_multiple_of", "padding_side") if key in options}
        if padding == "max_length":
            keywords["max_length"] = limit
        return dict(self.tokenizer.pad(columns, padding=padding, **keywords)) if rows else columns

    def _truncate(self, rows: list[dict], counts: list[int], limit: int) -> None:
        """Shorten rows in place, never through an image or its prompt. counts: `<|media_pad|>` tokens of each image."""
        pad = self.image_token_id if counts else None
        begin, end = (self.tokenizer.added_tokens_encoder.get(token) for token in (MEDIA_BEGIN, MEDIA_END))
        left = getattr(self.tokenizer, "truncation_side", "right") == "left"
        ends, before = list(accumulate(counts)), 0
        for index, row in enumerate(rows):
            ids = row["input_ids"]
            excess = max(0, len(ids) - limit)
            cut = excess if left else len(ids) - excess
            kept = slice(cut, None) if left else slice(0, cut)
            here = ids.count(pad)
            opened = opened_before(ids, cut, begin, end) if counts and excess else None
            if ids[kept].count(pad) != here or opened is not None:
                first_lost = before if left else before + ids[: cut if opened is None else opened].count(pad)
                raise MediaError(
                    f"max_length {limit} cuts away tokens of image {bisect_right(ends, first_lost) + 1} of "
                    f"{len(counts)} (row {index} of the batch has {len(ids)} tokens); allow more, or shrink the images "
                    "with in_patch_limit"
                )
            before += here
            for key, values in row.items():
                row[key] = values[kept]


def _collect(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Flat options; the nested groups that transformers' processors take are opened."""
    options = dict(kwargs)
    for group in ("common_kwargs", "text_kwargs", "images_kwargs"):
        options.update(options.pop(group, None) or {})
    for name in _IGNORED:
        options.pop(name, None)
    return options


def _refuse_leftovers(options: dict[str, Any]) -> None:
    unknown = [key for key, value in options.items() if key not in (*_PADDING, *_TEXT) and value not in (None, False)]
    if unknown:
        raise MediaError(f"{', '.join(sorted(unknown))}: not an option of this call; options of chats need messages")
