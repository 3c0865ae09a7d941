"""What Hugging Face's transformers computes with a folder that was written for it.

Where the package is missing, the folder is read back by our own reader instead, which sees a wrong
tensor or setting but not a difference between both libraries; `Verified` says so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.interop.verify import Verified, compare, reference

Logits = Callable[[Any], list[Tensor]]
"""Runs a model of either library on the same input; one matrix for each text or batch."""


def verified(
    model: nn.Module,
    folder: Path,
    kind: str,
    ours: Logits,
    theirs: Logits,
    again: Callable[[Path], list[Tensor]],
) -> Verified:
    """The logits of transformers' class `kind`, or `again` by our reader, beside the native ones.

    The weights of a half-precision model are compared as they are, in float32.
    """
    with torch.no_grad():
        expected = ours(reference(model))
        try:
            import transformers
        except ImportError:
            reader = "our own reader (transformers is not installed)"
            return compare(expected, again(folder), reader)
        quiet = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        try:
            peer = getattr(transformers, kind).from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        finally:
            if quiet:
                transformers.utils.logging.enable_progress_bar()
        return compare(expected, theirs(peer.eval()), "transformers")
