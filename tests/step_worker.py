"""Run by torchrun (and alone) for test_distributed.py: steps on given trees, split over the processes.

    python step_worker.py OUT    writes metrics, gradients and weights of rank 0, for every case, to OUT
"""
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from common import random_model
from lora import adapted, add_adapters
from murphy import assign_credit, optimise
from rollout import Group, Node, Tree
from problems import Problem
from test_murphy import CONFIG, make_tree
from train import check_replicas, start_processes


def lone_tree(lengths, rewards):
    nodes = [Node(-1, 1, 0, [5 + i] * n, "", "", False, reward=r) for i, (n, r) in enumerate(zip(lengths, rewards))]
    return Tree(Problem("p", ""), nodes, [Group(-1, [3, 4], list(range(len(nodes))))])


CASES = {  # (normaliser, trees of a step in the order in which processes take them)
    "even": ("grpo", [make_tree(0), make_tree(1), make_tree(2), make_tree(4)]),
    "uneven": ("dapo", [make_tree(0), make_tree(1), make_tree(2)]),
    "one and forty tokens, by token": ("dapo", [lone_tree([1, 1], [0, 1]), lone_tree([40, 40], [1, 0])]),
    "one and forty tokens, by response": ("grpo", [lone_tree([1, 1], [0, 1]), lone_tree([40, 40], [1, 0])]),
    "one process has nothing": ("dr-grpo", [make_tree(0)]),
    "adapters": ("dapo", [make_tree(0), make_tree(1), make_tree(2)]),
    "one process is flat": ("grpo", [make_tree(0), lone_tree([4, 4], [0.35, 0.35])]),
}


def two_steps(normaliser, trees, lora=False):
    config = replace(CONFIG, beta=0.04, normaliser=normaliser, updates_per_rollout=2)
    model, reference, metrics = random_model(), random_model(seed=1), []
    if lora:  # B is not 0, so that A has a gradient
        model = reference = add_adapters(model, rank=4, alpha=8)
        for m in adapted(model).values():
            torch.nn.init.constant_(m.lora_b, 0.01)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        for tree in trees:
            assign_credit(tree, config)
        metrics.append(optimise(model, reference, trees, optimizer, config))
        check_replicas(model)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {"metrics": metrics, "weights": model.state_dict(), "gradients": gradients}


def drift(model, rank):
    """What check_replicas says when one process has other weights."""
    with torch.no_grad():
        model.lm_head.weight[0, 0] += rank
    try:
        check_replicas(model)
    except RuntimeError as error:
        return str(error)


def main(out):
    rank, world, _ = start_processes()
    results = {name: two_steps(normaliser, trees[rank::world], name == "adapters") for name, (normaliser, trees) in CASES.items()}
    results["drift"] = drift(random_model(), rank)
    if rank == 0:
        torch.save(results, out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
