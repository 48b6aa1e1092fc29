"""Run alone for test_plan.py: the peak memory of steps on long packed rows, as the kernel counts it (VmHWM).

    python plan_worker.py    a line of JSON for each case: bytes by which the process grew, from before the model to the peak
"""
import json
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Olmo2Config, Qwen3Config

from lora import add_adapters
from murphy import MurphyConfig, pack, score, token_weights, row_loss, update
from plan import Setup
from models import enable_checkpointing

SHAPE = dict(vocab_size=128, hidden_size=512, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2)
COMMON = dict(cuda=False, group_size=4, max_new_tokens=112, batch_tokens=1, row_tokens=512, logit_chunk=None)
CASES = {
    "plain": (Olmo2Config(**SHAPE), Setup(**COMMON, reference=False)),
    "checkpointing and a reference": (Olmo2Config(**SHAPE), Setup(**COMMON, checkpointing=True)),
    "adapters": (Qwen3Config(**SHAPE, head_dim=64), Setup(**COMMON, lora_rank=8)),
}


def resident(name):
    """VmRSS (now) or VmHWM (the most there was) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def step(model, reference, optimizer, rows, config):
    token_weights(rows, len(rows) * 4, 1, config)
    if reference is not None:
        for row, logprobs in zip(rows, score(reference, rows, config)):
            row.ref = logprobs
    update(model, rows, optimizer, config, row_loss)


def long_row(setup):
    """A packed row of row_tokens tokens: a prefix, and responses of max_new_tokens."""
    prefix = setup.row_tokens - setup.group_size * setup.max_new_tokens
    return pack([3] * prefix, [[5] * setup.max_new_tokens] * setup.group_size, [1.0, -1.0, 0.5, -0.5])


def built(config, setup):
    fresh = lambda: AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    model = add_adapters(fresh(), setup.lora_rank, 1.0) if setup.lora_rank else fresh()
    reference = None if not setup.reference else model if setup.lora_rank else fresh().requires_grad_(False)
    if setup.checkpointing:
        enable_checkpointing(model)
    return model, reference, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def main(case):
    config, setup = CASES[case]
    objective, short = MurphyConfig(beta=0.04 if setup.reference else 0.0), pack([3, 4], [[5, 6]] * 2, [1.0, -1.0])
    tiny = Olmo2Config(**SHAPE | dict(num_hidden_layers=1, hidden_size=64, intermediate_size=64))
    step(*built(tiny, setup), [short], objective)  # libraries load on first use; that is not the model's memory
    before = resident("VmRSS")
    model, reference, optimizer = built(config, setup)
    step(model, reference, optimizer, [short], objective)  # Adam's state is made
    step(model, reference, optimizer, [short, long_row(setup)], objective)
    state = [t for m in {model, reference} - {None} for p in m.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    print(json.dumps({"case": case, "grown": resident("VmHWM") - before,
                      "state": sum(t.numel() * t.element_size() for t in state if t is not None and t.dim())}), flush=True)


if __name__ == "__main__":
    for case in CASES:  # each in a process of its own, for VmHWM never falls; forked, for importing takes longest
        if os.fork() == 0:
            main(case)
            os._exit(0)
        assert os.wait()[1] == 0
