"""Linear layers with a frozen 4-bit weight; importing this needs bitsandbytes.

The format is NF4 with double quantization (Dettmers et al. 2023, QLoRA): 4 bits per weight, 8 bits
for the scale of every 64 weights (their largest magnitude), and 32 bits for every 256 scales.
"""

import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import quantize_4bit
from torch import Tensor, nn

BLOCK = 64  # weights that share a scale


class Linear4bit(nn.Linear):
    """A linear layer whose weight is uint8 [weights / 2, 1], so that FSDP2 can shard it.

    It is on meta until the loader replaces it with the result of `quantize`. Every rank holds all
    scales, 1/64 of a byte per weight.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        width, outputs = linear.in_features, linear.out_features
        super().__init__(width, outputs, bias=False, device="meta")
        self.bias = linear.bias
        self.dtype = dtype  # of the computation
        self.quant_state = None
        packed = torch.empty(width * outputs // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.whole_shape = linear.weight.shape

    def quantize(self, weight: Tensor) -> Tensor:
        """Return `weight`, floats [outputs, width], as bytes for `self.weight`; keep the scales.

        Quantize whole tensors, because the second quantization takes the mean of all scales.
        """
        if weight.device.type == "cpu" and weight.shape[1] % BLOCK:
            raise ValueError(
                f"--load-in-4bit: bitsandbytes gives wrong results for width {weight.shape[1]} on "
                f"a CPU. Use a GPU, or widths that are multiples of {BLOCK}."
            )
        packed, self.quant_state = quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        self.quant_state.dtype = self.dtype
        return packed

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of a linear layer with the dequantized weight."""
        return matmul_4bit(inputs, self.weight, quant_state=self.quant_state, bias=self.bias)
