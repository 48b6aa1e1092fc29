"""Run by torchrun (and alone) for test_distributed.py: steps on given trees, split over the processes.

python step_worker.py OUT CASE    writes losses, gradient norms, entropies and the weights of rank 0 to OUT
"""
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from common import random_model
from murphy import assign_credit, optimise
from rollout import Group, Node, Tree
from problems import Problem
from test_murphy import CONFIG, make_tree
from train import check_replicas, start_processes


def lone_tree(lengths, rewards):
    nodes = [Node(-1, 1, 0, [5 + i] * n, "", "", False, reward=r) for i, (n, r) in enumerate(zip(lengths, rewards))]
    return Tree(Problem("p", ""), nodes, [Group(-1, [3, 4], list(range(len(nodes))))])


CASES = {  # trees of a step, in the order in which processes take them
    "even": [make_tree(0), make_tree(1), make_tree(2), make_tree(4)],
    "uneven": [make_tree(0), make_tree(1), make_tree(2)],
    "one_and_forty_tokens": [lone_tree([1, 1], [0, 1]), lone_tree([40, 40], [1, 0])],
    "one_process_has_nothing": [make_tree(0)],
    "one_process_is_flat": [make_tree(0), lone_tree([4, 4], [0.35, 0.35])],
}


def main(out, case, normaliser):
    rank, world, _ = start_processes()
    config = replace(CONFIG, beta=0.04, normaliser=normaliser, updates_per_rollout=2)
    model, reference, metrics = random_model(), random_model(seed=1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        trees = CASES[case][rank::world]
        for tree in trees:
            assign_credit(tree, config)
        metrics.append(optimise(model, reference, trees, optimizer, config))
        check_replicas(model)
    if rank == 0:
        gradients = {n: p.grad for n, p in model.named_parameters()}
        torch.save({"metrics": metrics, "weights": model.state_dict(), "gradients": gradients}, out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
