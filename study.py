"""The study: the embedded default trained with every method, credit and pruning rule, at equal numbers of sampled programs.

    python study.py                    all runs, 5 seeds, then study/README.md, results.json and two pictures
    python study.py --quick            the same in small, into study-quick/: 2 seeds, fewer programs, no sweep, no ablations
    python study.py --out DIR          elsewhere; what is finished there is not run again, so a killed study goes on

Every run is one `python train.py` of its own process with one thread, as many side by side as there are cores. All share the flags of SHARED; a
comparator samples as many programs per prompt as a whole MURPHY tree holds, and every run ends after the step that fills PROGRAMS.
The learning rate of each method is chosen among the same RATES, on seeds of their own, by Iter-3 on *training* problems; the table is of
held-out problems. MURPHY's credit and pruning variants and the ablations take MURPHY's rate: they get no sweep.

Left out: Reflexion (the tiny model cannot reflect) and muCode's best-of-N at test time (every row is one greedy attempt an iteration).
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from problems import BadInput
from runs import read_log

ROOT = Path(__file__).resolve().parent
SHARED = ["--steps", "10000", "--eval-every", "3", "--workers", "1", "--save-every", "10000", "--log-trees", "1"]
PROGRAMS, SEEDS, SWEEP_SEEDS, RATES = 4000, range(5), (100, 101), ("1e-4", "3e-4", "1e-3")
QUICK = dict(programs=2000, seeds=range(2), rates=("5e-4",))

METHODS = {  # name -> flags
    "GRPO": ["--method", "grpo", "--match-compute"],
    "GRPO-MT": ["--method", "grpo-mt", "--match-compute"],
    "RLEF": ["--method", "rlef", "--match-compute"],
    "muCode": ["--method", "mucode", "--match-compute"],
    "ReVeal": ["--method", "reveal", "--match-compute"],
    "MURPHY": ["--method", "murphy"],
}
VARIANTS = {  # of MURPHY, which is MaRS without pruning
    "MURPHY, MeRS": ["--credit", "mers"],
    "MURPHY, IntraP 4": ["--prune", "intrap", "--budget", "4"],
    "MURPHY, InterP 4": ["--prune", "interp", "--budget", "4"],
}
ABLATIONS = {
    "IntraP 2": ["--prune", "intrap", "--budget", "2"],
    "InterP 2": ["--prune", "interp", "--budget", "2"],
    "InterP 1": ["--prune", "interp", "--budget", "1"],
    "MeRS, gamma 0.5": ["--credit", "mers", "--gamma", "0.5"],
    "MeRS, gamma 1": ["--credit", "mers", "--gamma", "1"],
    "S = 1": ["--turns", "1"],
    "S = 3": ["--turns", "3"],
    "G = 4": ["--group-size", "4"],
}
CLOSE = 3.0                                                    # points within which two means count as close: our decision
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262}      # two-sided 95 % quantiles of Student's t by degrees of freedom


# ---------------------------------------------------------------- runs

def run_once(folder, flags):
    """One training run (list of str flags of train.py) into folder, or its finished result. Returns the result, a dict."""
    path = folder / "result.json"
    if path.exists():
        result = json.loads(path.read_text())
        if result["flags"] != flags:
            raise BadInput(f"{folder} holds a run with other settings; give another --out, or remove that folder")
        return result
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "train.py", "--out", folder.resolve(), *flags], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    if done.returncode:
        raise BadInput(f"train.py {' '.join(flags)} ended with code {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    metrics, scores = read_log(folder / "metrics.jsonl"), read_log(folder / "eval.jsonl")
    total = lambda name: sum(m[name] for m in metrics)
    sampled = [0]
    for m in metrics:
        sampled.append(sampled[-1] + m["nodes"])
    if sampled[-1] < int(flags[flags.index("--max-programs") + 1]):
        raise BadInput(f"the run in {folder} was stopped before its end; the same command goes on")
    result = dict(flags=flags, before=scores[0]["iter"], iter=scores[-1]["iter"], steps=len(metrics), programs=sampled[-1], tokens=total("tokens"),
                  seconds=round(time.perf_counter() - start, 1), rollout=round(total("seconds_rollout"), 1),
                  optimisation=round(total("seconds_optimisation"), 1), curve=[[sampled[s["step"]], *s["iter"]] for s in scores])
    shutil.rmtree(folder / "checkpoints")  # 16 MB a run
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(path)
    return result


def run_all(out, runs, workers, name):
    """runs: {key: flags}; a key names its folder. Returns {key: result}, in the same order."""
    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(runs), desc=name, dynamic_ncols=True) as bar:
        futures = {key: pool.submit(run_once, out / "runs" / folder_name(key), flags) for key, flags in runs.items()}
        for future in futures.values():
            future.add_done_callback(lambda _: bar.update())
        try:
            return {key: future.result() for key, future in futures.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def folder_name(key):
    return "-".join(str(part).replace(" = ", "").replace(", ", "-").replace(" ", "") for part in key)


def sweep(out, setting, workers):
    """Tries every rate for every method. Returns {method: {rate: mean Iter-3 on training problems}}."""
    runs = {(method, f"rate-{rate}", seed): [*flags, *setting["shared"], "--learning-rate", rate, "--seed", str(seed), "--eval-dataset",
                                             "tiny/train.jsonl", "--eval-problems", "100"]
            for method, flags in METHODS.items() for rate in setting["rates"] for seed in SWEEP_SEEDS}
    results = run_all(out, runs, workers, "learning rates")
    return {method: {rate: statistics.mean(results[method, f"rate-{rate}", seed]["iter"][-1] for seed in SWEEP_SEEDS)
                     for rate in setting["rates"]} for method in METHODS}


def best_rate(scores):
    """The rate (str) with the highest mean; the lowest of equals."""
    return min(scores, key=lambda rate: (-scores[rate], float(rate)))


# ---------------------------------------------------------------- numbers

def interval(values):
    """(mean, half width of its 95 % interval) of one value per seed: Student's t with n - 1 degrees of freedom."""
    mean = statistics.mean(values)
    return mean, T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def difference(results, a, b, turn):
    """(mean, half width) of Iter-turn of arm a less that of arm b, paired by seed."""
    return interval([x["iter"][turn - 1] - y["iter"][turn - 1] for x, y in zip(results[a], results[b], strict=True)])


