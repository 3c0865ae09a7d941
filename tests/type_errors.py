"""Deliberate errors: mypy and pyright report each line that ends in `wrong`, and no other."""

import torch

import regard
from regard import Classifier, MultiHeadAttention, Translator, attend, causal, record

predictor = regard.load("run")
texts: list[int] = predictor.translate(["A dog."])  # wrong
predictor.translate([1])  # wrong
predictor.transalte(["A dog."])  # wrong
Translator.load(3)  # wrong
translations: list[str] = Translator.load("run")("A dog.")  # wrong
label: int = Classifier.load("run")("cat.png")  # wrong
Classifier.load("run").translations(["A dog."])  # wrong
Translator.load("run").translations(["A dog."], beam=2)  # wrong
mask = causal() & 3  # wrong
out: str = attend(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))  # wrong
attend("query", torch.ones(2, 3), torch.ones(2, 3))  # wrong
MultiHeadAttention(32, head=4)  # wrong
regard.Transformer.tiny("100")  # wrong
regard.TrainingConfig(epoch=3)  # wrong
record(torch.nn.Linear(2, 3), select="layer")  # wrong
print(regard.no_such_name)  # wrong


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(32, heads=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.attention(x, key_padding_mask=x)  # wrong
        return self.attention(x, mask=causal())


ids = torch.ones(2, 3, dtype=torch.int64)
logits: int = regard.Transformer.tiny(100)(ids, ids)  # wrong
regard.LanguageModel.tiny(100)(ids, attention_mask=ids)  # wrong
regard.VisionTransformer.tiny(10)()  # wrong
regard.TextClassifier.tiny(2, 100)(ids, labels=ids)  # wrong
