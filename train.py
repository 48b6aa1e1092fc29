"""Train a Hugging Face causal LM with MURPHY.

    python train.py                                                    the embedded default: tiny/, on a laptop
    python train.py --model DIR --dataset problems.jsonl --steps 200   your model, your problems
    torchrun --nproc_per_node 8 train.py --model allenai/OLMo-2-1124-7B-Instruct
    python train.py --model NAME --lora-rank 16                        train adapters only, see lora.py
    python train.py --plan --model NAME --gpus 8 --gpu-gib 80          the memory it needs, without a GPU or any weights
    python train.py --resume runs/NAME                                 go on after the newest whole checkpoint

A run folder holds config.json, metrics.jsonl (a line a step), trees.jsonl (whole trees of a few prompts a step), eval.jsonl,
curves.png, and checkpoints/step-N (Hugging Face format in fp32, with optimizer.pt and LoRA's adapters.pt beside it).

What it simplifies: every process holds the whole model in fp32 with its Adam state (16 bytes a parameter, and 4 more for
the reference model where beta > 0), so the largest model is what one GPU holds. Bad input ends with one sentence and exit code 2.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not starve the programs being run
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from executor import Executor
from lora import adapter_state, add_adapters, merged
from murphy import MurphyConfig, all_reduce, autocast, murphy_step
from plan import GIB, Setup, advice, memory_plan, parameter_count, plan_text
from problems import BadInput, load_problems
from rollout import evaluate, prefix_of, prefix_room

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
    ("lora_rank", int, None, "train adapters of this rank beside the frozen weights (lora.py), so that 7B fits 24-48 GB; the default "
                             "learning rate is then ten times as high (default: off)"),
    ("lora_alpha", float, None, "adapters are scaled by alpha / rank (default: twice the rank)"),
    ("out", str, None, "run folder (default: runs/ and a name from the time and the settings)"),
    ("save_every", int, 50, "checkpoint every N steps, and at the end"),
    ("keep", int, 2, "checkpoints kept"),
    ("log_trees", int, 2, "prompts per step whose whole trees go to trees.jsonl"),
    ("workers", int, None, "executor processes per rank (default: one per core, shared between the ranks of a machine)"),
]


def build_parser():
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_argument_group("run")
    for name, kind, default, text in RUN_FLAGS:
        run.add_argument("--" + name.replace("_", "-"), type=kind, help=text + (f" (default {default})" if default is not None else ""))
    run.add_argument("--resume", metavar="RUN", help="go on with this run folder, with its settings; only --steps may be given beside it")
    run.add_argument("--gradient-checkpointing", action="store_true", default=None, help="recompute activations in the backward pass: "
                     "less memory, about a third more time")
    run.add_argument("--plan", action="store_true", default=None, help="print the memory plan of this run (plan.py) and stop")
    run.add_argument("--gpus", type=int, help="GPUs that the plan is for (default: those of this machine, or 1)")
    run.add_argument("--gpu-gib", type=float, help="memory of one GPU in GiB, for the plan (default: this machine's, or 80); in a run it "
                     "replaces the free memory that the plan is held against")
    groups = {"run": run}
    for f in fields(MurphyConfig):
        name = f.metadata["group"]
        groups.setdefault(name, None)
        groups[name] = groups[name] or parser.add_argument_group(name)
        tiny = f", with the tiny model {EMBEDDED[f.name]}" if f.name in EMBEDDED else ""
        groups[name].add_argument("--" + f.name.replace("_", "-"), type=f.type, choices=f.metadata["choices"],
                                  help=f"{f.metadata['help']} (default {f.default}{tiny})".replace("%", "%%"))
    return parser


def settings_of(argv):
    """Parsed flags -> (run settings dict, MurphyConfig, folder to resume or None)."""
    given = {k: v for k, v in vars(build_parser().parse_args(argv)).items() if v is not None}
    resume = given.pop("resume", None)
    if resume is not None:
        return resumed_settings(Path(resume), given)
    run = {name: default for name, _, default, _ in RUN_FLAGS} | {"gradient_checkpointing": False, "gpu_gib": None}
    config = {f.name: f.default for f in fields(MurphyConfig)}
    embedded = given.get("model", "tiny") == "tiny"
    config |= EMBEDDED if embedded else {}
    if given.get("lora_rank"):
        config["learning_rate"] *= 10
    run |= {k: v for k, v in given.items() if k in run}
    config |= {k: v for k, v in given.items() if k in config}
    run["dataset"] = run["dataset"] or ("tiny" if embedded else "KodCode/KodCode-V1")
    run["eval_dataset"] = run["eval_dataset"] or ("tiny" if embedded else None)
    return check_run(run), checked(MurphyConfig(**config)), None


def resumed_settings(folder, given):
    if set(given) - {"steps"}:
        flags = ", ".join("--" + k.replace("_", "-") for k in sorted(set(given) - {"steps"}))
        raise BadInput(f"--resume goes on with the settings of {folder}; leave out {flags} (only --steps may be given)")
    try:
        saved = json.loads((folder / "config.json").read_text())
        config = MurphyConfig(**saved["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder} is no run folder of train.py ({error}); give the folder that holds config.json") from None
    return {name: default for name, _, default, _ in RUN_FLAGS} | saved["run"], checked(replace(config, **given)), folder


def checked(config):
    config.check()
    return config


def check_run(run):
    for name, low in dict(max_problems=1, eval_problems=1, eval_every=0, eval_iterations=1, save_every=1, keep=1, log_trees=0, workers=1,
                          lora_rank=1).items():
        if run[name] is not None and run[name] < low:
            raise BadInput(f"--{name.replace('_', '-')} is {run[name]}; it must be at least {low}")
    if run["lora_alpha"] is not None and not (run["lora_rank"] and 0 < run["lora_alpha"] < float("inf")):
        raise BadInput(f"--lora-alpha is {run['lora_alpha']}; it must be above 0, and go with --lora-rank")
    return run


# ---------------------------------------------------------------- processes

def start_processes():
    """Join the process group if torchrun started us. Returns (rank, world, device)."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return 0, 1, torch.device("cuda" if cuda else "cpu")
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local) if cuda else torch.device("cpu")


