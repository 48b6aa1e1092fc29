"""muCode (arXiv 2502.20380): expert iteration with a verifier, no policy gradient.

    expanded   every failing program into one next attempt (chains), as GRPO-MT
    return     none. The verifier, a copy of the model with a scalar head, learns from (task, program) whether a program is right:
               --verifier-loss bce, or bt: Bradley-Terry on pairs of a right and a wrong program of the same problem
    loss       for every history of a problem (task, or task + attempt + feedback) cross-entropy of the label, which is the
               program that the verifier rates highest among all of the problem's

Certain, from the paper: the verifier and its two losses, relabelling every history of a problem, cross-entropy on the labels, and at test time
N programs a turn of which the verifier's best is kept. Our reading: a step is one round of it: VERIFIER_UPDATES of the verifier first, then
labels by it, then one update of the policy (the paper alternates over whole data sets); "right" is reward 1; cut programs are no
labels; pairs are formed inside one packed row. In logs, a node's credit is the verifier's probability, its advantage 1 for the label.
Leaves out: sharded models and adapters.

    python train.py --method mucode
    python eval.py --model CHECKPOINT --verifier CHECKPOINT --samples 8
"""
import copy
import time

import torch
import torch.nn.functional as F

from murphy import all_reduce, autocast, mean, pack, packed_logprobs, split, sync_and_clip, token_weights, tree_metrics, update
from rollout import grow_trees


VERIFIER_UPDATES = 8  # optimizer steps of the verifier before each relabelling


class Verifier(torch.nn.Module):
    """The body of a causal LM and a scalar head, 0 at the start: rates a response by the state at its last token."""
    def __init__(self, model):
        super().__init__()
        self.body = copy.deepcopy(model.base_model)
        self.head = torch.nn.Linear(model.config.hidden_size, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, row):
        """Logits [responses] fp32 of the responses of a packed row."""
        last = [int((row.owner == r).nonzero().max()) for r in range(int(row.owner.max()) + 1)]
        states = self.body(input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=row.mask, use_cache=False).last_hidden_state
        return self.head(states[0, last].float())[:, 0]


def add_head(model):
    """The verifier, from the model's present weights, as a part of the model: so it is checked and saved with it."""
    model.verifier = Verifier(model)
    return model


# ---------------------------------------------------------------- the verifier

def program_rows(tree, nodes, config, device):
    """[(packed row of the task and programs, those programs' nodes)], each program behind the task alone."""
    prefix = tree.groups[0].prefix_ids
    parts = split(range(len(nodes)), len(prefix), lambda i: len(nodes[i].response_ids), config.row_tokens)
    parts = [[nodes[i] for i in part] for part in parts]
    return [(pack(prefix, [n.response_ids for n in part], [0.0] * len(part), device), part) for part in parts]


def verifier_terms(logits, right, kind):
    """Loss terms (1-D, to be averaged). logits: [n] fp32; right: [n] bool; kind: bce, a term a program, or bt, a term a pair."""
    if kind == "bce":
        return F.binary_cross_entropy_with_logits(logits, right.float(), reduction="none")
    return F.softplus(-(logits[right][:, None] - logits[~right][None, :])).flatten()


def count_terms(nodes, kind):
    """How many terms verifier_terms gives for these nodes."""
    right = sum(n.reward == 1 for n in nodes)
    return len(nodes) if kind == "bce" else right * (len(nodes) - right)


def teach_verifier(model, rows, optimizer, config):
    """One optimizer step of the verifier. Returns its loss; 0.0 if there was nothing to learn from."""
    optimizer.zero_grad(set_to_none=True)
    terms = torch.tensor(float(sum(count_terms(nodes, config.verifier_loss) for _, nodes in rows)), device=model.device)
    total, loss_sum = all_reduce(terms).item(), torch.zeros((), device=model.device)
    for row, nodes in rows:
        with autocast(model):
            logits = model.verifier(row)
        right = torch.tensor([n.reward == 1 for n in nodes], device=model.device)
        loss = verifier_terms(logits, right, config.verifier_loss).sum() / max(total, 1)
        loss.backward()
        loss_sum += loss.detach()
    sync_and_clip(model.verifier, config)
    if total:
        optimizer.step()  # the policy has no gradients, so it stays
    return all_reduce(loss_sum).item()


