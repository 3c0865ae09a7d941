"""Attention, its weights and its masks: python examples/attention_and_masks.py"""

import torch

from regard import attend, attention_weights, causal, explain_attention, padding, window

query, key, value = (torch.randn(2, 4, 6, 8) for _ in range(3))  # batch, heads, positions, width
mask = causal() & window(3) & padding([6, 4])
out = attend(query, key, value, mask=mask)
weights = attention_weights(query, key, mask=mask)

print(mask)
print(out.shape, torch.allclose(out, weights @ value, atol=1e-6))
print(explain_attention(query, key, value, mask=mask).reason)
