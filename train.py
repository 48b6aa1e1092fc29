"""Train a Hugging Face causal LM with MURPHY.

    python train.py                                                    the embedded default: tiny/, on a laptop
    python train.py --model DIR --dataset problems.jsonl --steps 200   your model, your problems
    torchrun --nproc_per_node 8 train.py --model allenai/OLMo-2-1124-7B-Instruct
    python train.py --resume runs/NAME                                 go on after the newest whole checkpoint

A run folder holds config.json, metrics.jsonl (a line a step), trees.jsonl (whole trees of a few prompts a step), eval.jsonl,
curves.png, and checkpoints/step-N (Hugging Face format in fp32, with optimizer.pt beside it). report.py makes a page of it.

Under torchrun on GPUs a model of more than a billion parameters is sharded (--shard, sharding.py); a smaller one is replicated: every
process then holds it in fp32 with its Adam state (16 bytes a parameter, and 4 more for the reference model where beta > 0).
Bad input ends with one sentence and exit code 2.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not starve the programs being run
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import importlib
import json
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from executor import Executor
from murphy import MurphyConfig, all_reduce, autocast, hidden_states, murphy_step, pack
from problems import BadInput, load_problems
from rollout import evaluate, prefix_of, prefix_room
from sharding import is_sharded, load_optimizer_state, shard, unsharded, whole_optimizer_state, whole_state

TINY = Path(__file__).resolve().parent / "tiny"
EMBEDDED = dict(learning_rate=5e-4, beta=0.0, steps=30, max_new_tokens=48, prompts_per_step=8)  # defaults with tiny/


# ---------------------------------------------------------------- command line

RUN_FLAGS = [  # name, type, default, help
    ("model", str, "tiny", "Hugging Face name or folder of a causal LM with a chat template; tiny is the embedded default"),
    ("dataset", str, None, "training problems: tiny, a .jsonl/.json/.gz/.parquet file in KodCode, MBPP or our own fields, or a Hub name "
                           "(default: tiny with the tiny model, else KodCode/KodCode-V1; the paper trains on KodCode)"),
    ("max_problems", int, 1000, "problems taken from the data set, chosen by seed"),
    ("eval_dataset", str, None, "held-out problems, as --dataset (default: tiny's own with the tiny model, else none)"),
    ("eval_problems", int, None, "evaluate on the first N held-out problems only"),
    ("eval_every", int, 0, "evaluate every N steps as well; 0: before and after the run only"),
    ("eval_iterations", int, 3, "attempts per problem in evaluation: Iter-1 ... Iter-N; the paper reports 1, 3 and 5"),
    ("out", str, None, "run folder (default: runs/ and a name from the time and the settings)"),
    ("save_every", int, 50, "checkpoint every N steps, and at the end"),
    ("keep", int, 2, "checkpoints kept"),
    ("log_trees", int, 2, "prompts per step whose whole trees go to trees.jsonl"),
    ("workers", int, None, "executor processes per rank (default: one per core, shared between the ranks of a machine)"),
    ("shard", str, "auto", "under torchrun: full shards weights, gradients and Adam state over the processes (FSDP2), none copies them, "
                           "auto is full for more than a billion parameters on GPUs"),
]


SWITCHES = {"gradient_checkpointing": None, "cpu_offload": False, "tensorboard": False, "wandb": False}
BESIDE_RESUME = ["steps", "shard", "cpu_offload", "gradient_checkpointing", "workers"]


def flag(name):
    return "--" + name.replace("_", "-")


def build_parser():
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_argument_group("run")
    for name, kind, default, text in RUN_FLAGS:
        run.add_argument(flag(name), type=kind, help=text + (f" (default {default})" if default is not None else ""))
    run.add_argument("--resume", metavar="RUN", help="go on with this run folder and its settings, on any number of processes; beside it "
                     "only --steps, and what leaves the results alone: " + ", ".join(map(flag, BESIDE_RESUME[1:])))
    run.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=None, help="recompute activations in the "
                     "backward pass: less memory, about a third more time (default: for more than a billion parameters)")
    run.add_argument("--cpu-offload", action="store_true", default=None, help="with --shard full, keep the shards in the host's memory: "
                     "the least GPU memory, slower steps")
    run.add_argument("--tensorboard", action="store_true", default=None, help="log the metrics to RUN/tensorboard as well")
    run.add_argument("--wandb", action="store_true", default=None, help="log the metrics to Weights & Biases as well")
    groups = {"run": run}
    for f in fields(MurphyConfig):
        name = f.metadata["group"]
        groups.setdefault(name, None)
        groups[name] = groups[name] or parser.add_argument_group(name)
        tiny = f", with the tiny model {EMBEDDED[f.name]}" if f.name in EMBEDDED else ""
        groups[name].add_argument(flag(f.name), type=f.type, choices=f.metadata["choices"],
                                  help=f"{f.metadata['help']} (default {f.default}{tiny})".replace("%", "%%"))
    return parser


def settings_of(argv):
    """Parsed flags -> (run settings dict, MurphyConfig, folder to resume or None)."""
    given = {k: v for k, v in vars(build_parser().parse_args(argv)).items() if v is not None}
    resume = given.pop("resume", None)
    if resume is not None:
        return resumed_settings(Path(resume), given)
    run = {name: default for name, _, default, _ in RUN_FLAGS} | SWITCHES
    config = {f.name: f.default for f in fields(MurphyConfig)}
    embedded = given.get("model", "tiny") == "tiny"
    config |= EMBEDDED if embedded else {}
    run |= {k: v for k, v in given.items() if k in run}
    config |= {k: v for k, v in given.items() if k in config}
    run["dataset"] = run["dataset"] or ("tiny" if embedded else "KodCode/KodCode-V1")
    run["eval_dataset"] = run["eval_dataset"] or ("tiny" if embedded else None)
    return check_run(run), checked(MurphyConfig(**config)), None


def resumed_settings(folder, given):
    if refused := sorted(set(given) - set(BESIDE_RESUME)):
        raise BadInput(f"--resume goes on with the settings of {folder}; leave out {', '.join(map(flag, refused))} "
                       f"(only {', '.join(map(flag, BESIDE_RESUME))} may be given)")
    try:
        saved = json.loads((folder / "config.json").read_text())
        config = MurphyConfig(**saved["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder} is no run folder of train.py ({error}); give the folder that holds config.json") from None
    if "RANK" not in os.environ:
        saved["run"]["shard"] = "auto"  # it was sharded, and now there is one process
    defaults = {name: default for name, _, default, _ in RUN_FLAGS} | SWITCHES  # an older run may lack a setting
    run = check_run(defaults | saved["run"] | {k: v for k, v in given.items() if k != "steps"})
    return run, checked(replace(config, steps=given.get("steps", config.steps))), folder


def checked(config):
    config.check()
    return config


def check_run(run):
    for name, low in dict(max_problems=1, eval_problems=1, eval_every=0, eval_iterations=1, save_every=1, keep=1, log_trees=0, workers=1).items():
        if run[name] is not None and run[name] < low:
            raise BadInput(f"{flag(name)} is {run[name]}; it must be at least {low}")
    if run["shard"] not in ("auto", "none", "full"):
        raise BadInput(f"--shard is {run['shard']}; choose one of auto, none, full")
    if run["shard"] == "full" and "RANK" not in os.environ:
        raise BadInput("--shard full needs several processes; start train.py with torchrun --nproc_per_node N")
    if run["cpu_offload"] and run["shard"] == "none":
        raise BadInput("--cpu-offload moves shards to the host, and --shard none makes none; use --shard full")
    return run


def check_loggers(run):
    """Raises BadInput if a logger is asked for and its package is not there."""
    for package in ("tensorboard", "wandb"):
        try:
            if run[package]:
                importlib.import_module(package)
        except ImportError:
            raise BadInput(f"--{package} needs the package {package}: pip install {package}, or leave the flag out") from None


# ---------------------------------------------------------------- processes

def start_processes():
    """Join the process group if torchrun started us. Returns (rank, world, device)."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return 0, 1, torch.device("cuda" if cuda else "cpu")
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")  # gloo too: offloaded shards lie on the CPU
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local) if cuda else torch.device("cpu")


