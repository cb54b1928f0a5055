"""One torch thread: two on a busy machine were seen many times slower."""

import torch

torch.set_num_threads(1)
