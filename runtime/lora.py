"""The flags of LoRA and their checks; adapters.py makes the adapters."""

import importlib.util
from dataclasses import dataclass

import torch

from .options import INSTALL, as_flag, defaults, flag

FSDP1_ONLY = ("ddp", "no_shard")  # strategies


@dataclass
class Options:
    """adapters, under --fsdp 2"""

    lora_rank: int = flag(0, "train adapters of this rank (0: all weights)", low=0)
    lora_alpha: float = flag(16.0, "scales their output by alpha / rank", above=0)
    lora_dropout: float = flag(0.0, "dropout rate of their inputs", low=0, below=1)
    lora_targets: list[str] = flag([], "projections with adapters, such as q_proj v_proj (default: "
        "all in the blocks)", metavar="NAME")  # fmt: skip
    load_in_4bit: bool = flag(False, "hold frozen projections in NF4 (QLoRA)")
    merge: bool = flag(False, "export whole models, not adapters")
    packages = {"peft": "lora_rank", "bitsandbytes": "load_in_4bit"}  # and the field that needs it

    def derive(self) -> None:
        """Set --fsdp to 2 if adapters are trained and it is not passed."""
        if self.lora_rank and self.fsdp is None and self.strategy not in FSDP1_ONLY:
            self.fsdp = 2

    def problems(self) -> list[str]:
        """Return a message for each flag of LoRA or 4-bit weights that cannot work."""
        if not self.lora_rank:
            changed = [k for k, x in defaults(Options).items() if getattr(self, k) != x]
            return [f"{as_flag(name)} needs adapters. Pass --lora-rank." for name in changed]
        problems = []
        if self.strategy in FSDP1_ONLY:
            return [f"--lora-rank needs another strategy than {self.strategy}. Pass full_shard."]
        if self.fsdp == 1:
            problems.append("--lora-rank needs --fsdp 2. FSDP1 holds gradients of frozen weights.")
        if self.merge and self.model_name == "tiny":
            problems.append("--merge needs a model in files, not --model-name tiny.")
        for package, name in self.packages.items():
            if getattr(self, name) and importlib.util.find_spec(package) is None:
                problems.append(f"{as_flag(name)} needs {package}. {INSTALL}")
        if self.load_in_4bit and torch.__version__ < "2.13":  # FSDP2 would cast the bytes
            problems.append(f"--load-in-4bit needs torch 2.13 or newer, not {torch.__version__}.")
        return problems