def from_first(value):
    """The value that rank 0 has, on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def check_replicas(model):
    """Replicas that drift apart train nothing in particular: stop at the first step after which weights differ."""
    if dist.is_initialized() and not is_sharded(model):
        total = sum(p.detach().double().sum() for p in model.parameters())
        low, high = -all_reduce(-total, "max"), all_reduce(total.clone(), "max")
        if low != high:
            raise RuntimeError(f"the weights of the processes differ: checksums from {low.item()} to {high.item()}")


# ---------------------------------------------------------------- model and data

def load_tokenizer(name):
    path = str(TINY) if name == "tiny" else name
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise BadInput(f"there is no model folder {path}; give a folder with config.json and weights, or a Hub name")
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"cannot load the model {name}: {one_line(error)}") from None
    if not tokenizer.chat_template:
        raise BadInput(f"the model {name} has no chat template; use an instruct model, or add chat_template to its tokenizer")
    return tokenizer, config, path


def one_line(error):
    return " ".join(str(error).split())[:300]


def load_model(path):
    """On the CPU: fp32 weights (masters of bf16 compute on CUDA), sdpa attention (the packed mask needs it), dropout off."""
    hf_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
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
        if not torch.allclose(head(hidden), logits, rtol=1e-3, atol=1e-3):
            raise BadInput(f"{type(model).__name__} changes its logits behind the language-model head, which the loss here does not do; "
                           "use another model")


def place_model(path, device, run):
    """load_model on the device: whole, or sharded as --shard says. The processes of a machine load one after another, so that
    the host holds one whole model at a time."""
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
        if turn == int(os.environ.get("LOCAL_RANK", 0)):
            model = load_model(path)
            model = shard(model, device.type, run["cpu_offload"]) if wants_shards(model, run, device) else model.to(device)
        if dist.is_initialized():
            dist.barrier()
    return model


BIG = 1_000_000_000  # parameters


def size_of(model):
    return sum(p.numel() for p in model.parameters())


def wants_shards(model, run, device):
    auto = device.type == "cuda" and size_of(model) > BIG and dist.is_initialized() and dist.get_world_size() > 1
    return run["shard"] == "full" or run["shard"] == "auto" and (auto or dist.is_initialized() and run["cpu_offload"])


class Config:
    """Stands for a model that is not loaded yet where only its config is asked for."""
    def __init__(self, config):
        self.config = config


def check_prompts(problems, tokenizer, model_config, sampling):
    """Every task must fit the context beside a whole response, before any weights are loaded."""
    room = prefix_room(Config(model_config), tokenizer, sampling)
    for problem in problems:
        prefix_of(tokenizer, problem, None, None, room)


def problems_of_step(count, per_step, step, seed):
    """Indices of the problems of a step: epochs over a shuffle that depends on the seed and the epoch alone."""
    indices = []
    for position in range(step * per_step, (step + 1) * per_step):
        order = list(range(count))
        random.Random(f"{seed} {position // count}").shuffle(order)
        indices.append(order[position % count])
    return indices


# ---------------------------------------------------------------- run folder

def environment(world):
    """Versions, commit and machine, as a dict of str: what a reader of the run must know beside its settings."""
    try:
        git = subprocess.run(["git", "-C", str(TINY.parent), "describe", "--always", "--dirty", "--abbrev=12"],
                             capture_output=True, text=True).stdout.strip()
    except OSError:
        git = ""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {"started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "commit": git or "unknown", "python": platform.python_version(),
            "torch": torch.__version__, "transformers": transformers.__version__, "processes": str(world),
            "machine": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores{gpu}"}


def new_folder(run, config, world):
    what = [config.method] + ([config.credit, config.prune] if config.method == "murphy" else [])
    name = time.strftime("%Y%m%d-%H%M%S-") + "-".join(what) + f"-seed{config.seed}"
    folder = Path(run["out"] or Path("runs") / name)
    if (folder / "config.json").exists():
        raise BadInput(f"{folder} holds a run already; go on with it by --resume {folder}, or give another --out")
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_beside(folder / "config.json", json.dumps(
        {"run": run, "config": asdict(config), "environment": environment(world)}, indent=1) + "\n")
    return folder


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path, record):
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def cut_log(path, steps):
    """Drop lines of steps at or after `steps` (written after the checkpoint we go on from), and a half-written last line."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_beside(path, "".join(line for line in lines if json.loads(line)["step"] < steps))


