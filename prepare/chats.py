"""Chats for supervised fine-tuning: rows to documents with exact targets. Any rank may call it."""

import contextlib
import hashlib
import itertools
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
from prepare import losses, read, sets, tables, tokens
from prepare.read import Parts
from prepare.tables import Form, Table

IDS = List(Value("int32"))
NUMBER = Value("int64")
FEATURES = {
    "input_ids": IDS,
    "labels": IDS,
    "has_target": Value("bool"),
    "lost": NUMBER,
    "key": NUMBER,
    "spells": Value("bool"),
    **losses.FEATURES,
}
# Instead of today's date, so that each start has the same texts.
FIXED_DATE = r"""{%- macro strftime_now(format) -%}{{- format | replace('%d', '26')
| replace('%-d', '26') | replace('%I', '12') | replace('%p', 'PM')
| replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024')
| replace('%y', '24') | replace('%a', 'Fri') | replace('%A', 'Friday') | replace('%H', '12')
| replace('%M', '00') | replace('%S', '00') -}}{%- endmacro +%}"""
WORD = "xyzzy"  # no template contains it
ROLES = ("system", "user", "assistant", "tool")
TURN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content",
             "thinking", "train")  # fmt: skip
FLAGS = ("--prompt-column", "--completion-column", "--text-column")
FORMS = [("messages",), ("prompt", "completion"), ("input_ids",), ("content",)]
FORMS = chat_formats.FORMS  # optional: chat_formats
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


