"""A memory plan from a model's config alone: what one GPU must hold, before any weight is loaded.

    python train.py --plan --model NAME --gpus 8 --gpu-gib 80    the plan of a run, without a GPU
    python plan.py                                               the table "what fits where" of the README

Weights, gradients, Adam state, the reference model and the KV cache are counted from shapes. Activations are rehearsed: one and
two blocks run forward and backward on fake tensors (shapes and lifetimes, no data), every storage is counted from its birth to
its death, and the peak is extended to all blocks; so recomputation, the mask, autocast and adapters need no formula.
The dtypes are those of train.py: fp32 weights, gradients and Adam; bf16 compute on CUDA; a frozen LoRA base in bf16 there.

The most that can be alive at once is what always is, and the largest of three moments: sampling, the loss, the optimizer step.
Our decisions, measured on CPU only (tests/test_plan.py), never on CUDA: RUNTIME_GIB and SLACK for the CUDA context and the
allocator's gaps; LOGIT_COPIES; that FSDP2 holds two blocks unsharded at a time (the next is fetched early) and, throughout the
loss, the root.
CUDA's attention is taken to hold what the CPU's does (both save q, k, v, the output and the mask as a bias).
Left out: the buffers of NCCL, prompts that make a single group larger than --batch-tokens, models with other than dense attention.
"""
import copy
import os
import sys
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, Olmo2Config, Qwen2Config, Qwen3Config

from lora import add_adapters
from models import enable_checkpointing, wants_checkpointing, wants_shards
from murphy import LOGITS_AT_ONCE
from problems import BadInput

GIB = 2**30
RUNTIME_GIB, SLACK = 1.0, 0.05  # CUDA context and libraries; share lost to gaps in the allocator
LOGIT_COPIES = 5                # fp32 [tokens, vocabulary] tensors alive at once in the log-probs and their backward pass


@dataclass(frozen=True)
class Setup:
    """What the plan depends on beside the model; names and defaults as the flags of train.py."""
    gpus: int = 1
    cuda: bool = True                # bf16 compute; False: everything fp32, on the CPU
    shard: bool = False              # FSDP2: weights, gradients, Adam state and reference divided by gpus
    offload: bool = False            # of sharded state to the host
    lora_rank: int | None = None
    checkpointing: bool = False
    reference: bool = True           # beta > 0
    group_size: int = 8
    max_new_tokens: int = 512
    batch_tokens: int = 65536
    row_tokens: int = 8192
    logit_chunk: int | None = 512    # response positions whose logits exist at once; None: all of a row


# ---------------------------------------------------------------- rehearsal

class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are born inside and still alive; `peak` is the most there were."""

    def __init__(self, known=()):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {t.untyped_storage()._cdata for t in known}  # not born here: views of them do not count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.died, storage._cdata, storage.nbytes())
        return out

    def died(self, key, nbytes):
        self.seen.discard(key)
        self.now -= nbytes


def cut(config, layers):
    """The config with fewer blocks and next to no vocabulary, so that only blocks are rehearsed."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size = layers, 1
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def fake_model(config, dtype, lora_rank=None):
    """The model in shapes only; call inside FakeTensorMode (or under the meta device)."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return add_adapters(model, lora_rank, 1.0) if lora_rank else model


def activation_peak(model, tokens, rows=1, amp=False, training=True):
    """Peak bytes of the activations of a model's blocks on [rows, tokens], forward and (training) backward; fake or real model."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None  # gradients are there already and are added to
    known = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.requires_grad)]
    bf16 = torch.autocast("cpu", torch.bfloat16) if amp else nullcontext()
    with bf16, torch.set_grad_enabled(training), LiveBytes(known) as live:
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool)
        hidden = model.base_model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        if training:
            hidden.backward(torch.ones_like(hidden))
    copies = sum(2 * p.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)
                 for p in m.parameters() if p.requires_grad and p.dtype == torch.float32) if amp else 0
    return live.peak - copies  # autocast's copies of the weights are a line of their own


@lru_cache(maxsize=256)
def rehearse(config_json, layers, tokens, rows, dtype, amp, checkpointing, lora_rank, training):
    """activation_peak of the first `layers` blocks, on fake tensors."""
    with FakeTensorMode():
        model = fake_model(cut(CONFIGS[config_json], layers), dtype, lora_rank)
        if checkpointing and training:
            enable_checkpointing(model)
        return activation_peak(model, tokens, rows, amp, training)


