"""Credit: MaRS, MeRS, local advantages, IntraP and InterP, as pure functions on two flat lists.

A rollout tree is `rewards: list[float | None]` and `parents: list[int]`: node i was sampled after
reading node parents[i] and its feedback; -1 marks the first turn. A parent stands before its
children, so every backward pass below is one loop over the reversed list. Nodes with one parent are
siblings, and form a *group*: they share their prefix, and are compared with each other only.

`None` is "not there" (the executor failed, not the program). Such a node has no credit, counts in no
mean, no maximum and no group, and is never 0.

Left out: anything with tensors, models or randomness. Sources are named per function; "our decision"
marks what the MURPHY paper (arXiv 2511.07833) does not settle for us, or what we could not check.

>>> mars([0.2, 0.0, 1.0], [-1, 0, 0])
[1.0, 0.0, 1.0]
"""
import math
from statistics import fmean, stdev

FLAT = 1e-9  # a spread of credits up to this is "all equal": the std of eight times 0.35 is not exactly 0


def check_tree(rewards, parents):
    """Raises ValueError unless there is one reward per node, each finite or None, and parents stand before children."""
    if len(rewards) != len(parents):
        raise ValueError(f"{len(rewards)} rewards for {len(parents)} nodes")
    for i, (reward, parent) in enumerate(zip(rewards, parents)):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward {reward} of node {i} is not a finite number")
        if not -1 <= parent < i:
            raise ValueError(f"node {i} has parent {parent}: a parent must be -1 or stand before its child")


def children_of(parents):
    """Lists of child indices, one per node."""
    children = [[] for _ in parents]
    for i, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(i)
    return children


def turns_of(parents):
    """The turn (depth, from 1) of every node."""
    turns = []
    for parent in parents:
        turns.append(1 if parent < 0 else turns[parent] + 1)
    return turns


def groups_of(parents):
    """Sibling groups: {parent: [node, ...]}, in the order in which they were grown."""
    groups = {}
    for i, parent in enumerate(parents):
        groups.setdefault(parent, []).append(i)
    return groups


def backup(rewards, parents, combine):
    """One pass from the last node to the first: credit(i) = combine(i, reward(i), credits of children).

    `combine` is called only where a node has a reward and at least one child with a credit.
    """
    children, credits = children_of(parents), list(rewards)
    for i in reversed(range(len(rewards))):
        below = [credits[c] for c in children[i] if credits[c] is not None]
        if below and rewards[i] is not None:
            credits[i] = combine(i, rewards[i], below)
    return credits


def mars(rewards, parents):
    """MaRS, max backup: credit(i) = max(reward(i), max over children c of credit(c)).

    An attempt is worth the best program that grew out of it. Source: MURPHY paper, max reward strategy.
    Args: rewards, list of n floats (or None); parents, list of n ints. Returns: list of n floats (or None).
    Raises: ValueError if the lists do not describe a tree, or a reward is not finite.
    """
    check_tree(rewards, parents)
    return backup(rewards, parents, lambda i, reward, below: max(reward, *below))


def mers(rewards, parents, num_turns, gamma=0.9):
    """MeRS, mean backup: credit(i) = (reward(i) + gamma * mean of children's credits) / (S - turn(i) + 1).

    A node without (scored) children keeps its reward. S = num_turns is the number of turns of the rollout.
    Source: the mean strategy is the MURPHY paper's; the normaliser and gamma = 0.9 are as independent
    re-implementations have them. Mean over scored children only: our decision.
    Args and returns as `mars`; raises ValueError also if the tree is deeper than num_turns.
    """
    check_tree(rewards, parents)
    turns = turns_of(parents)
    if turns and max(turns) > num_turns:
        raise ValueError(f"the tree has {max(turns)} turns, num_turns is {num_turns}")
    return backup(rewards, parents, lambda i, reward, below: (reward + gamma * fmean(below)) / (num_turns - turns[i] + 1))


def chain_returns(rewards, parents):
    """GRPO-MT: every turn of a chain gets the reward of the chain's last scored turn.

    Source: the comparator of that name in the MURPHY paper; the definition is our reading.
    Raises: ValueError if a node has two children, for then it is a tree and not a chain.
    """
    check_tree(rewards, parents)
    if any(len(c) > 1 for c in children_of(parents)):
        raise ValueError("a chain has one child per node; this is a tree: use mars or mers")
    return backup(rewards, parents, lambda i, reward, below: below[0])


