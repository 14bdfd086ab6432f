"""A recording without its texts, so that it can be shared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ..records import JSONObject
from .files import LineWriter, read_lines

_FREE = {"metadata", "report"}  # objects of the user's own: nothing is known about what they say
_TEXTS = {"content", "reasoning_content", "description", "message", "stop"}
_IDS = {"prompt_ids", "prompt_delta", "output_ids", "top_p_ids", "end_of_turn"}


def redact(source: Path, target: Path, *, renumber_ids: bool = False) -> None:
    """Copy a recording with every text replaced by filler of its length; structure, order and numbers stay.

    Filled are the texts of messages, replies and tool descriptions, the string values of tool-call arguments (their
    keys stay, numbers become 0), images and where they lie, stop strings and failure messages; `metadata` and the
    evaluation's report are emptied. Names stay: of tools, harness, model, tokenizer, session and task.

    Token ids stay too, and *a tokenizer turns them back into text*. `renumber_ids` replaces each by its rank of first
    appearance: prefixes, lengths and log-probabilities stay as they are, the text is gone.

    Raises RecordingError; `target` must not exist.
    """
    ranks: dict[int, int] = {}

    def renumbered(ids: list[int]) -> list[int]:
        return [ranks.setdefault(one, len(ranks)) for one in ids]

    with LineWriter(target) as lines:
        for _, line in read_lines(source):
            if line is not None:  # else cut short
                lines.write(_redacted(line, renumbered if renumber_ids else list[int]))


def _redacted(line: JSONObject, ids: Callable[[list[int]], list[int]]) -> JSONObject:
    return {key: ids(value) if key in _IDS else _filled(key, value) for key, value in line.items()}


def _filled(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("JSONObject", value).items()
        return {} if key in _FREE else {name: _filled(name, item) for name, item in items}
    if isinstance(value, list) and key == "parts":
        return [_part_filled(part) for part in cast("list[Any]", value)]
    if isinstance(value, list) and key != "logprobs":
        return [_filled(key, item) for item in cast("list[Any]", value)]
    if isinstance(value, str) and key in _TEXTS:
        return _filler(value)
    return _arguments_filled(value) if isinstance(value, str) and key == "arguments" else cast("Any", value)


def _part_filled(part: Any) -> Any:
    """A piece of text, or an image of which the kind stays."""
    if not isinstance(part, dict):
        return _values_filled(part)
    return {
        name: value if name == "media_type" else _values_filled(value)
        for name, value in cast("JSONObject", part).items()
    }


def _filler(text: str) -> str:
    return re.sub(r"\S", "x", text)


def _values_filled(value: Any) -> Any:
    """JSON with its strings filled and its numbers 0."""
    if isinstance(value, str):
        return _filler(value)
    if isinstance(value, dict):
        return {name: _values_filled(item) for name, item in cast("JSONObject", value).items()}
    if isinstance(value, list):
        return [_values_filled(item) for item in cast("list[Any]", value)]
    return value if value is None or isinstance(value, bool) else 0


def _arguments_filled(text: str) -> str:
    try:
        return json.dumps(_values_filled(json.loads(text)))
    except ValueError:
        return _filler(text)