def write_beside(path, text):
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


def open_loggers(run, config, folder, done):
    """What --tensorboard and --wandb ask for, as functions (step, {name: number}). metrics.jsonl stays the source of truth."""
    loggers = []
    if run["tensorboard"]:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done)

        def tensorboard(step, values):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()
        loggers.append(tensorboard)
    if run["wandb"]:
        import wandb
        board = wandb.init(project="murphy", name=folder.name, id=folder.name, resume="allow", dir=str(folder),
                           config=run | asdict(config))
        loggers.append(lambda step, values: board.log(values, step=step))
    return loggers


def log(loggers, step, values):
    """Numbers only: a metric that is not there (None) is left out, not 0."""
    for logger in loggers:
        logger(step, {name: float(value) for name, value in values.items() if value is not None})


def tree_record(tree, step, tokenizer):
    """A whole tree as plain data: the tests, per group the prompt as the model read it (chat markup included), and the nodes."""
    nodes = [{"parent": n.parent, "turn": n.turn, "group": n.group, "text": n.text, "code": n.code, "reward": n.reward,
              "credit": n.credit, "advantage": n.advantage, "truncated": n.truncated, "tokens": len(n.response_ids),
              "status": n.verdict.status, "feedback": n.verdict.feedback()} for n in tree.nodes]
    groups = [{"parent": g.parent, "truncated": g.truncated, "prompt": tokenizer.decode(g.prefix_ids)} for g in tree.groups]
    return {"step": step, "task_id": tree.problem.task_id, "prompt": tree.problem.prompt,
            "tests": [shown_test(test) for test in tree.problem.tests], "groups": groups, "nodes": nodes}


