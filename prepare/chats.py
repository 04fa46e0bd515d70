"""Chats for supervised fine-tuning: rows to documents with exact targets. Any rank may call it."""

import contextlib
import itertools
import os
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from datasets import Dataset, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

import prepare.chat_formats as chat_formats  # optional: chat_formats
import prepare.template_checks as checks  # optional: template_checks
from core.ranks import Problem, print0
from prepare import columns, losses, read, sets, tables, tokens
from prepare.columns import CHAT, PAIR, TURN_KEYS, Form, forms_of
from prepare.sets import Parts

IDS = List(Value("int32"))
NUMBER = Value("int64")
FEATURES = {
    "input_ids": IDS,
    "labels": IDS,
    "has_target": Value("bool"),
    "lost": NUMBER,
    "key": NUMBER,
}
# Instead of today's date, so that each start has the same texts.
FIXED_DATE = r"""{%- macro strftime_now(format) -%}{{- format | replace('%d', '26')
| replace('%-d', '26') | replace('%I', '12') | replace('%p', 'PM')
| replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024')
| replace('%y', '24') | replace('%a', 'Fri') | replace('%A', 'Friday') | replace('%H', '12')
| replace('%M', '00') | replace('%S', '00') -}}{%- endmacro +%}"""
WORD = "xyzzy"  # no template contains it
ROLES = ("system", "user", "assistant", "tool")
# What stands for a call or for tools, which are read from tool_calls and the column tools.
OTHER_CALLS = ("function_call", "functions", "tools")
TEXT = "--text-column {}"
MORE = ("tools", "system", "system_prompt")  # columns that are read beside chats and pairs
FORMS = forms_of(CHAT, "messages", *MORE) + forms_of(PAIR, "prompt completion", *MORE)
FORMS = chat_formats.FORMS  # optional: chat_formats
FORMS = FORMS + forms_of(TEXT, "content") + forms_of(TEXT, "input_ids", "labels")
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
Chat = tuple  # turns, and tools or None


def draw_documents(
    name: str, split: str, documents: Dataset, limit: int, tokenizer: Tokenizer, args: Any
) -> Dataset:
    """Return `limit` random documents (0: all), without those whose first answer starts after
    --max-seq-length. Raise Problem if these are more than half."""
    documents = sets.sample(name, split, documents, limit)
    length = args.max_seq_length
    losses.print_cut(f"{name}, {split}", "--max-seq-length", length, documents["lost"][:])
    kept = np.flatnonzero(documents["has_target"][:])
    counts = f"{len(kept):,} of {len(documents):,} documents have an answer within that"
    if 2 * len(kept) < len(documents):
        raise Problem(f"{name}: {counts}, --max-seq-length {length}. Raise it.")
    if len(kept) < len(documents):
        print0(f"{name}, {split}: {counts}, and the others are left out")
    return documents.select(kept).select_columns(["input_ids", "labels"])


def load_documents(spec: str, tokenizer: Tokenizer, args: Any) -> Parts:
    """Return the documents of one --dataset argument by split: those that its rows are or contain,
    with FEATURES and at most --max-seq-length + 1 tokens."""
    length = args.max_seq_length + 1
    parts = {}
    for part, table in read.read(spec, args.dataset_config).items():
        form = columns.find_form(spec, table.columns, FORMS, args)
        encode_row = encode_text if form.flags == TEXT else encode_chat
        if form.columns == ("input_ids",):
            encode_row = encode_tokens
        function = partial(encode_row, form=form, tokenizer=tokenizer, length=length)
        parts[part] = tables.map_rows(spec, table, function, FEATURES, args)
    return parts


