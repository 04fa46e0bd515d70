"""Chat templates: two of our own, chats as texts, and the markers that a template puts around these
texts. Any rank may call these functions."""

import contextlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem, print0

# Instead of today's date, so that each start has the same texts.
FIXED_DATE = r"""{%- macro strftime_now(format) -%}{{- format | replace('%d', '26')
| replace('%-d', '26') | replace('%I', '12') | replace('%p', 'PM')
| replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024')
| replace('%y', '24') | replace('%a', 'Fri') | replace('%A', 'Friday') | replace('%H', '12')
| replace('%M', '00') | replace('%S', '00') -}}{%- endmacro +%}"""
WORD = "xyzzy"  # no template contains it
# Each question and its answer form a text from BOS to EOS. The markers are plain text.
LLAMA_2 = r"""{%- set turns, head = messages, '' -%}
{%- if turns and turns[0]['role'] == 'system' -%}
{%- set head = '<<SYS>>\n' + turns[0]['content'] | trim + '\n<</SYS>>\n\n' -%}
{%- set turns = turns[1:] -%}{%- endif -%}{%- for turn in turns -%}
{%- if turn['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
{{- raise_exception('user and assistant must alternate (not with --chat-template chatml)') -}}
{%- elif turn['role'] == 'user' -%}
{{- (bos_token or '') + '[INST] ' + (head if loop.first else '') -}}
{{- turn['content'] | trim + ' [/INST]' -}}
{%- else -%}{{- ' ' + turn['content'] | trim + ' ' + (eos_token or '') -}}
{%- endif -%}{%- endfor -%}"""
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
TEMPLATES = {"llama-2": LLAMA_2, "chatml": CHATML}


@dataclass
class Markers:
    """What a chat template puts around texts: after a `question`, the `header` of an answer, which
    is the last line of what a generation prompt has `added`; the `tails` of a text and of a call,
    and the tokens that end these, `stops` as texts. `known` has all tags of the template and of the
    tokenizer."""

    known: str
    ends: list
    tails: list
    question: str = ""
    header: str = ""
    added: str = ""
    stops: tuple = ()


def set_chat_template(tokenizer: Tokenizer, choice: str | None) -> None:
    """Set a tokenizer's chat template to `choice`; if None, to Llama 2's if it has none. Turns end
    in EOS instead of an <|im_end|> that the tokenizer would spell in letters."""
    if tokenizer.chat_template is None:
        choice = choice or "llama-2"
    if choice is None:
        return
    template = TEMPLATES.get(choice) or Path(choice).expanduser().read_text("utf-8-sig")
    if tokenizer.eos_token and "<|im_end|>" not in tokenizer.get_vocab():
        template = template.replace("<|im_end|>", tokenizer.eos_token)
    tokenizer.chat_template = template
    print0(f"The chat template is {choice}. Exports contain it.")


def markers_of(tokenizer: Tokenizer) -> Markers:
    """Return the markers of a tokenizer's chat template."""
    return find_markers(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=10)
def find_markers(tokenizer: Tokenizer, template: str) -> Markers:
    """Return the markers of a tokenizer's chat template, "" where it rejects the turns."""
    added = tokenizer.added_tokens_decoder
    known = template + " ".join(map(str, added.values()))
    known += known.replace("/", "")  # </think> may be the end of <think>
    markers = Markers(known, [tokenizer.eos_token_id], [])
    asked = {"role": "user", "content": WORD}
    answer = {"role": "assistant", "content": WORD}
    with contextlib.suppress(ValueError):
        chat = [asked, answer, asked], None
        prompt = text_of(chat, 3, tokenizer, is_prompt=True)
        *_, header = prompt.split(WORD)
        *_, markers.header = header.partition("<think>")[0].strip().split("\n")
        text = text_of(chat, 3, tokenizer)
        *_, markers.question = text.split(WORD, 2)
        markers.added = prompt.removeprefix(os.path.commonprefix([text, prompt]))
    function = {"name": "f", "arguments": {"of": WORD}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    once = answer | {"content": "", "tool_calls": [call]}
    twice = once | {"tool_calls": [call, call]}
    tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {}}}
    asked = {"role": "user", "content": "?"}
    for turn, more, tools in ((answer, answer, None), (once, twice, [tool])):
        after = ""
        with contextlib.suppress(ValueError):
            text = text_of(([asked, turn], tools), 2, tokenizer)
            _, *_, after = text.split(WORD)  # ValueError if the template drops it
            longer = text_of(([asked, more], tools), 2, tokenizer)
            # If nothing ends a call, the text of one more call starts with it.
            if longer != text and longer.startswith(text):
                after = ""
        # Gemma has an added token that is a line break.
        ends = [token for token in ids_of(after, tokenizer) if str(added.get(token, "")).strip()]
        markers.ends += ends[-1:] if tools else ends
        markers.tails.append(after.strip())
    markers.stops = tuple(str(added[token]) for token in markers.ends if token in added)
    return markers


def text_of(chat: tuple, count: int, tokenizer: Tokenizer, is_prompt: bool = False) -> str:
    """Return the first `count` turns as the chat template renders them: with the header of an
    answer if `is_prompt`, else without the line break after the last end marker, which is no
    target."""
    turns, tools = chat
    template = tokenizer.get_chat_template(tools=tools)
    if "strftime_now" in template:
        template = FIXED_DATE + template
    try:
        text = tokenizer.apply_chat_template(
            turns[:count],
            tools,
            chat_template=template,
            add_generation_prompt=is_prompt,
            tokenize=False,
        )
    except Exception as error:  # a template is a program and may raise anything
        has_calls = tools or any("tool_calls" in turn for turn in turns)  # as in other rows
        kind = Problem if has_calls else ValueError
        line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
        raise kind(f"the chat template rejects the chat: {error}{line}") from error
    return text if is_prompt else text.rstrip()


def ids_of(text: str | list, tokenizer: Tokenizer) -> list:
    """Return the tokens of a part of a rendered chat, or of each of several."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def answer_ends(tokenizer: Tokenizer) -> list:
    """Return the tokens that end a generation: EOS, the added tokens that the chat template puts
    after an answer, and the last one after a call."""
    return markers_of(tokenizer).ends