def shown_test(test):
    """A test in words, for people."""
    shown = {"stdin": f"stdin {test.input!r} -> {test.expected!r}",
             "call": f"{test.entry_point}({', '.join(test.input.splitlines())}) == {test.expected}"}
    return shown.get(test.kind, test.code)


def checkpoint_bytes(model):
    return size_of(model) * 12  # fp32 weights, two Adam moments


def check_disk(folder, model):
    free, need = shutil.disk_usage(folder).free, 2 * checkpoint_bytes(model)
    if free < need:
        raise BadInput(f"{folder} has {free / 2**30:.1f} GiB free and its checkpoints need {need / 2**30:.1f}; "
                       "free some space, or give --out on another disk")


def save_checkpoint(folder, model, tokenizer, optimizer, step, keep):
    """Written beside and renamed, so that whatever carries the final name is whole; then the oldest go."""
    final = folder / "checkpoints" / f"step-{step:06d}"
    part = final.with_name(final.name + ".part")
    weights, moments = whole_state(model), whole_optimizer_state(model, optimizer)  # by all processes together
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    try:
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part, state_dict=weights)
        tokenizer.save_pretrained(part)
        torch.save(moments, part / "optimizer.pt")
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    except Exception as error:  # safetensors, torch and the OS each raise their own kind for a full disk
        shutil.rmtree(part, ignore_errors=True)
        raise BadInput(f"cannot write the checkpoint {final}: {one_line(error)}; earlier checkpoints are whole, so free some "
                       f"space and run train.py --resume {folder}") from None
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints(folder):
    return sorted(p for p in (folder / "checkpoints").glob("step-*") if not p.name.endswith(".part"))


# ---------------------------------------------------------------- evaluation and logs