CONFIGS = {}  # by their text, so that rehearsals are remembered


def activations(config, setup, tokens, rows=1, training=True):
    """Peak bytes of activations on [rows, tokens]. Training, each block adds the same, which 1 and 2 blocks show; without
    gradients no block adds anything. The embedding's gradient exists when the activations are gone, beside the one it is added to.
    """
    key = config.to_json_string()
    CONFIGS[key] = config
    bf16 = setup.cuda and (setup.shard or setup.lora_rank)  # what flows between blocks has the dtype of the (unsharded) weights
    peak = lambda layers: rehearse(key, layers, tokens, rows, torch.bfloat16 if bf16 else torch.float32, setup.cuda,
                                   setup.checkpointing, setup.lora_rank, training)
    if not training:
        return peak(2)
    embedding = 0 if setup.lora_rank else config.vocab_size * config.hidden_size * 4
    return max(peak(1) + (config.num_hidden_layers - 1) * (peak(2) - peak(1)), embedding)


# ---------------------------------------------------------------- the plan

@lru_cache(maxsize=64)
def sizes(config_json, lora_rank):
    """Numbers of parameters: of the base, of all adapters, inside linear layers (lm_head too), of one block."""
    with torch.device("meta"):
        model = fake_model(CONFIGS[config_json], torch.float32)
        base = sum(p.numel() for p in model.parameters())
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        block = model.base_model.layers[0]
        adapters = (lora_rank or 0) * sum(sum(m.weight.shape) for m in model.base_model.layers.modules() if m in linears)
    return base, adapters, sum(m.weight.numel() for m in linears), sum(p.numel() for p in block.parameters())


def parameter_count(config):
    CONFIGS[config.to_json_string()] = config
    return sizes(config.to_json_string(), None)[0]


def context_of(config):
    return getattr(config, "max_position_embeddings", None) or 10**9


def row_length(config, setup):
    """The longest packed row there can be: row_tokens, or the longest prefix and a group of whole responses."""
    return min(setup.row_tokens, context_of(config) + (setup.group_size - 1) * setup.max_new_tokens)


