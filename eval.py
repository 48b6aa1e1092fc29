"""Evaluate a model: pass@1 after each iteration of attempt, run, feedback, next attempt.

    python eval.py --model DIR --benchmark humaneval --iterations 5
    python eval.py --model DIR --benchmark mbpp-sanitized --data sanitized-mbpp.json --limit 20
    python eval.py --model CHECKPOINT --verifier CHECKPOINT --samples 8     of 8 programs a turn, the verifier's best (muCode)
    python eval.py --compare RUN_A RUN_B                       the paper's table, with paired differences

Iter-k is the share of problems whose latest attempt within k iterations passes the benchmark's own tests. Feedback, and the
decision to stop, follow the tests that a solver may see (--feedback public); --feedback all uses every test, as training
does, and so tells the model hidden answers: a number of its own kind, printed as such.

The run folder holds results.json, samples.jsonl (human-eval's format: each completion is a whole program that runs when
appended to the prompt; the last attempt) and transcripts.jsonl (every attempt, verdict and feedback). Running the same
command with the same --out again goes on where it was killed. Left out: several processes, other engines.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, as in train.py

import argparse
import json
import platform
import sys
import time
from math import comb
from pathlib import Path

import numpy as np
import torch
import transformers
from tqdm import tqdm

from benchmarks import BENCHMARKS, load_benchmark
from comparators import mucode
from executor import Executor, Limits
from models import check_prompts, load_model, load_tokenizer, one_line
from murphy import MurphyConfig, autocast
from problems import BadInput
from rollout import Sampling, chains_of, grow_trees, solved_by_turn
from runs import append, write_beside

BLOCK = 64  # problems grown together; a kill loses at most the block in progress


# ---------------------------------------------------------------- scores

def pass_at_k(n, c, k):
    """Chance that at least one of k programs drawn from n, c of them right, is right. Codex paper, arXiv 2107.03374, eq. 1.

    Raises ValueError where it is not defined: k > n, or c outside 0 ... n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n; k {k}, n {n}, c {c}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def interval(values, seed=0, draws=10_000):
    """95 % bootstrap interval of the mean, over problems. values: [n] or paired differences. Returns (low, high)."""
    values = np.asarray(values, dtype=float)
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    low, high = np.percentile(values[picks].mean(1), [2.5, 97.5])
    return float(low), float(high)


def decisive(problem):
    """Mask of the tests that decide: the benchmark's own. HumanEval's docstring examples are shown but do not count."""
    hidden = [not test.public for test in problem.tests]
    return hidden if problem.source.startswith("humaneval") and any(hidden) else [True] * len(hidden)


def score(records, iterations, samples):
    """Scores of transcripts, in percent: Iter-k with its interval, pass@k at the last iteration, and by difficulty."""
    def iters(part):
        table = {}
        for k in range(iterations):
            per_problem = [np.mean([chain[k] for chain in r["solved"]]) for r in part]
            low, high = interval(per_problem)
            table[f"Iter-{k + 1}"] = {"pass@1": percent(np.mean(per_problem)), "low": percent(low), "high": percent(high)}
        return table
    levels = sorted({r["difficulty"] for r in records if r["difficulty"]})
    scores = {"problems": len(records), "iterations": iters(records)}
    if levels:
        scores["by_difficulty"] = {level: {"problems": len(part), "iterations": iters(part)} for level in levels
                                   for part in [[r for r in records if r["difficulty"] == level]]}
    if samples > 1:
        scores["pass@k"] = {str(k): percent(np.mean([pass_at_k(samples, sum(chain[-1] for chain in r["solved"]), k) for r in records]))
                            for k in range(1, samples + 1) if k in (1, 2, 4, 8, 16, 32, 64, samples)}
    scores["infra"] = sum(attempt["reward"] is None for r in records for chain in r["chains"] for attempt in chain)
    scores["truncated"] = sum(attempt["truncated"] for r in records for chain in r["chains"] for attempt in chain)
    return scores


def percent(share):
    return round(100 * float(share), 2)


# ---------------------------------------------------------------- the run