def held_out_scores(model, tokenizer, problems, executor, run, config, rank, world, bar=None):
    """Iter-1 ... Iter-k pass@1 in percent over all processes, greedy."""
    sampling = replace(config.sampling, temperature=0.0)
    with unsharded(model), autocast(model):
        _, solved = evaluate(model, tokenizer, problems[rank::world], executor, run["eval_iterations"], sampling, bar=bar)
    counts = torch.tensor([[float(s) for s in row] for row in solved] or [[0.0] * run["eval_iterations"]], dtype=torch.float64)
    return [round(100 * c / len(problems), 2) for c in all_reduce(counts.sum(0)).tolist()]


def final_table(scores):
    """Held-out pass@1 before and after, as text."""
    header = "held-out pass@1  " + "  ".join(f"Iter-{k + 1:<2}" for k in range(len(scores[0][1])))
    return "\n".join([header] + [f"{name:<15}" + "".join(f"{value:8.1f}" for value in row) for name, row in scores])


def warn(metrics, warned):
    """A loss of 0 looks healthy; say once why nothing can be learned."""
    causes = {"every response was cut: raise --max-new-tokens": metrics["truncated_share"] == 1,
              "every group is flat (equal credits), so there is no gradient: try other problems or a larger --group-size":
                  metrics["flat_groups"] == 1,
              "the executor failed on every program: see its note at the start": metrics["infra"] == metrics["nodes"]}
    for cause, holds in causes.items():
        if holds and cause not in warned:
            warned.add(cause)
            tqdm.write(f"warning: {cause}", file=sys.stderr)


def progress(bar, metrics):
    shown = {"reward": metrics["reward_turn1"], "solved": metrics["solved_prompts"], "tok/s": metrics["tokens_per_second"]}
    bar.set_postfix({k: "-" if v is None else f"{v:.0f}" if k == "tok/s" else f"{v:.2f}" for k, v in shown.items()})
    bar.update()


# ---------------------------------------------------------------- the run

