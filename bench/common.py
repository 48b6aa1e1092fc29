"""What the benches share: a random OLMo-2 of a size at which arithmetic and not Python is measured, and sides that take turns."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: every side gets one thread

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from transformers import AutoModelForCausalLM, Olmo2Config

torch.set_num_threads(1)


def random_model(hidden=256, layers=4, vocab=512, context=4096, seed=0):
    """A random OLMo-2 (fp32, eval) with weights large enough that its distributions are far from uniform; prints its size."""
    torch.manual_seed(seed)
    config = Olmo2Config(vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
                         num_attention_heads=hidden // 64, max_position_embeddings=context, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, hidden ** -0.5)
    print(f"model: random OLMo-2, width {hidden}, {layers} layers, vocabulary {vocab}, "
          f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, fp32, 1 thread")
    return model


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def race(name, slow, fast, rounds):
    """Run both sides by turns (the caller has warmed them up by comparing their results). Returns the median over rounds of the
    ratio slow / fast within a round."""
    times = [(seconds(slow), seconds(fast)) for _ in range(rounds)]
    ratio = statistics.median(s / f for s, f in times)
    print(f"{name}: {statistics.median(s for s, _ in times):.3f} s against {statistics.median(f for _, f in times):.3f} s, {ratio:.2f} x")
    return round(ratio, 2)
