"""Formats of chats besides messages and prompt/completion: ShareGPT, Alpaca and other usual pairs,
calls and chats as JSON text, weights of turns and rows; and the template chatml. Without this file,
rows in these formats are refused, and chatml is not a built-in template."""

import json
import re
from collections.abc import Sequence
from typing import Any

from core.ranks import Problem
from core.reading import print_columns, usual_columns

FORMATS = (  # the columns that each format requires; the first match is used
    ("messages",),
    ("prompt", "completion"),
    ("conversations",),  # ShareGPT
    ("conversation",),
    ("instruction", "output"),  # Alpaca
    ("instruction", "response"),  # Dolly
    ("query", "response"),  # ms-swift
)
PAIRS = (  # other usual names of prompts and answers
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("Question", "Response"),
    ("problem", "solution"),
    ("input", "output"),
    ("inputs", "targets"),
    ("user", "assistant"),
)
PREFERENCES = ("chosen", "rejected", "rejected_response", "rejected_messages")
# Keys of a turn or a row that say whether it is a target; `mask` says the opposite.
TRAIN_KEYS = ("mask", "weight", "loss", "train", "training", "trainable", "loss_mask",
              "loss_scale", "loss_weight")  # fmt: skip
READ = (*TRAIN_KEYS, "system", "system_prompt", "tools")  # columns beside those of the chat
# Columns besides the chat that are read here, or refused.
COLUMNS = ("input", "context", *PREFERENCES, *TRAIN_KEYS, "label", "kto_tag")
YES, NO = ("true", "1", "1.0"), ("false", "0", "0.0")  # CSV has text
SPEAKERS = {"human": "user", "function": "tool", "observation": "tool", "tool_response": "tool"}
SPEAKERS |= {"developer": "system"}
CALLERS = ("function_call", "tool_call")  # speakers whose text is a call in JSON
SPEAKERS |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", *CALLERS), "assistant")
HARMLESS_KEYS = """id uuid index turn turn_id turn_identifier message_id parent_id conversation_id
date time timestamp created created_at create_time updated_at model model_name lang language country
state source category author user header hashed_ip openai_id toxic redacted temperature top_p
token_counter tokens token_count num_tokens length rating score text markdown finish_reason
stop_reason end_turn"""
PART_KEYS = {"type", "text", "value", "cache_control", "annotations", *TRAIN_KEYS}
TURNS_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]""")
# Keys of a turn that are read or left out; others are kept.
KNOWN_KEYS = {"role", "from", "content", "value", "tool_calls", *TRAIN_KEYS, *HARMLESS_KEYS.split()}
# Tools and calls as in Hermes and Qwen 2.5.
CHATML = r"""{{- (bos_token or '') | replace('<|im_start|>', '') -}}
{%- if tools -%}{{- '<|im_start|>system\n' -}}
{{- messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' -}}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are '
'provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments '
'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
'<args-json-object>}\n</tool_call><|im_end|>\n' -}}{%- endif -%}
{%- for turn in messages -%}
{%- if turn['role'] == 'tool' -%}
{{- '<|im_start|>user' if loop.first or loop.previtem['role'] != 'tool' -}}
{{- '\n<tool_response>\n' + turn['content'] + '\n</tool_response>' -}}
{{- '<|im_end|>\n' if loop.last or loop.nextitem['role'] != 'tool' -}}
{%- elif not (tools and loop.first and turn['role'] == 'system') -%}
{{- '<|im_start|>' + turn['role'] + '\n' -}}
{%- set thought = turn['reasoning_content'] or turn['thinking'] -%}
{{- '<think>\n' + thought + '\n</think>\n\n' if thought -}}{{- turn['content'] -}}
{%- for call in turn['tool_calls'] or [] -%}{%- set function = call['function'] or call -%}
{{- '\n' if turn['content'] or not loop.first -}}
{{- '<tool_call>\n{"name": ' + function['name'] | tojson + ', "arguments": ' -}}
{{- function['arguments'] | tojson + '}\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}"""


def find_columns(
    name: str, columns: dict[str, Any], form: tuple[str, ...], args: Any
) -> tuple[str, ...]:
    """Return the columns with the chats of data set `name`, () if it has none. `columns` is its
    first row, and `form` the columns that the flags name or that need no conversion.

    Raise Problem if the rows are preferences or single turns.
    """
    is_chosen = form == (args.prompt_column, args.completion_column)  # by flags
    preferences = [x for x in PREFERENCES if x in columns]
    if preferences and not is_chosen:
        raise Problem(f"{name} has preferences ({', '.join(preferences)}). To train on the chosen "
                      "answers, pass --prompt-column and --completion-column.")  # fmt: skip
    form = form or usual_columns(columns, FORMATS) or ()
    read = (*form, *inputs_of(form), *READ)
    unread = [x for x in columns if x not in read]
    if form and unread:
        print_columns(name, form, [*form, *unread])
    if form or "input_ids" in columns:
        return form
    if "role" in columns:
        raise Problem(f"{name} has a row per turn. Write each chat as one row of messages.")
    if args.text_column in columns:
        return ()
    form = usual_columns(columns, PAIRS) or ()
    print_columns(name, form, [x for x in columns if form and x not in READ])
    return form


def inputs_of(form: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that continue the prompt, for chats in the columns `form`."""
    return ("input", "context") if "instruction" in form or "query" in form else ()


def normalize(row: dict, form: Sequence[str]) -> dict:
    """Return a row with its chat in the columns `form` as messages or text, and without the other
    COLUMNS. Raise ValueError if the row is unusable, for example because it is excluded."""
    has_tags = form[-1] in ("messages", "completion", "conversations", "conversation")
    is_bad = has_tags and str(row.get("label")).lower() == "false"
    if is_bad or str(row.get("kto_tag")).lower() in NO:
        raise Problem("a row is a bad example, for KTO. Delete such rows, or the column.")
    if not is_trained(row, "row"):
        raise ValueError("the row excludes all assistant turns, so there is nothing to learn")
    read = PREFERENCES if form in (*FORMATS, *PAIRS) else ()  # and refused: the first row had none
    result = {key: value for key, value in row.items() if key not in COLUMNS or key in read}
    result["tools"] = from_json(row.get("tools"))
    prompt = row.get(form[0])
    if len(form) == 1:
        prompt = from_json(prompt)
    else:
        result[form[1]] = read_turns(row.get(form[1]))
    for key in inputs_of(form):
        if row.get(key) not in (None, ""):
            prompt = "\n\n".join([prompt, row[key]])  # raises TypeError for others than text
    result[form[0]] = read_turns(prompt)
    return result


def is_trained(item: dict, what: str) -> bool:
    """Return whether a turn or a row is a target by its TRAIN_KEYS: true, 1 or none."""
    for key in TRAIN_KEYS:
        value = item.get(key)
        if value in (None, ""):
            continue
        word = str(value).lower()
        if word not in (*YES, *NO):
            raise ValueError(f"the {what} has {key} {value!r}. Use true, false, 0 or 1")
        if word in (YES if key == "mask" else NO):
            return False
    return True


def read_turns(value: Any) -> Any:
    """Return the turns in a list of messages, in a message, or in a dict of lists, and another
    value unchanged."""
    if isinstance(value, str) and TURNS_AS_TEXT.match(value):
        raise ValueError("the turns are text. Write them as a list of objects")
    if isinstance(value, dict):
        parts = [*value.values()]
        if all(isinstance(part, list) for part in parts):  # as `Sequence` of datasets stores turns
            value = [dict(zip(value, turn, strict=True)) for turn in zip(*parts, strict=True)]
        else:
            value = [value]
    if not isinstance(value, list):
        return value
    return [read_turn(turn) if isinstance(turn, dict) else turn for turn in value]


def read_turn(turn: dict) -> dict:
    """Return a turn with role and content, with calls in `tool_calls`, with `train` False if it is
    no target, and without empty or harmless keys."""
    speaker = turn.get("role") or turn.get("from")
    role = SPEAKERS.get(speaker, speaker)
    content = turn.get("content", turn.get("value"))
    calls = from_json(turn.get("tool_calls"))
    if speaker in CALLERS:
        call, content = from_json(content), None
        if not isinstance(call, dict | list):
            raise ValueError("the function call is not an object")
        calls = call if isinstance(call, list) else [call]
        calls = [{"type": "function", "function": function} for function in calls]
    if isinstance(content, list):
        content = joined_parts(content)
    result = {"role": role, "content": "" if content is None and calls else content}
    if calls:
        result["tool_calls"] = [parse_call(call) for call in calls]
    if not is_trained(turn, f"{role}'s turn"):
        result["train"] = False
    for key, value in turn.items():
        if key not in KNOWN_KEYS and value not in (None, "", [], {}):
            result[key] = value
    return result


def joined_parts(parts: list) -> Any:
    """Return the text of a content that is a list of parts, unchanged if others than text or parts
    that are no targets are among them."""
    texts = []
    for part in parts:
        text = part.get("text", part.get("value"))
        is_text = "text" in part.get("type", "text") and isinstance(text, str)
        if not is_text or part.keys() - PART_KEYS or not is_trained(part, "part"):
            return parts
        texts.append(text)
    return "".join(texts) if texts else parts


def parse_call(call: dict) -> dict:
    """Return a tool call with its arguments parsed, as most templates write them by `tojson`."""
    function = call.get("function", call)
    function = function | {"arguments": from_json(function.get("arguments")) or {}}
    return call | {"function": function} if "function" in call else function


def from_json(value: Any) -> Any:
    """Return the value of a text that is JSON; return any other text or value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        if value.lstrip().startswith(("[{'", "{'")):
            raise ValueError("a text is Python's repr of objects. Write JSON") from None
        return value