def rate(model, rows):
    """Sets every node's credit to the verifier's probability that it is right."""
    with torch.no_grad(), autocast(model):
        for row, nodes in rows:
            for node, probability in zip(nodes, model.verifier(row).sigmoid().tolist()):
                node.credit = probability


# ---------------------------------------------------------------- relabelling

def best(nodes):
    """The node that the verifier rates highest, the first of equals; cut programs do not count. None if there is none."""
    return max((n for n in nodes if not n.truncated), key=lambda n: n.credit, default=None)


def relabelled(trees, scored, device):
    """Packed rows of (history, label): every group's prefix, with the best program of its problem as the only response."""
    rows = []
    for tree, nodes in zip(trees, scored):
        label = best(nodes)
        for node in nodes:
            node.advantage = float(node is label)
        rows += [pack(group.prefix_ids, [label.response_ids], [1.0], device) for group in tree.groups if label]
    return rows


def imitation_loss(model, row, config):
    """Cross-entropy of a row's label, and statistics as murphy.row_loss has them."""
    logprobs, entropy = packed_logprobs(model, row, config.temperature)
    loss, zero = -(logprobs * row.weights).sum(), torch.zeros((), device=logprobs.device)
    return loss, torch.stack([loss.detach(), zero, zero, entropy.sum(), zero + len(logprobs)]), zero


def imitate(model, rows, optimizer, config):
    """One optimizer step of the policy on (history, label) rows."""
    counts = torch.tensor([len(rows), sum(len(row.targets) for row in rows)], dtype=torch.float64, device=model.device)
    token_weights(rows, *all_reduce(counts).tolist(), config)
    model.verifier.requires_grad_(False)
    try:
        return update(model, rows, optimizer, config, imitation_loss)
    finally:
        model.verifier.requires_grad_(True)


# ---------------------------------------------------------------- the step

def step(model, reference, tokenizer, problems, executor, optimizer, config, seed, bar=None):
    """One step of muCode; arguments and results as murphy.murphy_step. There is no reference model in this method."""
    torch.manual_seed(seed)
    seconds, start = {}, time.perf_counter()
    with autocast(model):
        trees = grow_trees(model, tokenizer, problems, executor, turns=config.turns, group_size=config.width, branch=1,
                           sampling=config.sampling, seconds=seconds, bar=bar)
    grown = time.perf_counter()
    scored = [[n for n in tree.nodes if n.reward is not None] for tree in trees]
    rows = [pair for tree, nodes in zip(trees, scored) for pair in program_rows(tree, nodes, config, model.device)]
    for _ in range(VERIFIER_UPDATES):
        verifier_loss = teach_verifier(model, rows, optimizer, config)
    rate(model, rows)
    metrics = imitate(model, relabelled(trees, scored, model.device), optimizer, config)
    seconds |= {"rollout": grown - start, "optimisation": time.perf_counter() - grown}
    known = [n for nodes in scored for n in nodes]
    return trees, tree_metrics(trees, config, seconds) | metrics | {
        "verifier_loss": verifier_loss, "verifier_right": mean([(n.credit > 0.5) == (n.reward == 1) for n in known])}


# ---------------------------------------------------------------- test time

def keep_best(model, config):
    """For grow_trees: of the programs of a turn, keep the one that the verifier rates highest (the first if all were cut)."""
    def choose(tree, nodes):
        rate(model, program_rows(tree, nodes, config, model.device))
        return best(nodes) or nodes[0]
    return choose
