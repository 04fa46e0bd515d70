"""Chat templates in the formats of known models, written for the tests.

Transformers drops a line break after a block (`%}`), but keeps one inside `{{ }}`.
"""

from chat_dataset import TEMPLATES

# The space precedes a turn, so that the text of the first turns is a prefix of the whole text.
PROMPTER = """{{ bos_token or '' }}{% for message in messages %}{{ '' if loop.first else ' ' }}<|{{
'prompter' if message['role'] == 'user' else message['role'] }}|> {{ message['content'] }} {{
'<|endoftext|>' }}{% endfor %}{{ ' <|assistant|>' if add_generation_prompt else '' }}"""
# Trims content, calls the assistant "model" and rejects system turns.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{{ '<start_of_turn>model\n' if add_generation_prompt else '' }}"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Has no generation prompt and accepts a system turn only before the first user turn.
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}"
    "{% if loop.index0 and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ bos_token }}[INST] "
    "{% if loop.index0 == 1 and messages[0].role == 'system' %}"
    "<<SYS>>{{ messages[0].content }}<</SYS>>{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
# Trims content, renders one tool call per turn and lists the tools in a system turn.
LLAMA_3 = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
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
# Renders the system text only while the last turn is a user turn.
FORGETS_THE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last %}{{ messages[0].content }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
KNOWN = {
    "llama 2": (LLAMA_2, "<s>", "</s>", []),
    "llama 3": (
        LLAMA_3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
    ),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]"]),
    "chatml": (CHATML, None, "<|im_end|>", ["<|im_start|>"]),
    "qwen 2.5": (QWEN_2_5, None, "<|im_end|>", ["<|im_start|>"]),
    "qwen 3": (QWEN_3, None, "<|im_end|>", ["<|im_start|>"]),
    "gemma": (GEMMA, "<bos>", "<end_of_turn>", ["<start_of_turn>"]),
    "prompter": (PROMPTER, "<s>", "</s>", []),
    "our llama 2": (TEMPLATES["llama-2"], "<s>", "</s>", []),
    "our chatml": (TEMPLATES["chatml"], None, "<|im_end|>", ["<|im_start|>"]),
}
TOOLS = ("llama 3", "mistral", "qwen 2.5", "qwen 3")
