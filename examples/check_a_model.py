"""Check that all ways to compute a model agree: python examples/check_a_model.py"""

import torch
from torch import nn

from regard import LanguageModel, check

model = LanguageModel.tiny(vocabulary=50)
print(check(model, properties=["cached = uncached", "packed = padded", "recorded = unrecorded"]))

layer = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
report = check(layer, torch.randn(3, 5, 32))
print(", ".join(finding.name for finding in report))
assert report.holds
