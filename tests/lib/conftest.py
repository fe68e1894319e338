"""One thread: the tests are many and tiny, and their float64 sums should not depend on a machine."""

import torch

torch.set_num_threads(1)
