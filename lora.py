"""LoRA (arXiv 2106.09685): train two thin matrices beside each frozen linear layer, y = W x + alpha / rank * B (A x).

Our own module and not peft: it is short enough to be read, nothing has to be installed, and the parameters of the base keep
their Hugging Face names, so that merged weights are a plain checkpoint. The reference model of the KL term is this
same model with its adapters switched off: no second copy. Memory: the frozen base has no gradient, no Adam state and no fp32
master (bf16 on CUDA), so a 7B model trains in about 15 GiB of weights instead of 140 GB.

Which layers: every linear layer of the blocks (attention and MLP), not the embedding and not lm_head. A is drawn from its own
seed, equal on every process; B is 0, so the first step samples from exactly the base model.

On its learning rate: B starts at 0 and one Adam step moves an entry by about the learning rate, so a rate meant for full
fine-tuning (1e-6) hardly moves the model. train.py's default with --lora-rank is ten times that without, and
--lora-alpha is twice the rank: both are common practice and our decision, tuned on no real model.

Left out: dropout on adapters, quantised bases, adapters under --shard full (FSDP wants one dtype; replicas of a frozen bf16
base are small), several adapters at once.

    add_adapters(model, rank=16, alpha=32, seed=0); ...; model.save_pretrained(folder, state_dict=merged(model))
"""
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from problems import BadInput


class LoraLinear(nn.Linear):
    """A frozen linear layer with its adapter. weight and bias are the base's own; lora_a [rank, in], lora_b [out, rank] fp32."""

    def __init__(self, linear, rank, alpha, generator):
        nn.Module.__init__(self)  # not nn.Linear's, which would allocate a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.on = alpha / rank, True
        a = torch.rand(rank, self.in_features, generator=generator) * 2 - 1  # uniform with the variance of nn.Linear's own
        self.lora_a = nn.Parameter((a / self.in_features ** 0.5).to(linear.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank, device=linear.weight.device))

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale if self.on else y


def adapted(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def add_adapters(model, rank, alpha, seed=0):
    """Freeze the model and put an adapter beside every linear layer of its blocks (model.base_model.layers). Returns the model."""
    blocks = getattr(model.base_model, "layers", None)
    if blocks is None:
        raise BadInput(f"--lora-rank: {type(model).__name__} keeps its blocks elsewhere than in .layers; train it without LoRA")
    model.requires_grad_(False)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, LoraLinear(child, rank, alpha, generator))
    return model


@contextmanager
def adapters_off(model):
    """Inside, the model is its base: the reference model. Without adapters, nothing happens."""
    modules = adapted(model).values()
    for module in modules:
        module.on = False
    try:
        yield
    finally:
        for module in modules:
            module.on = True


def adapter_state(model):
    """{name: tensor} of the adapters alone."""
    return {name: p for name, p in model.state_dict().items() if name.endswith(("lora_a", "lora_b"))}


@torch.no_grad()
def merged(model):
    """The state dict of the plain model with B A added to W; changed weights are fp32, so that small updates survive."""
    state = {name: p for name, p in model.state_dict().items() if not name.endswith(("lora_a", "lora_b"))}
    for name, m in adapted(model).items():
        state[f"{name}.weight"] = m.weight.float() + m.scale * (m.lora_b @ m.lora_a)
    return state
