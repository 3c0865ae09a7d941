"""Another library's state dict is refused with the name of what reads it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard import MultiHeadAttention, Transformer, VisionTransformer
from regard.interop import torch_nn
from regard.model.block import Block, FeedForward, PreNorm
from regard.model.stack import Stack

States = Callable[[], dict[str, Tensor]]


def block() -> Block:
    return Block(MultiHeadAttention(12, 3), FeedForward(12, 17), lambda: PreNorm(12))


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(12, 2, 17, batch_first=True)


def translator() -> Transformer:
    sizes = {"width": 12, "heads": 3, "feed_forward": 17}
    return Transformer.tiny(19, encoder_layers=1, decoder_layers=1, **sizes)


def vision() -> VisionTransformer:
    return VisionTransformer.tiny(3, 8, 4, width=12, layers=1, feed_forward=17)


def vit() -> dict[str, Tensor]:
    import transformers

    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 17}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_hidden_layers=1, **sizes)
    return transformers.ViTForImageClassification(config).state_dict()


def marian() -> dict[str, Tensor]:
    import transformers

    sizes = {"d_model": 12, "encoder_ffn_dim": 17, "decoder_ffn_dim": 17, "pad_token_id": 0}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    config = transformers.MarianConfig(vocab_size=19, **sizes, **layers, **heads)
    return transformers.MarianMTModel(config).state_dict()


@pytest.mark.parametrize(
    ("module", "state", "reader"),
    [
        (
            lambda: MultiHeadAttention(12, 3),
            lambda: nn.MultiheadAttention(12, 3).state_dict(),
            "torch_nn.attention(state, heads=…)",
        ),
        (
            lambda: MultiHeadAttention(12, 3, source_width=5),
            lambda: nn.MultiheadAttention(12, 3, kdim=5, vdim=5).state_dict(),
            "torch_nn.attention(state, heads=…)",
        ),
        (block, lambda: layer().state_dict(), "torch_nn.block(state, Layer(heads=…))"),
        (
            lambda: Stack([block()]),
            lambda: nn.TransformerEncoder(layer(), 1).state_dict(),
            "torch_nn.stack(state, Layer(heads=…))",
        ),
        (
            translator,
            lambda: nn.Transformer(12, 2, 1, 1, 17, batch_first=True).state_dict(),
            "torch_nn.stacks(state, Layer(heads=…))",
        ),
        (
            vision,
            lambda: {"blocks.0.attn.qkv.weight": torch.zeros(36, 12)},
            "timm.from_timm(state, heads=…)",
        ),
        (vision, vit, "vit.read(folder), or regard import FOLDER OUT"),
        (translator, marian, "marian.read(folder), or regard import FOLDER OUT"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_the_error_names_the_importer(
    module: Callable[[], nn.Module], state: States, reader: str, strict: bool
) -> None:
    if state in (vit, marian):
        pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        module().load_state_dict(state(), strict=strict)
    message = str(caught.value)
    assert message.startswith("the state dict holds '")
    assert message.endswith(f", as another library names it; read it by regard.interop.{reader}")


def test_the_importer_that_is_named_reads_it() -> None:
    peer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    ours = torch_nn.attention(peer.state_dict(), heads=3)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), peer(x, x, x)[0])


def test_missing_and_unexpected_keys_stay_torchs_own_error() -> None:
    module = MultiHeadAttention(12, 3)
    state = module.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"more\""):
        module.load_state_dict({**state, "more": torch.zeros(1)})
    keys = module.load_state_dict({**state, "more": torch.zeros(1)}, strict=False)
    assert keys.unexpected_keys == ["more"]