def load(args: Any, tokenizer: Tokenizer, evaluate_only: bool) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation sets by name."""
    parts = partial(load_documents, args=args, tokenizer=tokenizer)
    draw = partial(draw_documents, length=args.max_seq_length)
    return sets.load_sets(args, parts, draw, evaluate_only)


def draw_documents(name: str, split: str, documents: Dataset, limit: int, length: int) -> Dataset:
    """Return `limit` random documents (0: all), without those whose first answer starts after
    `length` tokens. Raise Problem if these are more than half."""
    documents = sets.sample(name, split, documents, limit)
    total = len(documents)
    lost = np.array(documents["lost"][:])
    kept = np.flatnonzero(documents["has_target"][:])
    is_cut = np.count_nonzero(lost[kept])
    num_lost = lost.sum()
    print0(
        f"{name}, {split}: {len(kept):,} of {total:,} documents have an answer within "
        f"--max-seq-length {length}, which cuts {is_cut:,} of them. Cut and left out: "
        f"{num_lost:,} tokens"
    )
    if 2 * len(kept) < total:
        raise Problem(
            f"{name}: {total - len(kept)} of {total} documents start their first "
            f"answer after --max-seq-length {length}. Raise it"
        )
    return documents.select(kept).select_columns(["input_ids", "labels"])


@dataclass
class Rendered:
    """A document of a chat as text, with the turn, start and end of each answer that is a target.
    `is_ended`: whether a marker ends the last one."""

    text: str
    answers: list
    is_ended: bool


def load_documents(spec: str, tokenizer: Tokenizer, args: Any) -> Parts:
    """Return the documents of one --dataset argument by split: train, and maybe validation."""
    tables_of = read.read(spec, args.dataset_config)
    return {part: encode_rows(spec, table, tokenizer, args) for part, table in tables_of.items()}


def encode_rows(name: str, table: Table, tokenizer: Tokenizer, args: Any) -> Dataset:
    """Return the documents that the rows of data set `name` are or contain, with FEATURES and at
    most --max-seq-length + 1 tokens."""
    form = find_form(name, table, args)
    text_column = args.text_column or "content"
    function = partial(
        encode_row,
        form=form,
        tokenizer=tokenizer,
        header=answer_header(tokenizer),
        # A column of chats may have the name content, too.
        is_text=form.columns == (text_column,) and args.prompt_column != text_column,
        length=args.max_seq_length + 1,
    )
    stored = [column for column in table.columns if column not in form.ignored]
    documents = tables.map_rows(name, table, stored, function, FEATURES, args.bad_rows)
    losses.print_losses(name, documents)
    spells = sum(documents["spells"][:])
    if spells:
        print0(f"{name}: {spells:,} documents spell special tokens. Text of chats becomes these.")
    return documents


def find_form(name: str, table: Table, args: Any) -> Form:
    """Return the columns of a data set's chats, or that of its texts or tokens: those of the flags
    if it has them, or else the usual ones. Raise Problem if it has none of these."""
    named = (args.prompt_column, args.completion_column)
    if args.completion_column is None:
        named = (args.prompt_column,)
    if args.text_column in table.columns or not any(named):
        named = (args.text_column,)
    form = tables.find_form(name, table, named, FORMS, FLAGS, args)
    form.more = ("system", "system_prompt", "tools")
    form.more = chat_formats.other_columns(form)  # optional: chat_formats
    if form.columns == ("input_ids",):
        form.more = ("labels",)
    used = [column for column in table.columns if column in form.columns + form.more]
    tables.print_columns(name, used, table.columns)
    return form


def encode_row(
    row: dict, form: Form, tokenizer: Tokenizer, header: str, is_text: bool, length: int
) -> list:
    """Return the documents of a row with FEATURES and at most `length` tokens. Raise ValueError if
    the row is unusable, as a text with the `header` of answers is."""
    for column in form.columns:
        value = row.get(column)
        if header and isinstance(value, str) and header in value:
            raise ValueError(f"{column} has a rendered chat ({header!r} in it). Write messages")
    text = change = ""  # the text may spell special tokens
    if is_text:
        text = prompt = row.get(*form.columns)
        chat_formats.check_text(text)  # optional: chat_formats
        documents = [encode_text(prompt, tokenizer)]
        change = losses.find_change(text, documents[0][0], tokenizer)
    elif form.columns == ("input_ids",):
        ids, labels = read_tokens(row, length, tokenizer)
        documents = [(ids, labels)]
        first = np.argmax(np.array(labels) != -100)  # target
        prompt = ids[:first] if first > 1 else ids
    else:
        chat = read_chat(row, form)
        text = str(chat)
        documents, rendered = encode(chat, tokenizer)
        ids, _ = documents[-1]
        change = losses.find_change(rendered, ids, tokenizer, is_rendered=True)
        turns, _ = chat
        first = [turn["role"] for turn in turns].index("assistant")
        prompt = turns[:first] or turns
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=7).digest()
    found = {
        "key": int.from_bytes(digest),  # of everything before the first answer
        "spells": special_tokens(tokenizer).search(text) is not None,
        "change": change,
        "mark": losses.find_mark(text, tokenizer),
    }
    samples = []
    for ids, labels in documents:
        labels = labels[:length]
        sample = {
            "input_ids": ids[:length],
            "labels": labels,
            "has_target": {*labels} != {-100},
            "lost": max(0, len(ids) - length),
        }
        samples.append(sample | found)
    return samples


def read_chat(row: dict, form: Form) -> Chat:
    """Return the turns of the chat in one or two columns of a row, and its tools or None. A turn is
    not a target if its `train` is False. Raise ValueError if the row is unusable, and Problem
    if columns or keys would be lost that may matter."""
    row = {column: row[column] for column in row if column not in form.ignored}
    row = chat_formats.normalize(row, form)  # optional: chat_formats
    read_turns = as_objects if len(form.columns) == 1 else read_pair
    turns = read_turns(row, *form.columns)
    for column in ("system", "system_prompt"):
        system = row.get(column)
        if system and turns[0].get("role") != "system":
            turns = [{"role": "system", "content": system}, *turns]
        if system and turns[0].get("content") != system:
            raise ValueError(f"{column} is not the system turn, or another system column")
    kept = {*TURN_KEYS} - {*form.ignored} | {"role", "content"}
    for i, turn in enumerate(turns):
        check_turn(turn)
        form.check(turn, TURN_KEYS, turn["content"], "", "Write reasoning as reasoning_content. ")
        turns[i] = {key: turn[key] for key in turn if key in kept}
    if not any(is_target(turn) for turn in turns):
        raise ValueError(
            "the chat has no assistant turn to train on (if it is in another column, pass "
            "--prompt-column and --completion-column)"
        )
    if not form.is_named:
        document = "\n\n".join(turn["content"] for turn in turns)
        way = tables.with_flags(FLAGS[:2], form.columns)
        form.check(row, form.columns + form.more, document, way)
    if is_target(turns[0]):
        raise ValueError('the chat starts with an answer. Write "train": false in that turn')
    return turns, as_objects(row, "tools") if row.get("tools") else None


def read_pair(row: dict, prompt: str, completion: str) -> list[dict]:
    """Return the turns of a prompt and its completion, which are texts or lists of turns. In a
    prompt, the assistant's turns are no targets unless they say so. The completion may be the whole
    chat, as in UltraFeedback."""
    turns = as_objects(row, prompt, "user")
    for i, turn in enumerate(turns):
        if turn.get("role") == "assistant":
            turns[i] = {"train": False} | turn
    answers = as_objects(row, completion, "assistant")
    if answers[0].get("role") == "assistant":
        return turns + answers
    if tables.is_known(row[prompt], "\n\n".join(str(turn.get("content")) for turn in answers)):
        return answers
    raise ValueError(f"{completion} is neither the answer to {prompt} nor a chat that contains it")


def as_objects(row: dict, key: str, role: str | None = None) -> list[dict]:
    """Return the list of objects in `row[key]`; with a `role`, a text is a turn of it. Raise
    ValueError if it is something else, or empty."""
    value = row.get(key)
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{key} is no list of objects. Turns are objects with role and content")
    return value


def is_target(turn: dict) -> bool:
    """Return whether a turn is trained on."""
    return turn["role"] == "assistant" and turn.get("train", True) is True


def check_turn(turn: dict) -> None:
    """Raise ValueError unless a turn has a known role, text and complete calls."""
    role = turn.get("role")
    content = turn.get("content")
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {ROLES}")
    if not isinstance(content, str):
        raise ValueError(f"the {role}'s turn is {content!r}, not text")
    if turn.get("tool_calls"):
        for call in as_objects(turn, "tool_calls"):
            function = call.get("function", call)
            is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
            if not is_named or not isinstance(function.get("arguments"), dict):
                raise ValueError(f"the call {function} has no name or no object `arguments`")
    elif role == "assistant" and not content.strip():
        raise ValueError("the assistant's turn is empty")


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
    functions = (render, text_of, answer_ends)  # optional: template_checks
    checks.check_chat(chat, rendered, tokenizer, *functions)  # optional: template_checks
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
        documents.append(Rendered(text, spans, has_end(text, chat, i, tokenizer)))
    last = documents[-1]
    if last.is_ended and not is_target(turns[-1]):
        whole = text_of(chat, len(turns), tokenizer)
        if whole.startswith(last.text):
            last.text = whole
    return documents


def has_end(text: str, chat: Chat, i: int, tokenizer: Tokenizer) -> bool:
    """Return whether `text` has a marker after its last turn, which is turn `i`. If nothing ends a
    call, the text of one more call starts with it."""
    turns, tools = chat
    turn = turns[i]
    if not turn.get("tool_calls"):
        # Templates write a thought at the start of a content in another way.
        _, _, end = turn["content"].rpartition(">")
        return not text.endswith(end.strip() or turn["content"].rstrip())
    turn = turn | {"tool_calls": turn["tool_calls"] * 2}
    with contextlib.suppress(ValueError):  # some templates take a single call
        more = text_of(([*turns[:i], turn], tools), i + 1, tokenizer)
        return more == text or not more.startswith(text)
    return True


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
    such token, so each answer then gets a document of its own, cut there.
    """
    ends = {end for _, *span in answers for end in span}
    prefixes = tokenize_prefixes(text, {*ends, len(text)}, tokenizer)
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
    whole = prefixes[len(text)]
    if len(documents) == 1 and whole[: len(ids)] == ids:  # with the turns after the answers
        labels += [-100] * (len(whole) - len(ids))
        documents = [(whole, labels)]
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
    text before it, so that text is tokenized once."""
    special = special_tokens(tokenizer)
    known = 0  # characters of the text that are in whole segments
    segments = []
    rests = {}  # the number of whole segments before each end, and the text between
    for end in sorted(ends):
        marks = [match.start() for match in special.finditer(text, known, end)]
        mark = max(marks, default=0)
        if mark > known:
            segments.append(text[known:mark])
            known = mark
        rests[end] = (len(segments), text[known:end])
    texts = [*segments, *(rest for _, rest in rests.values())]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    prefixes = {}
    for (end, (count, _)), rest in zip(rests.items(), ids[len(segments) :], strict=True):
        prefixes[end] = [*itertools.chain(*ids[:count]), *rest]
    return prefixes


@lru_cache
def special_tokens(tokenizer: Tokenizer) -> re.Pattern:
    """Return a pattern of the special tokens of a tokenizer, with the spaces that they strip."""
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    patterns = [(r"\s*" if token.lstrip else "") + re.escape(str(token)) for token in tokens]
    return re.compile("|".join(patterns) or "(?!)")  # matches nothing


def ids_of(text: str, tokenizer: Tokenizer) -> list:
    """Return the tokens of a part of a rendered chat."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode_text(text: Any, tokenizer: Tokenizer) -> tuple:
    """Return ids and labels of a plain document: BOS if the tokenizer adds it, text, EOS. Raise
    ValueError if it is empty or not text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the document is {text!r}, not text")
    ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids, [-100, *ids[1:]]


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


def answer_header(tokenizer: Tokenizer) -> str:
    """Return the last line of what the chat template puts between a question and its answer,
    without reasoning; "" if there is none."""
    question = {"role": "user", "content": WORD}
    with contextlib.suppress(ValueError):  # the template rejects a question
        prompt = text_of(([question], None), 1, tokenizer, is_prompt=True)
        header = prompt.rpartition(WORD)[2].partition("<think>")[0]
        return header.strip().rpartition("\n")[2]
    return ""


def answer_ends(tokenizer: Tokenizer) -> list:
    """Return the tokens that end a generation: EOS, the added tokens that the chat template puts
    after an answer, and the last one after a call."""
    ends = [tokenizer.eos_token_id]
    added = tokenizer.added_tokens_decoder
    call = {"type": "function", "function": {"name": "f", "arguments": {"of": WORD}}}
    for turn in ({"content": WORD}, {"content": "", "tool_calls": [call]}):
        chat = [{"role": "user", "content": "?"}, {"role": "assistant"} | turn], None
        with contextlib.suppress(ValueError):  # the template rejects such turns
            text = text_of(chat, 2, tokenizer)
            if has_end(text, chat, 1, tokenizer):
                _, *_, after = text.split(WORD)  # ValueError if the template drops it
                ids = ids_of(after, tokenizer)
                # Gemma has an added token that is a line break.
                found = [token for token in ids if str(added.get(token, "")).strip()]
                ends += found[-1:] if "tool_calls" in turn else found
    return ends