def memory_plan(config, setup):
    """Bytes on one GPU. Returns {part: bytes}; "total" is what the GPU must have, "host" what each GPU's state takes there.

    config: a transformers config; nothing is loaded. Parts: state (always there), then those of sampling, of the
    loss and of the optimizer step, of which only one moment exists at a time: total = state + the largest of them + runtime.
    """
    key = config.to_json_string()
    CONFIGS[key] = config
    base, adapters, linear, block = sizes(key, setup.lora_rank)
    trained, compute = adapters or base, 2 if setup.cuda else 4
    parts = setup.gpus if setup.shard else 1
    root = base - block * config.num_hidden_layers
    head = config.vocab_size * config.hidden_size

    weights = base * (2 if setup.lora_rank and setup.cuda else 4) + adapters * 4
    state = {"weights": weights / parts, "gradients": trained * 4 / parts, "Adam state": trained * 8 / parts,
             "reference": base * 4 / parts if setup.reference and not setup.lora_rank else 0}
    host = sum(state.values()) if setup.shard and setup.offload else 0
    if host:
        state = dict.fromkeys(state, 0)

    if setup.shard:  # sampling: everything unsharded; loss: two blocks and the root, with their gradients on the way out
        copy_sampling, copy_loss = base * compute, (2 * block + root) * (compute + 4)
    else:            # autocast keeps its copies; a step's largest gradient exists beside the one it is added to
        copy_sampling = copy_loss = (adapters or linear) * 2 if setup.cuda else 0
    head_gradient = 0 if setup.lora_rank or setup.shard else head * (6 if setup.cuda else 4)

    sampled = max(setup.batch_tokens, setup.group_size * 2 * setup.max_new_tokens)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv = sampled * 2 * config.num_hidden_layers * kv_heads * head_dim * compute
    prefix = min(context_of(config) - setup.max_new_tokens, setup.max_new_tokens)
    prefixes = max(1, sampled // (setup.group_size * (prefix + setup.max_new_tokens)))
    drawn = prefixes * setup.group_size * config.vocab_size * 4 * 3  # logits, their sorted or divided copy, probabilities

    row = row_length(config, setup)
    logits = min(row, setup.logit_chunk or row) * config.vocab_size * 4
    moments = {
        "sampling": {"bf16 weights": copy_sampling, "KV cache": kv * (1 + 1 / config.num_hidden_layers),  # a layer grows by a copy
                     "prefill": activations(config, setup, prefix, prefixes, training=False), "logits": drawn},
        "loss": {"bf16 weights": copy_loss, "activations": activations(config, setup, row),
                 "logits": max(LOGIT_COPIES * logits, 2 * logits + head_gradient)},
        "optimizer step": {"temporaries": trained * 4 / parts if setup.cuda and not host else 0}}
    plan = state | {f"{moment}: {part}": value for moment, values in moments.items() for part, value in values.items()}
    used = sum(state.values()) + max(sum(values.values()) for values in moments.values())
    plan["runtime"] = RUNTIME_GIB * GIB + SLACK * used if setup.cuda else 0
    return plan | {"total": used + plan["runtime"], "host": host}


# ---------------------------------------------------------------- what would make it fit

def remedies(setup):
    """(flag, what it changes), in the order in which they are tried: first those that cost time only, then those of the method."""
    halved = lambda tokens, least: [t for t in (tokens // 2, tokens // 4, tokens // 8) if t >= least]
    found = [("--gradient-checkpointing", dict(checkpointing=True))]
    shardable = setup.gpus > 1 and not setup.lora_rank
    found += [("--shard full", dict(shard=True))] * shardable
    group = setup.group_size * 2 * setup.max_new_tokens
    found += [(f"--batch-tokens {t}", dict(batch_tokens=t)) for t in halved(setup.batch_tokens, group)]
    found += [(f"--row-tokens {t}", dict(row_tokens=t)) for t in halved(setup.row_tokens, 2 * setup.max_new_tokens)]
    found += [("--cpu-offload", dict(offload=True))] * shardable
    found += [("--beta 0", dict(reference=False))] * (setup.reference and not setup.lora_rank)
    return found


def fitting(config, setup, gib):
    """(flags, plan) that fit into gib, changing as little as the order of `remedies` allows; None if nothing does.

    Remedies are added one by one until the plan fits; then each is taken back, or weakened, where that still fits.
    If all of them do not help, the same is tried with adapters.
    """
    changed = lambda picks: replace(setup, **{k: v for _, change in picks for k, v in change.items()})
    fits = lambda picks: memory_plan(config, changed(picks))["total"] <= gib * GIB
    listed, picks = remedies(setup), []
    for remedy in listed:
        if fits(picks):
            break
        picks = [p for p in picks if p[1].keys() != remedy[1].keys()] + [remedy]
    if not fits(picks):
        if setup.lora_rank:
            return None
        found = fitting(config, replace(setup, lora_rank=16, shard=False, offload=False), gib)
        return found and (["--lora-rank 16", *found[0]], found[1])
    for pick in list(picks):
        others = [p for p in picks if p is not pick]
        for weaker in ([], *([r] for r in listed[:listed.index(pick)] if r[1].keys() == pick[1].keys())):
            if fits(others + weaker):
                picks = others + weaker
                break
    return [flag for flag, _ in picks], memory_plan(config, changed(picks))


# ---------------------------------------------------------------- text

def layouts(setup):
    """The columns of a plan: as replicas, sharded, and with the shards on the host; adapters and lone GPUs are not sharded."""
    if setup.lora_rank or setup.gpus == 1:
        return {"": setup}
    return {"--shard none": replace(setup, shard=False, offload=False), "--shard full": replace(setup, shard=True, offload=False),
            "+ --cpu-offload": replace(setup, shard=True, offload=True)}


def plan_text(config, setup, gib):
    """The plan of a run as text, a column for each layout, and what fits."""
    plans = {name: memory_plan(config, s) for name, s in layouts(setup).items()}
    lines = [f"{setup.gpus} x {gib:g} GiB, rows of {row_length(config, setup)} tokens in the loss, {setup.batch_tokens} tokens sampled "
             f"at once, gradient checkpointing {'on' if setup.checkpointing else 'off'}",
             f"{'GiB per GPU':<28}" + "".join(f"{name:>18}" for name in plans)]
    for part in next(iter(plans.values())):
        label = "on the host, per GPU" if part == "host" else part
        lines.append(f"{label:<28}" + "".join(f"{p[part] / GIB:18.2f}" for p in plans.values()))
    fit = [name for name, p in plans.items() if p["total"] <= gib * GIB]
    return "\n".join([*lines, f"fits: {', '.join(fit) or 'yes'}" if fit else f"does not fit. {advice(config, setup, gib)}"])


def advice(config, setup, gib):
    found = fitting(config, setup, gib)
    if not found:
        return "Nothing here would make it fit: take a smaller model or larger GPUs"
    return f"This would fit: {' '.join(found[0])}"


# ---------------------------------------------------------------- before a run

def memory_setup(model_config, run, config, gpus, cuda):
    """The Setup of a run (its settings and MurphyConfig) on that many GPUs."""
    parameters = parameter_count(model_config)
    return Setup(gpus=gpus, cuda=cuda, shard=wants_shards(parameters, run, "cuda" if cuda else "cpu", gpus), offload=run["cpu_offload"],
                 lora_rank=run["lora_rank"], checkpointing=wants_checkpointing(parameters, run), reference=config.beta > 0,
                 group_size=config.group_size, max_new_tokens=config.max_new_tokens, batch_tokens=config.batch_tokens,
                 row_tokens=config.row_tokens, logit_chunk=max(1, LOGITS_AT_ONCE // model_config.vocab_size))


def free_gib(device):
    """Memory that one process can still have: of its GPU, or its share of the machine's; infinite where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / GIB
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib * 1024 / GIB / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_memory(run, config, model_config, device, world):
    """Refuse, before loading, what a GPU cannot hold; on the CPU warn, and refuse what needs more than twice what is free.

    Small models on the CPU (weights, gradients and Adam state below a tenth of what is free) are not worth the second it takes.
    """
    cuda, free = device.type == "cuda", run.get("gpu_gib") or free_gib(device)
    if not cuda and 20 * parameter_count(model_config) < 0.1 * free * GIB:
        return
    setup = memory_setup(model_config, run, config, world, cuda)
    need = memory_plan(model_config, setup)["total"] / GIB
    if need > free:
        said = f"training {run['model']} needs about {need:.1f} GiB a process, and {free:.1f} are free"
        if cuda or need > 2 * free:
            raise BadInput(f"{said}. {advice(model_config, setup, free)} (--plan shows the parts)")
        print(f"warning: {said}", file=sys.stderr)


# ---------------------------------------------------------------- what fits where

def known_models():
    """Shapes of public models, written from their published configs so that the table needs no network."""
    return {"OLMo-2 7B": Olmo2Config(vocab_size=100352, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                                     num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096),
            "Qwen3 4B": Qwen3Config(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, head_dim=128,
                                    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=40960,
                                    tie_word_embeddings=True),
            "Qwen2.5 1.5B": Qwen2Config(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                                        num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=32768,
                                        tie_word_embeddings=True)}


CARDS = {80: 79.0, 48: 44.5, 24: 23.5}  # GB on the box: GiB that torch reports, about
WHERE = [("OLMo-2 7B", 8, 80), ("OLMo-2 7B", 4, 80), ("OLMo-2 7B", 2, 80), ("OLMo-2 7B", 1, 80),
         ("OLMo-2 7B", 1, 48), ("OLMo-2 7B", 1, 24), ("Qwen3 4B", 8, 80), ("Qwen3 4B", 2, 80),
         ("Qwen3 4B", 1, 80), ("Qwen3 4B", 1, 24), ("Qwen2.5 1.5B", 1, 80), ("Qwen2.5 1.5B", 1, 48),
         ("Qwen2.5 1.5B", 1, 24)]


def table(where=WHERE):
    """What fits where, in Markdown: for each model and machine the flags that are needed beside the defaults, which for models of
    this size are gradient checkpointing, and sharding on several GPUs."""
    models = known_models()
    lines = ["| model | GPUs | flags needed | GiB a GPU | on the host |", "|---|---|---|---|---|"]
    for name, gpus, card in where:
        found = fitting(models[name], Setup(gpus=gpus, checkpointing=True, shard=gpus > 1), CARDS[card])
        flags, plan = found or (None, None)
        shown = f"{' '.join(flags) and '`' + ' '.join(flags) + '`' or 'none'} | {plan['total'] / GIB:.0f}" if found else "does not fit |"
        host = f"{plan['host'] * gpus / GIB:.0f}" if found and plan["host"] else "-"
        lines.append(f"| {name} | {gpus} x {card} GB | {shown} | {host} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
