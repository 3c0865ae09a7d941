"""What a search asks of logits: their normaliser, and the best few of each row.

    log p_n = logit_n - log Σ_m e^logit_m

Searches need log p of a few tokens, not of all. Where there are kernels for it they look at each
logit once or twice; torch copies and sorts whole rows.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.engine.int8 import library as native

LARGEST = 32_768
"""The largest vocabulary of which one row fits into a multiprocessor's registers."""


def best(
    logits: Float[Tensor, "R N"], count: int
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """log p of the likeliest tokens of each row, best first, and which they are.

    At least in float32; fewer than `count` where there are no more. Of equals, kernels give the
    first, and torch gives whichever it comes upon.
    """
    (R, N), count = logits.shape, min(count, logits.shape[1])
    kernels = native.library() if _plain(logits) else None
    if kernels is not None:
        values, sums = logits.new_empty(R, count), logits.new_empty(R)
        tokens = torch.empty_like(values, dtype=torch.int64)
        threads, given = torch.get_num_threads(), logits.data_ptr()
        kernels.log_sums(given, R, N, sums.data_ptr(), threads)
        kernels.best(given, R, N, count, values.data_ptr(), tokens.data_ptr(), threads)
        return values.sub_(sums[:, None]), tokens
    if logits.is_cuda and N <= LARGEST and logits.dtype != torch.float64:
        from regard.decode.engine.cuda import kernels as cuda

        return cuda.best(logits, count)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values, tokens = wide.log_softmax(-1).topk(count)
    return values, tokens


def _plain(logits: Tensor) -> bool:
    usual = logits.dtype == torch.float32 and logits.is_contiguous()
    return usual and logits.device.type == "cpu"
