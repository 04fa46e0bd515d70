"""Chats: turns and tools from rows of the usual formats, and the chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from . import ranks, readers

FORMATS = (  # the columns that each format requires; the first match is used
    ("messages",),
    ("prompt", "completion"),
    ("conversations",),  # ShareGPT
    ("conversation",),
    ("instruction", "output"),  # Alpaca
    ("instruction", "response"),  # Dolly
    ("query", "response"),  # ms-swift
)
INPUTS = ("input", "context")  # columns that continue those of INSTRUCTIONS
INSTRUCTIONS = ("instruction", "query")
PREFERENCES = ("chosen", "rejected", "rejected_response", "rejected_messages")
TURNS = ("parent_id", "message_tree_id", "role")  # columns of rows that are single turns
MEDIA = ("images", "videos", "audios", "image", "video", "audio")
# Keys of a turn or a row that say whether it is a target; `mask` says the opposite.
TRAIN_KEYS = ("mask", "weight", "loss", "train", "training", "trainable", "loss_mask",
              "loss_scale", "loss_weight")  # fmt: skip
COLUMNS = ("system", "system_prompt", "history", *INPUTS, "tools", "functions", "label", "kto_tag",
           *TRAIN_KEYS, *MEDIA, *(x for needed in FORMATS for x in needed))  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {"human": "user", "function": "tool", "observation": "tool", "tool_response": "tool"}
SPEAKERS |= {"developer": "system"}
CALLERS = ("function_call", "tool_call")  # speakers whose text is a call in JSON
SPEAKERS |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", *CALLERS), "assistant")
OPTIONAL_KEYS = ("name", "tool_call_id", "reasoning_content", "thinking")  # of a turn
HARMLESS_KEYS = """id uuid index turn turn_id turn_identifier message_id parent_id conversation_id
date time timestamp created created_at create_time updated_at model model_name lang language country
state source category author user header hashed_ip openai_id toxic redacted temperature top_p
token_counter tokens token_count num_tokens length rating score text markdown metadata finish_reason
stop_reason end_turn recipient"""
KNOWN_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call"}
KNOWN_KEYS |= {*TRAIN_KEYS, *OPTIONAL_KEYS, *HARMLESS_KEYS.split()}
CHATML = r"""{{- bos_token or '' -}}
{%- for turn in messages -%}{{- '<|im_start|>' + turn['role'] + '\n' -}}
{%- if 'reasoning_content' in turn or 'thinking' in turn -%}
{%- set thought = turn['reasoning_content'] or turn['thinking'] -%}
{{- '<think>\n' + thought + '\n</think>\n\n' if thought else '' -}}{%- endif -%}
{{- turn['content'] + '<|im_end|>\n' -}}{%- endfor -%}
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


def find_columns(
    name: str, columns: dict[str, int], pair: Sequence[str | None], system: str | None = None
) -> Sequence[str] | None:
    """Return the columns with the chats of data set `name`, None if it has none.

    `columns` are those of `readers.columns_of`, `pair` is --prompt-column and --completion-column,
    and `system` is --system-column. Raise ValueError if a column is missing, or if the rows are
    preferences or trees of messages.
    """
    if missing := [x for x in (*pair, system) if x and x not in columns]:
        raise ValueError(readers.lacks(name, missing, columns))
    if any(pair):
        return pair
    result = next((needed for needed in FORMATS if columns.keys() >= {*needed}), None)
    if result is None and not columns.keys().isdisjoint(TURNS):
        raise ValueError(f"--dataset {name} has single turns. Write each path from a prompt to an "
                         "answer as one row of messages.")  # fmt: skip
    preferences = [x for x in PREFERENCES if x in columns]
    if not preferences:
        return result
    likely = [*(result or ()), *readers.guess_columns(columns)]
    prompts = [x for x in likely if x not in PREFERENCES]
    advice = "write them as rows of messages"
    if prompts and columns.get("chosen", -1) >= 0:  # not a list, which may repeat the prompt
        advice = f"pass --prompt-column {prompts[0]} --completion-column chosen"
    raise ValueError(f"--dataset {name} has preferences ({', '.join(preferences)}), which need "
                     f"another loss. To train on the chosen answers, {advice}.")  # fmt: skip


def read_chat(
    row: dict, columns: Sequence[str], system_column: str | None, train_on_prompt: bool
) -> tuple[list[dict], list[dict] | None]:
    """Return the turns of the chat in a row (see `read_turn`), and its tools or None.

    `columns` are those of `find_columns`. Raise ValueError if the row is unusable, for example
    because it excludes all answers from training, or one with `train_on_prompt`.
    """
    turns = [*earlier_turns(row.get("history")), *main_turns(row, columns, train_on_prompt)]
    turns = [read_turn(turn) for turn in turns]
    system_columns = [system_column] if system_column else ["system", "system_prompt"]
    system = next(filter(None, map(row.get, system_columns)), None)
    if system not in (None, turns[0]["content"]):
        if turns[0]["role"] == "system":
            raise ValueError("the row has a system column and a system turn")
        turns = [{"role": "system", "content": as_text(system, "system")}, *turns]
    for key in MEDIA:
        if row.get(key) and (key.endswith("s") or f"<{key}>" in str(turns)):
            raise ValueError(f"the row has {key}, and this script trains on text only")
    for key in ("label", "kto_tag"):
        if str(row.get(key)).lower() == "false":
            raise ValueError(f"{key} is false, so the answer is a bad example (KTO)")
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if not answers:
        raise ValueError("the chat has no assistant turn, so there is nothing to learn")
    if not is_trained(row, "row") or not any(turn.get("train", True) for turn in answers):
        raise ValueError("the row excludes all assistant turns, so there is nothing to learn")
    if train_on_prompt and not all(turn.get("train", True) for turn in turns):
        raise ValueError("the row excludes a turn, but --train-on-prompt trains on all of them")
    tools = from_json(row.get("tools") or row.get("functions"))
    return turns, as_list(tools, "tools") if tools else None


