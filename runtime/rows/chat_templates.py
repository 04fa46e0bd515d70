"""Chat templates: the formats that --chat-template names, a file's, and what a template leaves out.

Imports nothing of this repository but chat_formats and ranks.
"""

import functools
import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,
    render_jinja_template,
)

from .. import ranks
from .chat_formats import THOUGHTS

DATE = "2024-07-26"  # in templates that ask for today's
CHATML = r"""{{- bos_token or '' -}}
{%- for turn in messages -%}
{{- '<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}"""
# A question and its answer are a text of their own, from BOS to EOS; the rest is plain text.
LLAMA_2 = r"""{%- set turns, head = messages, '' -%}
{%- if turns and turns[0]['role'] == 'system' -%}
{%- set head = '<<SYS>>\n' + turns[0]['content'] | trim + '\n<</SYS>>\n\n' -%}
{%- set turns = turns[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
{%- if turn['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
{{- raise_exception('the format of Llama 2 has the turns of user and assistant alternate, '
'the first of them the user\'s, after one of the system at most') -}}
{%- elif turn['role'] == 'user' -%}
{{- (bos_token or '') + '[INST] ' + (head if loop.first else '') -}}
{{- turn['content'] | trim + ' [/INST]' -}}
{%- else -%}
{{- ' ' + turn['content'] | trim + ' ' + (eos_token or '') -}}
{%- endif -%}
{%- endfor -%}"""
LLAMA_3 = r"""{{- bos_token or '' -}}
{%- for turn in messages -%}
{{- '<|start_header_id|>' + ('ipython' if turn['role'] == 'tool' else turn['role']) -}}
{{- '<|end_header_id|>\n\n' + turn['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt else '' -}}"""
# Spaces stand before turns, not after, so that a chat's text begins with that of its first turns.
PROMPTER = """{{ bos_token or '' }}{% for message in messages %}{{ '' if loop.first else ' ' }}<|{{
'prompter' if message['role'] == 'user' else message['role'] }}|> {{ message['content'] }} {{
'<|endoftext|>' }}{% endfor %}{{ ' <|assistant|>' if add_generation_prompt else '' }}"""
NAMED = {"chatml": CHATML, "llama-2": LLAMA_2, "llama-3": LLAMA_3, "prompter": PROMPTER}
DEFAULT = "llama-2"  # ends each answer with EOS, and needs no other special token
HELP = (
    f"{', '.join(NAMED)}, or a FILE with a template in Jinja; it replaces the tokenizer's "
    f"(default: the tokenizer's, or {DEFAULT} if it has none)"
)
# A chat of words that stand in no template, which shows what a template leaves out. An id has nine
# letters, as some templates want.
QUESTION = {"role": "user", "content": "zqquestion"}
ANSWER = {"role": "assistant", "content": "zqanswer"}
ARGUMENTS = {"zqkey": "zqvalue"}
CALL = {"id": "zqcall001", "type": "function"}
CALL |= {"function": {"name": "zqname", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "zqresult", "name": "zqname", "tool_call_id": "zqcall001"}
TOOL = {"type": "function", "function": {"name": "zqtool", "description": "zq", "parameters": {}}}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ADVICE = "give one that does by --chat-template FILE"  # no template of NAMED writes tools
TOOL_ROLE = "the role tool"


def check_argument(wanted: str | None) -> list[str]:
    """List a sentence if --chat-template names neither a template of NAMED nor a file with one."""
    try:
        if wanted is not None:
            read(wanted)
    except ValueError as error:
        return [str(error)]
    return []


def read(wanted: str) -> str:
    """Return the chat template that --chat-template names; ValueError, with a sentence, if none."""
    if wanted in NAMED:
        return NAMED[wanted]
    flag, known = f"--chat-template {wanted}", ", ".join(NAMED)
    path = Path(wanted).expanduser()
    if not path.is_file():
        raise ValueError(f"{flag} is no file, and none of the names {known}")
    advice = f"give a file that renders `messages`, or one of {known}"
    try:
        template = path.read_text(encoding="utf-8")
        text = rendered_alone(template)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        raise ValueError(f"{flag} is no chat template in Jinja ({error}): {advice}") from error
    if any(turn["content"] not in text for turn in (QUESTION, ANSWER)):
        raise ValueError(f"{flag} is no chat template, as it leaves out what is said: {advice}")
    return template


def rendered_alone(template: str) -> str:
    """Return a question and an answer as a template renders them without a tokenizer; only their
    contents if it cannot do without. Raises TemplateSyntaxError."""
    chat = [QUESTION, ANSWER]
    try:
        (text,), _ = render_jinja_template([chat], chat_template=template, **SPECIAL)
    except TemplateSyntaxError:
        raise
    except Exception:  # a template is a program, and may raise anything
        return "".join(turn["content"] for turn in chat)
    return text


def give(tokenizer: Tokenizer, wanted: str | None) -> None:
    """Give a tokenizer the chat template that --chat-template names, or DEFAULT if it has none of
    its own; rank 0 says which, and what of it the tokenizer takes apart."""
    own = tokenizer.chat_template
    if wanted is not None:
        tokenizer.chat_template = read(wanted)
        known = "which had none" if own is None else "in place of its own"
        ranks.say(
            f"--chat-template {wanted} is the tokenizer's chat template, {known}; "
            "final/ and best/ have it too"
        )
    elif own is None:
        tokenizer.chat_template = NAMED[DEFAULT]
        others = ", ".join(name for name in NAMED if name != DEFAULT)
        ranks.say(
            f"the tokenizer has no chat template: it is given {DEFAULT}, which final/ and best/ "
            f"have too; --chat-template chooses another ({others}, or a file), and prompter takes "
            "turns in any order"
        )
    if apart := taken_apart(tokenizer):
        ranks.say(
            f"the chat template writes {', '.join(apart)}, which are no single tokens of the "
            "tokenizer: the model reads and writes them as text"
        )


def taken_apart(tokenizer: Tokenizer) -> list[str]:
    """Return what the chat template writes in angle brackets, such as <|im_start|>, and the
    tokenizer makes several tokens of."""
    try:
        text = tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False)
    except Exception:  # a template is a program; what it raises is said where a chat is rendered
        return []
    # <<SYS>> is text in the format that has it.
    found = dict.fromkeys(re.findall(r"(?<!<)<[^<>\s]+>(?!>)", text))
    counts = {x: len(tokenizer(x, add_special_tokens=False)["input_ids"]) for x in found}
    return [marker for marker, count in counts.items() if count > 1]


