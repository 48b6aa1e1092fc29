"""Peak memory of a loss and its gradient with a vocabulary of 152k: logits in bounded parts against all logits at once.

    python bench/memory.py [--responses 8] [--length 192]

Each side runs in a process of its own; counted is what its peak resident memory grew by during forward and backward. Both are
murphy.packed_logprobs: all at once is the same function with no bound. The last line is JSON; a small ratio is good.
"""
import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from transformers import AutoModelForCausalLM, Olmo2Config

import murphy

VOCABULARY = 152_064  # Qwen2.5's


def measure(at_once, responses, length):
    """(bytes of peak growth, seconds, norm of the gradient) in a fork."""
    read, write = os.pipe()
    if os.fork() == 0:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = Olmo2Config(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=4, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # they are there in any training, and are not what is compared
        row = murphy.pack([5] * 64, torch.randint(3, VOCABULARY, (responses, length)).tolist(), [1.0] * responses)
        murphy.LOGITS_AT_ONCE = at_once
        before, start = resident(), time.perf_counter()
        logprobs, _ = murphy.packed_logprobs(model, row, 1.0)
        logprobs.mean().backward()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        norm = sum(p.grad.double().pow(2).sum() for p in model.parameters()).sqrt().item()
        os.write(write, json.dumps([peak - before, time.perf_counter() - start, norm]).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(read, 1000))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--length", type=int, default=192)
    args = parser.parse_args()
    whole, parts = (measure(bound, args.responses, args.length) for bound in (10**12, murphy.LOGITS_AT_ONCE))
    assert abs(whole[2] - parts[2]) < 1e-4 * whole[2], "the gradients differ"
    print(f"{args.responses * args.length} response tokens: {whole[0] / 2**20:.0f} MiB at once, {parts[0] / 2**20:.0f} MiB in parts")
    print(json.dumps({"peak_ratio": round(parts[0] / whole[0], 3), "time_ratio": round(parts[1] / whole[1], 2),
                      "whole_mib": round(whole[0] / 2**20), "parts_mib": round(parts[0] / 2**20), "vocabulary": VOCABULARY}))


if __name__ == "__main__":
    main()