def from_first(value):
    """The value that rank 0 has, on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def check_replicas(model):
    """Replicas that drift apart train nothing in particular: stop at the first step after which weights differ."""
    if dist.is_initialized():
        total = sum(p.detach().double().sum() for p in model.parameters())
        low, high = -all_reduce(-total, "max"), all_reduce(total.clone(), "max")
        if low != high:
            raise RuntimeError(f"the weights of the processes differ: checksums from {low.item()} to {high.item()}")


# ---------------------------------------------------------------- model and data

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


def load_model(path, device, dtype=torch.float32):
    """fp32 weights (masters of bf16 compute on CUDA), sdpa attention (the packed mask needs it), dropout off."""
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
    return model.to(device).eval()


def load_trained(path, last, device, run, config):
    """The model to train, at checkpoint `last` if there is one, and its reference (the model before training; None if beta is 0)."""
    if not run["lora_rank"]:
        return load_model(last or path, device), load_model(path, device).requires_grad_(False) if config.beta > 0 else None
    frozen = torch.bfloat16 if device.type == "cuda" else torch.float32  # never updated, so no fp32 master is needed
    model = add_adapters(load_model(path, device, frozen), run["lora_rank"], run["lora_alpha"] or 2 * run["lora_rank"], config.seed)
    if last:
        model.load_state_dict(torch.load(last / "adapters.pt", map_location=device), strict=False)
    return model, model if config.beta > 0 else None


def enable_checkpointing(model):
    """Recompute the blocks' activations in the backward pass.

    Checkpoints that are not re-entrant need no input with gradients; such inputs would be leaves in sampling, and autocast
    keeps its copy of every leaf: of the embedding of each sampled token, until the rollout ends.
    """
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    model.train()


def memory_setup(run, config, gpus, cuda):
    return Setup(gpus=gpus, cuda=cuda, lora_rank=run["lora_rank"], checkpointing=run["gradient_checkpointing"], reference=config.beta > 0,
                 group_size=config.group_size, max_new_tokens=config.max_new_tokens, batch_tokens=config.batch_tokens,
                 row_tokens=config.row_tokens)


def print_plan(argv):
    """--plan: the memory plan of a run with these flags, from the model's config alone."""
    asked, (run, config, _) = build_parser().parse_args(argv), settings_of(argv)
    gpus = asked.gpus if asked.gpus is not None else max(1, torch.cuda.device_count())
    here = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 80.0
    gib = asked.gpu_gib if asked.gpu_gib is not None else here
    if gpus < 1 or not gib > 0:
        raise BadInput(f"--gpus is {gpus} and --gpu-gib is {gib:g}; they must be at least 1, and above 0")
    model_config, _ = load_config(run["model"])
    print(f"{run['model']}: {parameter_count(model_config) / 1e9:.3f} billion parameters")
    print(plan_text(model_config, memory_setup(run, config, gpus, cuda=True), gib))


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
    setup = memory_setup(run, config, world, cuda)
    need = memory_plan(model_config, setup)["total"] / GIB
    if need > free:
        said = f"training {run['model']} needs about {need:.1f} GiB a process, and {free:.1f} are free"
        if cuda or need > 2 * free:
            raise BadInput(f"{said}. {advice(model_config, setup, free)} (--plan shows the parts)")
        print(f"warning: {said}", file=sys.stderr)


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