def samples_of(documents: list, prompt: Any, length: int, **notes: Any) -> list:
    """Return documents, ids and labels, as samples of at most `length` tokens, with `notes` about
    their row. Rows with one `prompt`, which is all before the first answer, are in one split."""
    key = tables.stable_hash(repr(prompt), size=7)
    samples = []
    for ids, labels in documents:
        sample = {
            "input_ids": ids[:length],
            "labels": labels[:length],
            "has_target": {*labels[:length]} != {-100},
            "lost": max(0, len(ids) - length),
            "key": key,
        }
        samples.append(sample | notes)
    return samples


def encode_tokens(row: dict, form: Form, tokenizer: Tokenizer, length: int) -> list:
    """Return the sample that a tokenized row is."""
    ids, labels = read_tokens(row, length, tokenizer)
    first = np.argmax(np.array(labels) != -100)  # target
    return samples_of([(ids, labels)], ids[:first] if first > 1 else ids, length)


def encode_text(row: dict, form: Form, tokenizer: Tokenizer, length: int) -> list:
    """Return the sample of a plain document: BOS if the tokenizer adds it, text, EOS. Raise
    ValueError if it is empty, not text, or a chat."""
    check_columns(row, form, tokenizer)
    text = row.get(*form.columns)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the document is {text!r}, not text")
    chat_formats.check_text(text)  # optional: chat_formats
    ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    notes = find_marks(text, tokenizer)
    notes["change"] = losses.find_change(text, ids, tokenizer)
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return samples_of([(ids, [-100, *ids[1:]])], text, length, **notes)


def encode_chat(row: dict, form: Form, tokenizer: Tokenizer, length: int) -> list:
    """Return the documents of a chat as samples. Raise ValueError if the row is unusable."""
    check_columns(row, form, tokenizer)
    chat, whole_turns = read_chat(row, form)
    documents, rendered = encode(chat, tokenizer)
    ids, _ = documents[-1]
    notes = find_marks(str(chat), tokenizer)
    notes["change"] = losses.find_change(rendered, ids, tokenizer, is_rendered=True)
    notes["turns"] = whole_turns
    turns, _ = chat
    first = [turn["role"] for turn in turns].index("assistant")
    return samples_of(documents, turns[:first] or turns, length, **notes)


