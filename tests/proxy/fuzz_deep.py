"""A request a dialect whose tools, calls and results use all that their fields may hold, nested."""

from __future__ import annotations

import json
from typing import Any

JSON = dict[str, Any]
PNG = "iVBORw0KGgo="

SCHEMA: JSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Edit", "type": "object",
    "additionalProperties": False, "minProperties": 1, "required": ["path", "edits"],
    "$defs": {"range": {"type": "object", "properties": {"from": {"$ref": "#/$defs/line"}, "to": {"type": "integer"}}},
              "line": {"type": ["integer", "null"], "minimum": 0, "exclusiveMaximum": 1e6, "default": None}},
    "properties": {
        "path": {"type": "string", "pattern": "^[^\\u0000]+$", "minLength": 1, "format": "uri", "examples": ["a é"]},
        "edits": {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"anyOf": [
            {"$ref": "#/$defs/range"}, {"type": "object", "properties": {"text": {"type": "string"}}},
            {"type": "array", "prefixItems": [{"type": "number"}, {"const": "x"}], "items": False}]}},
        "mode": {"enum": ["a", 1, None, True, 1.5, {"k": []}], "description": "How."},
        "flags": {"type": "object", "patternProperties": {"^x-": {"type": "boolean"}},
                  "propertyNames": {"maxLength": 9}, "additionalProperties": {"oneOf": [{"type": "string"}, {}]}},
        "if": {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"not": {"type": "null"}}},
        "type": {"type": "string"}, "properties": {"type": "object", "properties": {"properties": {"type": "array"}}},
    },
}  # fmt: skip
ARGUMENTS: JSON = {
    "path": "src/é\u0000😀\n", "mode": None, "type": "x", "properties": {"properties": [[]]},
    "edits": [{"from": None, "to": 9007199254740993}, {"text": "\"quoted\" \\ </tool_call>"}, [1.0, "x"], [[[{}]]]],
    "flags": {"x-a": True, "": {"": {"": []}}, "n": -0.0, "e": 1e-7, "big": 123456789012345678901234567890},
}  # fmt: skip
TEXT = json.dumps(ARGUMENTS)

