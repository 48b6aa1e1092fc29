"""One thread for all tests: the models are small, and sums come in one order. No progress bars: some tests read what is printed."""
import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()
