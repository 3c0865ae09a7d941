"""Statistics by the Triton kernels against whole matrices in float64."""

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, where it interprets
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3}
if DEVICE == "cuda":  # the interpreter does not multiply it
    CLOSE[torch.bfloat16] = 2e-3


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("L", "S", "width", "group", "masked", "biased", "topk"),
    [
        (5, 7, 16, 1, False, False, 3),
        (67, 131, 20, 2, False, True, 1),
        (11, 131, 37, 1, True, False, 4),
        (1, 1031, 16, 2, True, True, 5),
    ],
)
def test_statistics(
    L: int,
    S: int,
    width: int,
    group: int,
    masked: bool,
    biased: bool,
    topk: int,
    dtype: torch.dtype,
) -> None:
    pytest.importorskip("triton")
    from regard.attention import streaming

    B, H = 2, 2
    query, key = (
        (1.5 * torch.randn(B, n, heads, width + 3)).to(DEVICE, dtype)[..., :width].transpose(1, 2)
        for n, heads in ((L, H), (S, H // group))
    )
    bias = torch.randn(1, H, L, S).to(DEVICE) if biased else None
    edges, allowed = None, torch.ones(B, 1, L, S, dtype=torch.bool, device=DEVICE)
    if masked:  # some rows see nothing
        first = torch.randint(0, S, (B, L))
        last = torch.minimum(first + torch.randint(0, S // 2, (B, L)), torch.tensor(S))
        edges = first.int().to(DEVICE), last.int().to(DEVICE)
        place = torch.arange(S)
        seen = (place >= first[..., None]) & (place < last[..., None])
        allowed = seen[:, None].to(DEVICE)
    have = streaming.statistics(query, key, edges, 0.3, bias, topk)

    scores = 0.3 * query.double() @ key.double().repeat_interleave(group, 1).transpose(-1, -2)
    scores = scores if bias is None else scores + bias.double()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    close = {"atol": CLOSE[dtype] * 5, "rtol": CLOSE[dtype]}

    def compare(have: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(have.double(), want, **close)

    entropy, received, top_weights, top_positions = have
    compare(entropy, -torch.special.xlogy(weights, weights).sum(-1))
    compare(received, weights.sum(-2))
    largest = weights.topk(min(topk, S), -1).values
    compare(top_weights[..., : largest.shape[-1]], largest)
    assert torch.equal(top_positions >= 0, top_weights > 0)
    at = weights.gather(-1, top_positions.clamp_min(0))
    compare(top_weights, at.masked_fill(top_positions < 0, 0.0))
