"""A model's reasoning as the opaque `thoughtSignature` of Google's API, and back. Pure."""

from __future__ import annotations

import base64
import binascii

_SIGNED = b"polar_plugin reasoning 1\n"


def signature(reasoning: str) -> str:
    """A thoughtSignature that carries the reasoning: clients drop thoughts, but must send signatures back."""
    return base64.b64encode(_SIGNED + reasoning.encode("utf-8", "surrogatepass")).decode("ascii")


def signed_reasoning(signed: str) -> str | None:
    """The reasoning of one of our signatures, in either alphabet of base64; None for one of somebody else."""
    try:
        standard = signed.replace("-", "+").replace("_", "/").rstrip("=")
        raw = base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
        return raw.removeprefix(_SIGNED).decode("utf-8", "surrogatepass") if raw.startswith(_SIGNED) else None
    except (binascii.Error, ValueError):
        return None
