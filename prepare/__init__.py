"""From rows to tokens. Delete this folder and all lines that end in `# optional: prepare`, and the
scripts train on directories that tools/prepare.py wrote. The data modules import these files, never
the reverse.

read             rows of files, folders and the hub: which ones, and of which split
files            values exactly as they are in files; text files
columns          which columns of rows are read, and the line about the others
tables           rows, and the samples made of them in the cache
losses           what a tokenizer loses of texts
tokens           rows that are tokenized already
rows             keys of pairs and chats, and what a limit cuts of these
pairs            summarization pairs to tokens, for T5
texts            texts to blocks, for GPT-2
chats            chats to documents with exact targets, for Llama
templates        chats as texts: chat templates, and the markers that they write
chat_formats     chats of other formats than messages and prompt/completion
template_checks  texts, starts and ends of turns, as a chat template renders them
"""
