"""Models for training and evaluation: config, tokenizer, weights; whole, sharded over processes, or with adapters.

    tokenizer, config, path = load_tokenizer(name)          # "tiny", a folder or a Hub name; nothing heavy yet
    model = load_model(path)                                # fp32 on the CPU
    model, reference = load_trained(path, last, device, run, objective)       # what train.py trains, on its device

What is loaded here is refused early and in one sentence if it cannot be used (problems.BadInput). Leaves out: quantised weights.
"""
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from lora import add_adapters
from murphy import hidden_states, pack
from problems import BadInput
from rollout import prefix_of, prefix_room
from sharding import shard

TINY = Path(__file__).resolve().parent / "tiny"
BIG = 1_000_000_000  # parameters; above, recomputing activations and (on several GPUs) sharding are on by default


def load_config(name):
    """A model's config, before any weights. Returns (config, path)."""
    path = str(TINY) if name == "tiny" else name
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise BadInput(f"there is no model folder {path}; give a folder with config.json and weights, or a Hub name")
    try:
        return AutoConfig.from_pretrained(path), path
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"cannot load the model {name}: {one_line(error)}") from None


def load_tokenizer(name):
    config, path = load_config(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"cannot load the tokenizer of {name}: {one_line(error)}") from None
    if not tokenizer.chat_template:
        raise BadInput(f"the model {name} has no chat template; use an instruct model, or add chat_template to its tokenizer")
    return tokenizer, config, path


def one_line(error):
    return " ".join(str(error).split())[:300]


def load_model(path, dtype=torch.float32):
    """On the CPU: fp32 weights (masters of bf16 compute on CUDA), sdpa attention (the packed mask needs it), dropout off."""
    hf_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"cannot load the weights of {path}: {one_line(error)}") from None
    for module in model.modules():  # sampled and trained distributions must be the same
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    check_head(model)
    return model.eval()


def check_head(model):
    """Refuse a model that scales or caps its logits behind the head: murphy.packed_logprobs applies the head itself."""
    row = pack([1, 2], [[3]], [0.0])
    with torch.no_grad():
        hidden, head = hidden_states(model, row)
        logits = model(input_ids=row.input_ids[:, :2]).logits[0, -1:]
        if (head(hidden) - logits).abs().max() > 0.05 * logits.abs().max():  # bf16 alone rounds by up to 0.01
            raise BadInput(f"{type(model).__name__} changes its logits behind the language-model head, which the loss here does not do; "
                           "use another model")


def size_of(model):
    return sum(p.numel() for p in model.parameters())


def wants_shards(parameters, run, device_type, world):
    """Whether a model of that many parameters is sharded: see --shard."""
    if world == 1 or run["lora_rank"] or run["shard"] == "none":
        return False
    return run["shard"] == "full" or run["cpu_offload"] or device_type == "cuda" and parameters > BIG


def wants_checkpointing(parameters, run):
    return parameters > BIG if run["gradient_checkpointing"] is None else run["gradient_checkpointing"]


def in_turn(load):
    """load() on every process, one after another on each machine, so that a host holds one whole model at a time."""
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
        if turn == int(os.environ.get("LOCAL_RANK", 0)):
            model = load()
        if dist.is_initialized():
            dist.barrier()
    return model


def placed(path, device, run):
    """load_model on the device: whole, or sharded."""
    model = load_model(path)
    sharded = wants_shards(size_of(model), run, device.type, dist.get_world_size() if dist.is_initialized() else 1)
    return shard(model, device.type, run["cpu_offload"]) if sharded else model.to(device)


def with_adapters(path, last, device, run, seed):
    """A frozen model (bf16 on CUDA: it is never updated, so it needs no fp32 master) with its adapters, as saved in `last`."""
    model = load_model(path, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    model = add_adapters(model, run["lora_rank"], run["lora_alpha"] or 2 * run["lora_rank"], seed)
    if last:
        model.load_state_dict(torch.load(last / "adapters.pt", map_location=device), strict=False)
    return model


def load_trained(path, last, device, run, objective):
    """The model to train, at checkpoint `last` if there is one, and its reference: the model before training, also after a resume;
    with adapters the model itself, which murphy.optimise switches off; None if beta is 0."""
    if run["lora_rank"]:
        model = in_turn(lambda: with_adapters(path, last, device, run, objective.seed))
        return model, model if objective.beta > 0 else None
    model = in_turn(lambda: placed(last or path, device, run))
    return model, in_turn(lambda: placed(path, device, run)).requires_grad_(False) if objective.beta > 0 else None


def enable_checkpointing(model):
    """Recompute the blocks' activations in the backward pass.

    Checkpoints that are not re-entrant need no input with gradients; such inputs would be leaves in sampling, and autocast
    keeps its copy of every leaf: of the embedding of each sampled token, until the rollout ends.
    """
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    model.train()


def check_prompts(problems, tokenizer, model_config, sampling):
    """Every task must fit the context beside a whole response, before any weights are loaded."""
    room = prefix_room(model_config, tokenizer, sampling)
    for problem in problems:
        prefix_of(tokenizer, problem, None, None, room)
