"""Checks of a chat template. Without this file, what a template drops, adds or writes in another
form than the model will see in use is trained on in silence: content, calls, tools, reasoning."""

import json
from collections.abc import Callable

from core.ranks import Problem
from core.reading import shorten

ADVICE = "Pass a --chat-template that renders it, such as chatml"


def check_tools(text_of: Callable, turns: list[dict], tools: list[dict] | None) -> None:
    """Raise Problem if a template drops a tool. `text_of` renders turns, and optionally `tools`."""
    for tool in tools or ():
        if text_of(turns) == text_of(turns, tools=[x for x in tools if x is not tool]):
            raise Problem(f"the chat template drops a tool. {ADVICE}")


def check_answer(text_of: Callable, turns: list[dict], answer: str) -> None:
    """Raise an error unless `answer`, the text of the last turn, has its content and calls, its
    reasoning once, and no header that the prompt lacks, as Gemma 4's after a tool."""
    if turns[-2:][0]["role"] == "tool":
        question = [{"role": "user", "content": "?"}]
        header = text_of(question, is_prompt=True).removeprefix(text_of(question)).strip()
        if header and answer.lstrip().startswith(header):
            raise Problem(f"the prompt after a tool's turn lacks the answer's header. {ADVICE}")
    check_rendered(turns[-1:], answer)
    content, reasoning = turns[-1]["content"], turns[-1].get("reasoning_content")
    thoughts = (content.count("</think>") or 1) + (reasoning is not None)
    if answer.count("</think>") > thoughts:
        raise ValueError("the chat template adds </think>. Write reasoning as reasoning_content")
    before, _, thought = content.rpartition("</think>")[0].rpartition("<think>")
    for part in (before, thought, reasoning or "", turns[-1].get("thinking", "")):
        find(part, answer, 0, "assistant")


def check_rendered(turns: list[dict], text: str) -> None:
    """Raise Problem unless `text` has the content and the calls of the turns in this order, and
    the system's anywhere."""
    end = 0  # of the turn before
    for turn in turns:
        role, content = turn["role"], turn["content"]
        if role == "assistant":
            content = content.rpartition("</think>")[2]
        start = 0 if role == "system" else end
        content_end = find(content, text, start, role)
        for call in turn.get("tool_calls", ()):
            function = call.get("function", call)
            arguments = function["arguments"]
            parts = [function["name"], *arguments]
            parts += [value for value in arguments.values() if isinstance(value, str)]
            start = max(find(part, text, start, role) for part in parts)
            for key, value in [("", arguments), *arguments.items()]:
                if isinstance(value, str | bool) or json.dumps(value, ensure_ascii=False) in text:
                    continue
                # None in Qwen 3.5's calls. LFM's are Python: f(key=None).
                if str(value) in text and not (key and f"{key}={value}" in text):
                    raise Problem("the chat template writes calls in Python, not in JSON: "
                                  f"{shorten(str(value))}. {ADVICE}")  # fmt: skip
        if role != "system":
            end = max(start, content_end)


def find(part: str, text: str, start: int, role: str) -> int:
    """Return where a part of a turn of `role` ends in `text[start:]`; raise Problem if it is not
    there, as it is or as JSON."""
    for form in (part.strip(), json.dumps(part, ensure_ascii=False)[1:-1]):
        position = text.find(form, start)
        if position >= 0:
            return position + len(form)
    raise Problem(f"the chat template drops {shorten(part)!r} of the {role}'s turn. {ADVICE}")