def transcript(tree, settings):
    """One problem as plain data: every chain with its attempts, and whether it is solved after each iteration."""
    counts, chains = decisive(tree.problem), chains_of(tree)
    public = settings["feedback"] == "public"
    return {"task_id": tree.problem.task_id, "difficulty": tree.problem.difficulty, "prompt": tree.problem.prompt,
            "solved": [solved_by_turn(chain, settings["iterations"], counts) for chain in chains],
            "chains": [[{"text": n.text, "code": n.code, "status": n.verdict.status, "reward": n.reward, "truncated": n.truncated,
                         "reflection": n.reflection, "tokens": len(n.response_ids),
                         "feedback": (n.verdict.visible() if public else n.verdict).feedback()} for n in chain] for chain in chains]}


def run_benchmark(model, tokenizer, problems, executor, settings, folder):
    """Transcripts of all problems, in their order; those already in the folder are not repeated."""
    path = folder / "transcripts.jsonl"
    done = {r["task_id"]: r for r in read_lines(path)}
    left = [p for p in problems if p.task_id not in done]
    sampling = Sampling(settings["temperature"], max_new_tokens=settings["max_new_tokens"], batch_tokens=settings["batch_tokens"])
    choose = mucode.keep_best(model, MurphyConfig()) if settings["verifier"] else None
    with tqdm(total=len(problems), initial=len(problems) - len(left), desc=settings["benchmark"], dynamic_ncols=True) as bar:
        for start in range(0, len(left), BLOCK):
            block = left[start:start + BLOCK]
            torch.manual_seed((settings["seed"] << 32) + len(done))
            with autocast(model):
                trees = grow_trees(model, tokenizer, block, executor, turns=settings["iterations"], group_size=settings["samples"],
                                   branch=settings["samples"] if choose else 1, choose=choose, sampling=sampling, public_feedback=settings["feedback"] == "public",
                                   reflexion=settings["scaffold"] == "reflexion", bar=bar)
            bar.set_description(settings["benchmark"])
            for tree in trees:
                done[tree.problem.task_id] = transcript(tree, settings)
                append(path, done[tree.problem.task_id])
            bar.set_postfix({f"Iter-{k + 1}": f"{100 * np.mean([c[k] for r in done.values() for c in r['solved']]):.1f}"
                             for k in {0, settings["iterations"] - 1}})
            bar.update(len(block))
    return [done[p.task_id] for p in problems]


def read_lines(path):
    """Records of a .jsonl file; a last line that a kill cut in two is dropped from the file."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[:text.rfind("\n") + 1]
    if whole != text:
        write_beside(path, whole)
    return [json.loads(line) for line in whole.splitlines()]


def open_folder(settings, out):
    name = "-".join([Path(settings["model"]).name, settings["benchmark"], settings["feedback"], settings["scaffold"]])
    folder = Path(out or Path("runs") / ("eval-" + name + time.strftime("-%Y%m%d-%H%M%S")))
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "settings.json").exists():
        if json.loads((folder / "settings.json").read_text()) != settings:
            raise BadInput(f"{folder} holds an evaluation with other settings; give another --out")
    write_beside(folder / "settings.json", json.dumps(settings, indent=1))
    return folder


def load_verifier(model, checkpoint):
    """muCode's verifier from a checkpoint of train.py --method mucode, beside the model."""
    mucode.add_head(model)
    try:
        model.load_state_dict(torch.load(checkpoint / "head.pt", map_location=model.device), strict=False)
    except (OSError, RuntimeError) as error:
        raise BadInput(f"--verifier {checkpoint}: {one_line(error)}; give a checkpoint of train.py --method mucode on the same kind of model") from None
    model.eval()


def limits_of(benchmark):
    """LiveCodeBench's own harness gives each test 6 s and stops at the first failure; here all tests of a program share a minute."""
    return Limits(cpu_seconds=60, wall_seconds=120) if benchmark == "livecodebench" else Limits()


