"""Adam, AdamW and Muon, weight decay, the moving average of weights, and checkpoint averaging.

AdamW   θ ← θ - η (m / (√v + ε) + λ θ)           Loshchilov and Hutter (2019); λ = 0 is Adam
Muon    θ ← θ - η (0.2 √max(a, b) UVᵀ + λ θ)     for matrices of a×b; m = USVᵀ (Jordan et al. 2024)
mean    θ̄ ← θ̄ + (1 - d) (θ - θ̄)                  d is the decay
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.machine import atomic
from regard.machine.device import multiplies_bfloat16
from regard.train.config import TrainingConfig


class Adam:
    """Adam and AdamW by torch's fused kernel, which torch.optim calls as well.

    torch.optim would do; but it imports torch's compiler, which takes seconds at every start. What
    torch's GradScaler asks of an optimizer is here under the same names.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, groups: Iterable[tuple[list[nn.Parameter], float]], config: TrainingConfig
    ) -> None:
        """Groups are of parameters and their weight decay."""
        self.config = config
        self.param_groups: list[dict[str, Any]] = [
            {"params": parameters, "weight_decay": decay, "lr": config.lr}
            for parameters, decay in groups
            if parameters
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for group in self.param_groups
            for parameter in group["params"]
        }

    def zero_grad(self) -> None:
        for parameter in self.state:
            parameter.grad = None

    def products(self) -> list[Tensor]:
        """What matrix products make of the gradients, if any: its bits may depend on threads."""
        return []

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self._update(parameters, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[Tensor], lr: Any, weight_decay: float) -> None:
        adam = torch._fused_adam_ if self.config.optimizer == "adam" else torch._fused_adamw_
        beta1, beta2 = self.config.betas
        steps, means, squares = (
            [self.state[parameter][name] for parameter in parameters]
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, 1)
        adam(
            parameters,
            [cast(Tensor, parameter.grad) for parameter in parameters],
            means,
            squares,
            [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=self.config.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))


class Muon(Adam):
    """Muon for the matrices within blocks, AdamW for everything else.

    Jordan et al. (2024). A step has about the root mean square of AdamW's (Liu et al. 2025), and so
    a weight decay that means the same; the learning rate that serves best is another.
    """

    momentum = 0.95

    def __init__(
        self,
        matrices: list[nn.Parameter],
        groups: Iterable[tuple[list[nn.Parameter], float]],
        config: TrainingConfig,
    ) -> None:
        super().__init__(groups, config)
        self._matrices: dict[Tensor, None] = dict.fromkeys(matrices)
        self.param_groups.append(
            {"params": matrices, "weight_decay": config.weight_decay, "lr": config.lr}
        )
        self.state |= {matrix: {"momentum": torch.zeros_like(matrix)} for matrix in matrices}

    def _update(self, parameters: list[Tensor], lr: Any, weight_decay: float) -> None:
        if parameters[0] not in self._matrices:
            super()._update(parameters, lr, weight_decay)
            return
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        for shape, alike in _by_shape(parameters):
            grads = [cast(Tensor, parameter.grad) for parameter in alike]
            means = [self.state[parameter]["momentum"] for parameter in alike]
            torch._foreach_lerp_(means, grads, 1 - self.momentum)
            ahead = torch._foreach_lerp(grads, means, self.momentum)  # Nesterov's
            steps = orthogonalized(torch.stack(ahead)) * (-0.2 * max(shape) ** 0.5 * lr)
            torch._foreach_add_(alike, list(steps.unbind()))

    @torch.no_grad()
    def products(self) -> list[Tensor]:
        matrices = [matrix for matrix in self._matrices if matrix.grad is not None]
        return [
            orthogonalized(torch.stack([cast(Tensor, matrix.grad) for matrix in alike]))
            for _, alike in _by_shape(matrices)
        ]


def _by_shape(parameters: Iterable[Tensor]) -> Iterator[tuple[torch.Size, list[Tensor]]]:
    shapes: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        shapes.setdefault(parameter.shape, []).append(parameter)
    yield from shapes.items()