def check_columns(row: dict, form: Form, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a text of a row has the header of answers, as a rendered chat has."""
    header = markers_of(tokenizer).header
    for column in form.columns:
        value = row.get(column)
        if header and isinstance(value, str) and header in value:
            raise ValueError(f"{column} has a rendered chat ({header!r} in it). Write messages")


def find_marks(text: str, tokenizer: Tokenizer) -> dict:
    """Return the first special token, and the first mark that is none, which a text spells."""
    match = special_tokens(tokenizer).search(text)
    return {"spells": match and match[0], "mark": losses.find_mark(text, tokenizer)}


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


@dataclass
class Rendered:
    """A document of a chat as text, with the turn, start and end of each answer that is a target.
    `is_ended`: whether a marker ends the last one."""

    text: str
    answers: list
    is_ended: bool


def read_chat(row: dict, form: Form) -> tuple:
    """Return the chat in one or two columns of a row, and its turns with all their keys. A turn is
    not a target if its `train` is False. Raise ValueError if the row is unusable."""
    check_preferences(row, form)
    row = {column: row[column] for column in form.columns + form.more if column in row}
    row = chat_formats.normalize(row, form)  # optional: chat_formats
    turns = (as_objects if len(form.columns) == 1 else read_pair)(row, *form.columns)
    for column in ("system", "system_prompt"):
        turns = with_system(turns, column, row.get(column))
    read = []
    for turn in turns:
        check_turn(turn)
        read.append({key: turn[key] for key in turn if key in TURN_KEYS})
    if not any(map(is_target, read)):
        raise ValueError(
            "the chat has no assistant turn to train on (if it is in another column, pass "
            "--prompt-column and --completion-column)"
        )
    tools = as_objects(row, "tools") if row.get("tools") else None
    return (read, tools), turns


def check_preferences(row: dict, form: Form) -> None:
    """Raise Problem for unpaired preferences, whose answers may be bad ones, unless flags name the
    columns that are read."""
    # Beside other pairs, a label is the class of an answer.
    has_label = form.flags == CHAT or "completion" in form.columns
    for column in ("label", "kto_tag") if has_label else ("kto_tag",):
        is_boolean = str(row.get(column)).lower() in ("true", "false")
        if is_boolean and not form.is_named:
            flags = form.flags.format(*form.columns)
            raise Problem(
                f"{column} is {row[column]}, as in unpaired preferences. Delete the rows where it "
                f"is false, and pass {flags}"
            )


def with_system(turns: list, column: str, system: Any) -> list:
    """Return turns with the `system` text of a column first. Raise ValueError if they have another
    one."""
    if system and turns[0].get("role") != "system":
        turns = [{"role": "system", "content": system}, *turns]
    if system and turns[0].get("content") != system:
        raise ValueError(f"the column {column} is not the system turn, or another system column")
    return turns


def read_pair(row: dict, first: str, completion: str) -> list:
    """Return the turns of a prompt, a text or a list of turns, and of its completion. In a prompt,
    the assistant's turns are no targets unless they say so."""
    for column, role in ((first, "user"), (completion, "assistant")):
        value = row.get(column)
        if not isinstance(value, list):
            row = row | {column: [{"role": role, "content": value}]}
    turns = []
    for turn in as_objects(row, first):
        is_answer = turn.get("role") == "assistant"
        turns.append({"train": False} | turn if is_answer else turn)
    answers = as_objects(row, completion)
    if answers[0].get("role") != "assistant":
        way = CHAT.format(completion)
        raise ValueError(f"{completion} is no answer. If it has chats, pass only {way}")
    return turns + answers


def as_objects(row: dict, key: str) -> list:
    """Return the list of objects in `row[key]`. Raise ValueError if it is something else, or
    empty."""
    value = row.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{key} is no list of objects. Turns are objects with role and content")
    return value


def is_target(turn: dict) -> bool:
    """Return whether a turn is trained on."""
    return turn["role"] == "assistant" and turn.get("train", True) is True


def check_turn(turn: dict) -> None:
    """Raise ValueError unless a turn has a known role, text and complete calls."""
    role, content, calls = turn.get("role"), turn.get("content"), turn.get("tool_calls")
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {ROLES}")
    if not isinstance(content, str):
        raise ValueError(f"the {role}'s turn is {content!r}, not text")
    if role == "assistant" and not (calls or content.strip()):
        raise ValueError("the assistant's turn is empty")
    for key in OTHER_CALLS:
        if turn.get(key):
            raise ValueError(f"{key} of a turn is not read. Write tool_calls, or a column tools")
    for call in as_objects(turn, "tool_calls") if calls else ():
        function = call.get("function", call)
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"the call {function} has no name or no object `arguments`")


def set_chat_template(tokenizer: Tokenizer, choice: str | None) -> None:
    """Set a tokenizer's chat template to `choice`; if None, to Llama 2's if it has none. Turns end
    in EOS instead of an <|im_end|> that the tokenizer would spell in letters."""
    if tokenizer.chat_template is None:
        choice = choice or "llama-2"
    try:
        if choice:
            template = TEMPLATES.get(choice) or Path(choice).expanduser().read_text("utf-8-sig")
            eos = tokenizer.eos_token
            if eos and "<|im_end|>" not in tokenizer.get_vocab():
                template = template.replace("<|im_end|>", eos)
            tokenizer.chat_template = template
            print0(f"The chat template is {choice}. Exports contain it.")
        tokenizer.apply_chat_template([{"role": "user", "content": WORD}], tokenize=False)
    except (OSError, UnicodeError):
        message = f"--chat-template {choice} is no UTF-8 file, nor llama-2 or chatml."
        raise Problem(message) from None
    except jinja2.TemplateSyntaxError as error:
        place = choice or "the tokenizer's chat template"
        raise Problem(f"{place}, line {error.lineno}: {error.message}.") from None
    except Exception:  # a template may reject a question without an answer
        return


