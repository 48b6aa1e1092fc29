"""One thread for all tests: the models are small, and sums come in one order."""
import torch

torch.set_num_threads(1)