def new_folder(run, config):
    what = [config.method] + ([config.credit, config.prune] if config.method == "murphy" else [])
    name = time.strftime("%Y%m%d-%H%M%S-") + "-".join(what) + f"-seed{config.seed}"
    folder = Path(run["out"] or Path("runs") / name)
    if (folder / "config.json").exists():
        raise BadInput(f"{folder} holds a run already; go on with it by --resume {folder}, or give another --out")
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"run": run, "config": asdict(config)}, indent=1) + "\n")
    return folder


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


def tree_record(tree, step):
    """A whole tree as plain data, text included."""
    nodes = [{"parent": n.parent, "turn": n.turn, "text": n.text, "code": n.code, "reward": n.reward, "credit": n.credit,
              "advantage": n.advantage, "truncated": n.truncated, "tokens": len(n.response_ids), "status": n.verdict.status,
              "feedback": n.verdict.feedback()} for n in tree.nodes]
    return {"step": step, "task_id": tree.problem.task_id, "prompt": tree.problem.prompt, "nodes": nodes}


def checkpoint_bytes(model):
    return sum(p.numel() * (12 if p.requires_grad else 4) for p in model.parameters())  # fp32 weights, two Adam moments


def check_disk(folder, model):
    free, need = shutil.disk_usage(folder).free, 2 * checkpoint_bytes(model)
    if free < need:
        raise BadInput(f"{folder} has {free / 2**30:.1f} GiB free and its checkpoints need {need / 2**30:.1f}; "
                       "free some space, or give --out on another disk")


def save_checkpoint(folder, model, tokenizer, optimizer, step, keep):
    """Written beside and renamed, so that whatever carries the final name is whole; then the oldest go."""
    final = folder / "checkpoints" / f"step-{step:06d}"
    part = final.with_name(final.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part, state_dict=merged(model))
        if adapter_state(model):  # the merged weights are for others; a resumed run starts from base and adapters
            torch.save(adapter_state(model), part / "adapters.pt")
        tokenizer.save_pretrained(part)
        torch.save(optimizer.state_dict(), part / "optimizer.pt")
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