def encode(chat: Chat, tokenizer: Tokenizer) -> tuple:
    """Return the documents of a chat, and the text of the last. Raise an error if the template is
    not fit for it. Targets are the tokens of the assistant's turns, from after the header through
    the end marker. A first token is none: nothing predicts it. EOS is appended to an answer that
    ends a document."""
    rendered = render(chat, tokenizer)
    checks.check_chat(chat, rendered, tokenizer)  # optional: template_checks
    documents = []
    for document in rendered:
        documents += tokenize(document.text, document.answers, tokenizer)
    eos = tokenizer.eos_token_id
    for ids, labels in documents:
        labels[0] = -100
        if labels[-1] != -100 and ids[-1] != eos:
            ids.append(eos)
            labels.append(eos)
    return documents, rendered[-1].text


def render(chat: Chat, tokenizer: Tokenizer) -> list:
    """Return a chat's documents as texts, with the answers in each. Each answer is a target in one
    text, rendered without the turns after it: some templates drop reasoning before the last
    question. Raise Problem if an answer does not start with its generation prompt."""
    turns, _ = chat
    documents = []
    for i, turn in enumerate(turns):
        if not is_target(turn):
            continue
        prompt = text_of(chat, i, tokenizer, is_prompt=True)
        text = text_of(chat, i + 1, tokenizer)
        if not text.startswith(prompt):
            raise Problem(
                f"turn {i + 1}: the chat template does not start the answer with its generation "
                "prompt. Pass --chat-template chatml, or add reasoning_content to the answers if "
                "the template renders it"
            )
        spans = []
        if documents and documents[-1].is_ended and text.startswith(documents[-1].text):
            spans = documents.pop().answers
        spans = [*spans, (i, len(prompt), len(text))]
        tail = markers_of(tokenizer).tails["tool_calls" in turn]
        documents.append(Rendered(text, spans, tail != ""))
    return documents


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
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f"}}
    call["function"]["arguments"] = {"of": WORD}
    twice = answer | {"content": "", "tool_calls": [call, call]}
    once = twice | {"tool_calls": [call]}
    asked = {"role": "user", "content": "?"}
    tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {}}}
    for turn, more, tools in ((answer, None, None), (once, twice, [tool])):
        after = ""
        with contextlib.suppress(ValueError):
            text = text_of(([asked, turn], tools), 2, tokenizer)
            _, *_, after = text.split(WORD)  # ValueError if the template drops it
            longer = more and text_of(([asked, more], tools), 2, tokenizer)
            # If nothing ends a call, the text of one more call starts with it.
            if more and longer != text and longer.startswith(text):
                after = ""
        ids = ids_of(after, tokenizer)
        # Gemma has an added token that is a line break.
        ends = [token for token in ids if str(added.get(token, "")).strip()]
        markers.ends += ends[-1:] if more else ends
        markers.tails.append(after.strip())
    markers.stops = tuple(str(added[token]) for token in markers.ends if token in added)
    return markers


def text_of(chat: Chat, count: int, tokenizer: Tokenizer, is_prompt: bool = False) -> str:
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
        raise kind(f"the chat template rejects the chat: {error}") from error
    return text if is_prompt else text.rstrip()


