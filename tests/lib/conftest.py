"""One thread: the tests are many and tiny, and their float64 sums depend on no machine."""

import torch

torch.set_num_threads(1)
