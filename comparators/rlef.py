"""RLEF (arXiv 2410.02089): PPO on chains of attempts, with a value and an advantage per turn.

    expanded   every program that fails a public test, into one next attempt (a chain of up to S turns); feedback is public
    return     of a turn: the rewards from it to the end of the chain. The end gives +1 if all private tests pass, else -1; a turn
               without code -0.2; every turn minus beta times its KL to the initial policy (a sample of it: sum of old - ref log-probs)
    loss       PPO's clip on every token with its turn's advantage, return - V(prefix), and the clipped squared error of V

Certain, from its paper's summary: the rewards, public feedback and private reward, V once a turn from the last prompt token, one
advantage for all tokens of a turn. Our reading: the paper's beta is 0.05, ours is --beta; V is a linear layer on the policy's own last
hidden state, 0 at the start; VALUE_WEIGHT; token means by --normaliser; advantages as they are, not scaled; where a problem has no
private tests all count; a chain in which the executor failed is left out; pruning and --credit do not apply.
Leaves out: sharded models and adapters.

    python train.py --method rlef
"""
import time
from dataclasses import dataclass, fields

import torch

from murphy import (PackedRow, all_reduce, autocast, hidden_states, pack, score, split, state_logprobs, token_losses, token_weights, tree_metrics,
                    update)
from rollout import chains_of, grow_trees

NO_CODE, VALUE_WEIGHT = -0.2, 0.5


@dataclass
class TurnRow(PackedRow):
    """A packed row with what the value head learns from: its prefix is the context c_t of one turn."""
    returns: torch.Tensor = None      # [responses] fp32
    old_value: torch.Tensor = None    # [] fp32, V before the first update
    turns: float = 1.0                # responses of the whole step, the denominator of the value loss


def add_head(model):
    """A value head, 0 at the start, as a part of the model: so it is trained, checked and saved with it."""
    model.value_head = torch.nn.Linear(model.config.hidden_size, 1, device=model.device)
    torch.nn.init.zeros_(model.value_head.weight)
    torch.nn.init.zeros_(model.value_head.bias)
    return model


# ---------------------------------------------------------------- returns

def outcome(verdict):
    """+1 if all private tests pass (without private tests: all tests), else -1."""
    private = [passed for passed, public in zip(verdict.passed, verdict.public) if not public] or verdict.passed
    return 1.0 if all(private) else -1.0


def turn_returns(chain, kl, beta):
    """Returns of the turns of a chain (list of Node). kl: sum of old - ref log-probs of each turn. [turns] floats.

    A_t = sum of rewards from t on - V(c_t), RLEF's advantage, without its V.
    """
    total, returns = outcome(chain[-1].verdict), []
    for node, divergence in zip(reversed(chain), reversed(kl)):
        total += (0.0 if node.code else NO_CODE) - beta * divergence
        returns.append(total)
    return returns[::-1]


# ---------------------------------------------------------------- loss

def value_loss(value, row, config):
    """PPO's: the larger of the squared errors of V and of V kept near its old value, halved; mean over the turns of the step."""
    near = row.old_value + (value - row.old_value).clamp(-config.clip_eps, config.clip_eps)
    return 0.5 * torch.maximum((value - row.returns) ** 2, (near - row.returns) ** 2).sum() / row.turns


def row_loss(model, row, config):
    """As murphy.row_loss: the weighted loss of a row, statistics, and no k3, for the KL is in the reward."""
    with autocast(model):
        hidden, head = hidden_states(model, row)
        new, entropy = state_logprobs(hidden, head, row.targets, config.temperature)
    value = model.value_head(hidden[0].float()).squeeze()  # the first target is predicted by the last prompt token
    old = new.detach() if row.old is None else row.old
    loss, _, clipped = token_losses(new, old, None, row.advantages, config)
    loss = (loss * row.weights).sum() + VALUE_WEIGHT * value_loss(value, row, config)
    count = torch.tensor(float(len(new)), device=new.device)
    return loss, torch.stack([loss.detach(), torch.zeros_like(count), clipped.float().sum(), entropy.sum(), count]), torch.zeros_like(count)


# ---------------------------------------------------------------- the step

def turn_rows(trees, config, device):
    """(rows, the nodes of each row), over the groups of all trees; chains with a missing verdict are left out."""
    rows, owners = [], []
    for tree in trees:
        whole = {id(node) for chain in chains_of(tree) if all(n.reward is not None for n in chain) for node in chain}
        for group in tree.groups:
            members = [i for i in group.members if id(tree.nodes[i]) in whole]
            for part in split(members, len(group.prefix_ids), lambda i: len(tree.nodes[i].response_ids), config.row_tokens):
                nodes = [tree.nodes[i] for i in part]
                row = pack(group.prefix_ids, [n.response_ids for n in nodes], [0.0] * len(nodes), device)
                rows.append(TurnRow(**{f.name: getattr(row, f.name) for f in fields(PackedRow)}))
                owners.append(nodes)
    return rows, owners


def sums(values, nodes):
    """Sum of token values [R] for each node of a row, as floats."""
    return [part.sum().item() for part in values.split([len(n.response_ids) for n in nodes])]


def assign(trees, rows, owners, model, reference, config):
    """Old log-probs and values, returns and advantages, of rows and of their nodes (credit is the return)."""
    old = score(model, rows, config)
    ref = score(reference, rows, config) if reference is not None else old
    kl = {id(n): d for nodes, new, base in zip(owners, old, ref) for n, d in zip(nodes, sums(new - base, nodes))}
    for tree in trees:
        for chain in chains_of(tree):
            if id(chain[0]) in kl:
                for node, value in zip(chain, turn_returns(chain, [kl[id(n)] for n in chain], config.beta)):
                    node.credit = value
    for row, nodes, logprobs in zip(rows, owners, old):
        with torch.no_grad(), autocast(model):
            row.old_value = model.value_head(hidden_states(model, row)[0][0].float()).squeeze()
        row.old = logprobs if config.updates_per_rollout > 1 else None
        row.returns = torch.tensor([n.credit for n in nodes], device=logprobs.device)
        for node in nodes:
            node.advantage = node.credit - row.old_value.item()
        row.advantages = torch.tensor([n.advantage for n in nodes for _ in n.response_ids], device=logprobs.device)


def step(model, reference, tokenizer, problems, executor, optimizer, config, seed, bar=None):
    """One step of RLEF; arguments and results as murphy.murphy_step."""
    torch.manual_seed(seed)
    seconds, start = {}, time.perf_counter()
    with autocast(model):
        trees = grow_trees(model, tokenizer, problems, executor, turns=config.turns, group_size=config.width, branch=1,
                           sampling=config.sampling, public_feedback=True, seconds=seconds, bar=bar)
    grown = time.perf_counter()
    rows, owners = turn_rows(trees, config, model.device)
    assign(trees, rows, owners, model, reference, config)
    counts = torch.tensor([sum(map(len, owners)), sum(len(row.targets) for row in rows)], dtype=torch.float64, device=model.device)
    responses, tokens = all_reduce(counts).tolist()
    token_weights(rows, responses, tokens, config)
    for row in rows:
        row.turns = responses
    for _ in range(config.updates_per_rollout):
        metrics = update(model, rows, optimizer, config, row_loss)
    seconds |= {"rollout": grown - start, "optimisation": time.perf_counter() - grown}
    return trees, tree_metrics(trees, config, seconds) | metrics
