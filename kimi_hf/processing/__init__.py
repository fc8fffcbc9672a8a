"""Text and images in and out: tokenizer, chat encoding and parsing, image processor, processor."""

from importlib import import_module

_HOMES = {
    "TikTokenTokenizer": "tokenization_kimi",
    "Segment": "chat_encoding",
    "build_segments": "chat_encoding",
    "StreamingParser": "chat_parsing",
    "parse_completion": "chat_parsing",
    "KimiK3VisionProcessor": "image_processing_kimi_k3",
    "KimiK3Processor": "processing_kimi_k3",
    "register_processing": "registration",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    # Names are imported when first used, so that parsing chats does not load image code, nor the other way round.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