def main_turns(row: dict, columns: Sequence[str], train_on_prompt: bool) -> list[dict]:
    """Return the turns in the `columns` of a row: messages, or a prompt and its answer."""
    prompt, *answer = (row.get(column) for column in columns)
    if not answer:
        return as_list(from_json(prompt), columns[0])
    for key in INPUTS if columns[0] in INSTRUCTIONS else ():
        if row.get(key) not in (None, ""):
            prompt = f"{as_text(prompt, columns[0])}\n\n{as_text(row[key], key)}"
    turns = as_turns("user", prompt)
    answers = as_turns("assistant", *answer)
    if role_of(answers[0]) != "assistant":
        raise ValueError(f"{columns[1]} does not start with an assistant's turn")
    if not train_on_prompt:  # earlier answers are context
        turns = [x | {"train": False} if role_of(x) == "assistant" else x for x in turns]
    return turns + answers


def is_trained(item: dict, what: str) -> bool:
    """Return whether a turn or a row is a target by its TRAIN_KEYS: true, 1 or none."""
    words = {"0": 0, "false": 0, "1": 1, "true": 1}  # of CSV
    values = {x: item[x] for x in TRAIN_KEYS if item.get(x) not in (None, "")}
    values = {key: words.get(str(value).lower(), value) for key, value in values.items()}
    for key, value in values.items():
        if value not in (0, 1):
            raise ValueError(f"the {what} has {key} {value!r}. Use true, false, 0 or 1")
    return all(bool(value) != (key == "mask") for key, value in values.items())


def as_list(value: Any, name: str) -> list[dict]:
    """Return `value`; raise ValueError unless it is a list of objects and not empty."""
    if not value or not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{name} is empty or not a list of objects")
    return value


def as_text(value: Any, name: str) -> str:
    """Return `value`; raise ValueError unless it is text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not text")
    value.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return value


def as_turns(role: str, value: Any) -> list[dict]:
    """Return messages unchanged, a message as a list, and a text as a list of a turn of `role`."""
    if isinstance(value, dict):
        return [value]
    return as_list(value, role) if isinstance(value, list) else [{"role": role, "content": value}]


def earlier_turns(history: Any) -> list[dict]:
    """Return the turns of a `history`: pairs of question and answer, or messages."""
    turns = []
    for item in from_json(history) or ():
        if isinstance(item, dict):
            turns.append(item)
        elif not isinstance(item, list) or len(item) != 2:
            raise ValueError("history is not a list of pairs or turns")
        else:
            question, answer = item
            turns += [*as_turns("user", question), *as_turns("assistant", answer)]
    return turns


def role_of(turn: dict) -> str:
    """Return the role of a turn; raise ValueError if it is unknown."""
    speaker = turn.get("role") or turn.get("from")
    role = SPEAKERS.get(speaker, speaker)
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {', '.join(ROLES)}")
    return role


def read_turn(turn: dict) -> dict:
    """Return a turn with its content as text, its role in ROLES and only known keys; `train` is
    False if it is no target. Raise ValueError if the turn is invalid."""
    role = role_of(turn)
    for key, value in turn.items():
        if key not in KNOWN_KEYS and value not in (None, "", [], {}):
            raise ValueError(f"the {role}'s turn has {key}, an unknown key. Rename or remove it")
    content = turn.get("content", turn.get("value"))
    calls = from_json(turn.get("tool_calls"))
    call = turn.get("function_call")
    if (turn.get("role") or turn.get("from")) in CALLERS:
        call, content = content, None
    if call and calls:
        raise ValueError(f"the {role}'s turn has function_call and tool_calls. Remove one")
    if call:
        call = from_json(call)
        calls = as_list([call] if isinstance(call, dict) else call, "the function call")
        calls = [{"type": "function", "function": x} for x in calls]
    if isinstance(content, list):
        texts = [
            "text" in x.get("type", "text")
            and is_trained(x, "part")
            and x.get("text", x.get("value"))
            for x in as_list(content, "content")
        ]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if content is None and calls:
        content = ""  # some templates need it to be text
    result = {"role": role, "content": as_text(content, f"the {role}'s turn")}
    if role == "assistant" and not calls and not content.strip():
        raise ValueError("the assistant's turn is empty")
    if calls:
        result["tool_calls"] = [parse_call(call) for call in as_list(calls, "tool_calls")]
    if not is_trained(turn, f"{role}'s turn"):
        result["train"] = False
    return result | {key: turn[key] for key in OPTIONAL_KEYS if turn.get(key)}


def parse_call(call: dict) -> dict:
    """Return a tool call with its arguments parsed, as most templates write them by `tojson`."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no name")
    arguments = from_json(function.get("arguments")) or {}
    if not isinstance(arguments, dict) or not {"parameters", "args", "input"}.isdisjoint(function):
        raise ValueError(f"the call to {function['name']} has no object `arguments`")
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
    thought, _, content = turn["content"].rpartition("</think>")
    expected = [("content", content), ("content", thought.rpartition("<think>")[2])]
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