def claim(text, mean, half, sign):
    """One finding of the paper held against a difference in points; sign +1 or -1 is the claimed direction, 0 means close."""
    if sign:
        word = "repeated" if sign * mean - half > 0 else "contradicted" if sign * mean + half < 0 else "not repeated (the interval contains 0)"
    else:
        word = "repeated" if abs(mean) + half <= CLOSE else "contradicted" if abs(mean) - half > CLOSE else "undecided"
    return f"- {text}: **{word}**; {mean:+.1f} ± {half:.1f} points."


def findings(results):
    diff = lambda a, b, turn: difference(results, a, b, turn)
    return [claim("MURPHY is above compute-matched GRPO at Iter-3", *diff("MURPHY", "GRPO", 3), 1),
            claim(f"InterP stays close to unpruned MURPHY at Iter-3 (within {CLOSE:.0f} points, our margin)", *diff("MURPHY, InterP 4", "MURPHY", 3), 0),
            claim("IntraP helps Iter-1", *diff("MURPHY, IntraP 4", "MURPHY", 1), 1),
            claim("IntraP hurts Iter-3", *diff("MURPHY, IntraP 4", "MURPHY", 3), -1)]


# ---------------------------------------------------------------- the page

def table(results, arms):
    """Markdown rows in the layout of the paper's tables, with cost: one row per arm."""
    rows = ["| method | Iter-1 | Iter-2 | Iter-3 | steps | programs | 1,000 tokens | rollout, s | optimisation, s |", "|---|---|---|---|---|---|---|---|---|"]
    for arm in arms:
        runs = results[arm]
        scores = [interval([r["iter"][k] for r in runs]) for k in range(3)]
        mean = lambda name: statistics.mean(r[name] for r in runs)
        rows.append(f"| {arm} | " + " | ".join(f"{m:.1f} ± {h:.1f}" for m, h in scores)
                    + f" | {mean('steps'):.0f} | {mean('programs'):.0f} | {mean('tokens') / 1000:.0f} | {mean('rollout'):.0f} | {mean('optimisation'):.0f} |")
    return rows


