"""Families of chat formats: a tokenizer each, and how its model writes texts, thoughts, calls and the end of a turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polar_plugin.engine.base import Renderer
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.tokenizer import load_tokenizer
from tests import tokenizers


@dataclass(frozen=True)
class Family:
    """How its model writes; the ends are "" where the first of the renderer's stop ids ends a turn."""

    tokenizer: str
    kind: str = "auto"
    options: tuple[tuple[str, str], ...] = ()
    call: str = '<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
    between: str = "\n"
    """What stands between two calls of a turn."""
    text: str = "{text}"
    thoughts: str = "<think>\n{thoughts}\n</think>\n\n{text}"
    before_call: str = "{text}\n"
    """A text that calls follow."""
    begin_call: str = ""
    """What stands before the first call of a turn without a text."""
    end: str = ""
    end_of_call: str = ""
    unsampled_end: str = ""
    """What the format puts behind a text that ends without its end, the first of what follows included where `end` is
    that; "" where it is `end`."""
    extends_over_turns: bool = True
    """Whether what is told behind a sampled turn may hold assistant turns that were not sampled there."""

    def calls(self, *commands: str) -> str:
        told = (self.call.format(arguments=json.dumps({"command": one}), command=one) for one in commands)
        return self.between.join(told)


FAMILIES = {
    "Qwen3": Family("qwen3"),
    "Qwen3 by its template": Family("qwen3", "template"),
    "Qwen3-Coder's calls": Family(
        "qwen3",
        "template",
        (("tool_parser", "qwen3_coder"),),
        "<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>",
    ),
    "Llama 3.1": Family("llama3_1"),
    "DeepSeek V3": Family("deepseek_v3", "template"),
    "GLM 4.5": Family(
        "glm45",
        "glm45",
        call="\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{command}</arg_value>\n</tool_call>",
        between="",
        text="\n<think></think>\n{text}",
        thoughts="\n<think>{thoughts}</think>\n{text}",
        before_call="\n<think></think>\n{text}",
        end="<|user|>",
        end_of_call="<|observation|>",
        unsampled_end="<|endoftext|><|user|>",
    ),
    "gpt-oss": Family(
        "gptoss",
        "gpt-oss",
        call="<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{arguments}",
        between="<|call|><|start|>assistant",
        text="Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}",
        thoughts="{thoughts}<|end|><|start|>assistant<|channel|>final<|message|>{text}",
        before_call="Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>{text}<|end|><|start|>assistant",
        begin_call="Hm.<|end|><|start|>assistant",
        end="<|return|>",
        end_of_call="<|call|>",
        unsampled_end="<|end|>",
        extends_over_turns=False,
    ),
    "ChatML over bytes": Family("tiny"),
}


@cache
def loaded(family: Family, models: Path) -> tuple[Renderer, Callable[[str], Sequence[int]]]:
    """A family's renderer and how its model's text becomes tokens: seconds, so once a run."""
    directory = resolve_model("tiny", models) if family.tokenizer == "tiny" else tokenizers.load(family.tokenizer)
    renderer = load_renderer(directory, kind=family.kind, **dict(family.options))  # type: ignore[arg-type]
    return renderer, load_tokenizer(directory).encode
