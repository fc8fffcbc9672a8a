"""Images and the text that names them: where a conversation or a text has its images, and how many of each there are."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MediaError
from .chat_encoding import IMAGE_PARTS, IMAGE_PLACEHOLDER, Segment
from .media_loading import flatten_media, media_value
from .rendered_chat import RenderedChat


def conversation_images(messages: Sequence[Any]) -> list[Any]:
    """The images of one conversation in reading order: parts of list contents of user messages.

    Raises:
        MediaError: an image in a message of another role, which the release does not collect, or a part without one.
    """
    images = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
            continue
        for place, part in enumerate(message["content"]):
            if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
                continue
            where = f"messages[{index}]['content'][{place}]"
            if message.get("role") != "user":
                raise MediaError(
                    f"{where}: an image in a message of role {message.get('role')!r}; images belong into user messages"
                )
            try:
                images.append(media_value(part))
            except MediaError as error:
                raise MediaError(f"{where}: {error}") from error
    return images


def text_segments(text: str, special: bool) -> list[Segment]:
    """Runs of a text, placeholders of images by themselves."""
    if isinstance(text, RenderedChat) and not special:
        return list(text.segments)
    first, *others = text.split(IMAGE_PLACEHOLDER)
    segments = [Segment(first, special)]
    for run in others:
        segments += [Segment(IMAGE_PLACEHOLDER, True), Segment(run, special)]
    return segments


def is_placeholder(segment: Segment) -> bool:
    return segment.special and segment.text == IMAGE_PLACEHOLDER


def is_conversation(value: Any) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, Mapping) and "role" in value


def check_counts(wanted: list[int], medias: Any, found: int) -> None:
    """Placeholders against images, per text where images come per text."""
    if sum(wanted) != found:
        which = (
            f"image {sum(wanted) + 1} of {found} has no placeholder"
            if found > sum(wanted)
            else f"placeholder {found + 1} of {sum(wanted)} has no image"
        )
        raise MediaError(f"text holds {sum(wanted)} times {IMAGE_PLACEHOLDER} for {found} images: {which}")
    if isinstance(medias, (list, tuple)) and len(medias) == len(wanted) and isinstance(medias[0], (list, tuple)):
        for index, (count, own) in enumerate(zip(wanted, medias, strict=True)):
            if count != len(flatten_media(own)):
                raise MediaError(
                    f"text {index} holds {count} times {IMAGE_PLACEHOLDER}, but comes with {len(flatten_media(own))} "
                    "images"
                )


def opened_before(ids: Sequence[int], cut: int, begin: int | None, end: int | None) -> int | None:
    """Where the image prompt begins that stands on both sides of a cut before `ids[cut]`; None if there is none."""
    for at in range(min(cut, len(ids)) - 1, -1, -1):
        if ids[at] == end:
            return None
        if ids[at] == begin:
            return at
    return None