def renderer(
    tokenizer: Tokenizer, template: str, chat: list[dict], tools: list[dict] | None
) -> Callable:
    """Return a function that renders turns of a chat as `apply_chat_template` does.

    That one copies all turns at each call, lest a template sees more than plain values. Turns of
    a role and a text hold nothing else, and are given as they are.
    """
    is_plain = not tools and all(turn.keys() == {"role", "content"} for turn in chat)
    if not is_plain or type(tokenizer).apply_chat_template is not Tokenizer.apply_chat_template:
        options = {"tools": tools, "tokenize": False, "chat_template": template}
        return functools.partial(tokenizer.apply_chat_template, **options)
    write = _compile_jinja_template(template).render
    known = tokenizer.special_tokens_map | {"tools": None, "documents": None}

    def render(turns: list[dict], add_generation_prompt: bool = False) -> str:
        return write(known, messages=turns, add_generation_prompt=add_generation_prompt)

    return render


@functools.lru_cache(maxsize=4)
def restarts(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that a fast tokenizer takes out of a text before all else, by their ids.

    The text after one is made into tokens by itself, so that they do not depend on what stands
    before. Left out are tokens that depend on what stands beside them.
    """
    if tokenizer.split_special_tokens:
        return {}
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if not (token.normalized or token.lstrip or token.single_word)
    }


def check_turns(
    tokenizer: Tokenizer, template: str, turns: list[dict], tools: list[dict] | None
) -> None:
    """Raise ValueError if a chat has something that the chat template leaves out.

    Transformers passes everything on, and a template ignores what it does not know.
    """
    keys = {key for turn in turns for key in turn}
    wanted = [key for key in ("tool_calls", *THOUGHTS) if key in keys]
    if tools:
        wanted.append("tools")
    if any(turn["role"] == "tool" for turn in turns):
        wanted.append(TOOL_ROLE)
    for what in wanted:
        if problem := left_out(tokenizer, template, what):
            raise ValueError(problem)


@functools.lru_cache(maxsize=64)
def left_out(tokenizer: Tokenizer, template: str, what: str) -> str:
    """Return a sentence if a chat template does not write `what` a chat of words shows; else ""."""

    def render(*turns: dict, tools: list[dict] | None = None) -> str:
        options = {"tools": tools, "chat_template": template, "tokenize": False}
        return tokenizer.apply_chat_template(list(turns), **options)

    try:
        if what == "tools":
            is_written = "zqtool" in render(QUESTION, tools=[TOOL])
        elif what == "tool_calls":
            text = render(QUESTION, CALLING)
            is_written = all(word in text for word in ("zqname", *ARGUMENTS, *ARGUMENTS.values()))
        elif what == TOOL_ROLE:
            text = render(QUESTION, CALLING, RESULT, ANSWER)
            is_written = RESULT["content"] in text and not reads_as_another(text, render)
        else:
            is_written = "zqthought" in render(QUESTION, ANSWER | {what: "zqthought"})
    except Exception as error:  # a template is a program, and may raise anything
        return f"the tokenizer's chat template cannot write {what}: {error}"
    return "" if is_written else f"the tokenizer's chat template does not know {what}: {ADVICE}"


def reads_as_another(text: str, render: Callable) -> bool:
    """Tell whether the chat with RESULT, rendered as `text`, is rendered so with another role."""
    for role in ("system", "user", "assistant"):
        try:
            other = render(QUESTION, CALLING, RESULT | {"role": role}, ANSWER)
        except Exception:  # a template may refuse such a chat
            continue
        if other == text:
            return True
    return False


def asks_for_date(tokenizer: Tokenizer) -> bool:
    """Tell whether the chat template writes the date, as Llama 3.2's does."""
    return "strftime_now" in str(tokenizer.chat_template)


@functools.lru_cache(maxsize=4)
def with_date(template: str) -> str:
    """Return a chat template that writes DATE in place of today, so that every start of a run
    renders the same on all nodes. Raises ValueError if it cannot."""

    def as_literal(call: re.Match) -> str:
        return json.dumps(date.fromisoformat(DATE).strftime(call[2]))

    dated = re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", as_literal, template)
    if re.search(r"strftime_now\s*\(", dated):
        raise ValueError("the chat template asks for the date in another way than by strftime_now "
                         "and a format in quotes")  # fmt: skip
    return dated