def evaluate_model(settings, data, workers, out):
    start = time.perf_counter()
    skipped, device = [], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, config, path = load_tokenizer(settings["model"])
    problems = load_benchmark(settings["benchmark"], data, skipped=skipped, **settings["rows"])
    check_prompts(problems, tokenizer, config, Sampling(max_new_tokens=settings["max_new_tokens"]))
    folder = open_folder(settings, out)
    model = load_model(path).to(device)
    if settings["verifier"]:
        load_verifier(model, Path(settings["verifier"]))
    with Executor(workers, limits_of(settings["benchmark"])) as executor:
        records = run_benchmark(model, tokenizer, problems, executor, settings, folder)
    results = {"settings": settings, "scores": score(records, settings["iterations"], 1 if settings["verifier"] else settings["samples"]), "skipped_rows": skipped,
               "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
               "device": str(device), "seconds": round(time.perf_counter() - start, 1)}
    write_beside(folder / "results.json", json.dumps(results, indent=1))
    write_beside(folder / "samples.jsonl", "".join(json.dumps({"task_id": r["task_id"], "completion": "\n" + chain[-1]["code"] + "\n"}) + "\n"
                                                   for r in records for chain in r["chains"]))
    print(table(results))
    print(f"run folder: {folder}")


def table(results):
    """The scores as text, with what they depend on."""
    s, scores = results["settings"], results["scores"]
    judged = ", judged by public tests only" if s["rows"].get("public_only") else ""
    how = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']}, {s['samples']} samples"
    how += ", the verifier's best of each turn" if s.get("verifier") else ""
    lines = [f"{s['benchmark']}, {scores['problems']} problems, feedback {s['feedback']}, scaffold {s['scaffold']}, {how}{judged}"]
    parts = [("all", scores)] + list(scores.get("by_difficulty", {}).items())
    for name, part in parts:
        lines += [f"  {name:<7}{k:<7} {v['pass@1']:6.2f}  [{v['low']:.2f}, {v['high']:.2f}]" for k, v in part["iterations"].items()]
    lines += [f"  pass@{k}: {v:.2f}" for k, v in scores.get("pass@k", {}).items()]
    lines += [f"  {len(results['skipped_rows'])} rows could not be read and were left out"] * bool(results["skipped_rows"])
    lines += [f"  the executor failed on {scores['infra']} attempts, counted as not solved"] * bool(scores["infra"])
    lines += [f"  {scores['truncated']} answers were cut at {s['max_new_tokens']} tokens"] * bool(scores["truncated"])
    return "\n".join(lines)


# ---------------------------------------------------------------- comparing runs

def load_run(folder):
    try:
        results = json.loads((Path(folder) / "results.json").read_text())
        return results, {r["task_id"]: r for r in read_lines(Path(folder) / "transcripts.jsonl")}
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder} holds no finished evaluation ({error}); give the folder that eval.py printed") from None


def compare(folders):
    """The paper's layout: a row a run, columns Iter-1/3/5; then paired differences to the first run with 95 % intervals."""
    runs = [load_run(folder) for folder in folders]
    columns = [f"Iter-{k}" for k in (1, 3, 5) if all(f"Iter-{k}" in r["scores"]["iterations"] for r, _ in runs)]
    width = max(len(str(f)) for f in folders)
    lines = [" " * width + "".join(f"{c:>10}" for c in columns) + "   benchmark, feedback, scaffold"]
    for folder, (results, _) in zip(folders, runs):
        s = results["settings"]
        lines.append(f"{str(folder):<{width}}" + "".join(f"{results['scores']['iterations'][c]['pass@1']:10.2f}" for c in columns)
                     + f"   {s['benchmark']}, {s['feedback']}, {s['scaffold']}")
    for folder, (results, records) in list(zip(folders, runs))[1:]:
        lines.append(difference(folders[0], runs[0], folder, (results, records), columns))
    return "\n".join(lines)


def difference(first, a, second, b, columns):
    if any(a[0]["settings"][k] != b[0]["settings"][k] for k in ("benchmark", "feedback")):
        return f"{second} - {first}: not comparable, the benchmark or the feedback differs"
    both = sorted(set(a[1]) & set(b[1]))
    if not both:
        return f"{second} - {first}: no problem in common"
    parts = []
    for column in columns:
        k = int(column.split("-")[1]) - 1
        mean = lambda run, task: np.mean([chain[k] for chain in run[1][task]["solved"]])
        gaps = [mean(b, task) - mean(a, task) for task in both]
        low, high = interval(gaps)
        parts.append(f"{column} {percent(np.mean(gaps)):+.2f} [{percent(low):+.2f}, {percent(high):+.2f}]")
    return f"{second} - {first} over {len(both)} problems: " + ", ".join(parts)