def held_out_scores(model, tokenizer, problems, executor, run, config, rank, world):
    """Iter-1 ... Iter-k pass@1 in percent over all processes, greedy."""
    sampling = replace(config.sampling, temperature=0.0)
    with autocast(model):
        _, solved = evaluate(model, tokenizer, problems[rank::world], executor, run["eval_iterations"], sampling)
    counts = torch.tensor([[float(s) for s in row] for row in solved] or [[0.0] * run["eval_iterations"]], dtype=torch.float64)
    return [round(100 * c / len(problems), 2) for c in all_reduce(counts.sum(0).to(model.device)).tolist()]


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
    rank, world, device = start_processes()
    first = rank == 0
    tokenizer, model_config, path = load_tokenizer(run["model"])
    problems = load_problems(run["dataset"], limit=run["max_problems"], seed=config.seed)
    held_out = load_problems(run["eval_dataset"], limit=run["eval_problems"], split="heldout") if run["eval_dataset"] else []
    check_prompts(problems + held_out, tokenizer, model_config, config.sampling)
    check_memory(run, config, model_config, device, world)
    folder = resumed or from_first(new_folder(run, config) if first else None)
    last = checkpoints(folder)[-1] if checkpoints(folder) else None
    done = int(last.name.split("-")[1]) if last else 0

    model, reference = load_trained(path, last, device, run, config)
    check_disk(folder, model)
    if run["gradient_checkpointing"]:
        enable_checkpointing(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
    if last:
        optimizer.load_state_dict(torch.load(last / "optimizer.pt", map_location=device))
    if first and resumed:
        for name in ("metrics.jsonl", "trees.jsonl"):
            cut_log(folder / name, done)
    stop = StopFlag()
    workers = run["workers"] or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    with (Executor(workers) as executor,
          tqdm(total=config.steps, initial=done, disable=not first, desc=config.method, dynamic_ncols=True) as bar):
        def held_out_eval(step):
            if not held_out:
                return
            scores = held_out_scores(model, tokenizer, held_out, executor, run, config, rank, world)
            if first:
                append(folder / "eval.jsonl", {"step": step, "iter": scores})
                tqdm.write(f"step {step}: held-out pass@1 " + ", ".join(f"Iter-{k + 1} {s:.1f}" for k, s in enumerate(scores)))

        if done == 0:
            held_out_eval(0)
        bar.unpause()  # the pace is that of steps, without the evaluation before them
        bad_steps, warned = 0, set()
        for step in range(done, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1))
            chosen = problems_of_step(len(problems), config.prompts_per_step, step, config.seed)[rank::world]
            trees, metrics = murphy_step(model, reference, tokenizer, [problems[i] for i in chosen], executor, optimizer, config,
                                         seed=(config.seed << 32) + step * world + rank)
            check_replicas(model)
            bad_steps = bad_steps + 1 if metrics["skipped"] else 0
            if first:
                append(folder / "metrics.jsonl", {"step": step} | metrics)
                for tree in trees[:run["log_trees"]]:
                    append(folder / "trees.jsonl", tree_record(tree, step))
                warn(metrics, warned)
                progress(bar, metrics)
            if bad_steps == 3:
                raise BadInput(f"the loss was not finite in three steps running; {folder}/metrics.jsonl has them. "
                               "Lower --learning-rate and start again from the last checkpoint")
            ending = stop.asked() or step + 1 == config.steps
            if ending or (step + 1) % run["save_every"] == 0:
                if first:
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
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
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
    if (folder / "eval.jsonl").exists():
        scores = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        print(final_table([("before", scores[0]["iter"]), ("after", scores[-1]["iter"])]))
    print(f"run folder: {folder}")


class StopFlag:
    """Set by SIGTERM; asked() is the same on every process."""
    def __init__(self):
        self.set = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "set", True))

    def asked(self):
        device = "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
        return bool(all_reduce(torch.tensor(float(self.set), device=device), "max"))


def main(argv=None):
    try:
        print_plan(argv) if build_parser().parse_args(argv).plan else train(argv)
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
