"""Recorded sessions as files: one JSONL file a session, compressed where the name ends in `.gz` or `.zst`.

The first line is the session, then one line a completion, the last one its end:

    {"type": "session", "version": 1, "session_id", "task_id", "harness", "model", "tokenizer", "metadata",
     "end_of_turn"}
    {"type": "completion", "id", "parent", "role", "break_reason", "started", "ended", "api", "request", "sampling",
     "prompt_ids" or "prompt_delta", "output_ids", "logprobs", "finish_reason", "stop", "weight_versions", "reply",
     "malformed_calls", "images_omitted", "delivery", and where the engine tells them "routed_experts" ("start",
     "width", "data": base64 of int16 rows for the tokens from `start` on), "top_p_ids", "top_p_offsets"}
    {"type": "delivery", "id", "delivery"}
    {"type": "end", "status", "evaluation", "failure", "counts", "session_counts"}

A message is an object of OpenAI Chat with `reasoning_content`; one with images has `parts` too, its content piece by
piece: texts, and an object {"media_type", "data", "url"} an image.

A file grows with what is new in a session, not with its history:

* `prompt_delta` follows the parent's prompt ‖ output; `prompt_ids` is a whole prompt;
* in `request`, `messages` is the whole list; `messages_delta` follows the first `messages_kept` of the parent's
  messages and its reply; `tools` is left out where they are the parent's.

Log-probabilities are the shortest decimals that give the same float32. Delivery is known after a completion's line is
written, so a later `delivery` line replaces what that line says; without either the completion counts as delivered.
Readers ignore keys and line types that they do not know. A last line cut short by a crash is skipped and counted.
Numbers that JSON does not have are written as Python's json module does (NaN, Infinity).
"""

from .files import Recorder, Recording, iter_completions, load, load_header, name_of, record, recordings
from .forms import End, Header
from .redact import redact

__all__ = [
    "End",
    "Header",
    "Recorder",
    "Recording",
    "iter_completions",
    "load",
    "load_header",
    "name_of",
    "record",
    "recordings",
    "redact",
]