def orthogonalized(x: Tensor) -> Tensor:
    """Matrices with the same singular vectors, and singular values of about 1: UVᵀ of x = USVᵀ.

    Five Newton-Schulz iterations, aX + b(XXᵀ)X + c(XXᵀ)²X. The coefficients trade exactness, which
    nothing is gained by, for speed: most singular values come out between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    y = x if wide else x.mT
    # What is added up is of size 1 at most, and no more exact than the polynomial has to be.
    if x.dtype != torch.float64 and multiplies_bfloat16(x.device.type):
        y = y.bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        # The second one is symmetric: a CPU's product by a transposed matrix is the faster one.
        mix = (gram @ gram.mT).mul_(c).add_(gram, alpha=b)
        y = (mix @ y).add_(y, alpha=a)
    return (y if wide else y.mT).to(x.dtype)


def make(model: nn.Module, config: TrainingConfig) -> Adam:
    """The optimizer of a model's parameters."""
    decayed, others = split(model)
    if not decayed and not others:
        raise ValueError("all parameters of the model are frozen; set requires_grad on some")
    if config.optimizer != "muon":
        return Adam([(decayed, config.weight_decay), (others, 0.0)], config)
    inner = within_blocks(model)
    hidden = {p for p in decayed if p.ndim == 2 and p in inner}
    if not hidden:
        raise ValueError(
            "optimizer (muon) is for matrices within blocks, an nn.ModuleList of the model, and "
            "there are none to train; use adamw"
        )
    matrices, rest = ([p for p in decayed if (p in hidden) is wanted] for wanted in (True, False))
    return Muon(matrices, [(rest, config.weight_decay), (others, 0.0)], config)


def within_blocks(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of repeated blocks: neither embeddings nor the output layer."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return {parameter for blocks in lists for parameter in blocks.parameters()}


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters: matrices, which have weight decay, and all others.

    What is added (biases, norms, positions, class tokens) or looked up (embeddings, even where
    they are the output's matrix too) has none: zero is no simpler a value for it.
    """
    spared: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            matrix = parameter.ndim >= 2 and "weight" in name
            if not matrix or isinstance(module, nn.Embedding):
                spared.add(parameter)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        [parameter for parameter in trained if parameter not in spared],
        [parameter for parameter in trained if parameter in spared],
    )


class MovingAverage:
    """An exponential moving average of parameters, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self.decay = decay
        self.means = {name: value.detach().clone() for name, value in parameters.items()}

    def weight(self, step: int) -> float:
        """Of the new parameters: larger in the first steps, which forgets the initial weights."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter], weight: float | Tensor) -> None:
        means = list(self.means.values())
        values = [parameters[name].detach() for name in self.means]
        if isinstance(weight, float):
            torch._foreach_lerp_(means, values, weight)
            return
        steps = torch._foreach_sub(values, means)
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_(means, steps)


class Snapshots:
    """Checkpoint averaging: the weights at the last few evaluations, one file each, and their mean.

    Vaswani et al. (2017), section 6.1, averaged the last 5 (base) and 20 (big) checkpoints.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def add(self, step: int, model: nn.Module) -> None:
        self.folder.mkdir(exist_ok=True)
        tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
        with atomic.file(self._path(step)) as draft:
            save_file(tensors, draft)

    @torch.no_grad()
    def average(self, model: nn.Module) -> None:
        """Copies the mean of the last snapshots into a model."""
        steps = self.steps()[-self.keep :]
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            parameter.copy_(torch.zeros_like(parameter))
            for step in steps:
                with safe_open(self._path(step), framework="pt") as file:
                    parameter.add_(file.get_tensor(name).to(parameter.device) / len(steps))

    def steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.safetensors"))

    def forget(self, saved: int) -> None:
        """Removes snapshots that a run resumed from a saved step will not average any more."""
        for step in [step for step in self.steps() if step <= saved][: -self.keep]:
            self._path(step).unlink()

    def rewind(self, saved: int) -> None:
        """Removes snapshots after a saved step, and what a killed run was writing."""
        for step in self.steps():
            if step > saved:
                self._path(step).unlink()
        if self.folder.is_dir():
            atomic.clear_all(self.folder)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:09}.safetensors"
