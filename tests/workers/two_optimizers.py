"""Run gpt2_fsdp.py with two optimizers. The first argument says what the first one has: the blocks
(units: FSDP1's units stay whole) or the weights of linear layers (shared)."""

import sys

from copied import edited_script

from core import ranks

IS_FIRST = {"units": "'.h.' in name", "shared": "name.endswith('weight') and '.ln' not in name"}
ONE = """    optimizers = [torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)]
"""
TWO = """    named = list(model.named_parameters())
    first = [p for name, p in named if IS_FIRST]
    second = [p for name, p in named if not (IS_FIRST)]
    momentum = torch.optim.SGD(second, lr=optim.lr, momentum=0.9)
    optimizers = [torch.optim.AdamW(first, lr=optim.lr, fused=True), momentum]
"""


if __name__ == "__main__":
    condition = IS_FIRST[sys.argv.pop(1)]
    script = edited_script("gpt2_fsdp", {ONE: TWO.replace("IS_FIRST", condition)})
    ranks.run(script.fsdp_main, script.parse_args())
