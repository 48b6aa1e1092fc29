"""A run folder: settings, logs, checkpoints, curves. train.py writes it; report.py and eval.py read parts of it.

    config.json         settings, versions, commit, machine
    metrics.jsonl       a line a step, and eval.jsonl a line an evaluation; trees.jsonl whole trees of a few prompts a step
    checkpoints/step-N  Hugging Face format in fp32, with optimizer.pt (and adapters.pt, see lora.py, or head.pt, see comparators/) beside it
    curves.png          reward and solved share by turn

Whatever carries its final name is whole: it was written beside and renamed. Under torchrun rank 0 writes; a folder that several
machines are to resume from must lie on a file system that they share. Leaves out: any upload.
"""
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from lora import adapter_state, merged
from models import TINY, one_line
from problems import BadInput
from sharding import whole_optimizer_state, whole_state


# ---------------------------------------------------------------- the folder and its logs

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


# ---------------------------------------------------------------- other loggers

def check_loggers(run):
    """Raises BadInput if a logger is asked for and its package is not there."""
    for package in ("tensorboard", "wandb"):
        try:
            if run[package]:
                importlib.import_module(package)
        except ImportError:
            raise BadInput(f"--{package} needs the package {package}: pip install {package}, or leave the flag out") from None


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


# ---------------------------------------------------------------- checkpoints

HEADS = ("value_head.", "verifier.")  # what comparators add to a model: saved apart, for the checkpoint is a plain model to others


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
    adapters = adapter_state(model)
    weights = merged(model) if adapters else whole_state(model)  # by all processes together
    head = {name: weights.pop(name) for name in list(weights) if name.startswith(HEADS)}
    moments = whole_optimizer_state(model, optimizer)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    try:
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part, state_dict=weights)
        if adapters:  # the merged weights are for others; a resumed run starts from base and adapters
            torch.save(adapters, part / "adapters.pt")
        if head:
            torch.save(head, part / "head.pt")
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


# ---------------------------------------------------------------- the end of a run

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


def final_table(scores):
    """Held-out pass@1 before and after, as text."""
    header = "held-out pass@1  " + "  ".join(f"Iter-{k + 1:<2}" for k in range(len(scores[0][1])))
    return "\n".join([header] + [f"{name:<15}" + "".join(f"{value:8.1f}" for value in row) for name, row in scores])


def report(folder):
    draw_curves(folder)
    if scores := read_log(folder / "eval.jsonl"):
        print(final_table([("before", scores[0]["iter"]), ("after", scores[-1]["iter"])]))
    print(f"run folder: {folder}")