def is_flat(credits):
    """True if the credits (no None among them) are all equal up to FLAT, or fewer than two."""
    return len(credits) < 2 or max(credits) - min(credits) <= FLAT


def kept_members(credits, members, keep):
    """The members of a group that have a credit and were not pruned."""
    return [i for i in members if credits[i] is not None and (keep is None or keep[i])]


def local_advantages(credits, parents, keep=None, eps=1e-4):
    """GRPO's z-score inside every sibling group: A(i) = (credit(i) - mean) / (std + eps).

    std is the sample standard deviation (n - 1) and eps 1e-4, as TRL has them: our decision. Mean and std
    are over the kept nodes only: our decision. A flat group, a group of one, a pruned node and a node
    without credit get exactly 0.0. Source: GRPO (arXiv 2402.03300), made local to siblings by MURPHY.
    Args: credits, list of n floats (or None); keep, list of n bools or None for all. Returns: n floats.
    """
    check_tree(credits, parents)
    advantages = [0.0] * len(credits)
    for members in groups_of(parents).values():
        members = kept_members(credits, members, keep)
        values = [credits[i] for i in members]
        if is_flat(values):
            continue
        mean, std = fmean(values), stdev(values)
        for i in members:
            advantages[i] = (credits[i] - mean) / (std + eps)
    return advantages


def chain_advantages(returns, parents, eps=1e-4):
    """GRPO-MT: advantages over the chains of a prompt; every turn of a chain has its first turn's advantage."""
    advantages = local_advantages(returns, parents, [p < 0 for p in parents], eps)
    for i, parent in enumerate(parents):
        if parent >= 0 and returns[i] is not None:
            advantages[i] = advantages[parent]
    return advantages


def widest(values, budget):
    """Positions of the `budget` values with the largest variance.

    The best subset is always some k lowest and budget - k highest values, so trying every k is exact
    (arXiv 2504.13818). Prefix sums make each try constant time. Ties: the smallest k, then the order given.
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    if len(order) <= budget:
        return order
    center = fmean(values)  # shifting by the mean keeps the sums of squares well conditioned

    def spread(k):
        chosen = [values[i] - center for i in order[:k] + order[len(order) - (budget - k):]]
        return fmean(v * v for v in chosen) - fmean(chosen) ** 2

    best = max(range(budget + 1), key=spread)
    return order[:best] + order[len(order) - (budget - best):]


def check_pruning(credits, parents, budget):
    check_tree(credits, parents)
    if budget < 1:
        raise ValueError(f"the pruning budget is {budget}; it must be at least 1")


def intrap(credits, parents, budget):
    """IntraP: inside every sibling group keep the `budget` nodes whose credits have the largest variance.

    Source: pruning inside a group after the rollout is the MURPHY paper's; the subset rule is as
    re-implementations have it. Nodes without credit are not kept and take no place in the budget.
    Returns: keep mask, list of n bools. Raises: ValueError for a budget below 1, or lists that are no tree.
    """
    check_pruning(credits, parents, budget)
    keep = [False] * len(credits)
    for members in groups_of(parents).values():
        members = kept_members(credits, members, None)
        for position in widest([credits[i] for i in members], budget):
            keep[members[position]] = True
    return keep


def interp(credits, parents, budget):
    """InterP: of the groups at turn >= 2 keep the `budget` with the largest credit std; turn 1 always stays.

    Source: pruning between groups after the rollout is the MURPHY paper's, the std rule as
    re-implementations have it; "turn 1 stays", the sample std and "ties: the group grown first" are our decision.
    Returns: keep mask, list of n bools. Raises: ValueError for a budget below 1, or lists that are no tree.
    """
    check_pruning(credits, parents, budget)
    groups = {parent: kept_members(credits, members, None) for parent, members in groups_of(parents).items()}

    def spread(parent):
        values = [credits[i] for i in groups[parent]]
        return 0.0 if is_flat(values) else stdev(values)

    later = [parent for parent in groups if parent >= 0]
    chosen = set(sorted(later, key=spread, reverse=True)[:budget]) | {-1}  # sorted is stable: ties keep their order
    return [credits[i] is not None and parents[i] in chosen for i in range(len(credits))]
