"""Rows of the usual formats as chats: a list of turns, as a chat template takes them, and tools.

Imports nothing else of this repository.
"""

import json
from typing import Any

COLUMNS = {  # the columns of each kind of rows; the first kind that fits is taken, then plain text
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
}
OPTIONAL = {"alpaca": ("input",)}
ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
SPEAKERS |= {role: role for role in ROLES}  # ShareGPT's names of the roles
THOUGHTS = ("reasoning_content", "thinking")
OTHER_NAMES = {"function_call": "tool_calls", "reasoning": "reasoning_content"}


def find_kind(name: str, columns: list[str], text_column: str) -> str:
    """Return the kind of the rows of data set `name`: a key of COLUMNS, text, or tokens (made
    beforehand); ValueError if none."""
    kinds = COLUMNS | {"text": (text_column,), "tokens": ("input_ids",)}
    for kind, needed in kinds.items():
        if set(needed) <= set(columns):
            return kind
    known = ", or ".join(" and ".join(needed) for needed in COLUMNS.values())
    raise ValueError(f"{name} has columns {', '.join(columns)}: rename them to {known}, or give "
                     f"--text-column {columns[0]}, if that holds whole documents")  # fmt: skip


def used_columns(kind: str, columns: list[str], text_column: str) -> list[str]:
    """Return those of `columns` that rows of a kind are read from."""
    if kind == "text":
        return [text_column]
    if kind == "tokens":
        return columns
    known = (*COLUMNS[kind], *OPTIONAL.get(kind, ()), "tools")
    return [column for column in columns if column in known]


def read(row: dict, kind: str) -> tuple[list[dict], list[dict] | None]:
    """Return the turns of the chat in a row, and its tools if it has some; raises ValueError.

    A turn has a role and a content, and if they are there, tool_calls, the name and the id of a
    call, and thoughts. Other keys are left out, and those that are None; the arguments of a call
    and tools stay as they are.
    """
    row = present(row)
    turns = [checked(turn) for turn in READERS[kind](row)]
    if all(turn["role"] != "assistant" for turn in turns):
        raise ValueError("no turn is the assistant's, so there is nothing to learn")
    return turns, read_tools(row.get("tools"))


def present(value: dict) -> dict:
    """Return a dict without the keys whose value is None, which a template would take as given."""
    return {key: part for key, part in value.items() if part is not None}


def read_messages(row: dict) -> list[dict]:
    """Return the turns of a row with messages; checks only that they are dicts."""
    return listed(row.get("messages"), "messages is empty or not a list of {role, content}")


def read_prompt(row: dict) -> list[dict]:
    """Return the turns of a row with prompt and completion, each a text or a list of messages."""
    asked = as_turns("user", row.get("prompt"))
    if any(turn.get("role") == "assistant" for turn in asked):
        # It would be trained on like the completion, once for each row that has it in its prompt.
        raise ValueError("a turn of the prompt is the assistant's: give such chats as messages")
    return asked + as_turns("assistant", row.get("completion"))


def read_sharegpt(row: dict) -> list[dict]:
    """Return the turns of a row with conversations."""
    problem = "conversations is empty or not a list of {from, value}"
    turns = []
    for turn in listed(row.get("conversations"), problem):
        speaker = turn.get("from")
        if speaker not in SPEAKERS:
            raise ValueError(f"the speaker {speaker} is not one of {', '.join(SPEAKERS)}")
        turns.append(turn | {"role": SPEAKERS[speaker], "content": turn.get("value")})
    return turns


def read_alpaca(row: dict) -> list[dict]:
    """Return the two turns of a row with instruction, output and maybe input."""
    instruction = row.get("instruction")
    more = row.get("input", "")
    if not isinstance(more, str):
        raise ValueError("input is not text")
    if instruction and isinstance(instruction, str) and more.strip():
        instruction = f"{instruction}\n\n{more}"
    return as_turns("user", instruction) + as_turns("assistant", row.get("output"))


READERS = {
    "messages": read_messages,
    "prompt": read_prompt,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
}


def as_turns(role: str, value: Any) -> list[dict]:
    """Return messages as they are, a text as the only turn of a role."""
    if value and isinstance(value, list):
        return listed(value, "prompt or completion is neither text nor a list of {role, content}")
    return [{"role": role, "content": value or None}]


def listed(value: Any, problem: str) -> list[dict]:
    """Return `value` if it is a list of dicts, and not empty; else raise ValueError(problem)."""
    if not value or not isinstance(value, list):
        raise ValueError(problem)
    if not all(isinstance(part, dict) for part in value):
        raise ValueError(problem)
    return value


def checked(turn: dict) -> dict:
    """Return a turn with the keys that templates know, its content as text; raises ValueError."""
    turn = present(turn)
    role = turn.get("role")
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {', '.join(ROLES)}")
    calls = from_json(turn.get("tool_calls") or [])
    content = joined(turn.get("content"), role)
    if content is None and calls:
        content = ""  # some templates need it to be text
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the {role}'s turn is of type {type(content).__name__}, not text")
    if content is None or (role == "assistant" and not calls and not content.strip()):
        raise ValueError(f"the {role}'s turn is empty")
    for key, right in OTHER_NAMES.items():
        if key in turn:
            raise ValueError(f"the {role}'s turn has {key}, which is called {right} here")
    if turn.get("weight", 1) != 1:
        raise ValueError(f"the {role}'s turn has a weight, which is not known here")
    found = {"role": role, "content": content}
    if calls:
        calls = listed(calls, "tool_calls is not a list of {function}")
        found["tool_calls"] = [checked_call(call) for call in calls]
    kept = ("name", "tool_call_id") if role == "tool" else THOUGHTS
    return found | {key: turn[key] for key in kept if turn.get(key)}


def joined(content: Any, role: str) -> Any:
    """Return content that is a list of texts as one text, any other as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in listed(content, f"the {role}'s turn is empty or not text"):
        kind = present(part).get("type", "text")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"the {role}'s turn has a part of type {kind}, which is not text")
        texts.append(part["text"])
    return "".join(texts)


def checked_call(call: dict) -> dict:
    """Return a tool call whose arguments are a dict; raises ValueError.

    JSON is parsed, because most templates write arguments by `tojson`, which would quote a text.
    """
    call = present(call)
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no name")
    function = present(function)
    if "arguments" in function:
        arguments = from_json(function["arguments"] or {})
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of a call of {function['name']} are no JSON object")
        function["arguments"] = arguments
    return call | {"function": function} if "function" in call else function


def read_tools(value: Any) -> list[dict] | None:
    """Return the tools of the column tools, a list or JSON of one; None without tools; raises
    ValueError."""
    tools = from_json(value or [])
    if tools in (None, []):
        return None
    return listed(tools, "tools is neither a list of objects nor JSON of one")


def from_json(value: Any) -> Any:
    """Return the value of a text that is JSON; any other text, or value, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
