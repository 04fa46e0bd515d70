"""Chat templates in the formats of known models, written for the tests.

Transformers drops a line break after a block (`%}`), but keeps one inside `{{ }}`.
"""

from prepare.templates import TEMPLATES

# The space precedes a turn, so that the text of the first turns is a prefix of the whole text.
PROMPTER = """{{ bos_token or '' }}{% for message in messages %}{{ '' if loop.first else ' ' }}<|{{
'prompter' if message['role'] == 'user' else message['role'] }}|> {{ message['content'] }} {{
'<|endoftext|>' }}{% endfor %}{{ ' <|assistant|>' if add_generation_prompt else '' }}"""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts the system text and the tools before the last user turn.
MISTRAL = (
    "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {% if m == asked[-1] and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | tojson }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{{ call.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Adds a default system turn. Consecutive tool results are merged into one user turn.
QWEN_HEAD = (
    "{% if tools %}<|im_start|>system\n"
    "{{ messages[0].content if messages[0].role == 'system' else 'Help.' }}\n<tools>"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n' }}</tools><|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
)
QWEN_TURN = (
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif not (tools and loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
QWEN_2_5 = (
    QWEN_HEAD + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content }}" + QWEN_CALLS + "<|im_end|>\n" + QWEN_TURN
)
# Renders thoughts only after the last user turn, where the last turn always has a <think> block.
QWEN_3 = (
    QWEN_HEAD + "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.reasoning_content or '' %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}" + QWEN_CALLS + "<|im_end|>\n" + QWEN_TURN
)
# The generation prompt opens <think>, but thoughts are dropped from answers.
ASKS_FOR_THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
# The generation prompt opens <think>, in which the last answer is, as with Nemotron Nano.
OPENS_THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{{ '<think>\n' if loop.last and m.role == 'assistant' }}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ '<assistant><think>\n' if add_generation_prompt }}"
)
# Tokens merge at the start of an answer, or at its end.
MERGES = {
    "think": "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}",
    "plain": "{% for m in messages %}{{ '[INST] ' if m.role != 'assistant' }}{{ m.content }}"
    "{{ ' </s> ' if m.role == 'assistant' else ' [/INST] ' }}{% endfor %}",
    "prompter": PROMPTER.replace("<|endoftext|>", "</s>"),
}
KNOWN = {  # template, BOS, EOS and other special tokens
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]"]),
    "qwen 2.5": (QWEN_2_5, None, "<|im_end|>", ["<|im_start|>"]),
    "qwen 3": (QWEN_3, None, "<|im_end|>", ["<|im_start|>"]),
    "prompter": (PROMPTER, "<s>", "<|endoftext|>", []),
    "our llama 2": (TEMPLATES["llama-2"], "<s>", "</s>", []),
    "our chatml": (TEMPLATES["chatml"], None, "<|im_end|>", ["<|im_start|>"]),
}
TOOLS = ("mistral", "qwen 2.5", "qwen 3")