def train(argv):
    run, config, resumed = settings_of(argv)
    check_loggers(run)
    rank, world, device = start_processes()
    first = rank == 0
    if run["cpu_offload"] and device.type == "cpu":
        raise BadInput("--cpu-offload moves shards from GPUs to the host, and there is no GPU here; leave it out")
    tokenizer, model_config, path = load_tokenizer(run["model"])
    problems = load_problems(run["dataset"], limit=run["max_problems"], seed=config.seed)
    held_out = load_problems(run["eval_dataset"], limit=run["eval_problems"], split="heldout") if run["eval_dataset"] else []
    check_prompts(problems + held_out, tokenizer, model_config, config.sampling)
    folder = resumed or from_first(new_folder(run, config, world) if first else None)
    last = checkpoints(folder)[-1] if checkpoints(folder) else None
    done = int(last.name.split("-")[1]) if last else 0

    # fp32 weights; the reference is the model before training, also after a resume
    model = place_model(last or path, device, run)
    reference = place_model(path, device, run).requires_grad_(False) if config.beta > 0 else None
    check_disk(folder, model)
    if run["gradient_checkpointing"] or run["gradient_checkpointing"] is None and size_of(model) > BIG:
        model.activation_checkpointing_enable()
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    if last:
        load_optimizer_state(model, optimizer, torch.load(last / "optimizer.pt", mmap=True))
    if first and resumed:
        for name in ("metrics.jsonl", "trees.jsonl"):
            cut_log(folder / name, done)
        cut_log(folder / "eval.jsonl", done + 1)  # of the state after that many steps
    evaluated = set(from_first([r["step"] for r in read_log(folder / "eval.jsonl")]))
    loggers = open_loggers(run, config, folder, done) if first else []
    stop = StopFlag()
    workers = run["workers"] or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    with (Executor(workers) as executor,
          tqdm(total=config.steps, initial=done, disable=not first, desc=config.method, dynamic_ncols=True) as bar):
        def held_out_eval(step):
            if not held_out or step in evaluated:
                return
            scores = held_out_scores(model, tokenizer, held_out, executor, run, config, rank, world, bar)
            bar.set_description("evaluated")
            if first:
                append(folder / "eval.jsonl", {"step": step, "iter": scores})
                log(loggers, step, {f"held_out_iter{k + 1}": score for k, score in enumerate(scores)})
                tqdm.write(f"step {step}: held-out pass@1 " + ", ".join(f"Iter-{k + 1} {s:.1f}" for k, s in enumerate(scores)))

        if done == 0 or run["eval_every"] and done % run["eval_every"] == 0:
            held_out_eval(done)  # a kill may have come between a checkpoint and its evaluation
        bar.unpause()  # the pace is that of steps, without the evaluation before them
        bad_steps, warned = 0, set()
        for step in range(done, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1))
            chosen = problems_of_step(len(problems), config.prompts_per_step, step, config.seed)[rank::world]
            trees, metrics = murphy_step(model, reference, tokenizer, [problems[i] for i in chosen], executor, optimizer, config,
                                         seed=(config.seed << 32) + step * world + rank, bar=bar)
            bar.set_description(config.method)
            check_replicas(model)
            bad_steps = bad_steps + 1 if metrics["skipped"] else 0
            if first:
                append(folder / "metrics.jsonl", {"step": step} | metrics)
                log(loggers, step, metrics)
                for tree in trees[:run["log_trees"]]:
                    append(folder / "trees.jsonl", tree_record(tree, step, tokenizer))
                warn(metrics, warned)
                progress(bar, metrics)
            if bad_steps == 3:
                raise BadInput(f"the loss was not finite in three steps running; {folder}/metrics.jsonl has them. "
                               "Lower --learning-rate and start again from the last checkpoint")
            ending = stop.asked() or step + 1 == config.steps
            if ending or (step + 1) % run["save_every"] == 0:
                save_checkpoint(folder, model, tokenizer, optimizer, step + 1, run["keep"])
            if ending and step + 1 < config.steps:
                bar.close()
                return print(f"stopped by a signal after step {step + 1}; go on with --resume {folder}") if first else None
            if run["eval_every"] and (step + 1) % run["eval_every"] == 0 and step + 1 < config.steps:
                held_out_eval(step + 1)
        bar.close()
        held_out_eval(config.steps)
    if first:
        report(folder)
    if dist.is_initialized():
        dist.barrier()  # a process that leaves early breaks the connections of the others


def draw_curves(folder):
    """curves.png: reward and solved share by turn, over steps; without matplotlib one sentence instead."""
    try:
        import matplotlib
    except ImportError:
        return print("curves.png was not drawn, because matplotlib is not installed: pip install matplotlib", file=sys.stderr)
    matplotlib.use("Agg")
    from matplotlib import pyplot
    metrics = read_log(folder / "metrics.jsonl")
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    for axis, name in zip(axes, ("reward", "solved")):
        for turn in range(1, 10):
            points = [(m["step"], m[f"{name}_turn{turn}"]) for m in metrics if m.get(f"{name}_turn{turn}") is not None]
            if points:
                axis.plot(*zip(*points), label=f"turn {turn}")
        axis.set(xlabel="step", title=f"{name} in training, by turn", ylim=(0, 1))
        axis.legend()
    figure.savefig(folder / "curves.png", dpi=100)
    pyplot.close(figure)


def report(folder):
    draw_curves(folder)
    if scores := read_log(folder / "eval.jsonl"):
        print(final_table([("before", scores[0]["iter"]), ("after", scores[-1]["iter"])]))
    print(f"run folder: {folder}")


class StopFlag:
    """Set by SIGTERM; asked() is the same on every process."""
    def __init__(self):
        self.set = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "set", True))

    def asked(self):
        return bool(all_reduce(torch.tensor(float(self.set)), "max"))


def main(argv=None):
    try:
        train(argv)
    except BadInput as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (28, 122):  # ENOSPC, EDQUOT
            raise
        print(f"train.py: the disk is full ({error.filename or 'run folder'}); free some space and use --resume", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
