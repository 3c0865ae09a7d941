"""The command `quantize`: a model whose linear layers have weights of 8 bits, loaded as they are.

On a CPU its kernels compute with the integers as they are; anywhere else they are widened.
"""

from regard import checkpoint
from regard.cli.average import other_files
from regard.model.quantized import QuantizedLinear, quantize
from regard.task.folder import check_new, model_folder


def quantized(folder: str, out: str) -> None:
    """`regard quantize RUN NEW`."""
    check_new(out)
    saved = checkpoint.load(model_folder(folder))
    before = saved.files[checkpoint.WEIGHTS].stat().st_size
    quantize(saved.model.float())
    count = sum(isinstance(part, QuantizedLinear) for part in saved.model.modules())
    if not count:
        raise ValueError(f"{folder} has no linear layer in a stack, and nothing to quantize")
    checkpoint.save(
        out,
        saved.model,
        files=other_files(saved),
        task=saved.task,
        origin=f"The weights of {saved.folder}, those of {count} linear layers in 8 bits.",
    )
    after = checkpoint.load(out, keep_int8=True).files[checkpoint.WEIGHTS].stat().st_size
    print(
        f"{out}: {count} linear layers in 8 bits, {after / 2**20:,.1f} MiB instead of "
        f"{before / 2**20:,.1f}"
    )
