"""What the server of processes imports: all that is slow to import, and nothing that computes."""

import matplotlib.figure  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import tests.train.starts  # noqa: F401
