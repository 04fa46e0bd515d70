"""What rows of pairs and of chats share: their key, and the line about what a limit of length cuts.
Any rank may call these functions."""

import hashlib

from core.ranks import print0


def stable_hash(text: str, size: int = 6) -> int:
    """Return a hash of a text, in bytes of `size`, that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest())


def print_cut(name: str, flag: str, limit: int, lost: list) -> None:
    """Print how many samples a flag cuts, given the number of tokens that each loses."""
    cut = [number for number in lost if number > 0]
    if cut:
        print0(f"{name}: {flag} {limit} cuts {len(cut):,} of {len(lost):,}, by {sum(cut):,} tokens")