def tokenize(text: str, answers: list, tokenizer: Tokenizer) -> list:
    """Return the documents of a text as ids and labels, given the answers in it. The tokens before
    each answer are those of its prompt alone.

    A token of the whole text may span the end of a prompt, or of an answer. Generation produces no
    such token, so each answer then gets a document of its own, cut there. Between the brackets are
    tokens, and the prompt ends after the first line break:

        together  [<assistant>] [\\n\\n] [2] [</s>]
        prompt    [<assistant>] [\\n]
        answer                       [\\n] [2] [</s>]
        ids       [<assistant>] [\\n] [\\n] [2] [</s>]    labels: -100 -100 \\n 2 </s>
    """
    ends = set()
    for _, start, end in answers:
        ends |= {start, end}
    prefixes = tokenize_prefixes(text, ends, tokenizer)
    documents = []
    for _, start, end in answers:
        prompt = prefixes[start]
        ids = join_answer(prompt, text[start:end], prefixes[end], tokenizer)
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        if documents:
            before, known = documents[-1]
            if prompt[: len(before)] == before:
                labels[: len(before)] = known
                documents.pop()
        documents.append((ids, labels))
    return documents


def join_answer(prompt: list, answer: str, together: list, tokenizer: Tokenizer) -> list:
    """Return the tokens of a prompt and its answer: `together`, or separately if a token spans the
    end of the prompt, or if its last token would strip the answer's spaces."""
    is_stripped = False
    if prompt and answer[:1].isspace():
        last = tokenizer.added_tokens_decoder.get(prompt[-1])
        is_stripped = last is not None and last.rstrip
    if together[: len(prompt)] == prompt and not is_stripped:
        return together
    separate = prompt + ids_of(answer, tokenizer)
    if not is_stripped and tokenizer.decode(separate) != tokenizer.decode(together):
        raise ValueError("a token spans the end of the prompt of an answer")
    return separate


def tokenize_prefixes(text: str, ends: set, tokenizer: Tokenizer) -> dict:
    """Return the tokens of text[:end] by end. The tokens from a special token do not depend on the
    text before it, so each text between these is tokenized once."""
    marks = [match.start() for match in special_tokens(tokenizer).finditer(text)]
    pieces = {}
    for end in ends:
        places = [0, *(mark for mark in marks if 0 < mark < end), end]
        pieces[end] = [text[start:stop] for start, stop in itertools.pairwise(places)]
    texts = [*{*itertools.chain(*pieces.values())}]
    ids = dict(zip(texts, ids_of(texts, tokenizer), strict=True))
    return {end: [*itertools.chain(*map(ids.get, pieces[end]))] for end in ends}


@lru_cache
def special_tokens(tokenizer: Tokenizer) -> re.Pattern:
    """Return a pattern of the special tokens of a tokenizer, with the spaces that they strip."""
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    patterns = [(r"\s*" if token.lstrip else "") + re.escape(str(token)) for token in tokens]
    return re.compile("|".join(patterns) or "(?!)")  # matches nothing


def ids_of(text: str | list, tokenizer: Tokenizer) -> list:
    """Return the tokens of a part of a rendered chat, or of each of several."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def read_tokens(row: dict, length: int, tokenizer: Tokenizer) -> tuple:
    """Return ids and labels of a tokenized row; raise ValueError if they cannot be trained on."""
    ids = tokens.check_tokens(row, "input_ids", "--max-seq-length", length, tokenizer)
    labels = [-100, *row.get("labels", ids)[1:]]
    if len(labels) != len(ids) or {*labels} == {-100}:
        raise ValueError("labels must be one per token, and not all -100")
    before = -100
    for token, label in zip(ids, labels, strict=True):
        if str(label) not in (str(token), "-100"):  # True is not 1
            raise ValueError(f"labels must be -100 or the token, not {label} for {token}")
        # Other tools take EOS for padding.
        if token == tokenizer.eos_token_id and label == -100 != before:
            raise ValueError("labels exclude the EOS after a target: the model would not stop")
        before = label
    return ids, labels


def answer_ends(tokenizer: Tokenizer) -> list:
    """Return the tokens that end a generation: EOS, the added tokens that the chat template puts
    after an answer, and the last one after a call."""
    return markers_of(tokenizer).ends


load = partial(sets.load_sets, load_parts=load_documents, draw=draw_documents)
