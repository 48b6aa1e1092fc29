"""What pruning saves: optimisation and whole-step time with InterP against none, on the embedded default.

    python bench/prune.py [--rounds 3] [--budget 1] [--train]

Each round grows the trees of 8 problems with tiny/ (G = 8, two turns, temperature 1), then takes the optimisation part of a step (credit,
packing, reference, loss, backward, AdamW) on the same trees without pruning and with InterP, by turns; the learning rate is 0, so every
round starts from the same weights. A step is the round's rollout plus its optimisation. Medians over rounds of the share of time saved.
The paper's figures are 0.741 and 0.214. How much is saved is a matter of the budget (groups of turn 2 kept per tree, of up to 8) and of
beta: with beta 0 flat groups cost nothing even unpruned, so less is left to save; both are printed.

--train adds the price: held-out Iter-3 after train.py with and without InterP over seeds 0, 1, 2 (half an hour).
Last line: one JSON object.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import seconds
import torch
from transformers import AutoTokenizer

from executor import Executor
from murphy import MurphyConfig, assign_credit, kept_nodes, optimise
from problems import load_problems
from rollout import grow_trees
from models import TINY, load_model
from train import EMBEDDED

ROOT = Path(__file__).resolve().parents[1]


def optimise_pruned(model, reference, optimizer, trees, config):
    """Credit and one update. Returns the share of nodes kept."""
    for tree in trees:
        assign_credit(tree, config)
    optimise(model, reference if config.beta else None, trees, optimizer, config)
    return len(kept_nodes(trees)) / sum(len(tree.nodes) for tree in trees)


def measure(rounds, budget):
    model, reference = load_model(TINY), load_model(TINY).requires_grad_(False)
    tokenizer, problems = AutoTokenizer.from_pretrained(TINY), load_problems("tiny", limit=200, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    base = MurphyConfig(**EMBEDDED)
    cuts = {f"{part}_beta_{beta}": [] for part in ("optimisation", "step") for beta in (0.04, 0.0)}
    kept, trees = [], []
    with Executor() as executor:
        for number in range(rounds):
            torch.manual_seed(number)

            def grow():
                trees[:] = grow_trees(model, tokenizer, problems[8 * number:8 * number + 8], executor, turns=2, group_size=8,
                                      sampling=base.sampling)
            rollout = seconds(grow)
            for beta in (0.04, 0.0):
                none, interp = replace(base, beta=beta), replace(base, beta=beta, prune="interp", budget=budget)
                share = lambda config: optimise_pruned(model, reference, optimizer, trees, config)
                full = seconds(lambda: share(none))
                cut = seconds(lambda: kept.append(share(interp)))
                cuts[f"optimisation_beta_{beta}"].append(1 - cut / full)
                cuts[f"step_beta_{beta}"].append((full - cut) / (rollout + full))
                print(f"round {number + 1}, beta {beta}: rollout {rollout:.2f} s, optimisation {full:.2f} s, with InterP {cut:.2f} s, "
                      f"{sum(len(tree.nodes) for tree in trees)} nodes, {kept[-1]:.0%} kept")
    medians = {name: round(statistics.median(values), 3) for name, values in cuts.items()}
    return {"optimization_time_cut": medians["optimisation_beta_0.04"], "step_time_cut": medians["step_beta_0.04"],
            "optimization_time_cut_beta_0": medians["optimisation_beta_0.0"], "step_time_cut_beta_0": medians["step_beta_0.0"],
            "nodes_kept": round(statistics.median(kept), 3), "budget": budget, "rounds": rounds}


def held_out(flags):
    """Mean held-out Iter-3 pass@1 in percent after a run of train.py, over seeds 0, 1, 2."""
    scores = []
    for seed in range(3):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            subprocess.run([sys.executable, ROOT / "train.py", "--seed", str(seed), "--out", out, *flags], check=True, stdout=sys.stderr)
            scores.append(json.loads((out / "eval.jsonl").read_text().splitlines()[-1])["iter"][2])
    return {"iter3": scores, "iter3_mean": round(statistics.mean(scores), 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=1, help="groups of turn 2 that InterP keeps per tree")
    parser.add_argument("--train", action="store_true", help="also train with and without InterP, three seeds each")
    args = parser.parse_args()
    result = measure(args.rounds, args.budget)
    if args.train:
        full, pruned = held_out([]), held_out(["--prune", "interp", "--budget", str(args.budget)])
        result["held_out"] = {"none": full, "interp": pruned, "iter3_cost": round(full["iter3_mean"] - pruned["iter3_mean"], 2)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
