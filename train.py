"""Train a Hugging Face causal LM with MURPHY.

    python train.py                                                    the embedded default: tiny/, on a laptop
    python train.py --model DIR --dataset problems.jsonl --steps 200   your model, your problems
    torchrun --nproc_per_node 8 train.py --model allenai/OLMo-2-1124-7B-Instruct
    python train.py --model NAME --lora-rank 16                        train adapters only, see lora.py
    python train.py --plan --model NAME --gpus 8 --gpu-gib 80          the memory it needs, without a GPU or any weights
    python train.py --resume runs/NAME                                 go on after the newest whole checkpoint

The method is in murphy.py; here are the flags, the processes and the loop over steps. Models are loaded by models.py, the run folder is
written by runs.py, and report.py makes a page of it. Under torchrun on GPUs a model of more than a billion parameters is sharded
(--shard, sharding.py); a smaller one is copied to every process. Bad input ends with one sentence and exit code 2.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not starve the programs being run
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import random
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from comparators import mucode, reveal, rlef
from executor import Executor
from models import check_prompts, enable_checkpointing, load_config, load_tokenizer, load_trained, size_of, wants_checkpointing
from murphy import MurphyConfig, all_reduce, autocast, murphy_step
from plan import GIB, check_memory, memory_setup, parameter_count, plan_text
from problems import BadInput, load_problems
from rollout import evaluate
from runs import append, check_disk, check_loggers, checkpoints, cut_log, log, new_folder, open_loggers, read_log, report, save_checkpoint, tree_record
from sharding import is_sharded, load_optimizer_state, unsharded

EMBEDDED = dict(learning_rate=5e-4, beta=0.0, steps=30, max_new_tokens=48, prompts_per_step=8)  # defaults with tiny/


# ---------------------------------------------------------------- command line

RUN_FLAGS = [  # name, type, default, help
    ("model", str, "tiny", "Hugging Face name or folder of a causal LM with a chat template; tiny is the embedded default"),
    ("dataset", str, None, "training problems: tiny, a .jsonl/.json/.gz/.parquet file in KodCode, MBPP or our own fields, or a Hub name "
                           "(default: tiny with the tiny model, else KodCode/KodCode-V1; the paper trains on KodCode)"),
    ("max_problems", int, 1000, "problems taken from the data set, chosen by seed"),
    ("max_programs", int, None, "end the run after the step in which this many programs have been sampled, so that methods can be compared at "
                                "equal numbers (default: --steps alone decides)"),
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
    ("shard", str, "auto", "under torchrun: full shards weights, gradients and Adam state over the processes (FSDP2), none copies them, "
                           "auto is full for more than a billion parameters on GPUs"),
]
SWITCHES = {"gradient_checkpointing": None, "cpu_offload": False, "gpu_gib": None, "tensorboard": False, "wandb": False}
BESIDE_RESUME = ["steps", "shard", "cpu_offload", "gradient_checkpointing", "workers", "gpu_gib"]


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
    run.add_argument("--plan", action="store_true", default=None, help="print the memory plan of this run (plan.py) and stop")
    run.add_argument("--gpus", type=int, help="GPUs that the plan is for (default: those of this machine, or 1)")
    run.add_argument("--gpu-gib", type=float, help="memory of one GPU in GiB, for the plan (default: this machine's, or 80); in a run it "
                     "replaces the free memory that the plan is held against")
    run.add_argument("--tensorboard", action="store_true", default=None, help="log the metrics to RUN/tensorboard as well")
    run.add_argument("--wandb", action="store_true", default=None, help="log the metrics to Weights & Biases as well")
    groups = {"run": run}
    for f in fields(MurphyConfig):
        name = f.metadata["group"]
        groups.setdefault(name, None)
        groups[name] = groups[name] or parser.add_argument_group(name)
        tiny = f", with the tiny model {EMBEDDED[f.name]}" if f.name in EMBEDDED else ""
        kind = {"action": "store_true", "default": None} if f.type is bool else {"type": f.type, "choices": f.metadata["choices"]}
        groups[name].add_argument(flag(f.name), **kind,
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
    if given.get("lora_rank"):
        config["learning_rate"] *= 10
    run |= {k: v for k, v in given.items() if k in run}
    config |= {k: v for k, v in given.items() if k in config}
    run["dataset"] = run["dataset"] or ("tiny" if embedded else "KodCode/KodCode-V1")
    run["eval_dataset"] = run["eval_dataset"] or ("tiny" if embedded else None)
    if hasattr(COMPARATORS.get(config["method"]), "add_head") and run["lora_rank"]:
        raise BadInput(f"--method {config['method']} trains all weights; leave out --lora-rank")
    if config["method"] == "mucode":
        if given.get("beta"):
            raise BadInput("--method mucode has no KL term; leave out --beta")
        config["beta"] = 0.0
    return check_run(run, "plan" in given), checked(MurphyConfig(**config)), None


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


def check_run(run, planned=False):
    for name, low in dict(max_problems=1, max_programs=1, eval_problems=1, eval_every=0, eval_iterations=1, save_every=1, keep=1, log_trees=0, workers=1,
                          lora_rank=1).items():
        if run[name] is not None and run[name] < low:
            raise BadInput(f"{flag(name)} is {run[name]}; it must be at least {low}")
    if run["shard"] not in ("auto", "none", "full"):
        raise BadInput(f"--shard is {run['shard']}; choose one of auto, none, full")
    if run["lora_alpha"] is not None and not (run["lora_rank"] and 0 < run["lora_alpha"] < float("inf")):
        raise BadInput(f"--lora-alpha is {run['lora_alpha']}; it must be above 0, and go with --lora-rank")
    if run["lora_rank"] and (run["shard"] == "full" or run["cpu_offload"]):
        raise BadInput("--lora-rank trains copies of a frozen base, which are small; leave out --shard full and --cpu-offload")
    if run["shard"] == "full" and "RANK" not in os.environ and not planned:
        raise BadInput("--shard full needs several processes; start train.py with torchrun --nproc_per_node N")
    if run["cpu_offload"] and run["shard"] == "none":
        raise BadInput("--cpu-offload moves shards to the host, and --shard none makes none; use --shard full")
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


# ---------------------------------------------------------------- a step's problems, evaluation, progress

def problems_of_step(count, per_step, step, seed):
    """Indices of the problems of a step: epochs over a shuffle that depends on the seed and the epoch alone."""
    indices = []
    for position in range(step * per_step, (step + 1) * per_step):
        order = list(range(count))
        random.Random(f"{seed} {position // count}").shuffle(order)
        indices.append(order[position % count])
    return indices


def held_out_scores(model, tokenizer, problems, executor, run, config, rank, world, bar=None):
    """Iter-1 ... Iter-k pass@1 in percent over all processes, greedy."""
    sampling = replace(config.sampling, temperature=0.0)
    with unsharded(model), autocast(model):
        _, solved = evaluate(model, tokenizer, problems[rank::world], executor, run["eval_iterations"], sampling, bar=bar)
    counts = torch.tensor([[float(s) for s in row] for row in solved] or [[0.0] * run["eval_iterations"]], dtype=torch.float64)
    return [round(100 * c / len(problems), 2) for c in all_reduce(counts.sum(0)).tolist()]


def warn_of_filters(config):
    """The loss scores the whole distribution, so filtered samples are not on-policy."""
    if config.top_k or config.top_p < 1:
        print("warning: --top-k and --top-p cut the distribution that is sampled, while the loss scores the whole one; leave them off "
              "unless you mean that", file=sys.stderr)


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

COMPARATORS = {"rlef": rlef, "mucode": mucode, "reveal": reveal}  # the methods that are more than a few lines of murphy_step


def add_head(model, comparator, last):
    """What a comparator adds to the model, as it was at checkpoint `last` if there is one."""
    if is_sharded(model):
        raise BadInput("this --method trains copies of the model; give --shard none, and --plan to see whether that fits")
    comparator.add_head(model)
    if last:
        model.load_state_dict(torch.load(last / "head.pt"), strict=False)


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
    print(plan_text(model_config, memory_setup(model_config, run, config, gpus, cuda=True), gib))


def train(argv):
    run, config, resumed = settings_of(argv)
    check_loggers(run)
    warn_of_filters(config)
    rank, world, device = start_processes()
    first = rank == 0
    if run["cpu_offload"] and device.type == "cpu":
        raise BadInput("--cpu-offload moves shards from GPUs to the host, and there is no GPU here; leave it out")
    tokenizer, model_config, path = load_tokenizer(run["model"])
    problems = load_problems(run["dataset"], limit=run["max_problems"], seed=config.seed)
    held_out = load_problems(run["eval_dataset"], limit=run["eval_problems"], split="heldout") if run["eval_dataset"] else []
    check_prompts(problems + held_out, tokenizer, model_config, config.sampling)
    if config.method == "reveal":
        reveal.check_problems(problems)
    check_memory(run, config, model_config, device, world)
    folder = resumed or from_first(new_folder(run, config, world) if first else None)
    last = checkpoints(folder)[-1] if checkpoints(folder) else None
    done = int(last.name.split("-")[1]) if last else 0

    model, reference = load_trained(path, last, device, run, config)
    if hasattr(COMPARATORS.get(config.method), "add_head"):
        add_head(model, COMPARATORS[config.method], last)
    check_disk(folder, model)
    if wants_checkpointing(size_of(model), run):
        enable_checkpointing(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
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
        step, bad_steps, warned, most = done, 0, set(), run["max_programs"] or float("inf")
        programs = from_first(sum(m["nodes"] for m in read_log(folder / "metrics.jsonl")))
        step_of = COMPARATORS[config.method].step if config.method in COMPARATORS else murphy_step
        while step < config.steps and programs < most:
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1))
            chosen = problems_of_step(len(problems), config.prompts_per_step, step, config.seed)[rank::world]
            trees, metrics = step_of(
                model, reference, tokenizer, [problems[i] for i in chosen], executor, optimizer, config,
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
            programs += metrics["nodes"]
            step += 1
            last_step, stopping = step == config.steps or programs >= most, stop.asked()
            if last_step or stopping or step % run["save_every"] == 0:
                save_checkpoint(folder, model, tokenizer, optimizer, step, run["keep"])
            if stopping and not last_step:
                bar.close()
                return print(f"stopped by a signal after step {step}; go on with --resume {folder}") if first else None
            if run["eval_every"] and step % run["eval_every"] == 0 and not last_step:
                held_out_eval(step)
        bar.close()
        held_out_eval(step)
    if first:
        report(folder)
    if dist.is_initialized():
        dist.barrier()  # a process that leaves early breaks the connections of the others


class StopFlag:
    """Set by SIGTERM or Ctrl-C (a second Ctrl-C ends the run at once); asked() is the same on every process."""
    def __init__(self):
        self.set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, *_):
        self.set = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tqdm.write("stopping and saving after this step; Ctrl-C ends at once", file=sys.stderr)

    def asked(self):
        return bool(all_reduce(torch.tensor(float(self.set)), "max"))


def main(argv=None):
    try:
        print_plan(argv) if build_parser().parse_args(argv).plan else train(argv)
    except BadInput as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train.py: stopped; what was saved goes on with --resume", file=sys.stderr)
        return 130
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
