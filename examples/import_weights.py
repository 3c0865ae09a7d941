"""Weights of torch's own modules, in Regard's: python examples/import_weights.py"""

import torch
from torch import Tensor, nn

from regard import causal
from regard.interop import torch_nn

theirs = nn.MultiheadAttention(32, 4, batch_first=True).eval()
ours = torch_nn.attention(theirs).eval()
x = torch.randn(2, 6, 32)
hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)  # torch's masks say what is hidden
expected: Tensor = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
out: Tensor = ours(x, mask=causal())
print(torch.allclose(out, expected, atol=1e-6))

layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
stack = torch_nn.stack(nn.TransformerEncoder(layer, 2).eval())
print(sum(parameter.numel() for parameter in stack.parameters()))
