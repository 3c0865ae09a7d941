"""A model and the attention inside it: python examples/record_attention.py"""

import torch

from regard import Transformer, record

model = Transformer.tiny(vocabulary=100).eval()
source, target = torch.randint(3, 100, (2, 7)), torch.randint(3, 100, (2, 5))
with record(model) as recording:
    logits: torch.Tensor = model(source, target)

print(logits.shape)
for name, call in recording.items():
    print(name, tuple(call.weights().shape))
