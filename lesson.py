"""One real prompt through the whole method, with the numbers worked out: the lesson of README.md.

    python lesson.py [--task tiny/train/102] [--seed 2]

Samples one tree with the embedded default model (seconds, no GPU), then prints every stage that murphy_step goes through: tree and
verdicts, credit by MaRS and MeRS, advantages, pruning, one packed row with its mask, the loss. Leaves out the optimizer step.
"""
import argparse
import sys
from statistics import fmean, stdev

import torch

import credit
from executor import Executor
from models import load_model, load_tokenizer
from murphy import MurphyConfig, assign_credit, kept_nodes, pack_tree, row_loss, token_weights
from problems import BadInput, load_problems
from rollout import Sampling, grow_trees

CONFIG = MurphyConfig(group_size=4, beta=0.0, max_new_tokens=48)


def grow(task, seed):
    """(model, tree) of one training problem of tiny/: G = 4, two turns."""
    problem = next((p for p in load_problems("tiny") if p.task_id == task), None)
    if problem is None:
        raise BadInput(f"there is no problem {task} in tiny/; give one of tiny/train/0 ... tiny/train/199")
    tokenizer, _, path = load_tokenizer("tiny")
    model = load_model(path)
    torch.manual_seed(seed)
    with Executor(1) as executor:
        (tree,) = grow_trees(model, tokenizer, [problem], executor, turns=2, group_size=4, sampling=Sampling(max_new_tokens=48))
    return model, tree


def program(node):
    """The program in a line: what it returns."""
    return node.code.split("return ")[-1].strip() or "(no code)"


def show_tree(tree):
    print("prompt:   " + "   ".join(tree.problem.prompt.split("\n")))
    for i, node in enumerate(tree.nodes):
        if node.parent >= 0:
            continue
        print(f"node {i}: {program(node)}   reward {node.reward:.2f}")
        for group in [g for g in tree.groups if g.parent == i]:
            print("  feedback: " + " | ".join(node.verdict.feedback().split("\n")))
            for c in group.members:
                print(f"  node {c}: {program(tree.nodes[c])}   reward {tree.nodes[c].reward:.2f}")


def numbers(values, places=2):
    return ", ".join(f"{v:.{places}f}" for v in values)


def show_credit(tree):
    mars, mers = credit.mars(tree.rewards, tree.parents), credit.mers(tree.rewards, tree.parents, 2, CONFIG.gamma)
    for group in tree.groups[1:]:
        i, below = group.parent, [tree.rewards[c] for c in group.members]
        print(f"node {i}: MaRS max({tree.rewards[i]:.2f}, {numbers(below)}) = {mars[i]:.2f}")
        print(f"        MeRS ({tree.rewards[i]:.2f} + {CONFIG.gamma} * mean({numbers(below)})) / 2 = {mers[i]:.2f}")
    for i in [i for i in tree.groups[0].members if tree.rewards[i] == 1]:
        print(f"node {i}: no children; MaRS {mars[i]:.2f}, MeRS {mers[i]:.2f}")


def show_advantages(tree):
    for group in tree.groups:
        values = [tree.nodes[i].credit for i in group.members]
        name = "turn 1" if group.parent < 0 else f"children of node {group.parent}"
        if credit.is_flat(values):
            print(f"{name}: credits {numbers(values)} are equal: advantages 0, no gradient")
            continue
        print(f"{name}: credits {numbers(values)}, mean {fmean(values):.4f}, std {stdev(values):.4f}")
        print(f"        advantages {numbers([tree.nodes[i].advantage for i in group.members])}")


def show_pruning(tree):
    credits = [node.credit for node in tree.nodes]
    for group in tree.groups[1:]:
        print(f"children of node {group.parent}: std of credits {stdev([credits[i] for i in group.members]):.4f}")
    for name, rule, budget in (("InterP", credit.interp, 1), ("IntraP", credit.intrap, 2)):
        keep = rule(credits, tree.parents, budget)
        print(f"{name}, budget {budget}: keeps nodes {', '.join(str(i) for i, kept in enumerate(keep) if kept)}")


def blocks(row, prefix):
    """[(name, first position, end)] of the prefix and the responses in a packed row."""
    parts, start = [("prefix", 0, prefix)], prefix
    while start < row.input_ids.shape[1]:
        length = int(row.lengths[start - prefix])
        parts.append((f"response {len(parts)}", start, start + length))
        start += length
    return parts


def show_row(row, prefix):
    parts = blocks(row, prefix)
    print(f"{row.input_ids.shape[1]} tokens: " + ", ".join(f"{name} {end - start}" for name, start, end in parts))
    for name, start, end in parts:
        sees = [row.mask[0, 0, start:end, s:e] for _, s, e in parts]
        drawn = "".join("  all " if m.all() and len(m) > 1 else "  .   " if not m.any() else "  tri " for m in sees)
        positions = row.position_ids[0, start:end].tolist()
        print(f"{name:<11}{drawn}  positions {positions[0]} ... {positions[-1]}")


def show_loss(model, tree):
    rows = pack_tree(tree, CONFIG, "cpu")
    if not rows:
        return print("every group is flat, so there is no row, and no gradient; try another --seed")
    kept = kept_nodes([tree])
    token_weights(rows, len(kept), sum(len(n.response_ids) for n in kept), CONFIG)
    first = next(group for group in tree.groups if any(tree.nodes[i].advantage for i in group.members))  # flat groups have no row
    show_row(rows[0], len(first.prefix_ids))
    total = 0.0
    for row in rows:
        loss, *_ = row_loss(model, row, CONFIG)
        loss.backward()
        total += loss.item()
    norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt().item()
    print(f"{len(kept)} responses; a token of one with L tokens weighs 1 / (L * {len(kept)})")
    print(f"{len(rows)} rows, loss {round(total, 4) + 0.0:.4f}: on-policy every ratio is 1 and advantages sum to 0; its gradient has norm {norm:.2f}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="tiny/train/102", help="a training problem of tiny/")
    parser.add_argument("--seed", type=int, default=2, help="of the sampled programs")
    args = parser.parse_args(argv)
    try:
        model, tree = grow(args.task, args.seed)
    except BadInput as error:
        print(f"lesson.py: {error}", file=sys.stderr)
        return 2
    assign_credit(tree, CONFIG)
    for title, show in (("1. Tree and verdicts", show_tree), ("2. Credit", show_credit), ("3. Advantages", show_advantages),
                        ("4. Pruning", show_pruning)):
        print(f"\n{title}")
        show(tree)
    print("\n5. The first packed row, and the loss")
    show_loss(model, tree)
    return 0


if __name__ == "__main__":
    sys.exit(main())
