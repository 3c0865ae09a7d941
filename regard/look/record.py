"""Records a model's attention while it runs, and gives the weights on demand.

    with record(model) as seen:
        model(source, target)
    seen["decoder.blocks.3.cross"].weights()       exact, per head, (B, H, L, S)

The fused kernel still runs: only queries, keys and values are kept, and weights are recomputed from
them on demand, for the rows asked for. Every model is recorded that attends by Regard's modules, by
`F.scaled_dot_product_attention`, as those of Hugging Face and timm do, by Regard's function of that
name, or by `nn.MultiheadAttention`. An attention is known by its name in the model: that of the
innermost module which calls it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.attention.functional import from_torch, scaled_dot_product_attention
from regard.attention.mask import Mask
from regard.attention.multihead import Core, MultiHeadAttention
from regard.attention.score import Score
from regard.attention.weights import Statistics, statistics, weights


@dataclass(frozen=True)
class Asked:
    """One call of an attention: its queries and keys, and all else that makes its weights."""

    query: Float[Tensor, "B H L K"]
    key: Float[Tensor, "B G S K"]
    mask: Mask | None
    beta: float | int | Tensor | None
    bias: Tensor | None
    value: Tensor | None = None
    """What the weights were applied to, (B, G, S, V); None where it is not known."""

    def weights(
        self, rows: int | slice | Sequence[int] | Tensor | None = None
    ) -> Float[Tensor, "B H R S"]:
        """The weights of these rows, or of all."""
        return weights(self.query, self.key, self.mask, self.beta, self.bias, rows)

    def statistics(self, topk: int = 4) -> Statistics:
        """Entropy, top weights and mass received, without the matrix of weights."""
        return statistics(self.query, self.key, self.mask, self.beta, self.bias, topk)

    def overview(self, cells: int = 256, rows: int = 256) -> Float[Tensor, "B H R C"]:
        """The whole matrix in at most so many rows and columns, a few rows in memory at a time.

        A cell is the weight that its columns receive together from one of its rows, on average.
        Rows sum to 1 as they do in the matrix.
        """
        L = self.query.shape[2]
        down = -(-L // min(L, cells))
        step = down * max(1, rows // down)
        parts = []
        for begin in range(0, L, step):
            part = self._summed(self.weights(slice(begin, min(begin + step, L))), cells)
            parts += [some.mean(-2, keepdim=True) for some in part.split(down, -2)]
        return torch.cat(parts, -2)

    def sample(self, cells: int = 256) -> Float[Tensor, "B H R C"]:
        """As many rows as are seen at once, `sampled` of all, with their columns summed in cells.

        What is not shown is not computed: of 16,384 tokens, one row in 64.
        """
        return self._summed(self.weights(sampled(self.query.shape[2], cells)), cells)

    def _summed(self, part: Tensor, cells: int) -> Tensor:
        S = self.key.shape[2]
        across = -(-S // min(S, cells))
        return F.pad(part, (0, -S % across)).unflatten(-1, (-1, across)).sum(-1)


def sampled(count: int, cells: int) -> list[int]:
    """At most so many of the numbers below count, evenly spaced; the last one is among them."""
    step = -(-count // min(count, cells))
    return list(range((count - 1) % step, count, step))


class Recording(dict[str, Asked]):
    """The last call of each attention, by its name in the model; one called twice is kept once."""

    def __missing__(self, name: str) -> Asked:
        raise KeyError(f"{name!r} was not recorded; there are {', '.join(self) or 'none'}")

    def __repr__(self) -> str:
        """Names and sizes: numbers are computed when they are asked for."""
        return "\n".join(
            [
                "Recorded: batch × heads × queries × keys",
                *(
                    f"  {name}: {' × '.join(map(str, (*one.query.shape[:3], one.key.shape[2])))}"
                    for name, one in self.items()
                ),
            ]
        )


@contextmanager
def record(
    model: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[Recording]:
    """Keeps queries and keys of the attentions whose names are `wanted`, while the block runs."""
    seen = Recording()
    with ExitStack() as stack:
        foreign = _Foreign(seen, wanted)
        for name, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):
                foreign.ours(stack, module)
                if wanted(name):
                    hook = module.core.register_forward_pre_hook(
                        _keep(seen, name), with_kwargs=True
                    )
                    stack.callback(hook.remove)
            else:
                foreign.follow(stack, name, module)
        stack.enter_context(foreign)
        yield seen


def _keep(seen: Recording, name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    @torch.no_grad()
    def keep(core: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(core, Core)
        query, key, value = inputs[:3]
        beta, bias = core.beta, named.get("bias")
        if isinstance(core.score, Score):
            query, key, beta, scores = core.score.project(query, key)
            if scores is not None:
                bias = scores if bias is None else scores + bias
        seen[name] = Asked(query, key, named.get("mask"), beta, bias, value)

    return keep


class _Foreign(TorchFunctionMode):
    """Sees calls of torch's own attention, in whichever module they are made.

    Modules are followed by hooks, so that a call is known by the module that is running.
    """

    def __init__(self, seen: Recording, wanted: Callable[[str], bool]):
        super().__init__()
        self.seen, self.wanted = seen, wanted
        self.running: list[str | None] = []
        """Names of the modules that are running, None for one of ours, which records itself."""

    def follow(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        self._enter(stack, module, name)

    def ours(self, stack: ExitStack, module: nn.Module) -> None:
        self._enter(stack, module, None)

    def _enter(self, stack: ExitStack, module: nn.Module, name: str | None) -> None:
        def enter(_: nn.Module, __: Any) -> None:
            self.running.append(name)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            self.running.pop()

        stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        ours = None in self.running
        name = self.running[-1] if self.running else ""
        if not ours and name is not None and self.wanted(name):
            if func in (F.scaled_dot_product_attention, scaled_dot_product_attention):
                self.seen[name] = _asked(*args, **kwargs)
            elif func is F.multi_head_attention_forward:
                self.seen[name] = _multihead(func, args, kwargs)
        return func(*args, **kwargs)


@torch.no_grad()
def _asked(*args: Any, **kwargs: Any) -> Asked:
    """The arguments of torch's function in our words, in four axes."""
    query, key, value, mask, beta, bias, _ = from_torch(*args, **kwargs)

    def four(x: Tensor) -> Tensor:
        # Of three axes the first is the batch's, as `attend` has it.
        x = x.detach()
        return x[:, None] if x.ndim == 3 else x.reshape(-1, *((1, 1, *x.shape)[-3:]))

    return Asked(four(query), four(key), mask, beta, bias, four(value))


@torch.no_grad()
def _multihead(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """`nn.MultiheadAttention` splits its projections inside; it is asked for the weights.

    What it answers is kept as a bias: softmax(log A) = A.
    """
    named = {**kwargs, "need_weights": True, "average_attn_weights": False, "training": False}
    _, found = func(*args, **named)
    found = found[None] if found.ndim == 3 else found
    B, H, L, S = found.shape
    return Asked(found.new_zeros(B, H, L, 1), found.new_zeros(B, H, S, 1), None, 1.0, found.log())