def page(results, rates, setting):
    """The text of README.md (str)."""
    base = next(iter(results.values()))[0]["before"]
    text = ["# The study", "", f"Made by `python study.py{' --quick' if setting['quick'] else ''}`: `tiny/` trained with every method until "
            f"{setting['programs']:,} programs are sampled, {len(setting['seeds'])} seeds. Held-out pass@1 in percent, 150 problems, greedy, "
            "feedback from public tests; mean over seeds ± half of the 95 % interval (Student's t). `study.py` says what is shared and how rates "
            "were chosen. Seconds are of runs with one thread each, side by side. ReVeal's programs include its verification answers.", "",
            "This is a model of 1.3 million parameters on a family of toy problems, made with the habits that training then unlearns "
            "(`tiny/README.md`). It shows how the methods differ there; it is no evidence about real code models.", "",
            *table(results, [*METHODS, *VARIANTS]), "| Base | " + " | ".join(f"{score:.1f}" for score in base) + " | 0 | 0 | 0 | 0 | 0 |", "",
            "![Learning curves](curves.png)", "", "## The paper's findings", "", *findings(results), ""]
    if rates:
        text += ["## Learning rates", "", f"Mean Iter-3 on 100 training problems, seeds {', '.join(map(str, SWEEP_SEEDS))}; the highest is taken.", "",
                 "| method | " + " | ".join(setting["rates"]) + " |", "|---|" + "---|" * len(setting["rates"])]
        text += [f"| {method} | " + " | ".join(f"**{s:.1f}**" if rate == best_rate(scores) else f"{s:.1f}" for rate, s in scores.items()) + " |"
                 for method, scores in rates.items()] + [""]
    if ablations := [arm for arm in ABLATIONS if arm in results]:
        text += ["## Ablations of MURPHY", "", "Against MaRS, S = 2, G = 8, no pruning. Equal programs are not equal steps: with a smaller tree the "
                 "same number of programs makes more steps, of more prompts.", "", *table(results, ["MURPHY", *VARIANTS, *ablations]), "",
                 "![All arms](arms.png)", ""]
    return "\n".join(text)


def draw(results, out):
    """curves.png: Iter-1 and Iter-3 over programs, by method; arms.png: every arm with its interval."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axis, turn in zip(axes, (1, 3)):
        for style, method in zip(("o-", "s-", "^-", "v-", "D-", "*-"), METHODS):
            points = list(zip(*(run["curve"] for run in results[method])))  # evaluations that all seeds have
            axis.plot(*zip(*[(statistics.mean(p[0] for p in at), statistics.mean(p[turn] for p in at)) for at in points]), style, label=method, markersize=5)
        axis.set(xlabel="programs sampled", title=f"held-out Iter-{turn}, %")
    axes[0].legend()
    figure.savefig(out / "curves.png", dpi=90)
    pyplot.close(figure)

    figure, axis = pyplot.subplots(figsize=(8, 0.32 * len(results) + 1), layout="constrained")
    for turn, style in ((1, "o"), (3, "s")):
        means, halves = zip(*(interval([run["iter"][turn - 1] for run in runs]) for runs in results.values()))
        axis.errorbar(means, range(len(results)), xerr=halves, fmt=style, capsize=3, label=f"Iter-{turn}")
    axis.set(yticks=range(len(results)), yticklabels=list(results), xlabel="held-out pass@1, %", title="mean and 95 % interval over seeds")
    axis.invert_yaxis()
    axis.legend()
    figure.savefig(out / "arms.png", dpi=90)
    pyplot.close(figure)


# ---------------------------------------------------------------- command line

def study(out, quick, workers):
    setting = dict(programs=PROGRAMS, seeds=SEEDS, rates=RATES) | (QUICK if quick else {}) | {"quick": quick}
    setting["shared"] = [*SHARED, "--max-programs", str(setting["programs"])]
    rates = {} if quick else sweep(out, setting, workers)
    chosen = {method: best_rate(rates[method]) if rates else setting["rates"][0] for method in METHODS}
    arms = METHODS | VARIANTS | ({} if quick else ABLATIONS)
    runs = {(arm, seed): [*flags, *setting["shared"], "--learning-rate", chosen.get(arm, chosen["MURPHY"]), "--seed", str(seed)]
            for seed in setting["seeds"] for arm, flags in arms.items()}
    finished = run_all(out, runs, workers, "runs")
    results = {arm: [finished[arm, seed] for seed in setting["seeds"]] for arm in arms}
    draw(results, out)
    (out / "README.md").write_text(page(results, rates, setting))
    (out / "results.json").write_text(json.dumps({"rates": rates, "arms": results}))
    print("\n".join([*table(results, [*METHODS, *VARIANTS]), *findings(results), f"written: {out}/README.md"]))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="study.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small version, about 8 minutes on 2 cores")
    parser.add_argument("--out", type=Path, help="folder of the study (default: study, or study-quick)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs side by side (default: one per core)")
    args = parser.parse_args(argv)
    try:
        if args.workers < 1:
            raise BadInput(f"--workers is {args.workers}; it must be at least 1")
        study(args.out or ROOT / ("study-quick" if args.quick else "study"), args.quick, args.workers)
    except BadInput as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("study.py: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
