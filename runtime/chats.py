"""Chats: turns and tools from rows of the usual formats, and the chat template."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from . import ranks

COLUMNS = {  # required by each format; the first match is used
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
}
ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
UNKNOWN = {"function_call": "tool_calls", "reasoning": "reasoning_content", "weight": "no weights"}
OPTIONAL_KEYS = ("name", "tool_call_id", "reasoning_content", "thinking")  # of a turn
CHATML = r"""{{- bos_token or '' -}}
{%- for turn in messages -%}
{{- '<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>\n' -}}{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}"""
# Each question and its answer form a text from BOS to EOS. The markers are plain text.
LLAMA_2 = r"""{%- set turns, head = messages, '' -%}
{%- if turns and turns[0]['role'] == 'system' -%}
{%- set head = '<<SYS>>\n' + turns[0]['content'] | trim + '\n<</SYS>>\n\n' -%}
{%- set turns = turns[1:] -%}{%- endif -%}{%- for turn in turns -%}
{%- if turn['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
{{- raise_exception('in Llama 2\'s format user and assistant alternate, after at most one system '
'turn; --chat-template chatml takes any order, and a FILE with Qwen 2.5\'s takes tools') -}}
{%- elif turn['role'] == 'user' -%}
{{- (bos_token or '') + '[INST] ' + (head if loop.first else '') -}}
{{- turn['content'] | trim + ' [/INST]' -}}
{%- else -%}
{{- ' ' + turn['content'] | trim + ' ' + (eos_token or '') -}}
{%- endif -%}{%- endfor -%}"""
TEMPLATES = {"chatml": CHATML, "llama-2": LLAMA_2}


def read_chat(row: dict, kind: str) -> tuple[list[dict], list[dict] | None]:
    """Return the turns of the chat in a row (see `validate_turn`), and its tools or None."""
    if kind == "messages":
        turns = as_list(row.get("messages"), "messages")
    elif kind == "prompt":
        turns = as_turns("user", row.get("prompt"))
        if any(turn.get("role") == "assistant" for turn in turns):
            raise ValueError("the prompt has an assistant turn. Use the column messages instead")
        turns = turns + as_turns("assistant", row.get("completion"))
    elif kind == "ShareGPT":
        turns = as_list(row.get("conversations"), "conversations")
        turns = [turn | {"role": turn.get("from"), "content": turn.get("value")} for turn in turns]
    else:
        question, more = row.get("instruction"), row.get("input")
        if question and more:
            question = f"{question}\n\n{more}"
        turns = as_turns("user", question) + as_turns("assistant", row.get("output"))
    turns = [validate_turn(turn) for turn in turns]
    if all(turn["role"] != "assistant" for turn in turns):
        raise ValueError("the chat has no assistant turn, so there is nothing to learn")
    tools = from_json(row.get("tools"))
    return turns, as_list(tools, "tools") if tools else None


def as_list(value: Any, name: str) -> list[dict]:
    """Return `value`; raise ValueError unless it is a list of objects and not empty."""
    if not value or not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{name} is empty or not a list of objects")
    return value


def as_turns(role: str, value: Any) -> list[dict]:
    """Return a list of messages unchanged, and a text as a list with one turn of `role`."""
    return (
        value if value and isinstance(value, list) else [{"role": role, "content": value or None}]
    )


def validate_turn(turn: dict) -> dict:
    """Return a turn with its content as text and only known keys; raise ValueError if invalid."""
    role = SPEAKERS.get(turn.get("role"), turn.get("role"))
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {', '.join(ROLES)}")
    for key in UNKNOWN:
        if turn.get(key) not in (None, 1):
            raise ValueError(f"the {role}'s turn has {key}, an unknown key. Use {UNKNOWN[key]}")
    calls, content = from_json(turn.get("tool_calls")), turn.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in as_list(content, "content")]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if content is None and calls:
        content = ""  # some templates need it to be text
    if not isinstance(content, str):
        raise ValueError(f"the {role}'s turn is {content}, not text")
    if role == "assistant" and not calls and not content.strip():
        raise ValueError("the assistant's turn is empty")
    result = {"role": role, "content": content}
    if calls:
        result["tool_calls"] = [parse_call(call) for call in as_list(calls, "tool_calls")]
    return result | {key: turn[key] for key in OPTIONAL_KEYS if turn.get(key)}


def parse_call(call: dict) -> dict:
    """Return a tool call with its arguments parsed, as most templates write them by `tojson`."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no name")
    arguments = from_json(function.get("arguments")) or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a call to {function['name']} are not an object")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def from_json(value: Any) -> Any:
    """Return the value of a text that is JSON; return any other text or value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def set_chat_template(tokenizer: Tokenizer, choice: str | None) -> None:
    """Set a tokenizer's chat template to `choice`; if None, to Llama 2's if it has none."""
    if choice is None:
        if tokenizer.chat_template is None:
            tokenizer.chat_template = LLAMA_2
            ranks.say("The tokenizer has no chat template: using llama-2, in best/ and final/ too.")
        return
    path = Path(choice).expanduser()
    if choice not in TEMPLATES and not path.is_file():
        raise ValueError(f"--chat-template {choice} is neither a file nor chatml or llama-2.")
    template = TEMPLATES.get(choice) or path.read_text(encoding="utf-8", errors="replace")
    if "messages" not in template:
        raise ValueError(f"--chat-template {choice} does not use `messages`. Pass a Jinja file.")
    tokenizer.chat_template = template
    ranks.say(f"--chat-template {choice} replaces the tokenizer's, in best/ and final/ too.")


def check_rendered(turn: dict, tools: list[dict] | None, text: str) -> None:
    """Raise ValueError unless `text` contains the turn's content and calls, and the tool names."""
    expected = [("content", turn["content"].rpartition("</think>")[2])]
    expected += [(key, turn[key]) for key in ("reasoning_content", "thinking") if key in turn]
    expected += [("tools", tool.get("function", tool).get("name", "")) for tool in tools or ()]
    for call in turn.get("tool_calls", ()):
        function = call.get("function", call)
        expected += [("tool_calls", x) for x in (function["name"], *function["arguments"])]
    for key, part in expected:
        if part.strip() not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text:
            advice = "Pass a --chat-template FILE that renders it; for tools, Qwen 2.5's"
            raise ValueError(
                f"the chat template drops {key} of the {turn['role']}'s turn. {advice}"
            )
