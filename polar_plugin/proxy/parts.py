"""The pieces of one message's content, texts and images, as a Message holds them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import IMAGE, Image

Part = str | Image


def joined(parts: Sequence[Part], joint: str) -> tuple[str, tuple[Part, ...]]:
    """`Message.content` and `Message.parts`.

    Pieces of an assistant's turn are one text cut up by its client (`joint` is ""), those of other turns are texts of
    their own ("\\n").
    """
    text = joint.join(IMAGE if isinstance(part, Image) else part for part in parts)
    return text, tuple(parts) if any(isinstance(part, Image) for part in parts) else ()