ANTHROPIC: JSON = {
    "model": "claude-x", "max_tokens": 99, "tool_choice": {"type": "any"},
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}}, "more"],
    "mcp_servers": [{"type": "url", "url": "http://x", "name": "m", "tool_configuration": {"enabled": True}}],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [
        {"type": "custom", "name": "edit", "description": "Edits.", "input_schema": SCHEMA, "strict": True,
         "cache_control": {"type": "ephemeral"}, "input_examples": [ARGUMENTS]},
        {"type": "bash_20250124", "name": "bash"}, {"type": "tool_search_tool_regex_20251119", "name": "find"},
        {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "tool_addition", "tool": {"name": "later"}}, "text",
            {"type": "document", "citations": {"enabled": True}, "source": {"type": "content", "content": [
                {"type": "text", "text": "in"}, {"type": "image", "source": {"type": "file", "file_id": "f"}}]}}]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]},
            {"type": "text", "text": "so", "citations": [{"type": "char_location", "cited_text": "in"}]},
            {"type": "tool_use", "id": "t1", "name": "edit", "input": ARGUMENTS, "caller": {"type": "direct"}},
            {"type": "tool_use", "id": "t2", "name": "gone", "input": {"__unparsedToolInput": {"raw": "{"}}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [
                {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "found"}]},
                {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PNG}},
                {"type": "text", "text": "a\u2028b"}]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            {"type": "tool_result", "tool_use_id": "nobody", "content": None, "cache_control": None}]},
    ],
}  # fmt: skip
CHAT: JSON = {
    "model": "policy", "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "edit"}}]}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": SCHEMA}},
    "metadata": {"a": {"b": [1]}}, "functions": [{"name": "old", "parameters": {}}], "function_call": "auto",
    "tools": [
        {"type": "function", "function": {"name": "edit", "description": "E.", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "name": "flat", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "custom": {"name": "free", "format": {"type": "grammar", "grammar": {
            "syntax": "lark", "definition": "start: /x/"}}}},
    ],
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}, "plain",
            {"type": "image_url", "image_url": "http://x/y.png"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "audio": {"id": "a"},
         "annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}], "tool_calls": [
            {"id": "c1", "type": "function", "index": 0, "function": {"name": "edit", "arguments": TEXT}},
            {"id": "c2", "type": "function", "function": {"name": "edit", "arguments": ARGUMENTS},
             "extra_content": {"google": {"thought_signature": "c2ln"}}},
            {"id": "c3", "type": "function", "function": {"name": "invalid", "arguments": "{\"half\": "}}]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": TEXT},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}]},
        {"role": "tool", "tool_call_id": "c2", "content": None},
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{}"}},
        {"role": "function", "name": "old", "content": "x"},
    ],
}  # fmt: skip
_LARK: JSON = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}
RESPONSES: JSON = {
    "model": "policy", "store": True, "include": ["reasoning.encrypted_content", "file_search_call.results", 3],
    "text": {"format": {"type": "json_schema", "name": "r", "schema": SCHEMA, "strict": True, "description": "d"}},
    "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "custom", "name": "patch"}, {"type": "function", "name": "edit"}, {"type": "local_shell"}]},
    "tools": [
        {"type": "function", "name": "edit", "description": "E.", "parameters": SCHEMA, "strict": False},
        {"type": "function", "function": {"name": "inner", "parameters": SCHEMA}},
        {"type": "custom", "name": "patch", "description": "P.", "format": _LARK},
        {"type": "namespace", "name": "agents__", "description": "A.", "tools": [
            {"type": "function", "name": "edit", "parameters": {"type": "object"}},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "web_search", "filters": {"allowed_domains": ["x"]}}]},
        {"type": "local_shell"}, {"type": "function", "name": "edit", "parameters": None},
        {"type": "mcp", "server_label": "m", "require_approval": {"never": {"tool_names": []}}},
    ],
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "namespace", "name": "fns", "tools": [
            {"type": "function", "name": "exec", "parameters": SCHEMA}]}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "f"}, {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": {"url": "http://x"}, "detail": "auto"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}],
         "encrypted_content": None, "status": "completed"},
        {"type": "function_call", "call_id": "c1", "name": "edit", "namespace": "agents__", "arguments": TEXT},
        {"type": "function_call", "call_id": "c2", "name": "edit", "arguments": ARGUMENTS, "status": "incomplete"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "namespace": "agents__", "input": TEXT},
        {"type": "local_shell_call", "call_id": "c4", "status": "in_progress", "action": {
            "type": "exec", "command": [], "env": {"A": ""}, "user": None, "working_directory": "/é"}},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}, "text",
            {"type": "input_text", "text": TEXT}], "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": ""},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "local_shell_call_output", "id": "c4", "output": "{\"output\": \"\", \"metadata\": {}}"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
        {"type": "message", "role": "assistant", "phase": "final", "content": [
            {"type": "output_text", "text": "so", "annotations": [{"type": "url_citation"}]},
            {"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "go on"}, {"type": "compaction_trigger"},
    ],
}  # fmt: skip
GOOGLE: JSON = {
    "systemInstruction": "Be brief.", "cachedContent": "", "labels": {"a": "b"},
    "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA, "responseSchema": {
        "type": "OBJECT", "nullable": True, "properties": {"a": {"anyOf": [{"type": "STRING"}, {"type": "NULL"}]}}},
        "thinkingConfig": {"includeThoughts": False, "thinkingBudget": -1, "thinkingLevel": "HIGH"}},
    "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}, "retrievalConfig": {"latLng": {"latitude": 1.5}}},
    "tools": [
        {"functionDeclarations": [
            {"name": "edit", "description": "E.", "parametersJsonSchema": SCHEMA, "behavior": "BLOCKING",
             "responseJsonSchema": SCHEMA, "response": {"type": "STRING"}},
            {"name": "upper", "parameters": {"type": "OBJECT", "required": ["list"], "propertyOrdering": ["list"],
             "properties": {"list": {"type": "ARRAY", "minItems": "1", "maxItems": "99999999999999999999", "items": {
                 "type": "OBJECT", "nullable": True, "properties": {"kind": {"type": "STRING", "format": "enum",
                 "enum": ["A"], "nullable": True, "example": {"x": 1}}}}},
                 "any_of": {"anyOf": [{"type": "NUMBER", "minimum": 0}, {"ref": "#/defs/x"}]}}, "defs": {"x": {}}}},
            {"name": "none"}]},
        {"codeExecution": {}, "urlContext": {}, "function_declarations": {"name": "alone", "parameters": SCHEMA}},
    ],
    "contents": [
        "plain", {"parts": {"text": "one part"}},
        {"role": "model", "parts": [
            {"executableCode": {"language": "PYTHON", "code": "1"}}, {"codeExecutionResult": {"outcome": "OUTCOME_OK"}},
            {"functionCall": {"id": "c1", "name": "edit", "args": ARGUMENTS, "thoughtSignature": "c2ln"}},
            {"functionCall": {"name": "upper", "args": {"unparsed_arguments": "{"}}, "thought_signature": "c2ln"},
            {"functionCall": {"name": "none", "args": "{}", "partialArgs": [{"jsonPath": "$.a"}]}}]},
        {"role": "function", "parts": [
            {"functionResponse": {"name": "none", "response": {"error": {"deep": [ARGUMENTS]}}, "willContinue": False}},
            {"functionResponse": {"id": "c1", "name": "edit", "response": ARGUMENTS, "scheduling": "SILENT", "parts": [
                {"inlineData": {"mimeType": "image/png", "data": PNG, "displayName": "d"}}, {"fileData": {
                    "mimeType": "image/png", "fileUri": "gs://y"}}]}},
            {"functionResponse": {"response": "text"}}, {"text": "and", "videoMetadata": {"fps": 1}}]},
        {"role": "user", "parts": [{"text": "go on", "partMetadata": {"k": [1, None]}}]},
    ],
}  # fmt: skip
