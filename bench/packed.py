"""Attention within packed sequences on a CPU, forwards and backwards, as training has it.

    python -m bench.packed

Ours reads each token where it lies. Beside it the same by torch's kernel: on rectangles of
sequences of like length, gathered and put back, which is our way without a C++ compiler; and on a
padded batch with a boolean mask, as one would write it, which also computes its padding. Lengths
vary by a half to either side of the mean. Gradients are compared before anything is timed. Ratios
are times divided by ours: above 1, ours is faster.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bench.timing import Run, turns
from regard.attention.attend import attend
from regard.attention.backends import Call, ranges, sequences
from regard.attention.mask import Mask, causal, packed

TOKENS, HEADS, WIDTH = 2048, 4, 64
MEANS = (8, 16, 32, 64, 128, 256)


def grads(out: Tensor, leaves: list[Tensor], above: Tensor) -> Tensor:
    """Gradients of queries, keys and values, end to end."""
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(out, leaves, above)])


def competitors(lengths: list[int], is_causal: bool) -> dict[str, Run]:
    total = sum(lengths)
    mask: Mask = packed(lengths) & causal() if is_causal else packed(lengths)
    rows = [torch.randn(total, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    above = torch.randn(total, HEADS, WIDTH)
    beta = WIDTH**-0.5

    def heads() -> list[Tensor]:
        return [x.transpose(0, 1)[None] for x in rows]

    def ours() -> Tensor:
        return grads(attend(*heads(), mask=mask)[0].transpose(0, 1), rows, above)

    def gathered() -> Tensor:
        out = ranges.grouped(Call(*heads(), mask, beta, None, 0.0))
        return grads(out[0].transpose(0, 1), rows, above)

    # A user's batch is padded from the start: padding and its removal are not timed.
    padded = [pad_sequence(x.detach().split(lengths), True).requires_grad_() for x in rows]
    padded_above = pad_sequence(above.split(lengths), True)
    longest = max(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    allowed = real[:, None, None].expand(-1, 1, longest, -1)
    if is_causal:
        allowed = allowed & torch.ones(longest, longest, dtype=torch.bool).tril()

    def of_padded() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in padded)
        out = F.scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2)
        found = torch.autograd.grad(out, padded, padded_above)
        return torch.cat([grad[real].flatten() for grad in found])

    runs = {"ours": ours, "gathered": gathered, "padded": of_padded}
    wanted = ours()
    for run in runs.values():
        torch.testing.assert_close(run(), wanted, rtol=1e-4, atol=1e-4)
    return {name: Run(run) for name, run in runs.items()}


def main() -> None:
    if missing := sequences.SOURCE.missing():
        print(f"no kernel: {missing}")
        return
    torch.manual_seed(0)
    print(f"{TOKENS} tokens, {HEADS} heads of width {WIDTH}, {torch.get_num_threads()} threads")
    print(f"{'mean length':>12} {'':>7} {'ours, ms':>9} {'gathered':>9} {'padded':>7}")
    for mean in MEANS:
        lengths = torch.randint(mean // 2, mean + mean // 2 + 1, (TOKENS // mean,)).tolist()
        for is_causal in (False, True):
            took = turns(competitors(lengths, is_causal))
            ratios = [took[name] / took["ours"] for name in ("gathered", "padded")]
            kind = "causal" if is_causal else ""
            print(
                f"{mean:>12} {kind:>7} {took['ours'] * 1e3:>9.2f}"
                f" {ratios[0]:>9.2f} {ratios[1]:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