# ---------------------------------------------------------------- command line

def build_parser():
    parser = argparse.ArgumentParser(prog="eval.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--compare", nargs="+", metavar="RUN", help="print the table of finished evaluations instead of running one")
    what = parser.add_argument_group("what is evaluated")
    what.add_argument("--model", default="tiny", help="Hugging Face name or folder (default: the embedded tiny model)")
    what.add_argument("--benchmark", default="tiny", choices=sorted(BENCHMARKS), help="the paper uses humaneval, mbpp and livecodebench")
    what.add_argument("--data", help="the benchmark's official file (.jsonl, .json, .gz, .parquet); default: from the Hub")
    what.add_argument("--limit", type=int, help="the first N problems only")
    what.add_argument("--skip-bad-rows", action="store_true", help="leave out rows that cannot be read, instead of stopping at them")
    lcb = parser.add_argument_group("LiveCodeBench only")
    lcb.add_argument("--release", default="v6", help="v1 ... v6; the paper uses v6 (default v6)")
    lcb.add_argument("--start-date", help="contests from this day on, YYYY-MM-DD")
    lcb.add_argument("--end-date", help="contests up to this day, YYYY-MM-DD")
    lcb.add_argument("--difficulty", choices=["easy", "medium", "hard"])
    lcb.add_argument("--public-only", action="store_true", help="judge rows without private tests by their public ones; said in the result")
    how = parser.add_argument_group("protocol")
    how.add_argument("--iterations", type=int, default=5, help="attempts per problem; the paper reports 1, 3 and 5 (default 5)")
    how.add_argument("--feedback", default="public", choices=["public", "all"], help="tests that feedback and stopping follow (default public)")
    how.add_argument("--scaffold", default="plain", choices=["plain", "reflexion"], help="reflexion: a written note on each failure is kept in the context")
    how.add_argument("--samples", type=int, default=1, help="chains per problem; with more than 1, pass@k is reported too (default 1)")
    how.add_argument("--verifier", metavar="CHECKPOINT", help="of --samples programs a turn keep the one that this verifier rates highest "
                     "(a checkpoint of train.py --method mucode)")
    how.add_argument("--temperature", type=float, help="default: greedy for one sample, else 0.8")
    how.add_argument("--max-new-tokens", type=int, help="longest answer (default 1024, with the tiny model 48)")
    how.add_argument("--batch-tokens", type=int, default=65536, help="tokens (rows x longest) sampled at once (default 65536)")
    how.add_argument("--seed", type=int, default=0)
    add("--workers", type=int, help="executor processes (default: one per core)")
    add("--out", help="run folder; the same one again goes on where a killed run stopped (default: a new one in runs/)")
    return parser


def settings_of(args):
    for name in ("iterations", "samples", "batch_tokens", "limit", "max_new_tokens", "workers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BadInput(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    temperature = args.temperature if args.temperature is not None else 0.0 if args.samples == 1 else 0.8
    if not 0 <= temperature < float("inf"):
        raise BadInput(f"--temperature is {temperature}; it must be 0 (greedy) or above")
    if temperature == 0 and args.samples > 1:
        raise BadInput("--samples above 1 with --temperature 0 would draw the same answer again; give a temperature above 0")
    if args.verifier and args.samples == 1:
        raise BadInput("--verifier chooses among the programs of a turn; give --samples above 1")
    rows = {"limit": args.limit, "skip_bad_rows": args.skip_bad_rows}
    if args.benchmark == "livecodebench":
        rows |= {"release": args.release, "start_date": args.start_date, "end_date": args.end_date, "difficulty": args.difficulty,
                 "public_only": args.public_only}
    return {"model": args.model, "benchmark": args.benchmark, "rows": rows, "iterations": args.iterations, "feedback": args.feedback,
            "scaffold": args.scaffold, "verifier": args.verifier, "samples": args.samples, "temperature": temperature,
            "max_new_tokens": args.max_new_tokens or (48 if args.model == "tiny" else 1024), "batch_tokens": args.batch_tokens, "seed": args.seed}


def main(argv=None):
    args = build_parser().parse_args(argv)
    try:
        if args.compare:
            print(compare(args.compare))
        else:
            evaluate_model(settings_of(args), args.data, args.workers, args.out)
    except BadInput as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
