"""MURPHY: one training step, read top to bottom, and the objective it minimises.

    grow trees -> MaRS / MeRS credit -> InterP / IntraP pruning -> local advantages
    -> one packed row per sibling group -> token log-probs -> GRPO loss -> backward -> optimizer

A packed row holds the prefix of a group once, then its responses; a mask lets every response see the prefix and
itself. One row is one micro-batch: gradients accumulate over rows, and each token carries a weight whose denominator
is that of the whole step over all rows and processes, so splitting the step differently changes nothing.

Left out: how a model is loaded and sharded (train.py, sharding.py), schedules other than warm-up, and every trick that is in neither paper.
The method is arXiv 2511.07833 (MURPHY) on arXiv 2402.03300 (GRPO); "our decision" marks what they do not settle.
"""
import contextlib
import math
import time
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import credit
from lora import adapters_off
from problems import BadInput
from rollout import Sampling, grow_trees
from sharding import device_of, is_sharded, unsharded


# ---------------------------------------------------------------- hyperparameters

def option(default, group, help, choices=None):
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True)
class MurphyConfig:
    """Every hyperparameter, with a line of why. train.py turns each into a flag with this line as its help."""
    method: str = option("murphy", "method", "murphy: trees; grpo: one turn; grpo-mt: chains of one child per failing "
                         "program, the last reward of a chain is the return of all its turns; rlef: PPO on such chains; mucode: imitation of the "
                         "programs that a verifier likes best; reveal: the model writes tests too; see comparators/",
                         ["murphy", "grpo", "grpo-mt", "rlef", "mucode", "reveal"])
    match_compute: bool = option(False, "method", "for the comparators: sample as many programs per prompt as a whole tree of G and S "
                                 "would hold, 72 for 8 and 2 (our reading of compute-matched)")
    turns: int = option(2, "method", "S, attempts from task to deepest node; the paper trains with 2")
    group_size: int = option(8, "method", "G, programs sampled from one prefix; 8 is the usual GRPO group (our decision)")
    credit: str = option("mars", "method", "how rewards flow back: mars takes the maximum over self and children, "
                         "mers the discounted mean; both are the paper's", ["mars", "mers"])
    gamma: float = option(0.9, "method", "discount of MeRS; 0.9 as in re-implementations, the paper's value is unknown to us")
    prune: str = option("none", "method", "after the rollout, before the loss: intrap keeps the siblings of widest credit, "
                        "interp the later groups of widest credit; both are the paper's", ["none", "intrap", "interp"])
    budget: int = option(4, "method", "what pruning keeps: nodes per group (intrap), or groups of turn 2 and later per "
                         "tree (interp); 4 is our decision")
    reward: str = option("fraction", "method", "fraction: share of tests passed; binary: 1 only if all pass (our decision)",
                         ["fraction", "binary"])
    verifier_loss: str = option("bce", "method", "of mucode's verifier: bce on each program, or bt, Bradley-Terry on pairs; both are its paper's",
                                ["bce", "bt"])
    temperature: float = option(1.0, "sampling", "of sampling, and of the log-probs in the loss; 0 samples greedily and scores at 1")
    top_k: int = option(0, "sampling", "sample among the k likeliest tokens, 0 is off; the loss scores the full distribution, so leave it off")
    top_p: float = option(1.0, "sampling", "nucleus sampling, 1 is off; as top_k")
    max_new_tokens: int = option(512, "sampling", "longest response; a longer one is cut and marked truncated")
    batch_tokens: int = option(65536, "sampling", "tokens (rows x longest) sampled at once; bounds the KV cache")
    normaliser: str = option("grpo", "objective", "grpo: mean over a response's tokens, then over responses; dapo: mean over all "
                             "tokens; dr-grpo: sum over responses x max_new_tokens", ["grpo", "dapo", "dr-grpo"])
    clip_eps: float = option(0.2, "objective", "clip of the probability ratio; GRPO's published value")
    beta: float = option(0.04, "objective", "weight of the k3 KL to the initial model; GRPO's value; 0 loads no reference model")
    updates_per_rollout: int = option(1, "objective", "optimizer steps on one rollout; 1 keeps it on-policy (ratio 1)")
    learning_rate: float = option(1e-6, "optimizer", "of AdamW; 1e-6 is usual for RL of 1-7B models (our decision)")
    warmup_steps: int = option(0, "optimizer", "steps over which the learning rate rises from 0")
    weight_decay: float = option(0.0, "optimizer", "of AdamW")
    max_grad_norm: float = option(1.0, "optimizer", "gradients are scaled down to this norm")
    row_tokens: int = option(8192, "optimizer", "longest packed row; a longer group is split, each part with the prefix")
    prompts_per_step: int = option(8, "run", "problems whose trees make one step, over all processes")
    steps: int = option(100, "run", "training steps")
    seed: int = option(0, "run", "the one seed: problems, order, sampling, evaluation")

    def check(self):
        """Raises BadInput with one sentence for a value that cannot be meant."""
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            flag = "--" + f.name.replace("_", "-")
            if choices and value not in choices:
                raise BadInput(f"{flag} is {value}; choose one of {', '.join(choices)}")
            low = LOWEST.get(f.name)
            if low is not None and not (value >= low and value < float("inf")):
                raise BadInput(f"{flag} is {value}; it must be a number of at least {low}")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"--top-p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def width(self):
        """Programs sampled from a task: G; with match_compute a whole tree's number, over the turns of a chain (rounded up)."""
        if self.method == "murphy" or not self.match_compute:
            return self.group_size
        whole = sum(self.group_size ** turn for turn in range(1, self.turns + 1))
        return whole if self.method == "grpo" else math.ceil(whole / self.turns)

    @property
    def sampling(self):
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens, self.batch_tokens)


LOWEST = dict(turns=1, group_size=2, gamma=0, budget=1, temperature=0, top_k=0, max_new_tokens=1, batch_tokens=1, clip_eps=0,
              beta=0, updates_per_rollout=1, learning_rate=0, warmup_steps=0, weight_decay=0, max_grad_norm=0, row_tokens=1,
              prompts_per_step=1, steps=1, seed=0)


# ---------------------------------------------------------------- credit

def assign_credit(tree, config):
    """Fill credit and advantage of every node of a tree; a pruned node, or one without reward, keeps advantage None."""
    rewards, parents = tree.rewards, tree.parents
    if config.method == "grpo-mt":
        credits = credit.chain_returns(rewards, parents)
        keep, advantages = [c is not None for c in credits], credit.chain_advantages(credits, parents)
    else:
        credits = (credit.mars(rewards, parents) if config.credit == "mars" else
                   credit.mers(rewards, parents, config.turns, config.gamma))
        keep = prune(credits, parents, config)
        advantages = credit.local_advantages(credits, parents, keep)
    for node, c, kept, advantage in zip(tree.nodes, credits, keep, advantages):
        node.credit, node.advantage = c, advantage if kept else None


def prune(credits, parents, config):
    if config.prune == "intrap":
        return credit.intrap(credits, parents, config.budget)
    if config.prune == "interp":
        return credit.interp(credits, parents, config.budget)
    return [c is not None for c in credits]


# ---------------------------------------------------------------- packed rows

@dataclass
class PackedRow:
    """A group (or a part of it) in one row of T tokens with R response tokens."""
    input_ids: torch.Tensor       # [1, T] prefix, then the responses one after another
    position_ids: torch.Tensor    # [1, T] every response starts at len(prefix)
    owner: torch.Tensor           # [T] the response that a token belongs to, -1: the prefix
    response_index: torch.Tensor  # [R] the position whose logits predict target r
    targets: torch.Tensor         # [R] the sampled tokens
    advantages: torch.Tensor      # [R] fp32, of the response that the token belongs to
    lengths: torch.Tensor         # [R] length of that response
    weights: torch.Tensor = None  # [R] fp32, 1 / denominator of the whole step, see `token_weights`
    old: torch.Tensor = None      # [R] log-probs before the first update; None: on-policy
    ref: torch.Tensor = None      # [R] log-probs of the reference model; None: beta is 0

    @property
    def mask(self):
        """[1, 1, T, T] bool, True where a token may look: at the prefix and its own response, never later. Made when it is asked
        for: a step has many rows, and their masks together would take gigabytes."""
        causal = torch.ones(len(self.owner), len(self.owner), dtype=torch.bool, device=self.owner.device).tril()
        return (causal & ((self.owner == -1) | (self.owner == self.owner[:, None])))[None, None]


def pack(prefix_ids, responses, advantages, device="cpu"):
    """Pack one group. responses: list of id lists (not empty); advantages: one float per response. Returns PackedRow."""
    owner, ids, positions, index, lengths = [-1] * len(prefix_ids), list(prefix_ids), list(range(len(prefix_ids))), [], []
    for r, response in enumerate(responses):
        # the last prefix token predicts a response's first token, each response token predicts the next one
        index += [len(prefix_ids) - 1] + list(range(len(ids), len(ids) + len(response) - 1))
        owner += [r] * len(response)
        ids += response
        positions += range(len(prefix_ids), len(prefix_ids) + len(response))
        lengths += [len(response)] * len(response)
    row = lambda values, dtype=torch.long: torch.tensor(values, dtype=dtype, device=device)
    return PackedRow(row([ids]), row([positions]), row(owner), row(index), row(ids[len(prefix_ids):]),
                     row([a for a, response in zip(advantages, responses) for _ in response], torch.float32), row(lengths))


def split(members, prefix_tokens, length, row_tokens):
    """Cut a group into parts whose packed rows have at most row_tokens tokens (one response at least)."""
    parts, used = [], row_tokens + 1
    for i in members:
        if used + length(i) > row_tokens:
            parts.append([])
            used = prefix_tokens
        parts[-1].append(i)
        used += length(i)
    return parts


def pack_tree(tree, config, device):
    """Packed rows of the kept nodes of a tree. Rows without any gradient (advantages all 0, beta 0) are skipped."""
    rows = []
    for group in tree.groups:
        kept = [i for i in group.members if tree.nodes[i].advantage is not None]
        for part in split(kept, len(group.prefix_ids), lambda i: len(tree.nodes[i].response_ids), config.row_tokens):
            nodes = [tree.nodes[i] for i in part]
            if config.beta > 0 or any(n.advantage != 0 for n in nodes):
                rows.append(pack(group.prefix_ids, [n.response_ids for n in nodes], [n.advantage for n in nodes], device))
    return rows


def kept_nodes(trees):
    return [n for tree in trees for n in tree.nodes if n.advantage is not None]


def token_weights(rows, responses, tokens, config):
    """Set each row's weights, so that the step's loss is the plain sum of weight x token loss.

    responses, tokens: counts of the whole step over all processes, flat groups included (so that skipping them
    changes nothing), pruned nodes not. Sources: grpo arXiv 2402.03300, dapo arXiv 2503.14476, dr-grpo arXiv 2503.20783.
    """
    for row in rows:
        if config.normaliser == "grpo":
            denominator = row.lengths.float() * responses
        elif config.normaliser == "dapo":
            denominator = torch.full_like(row.advantages, tokens)
        else:
            denominator = torch.full_like(row.advantages, responses * config.max_new_tokens)
        row.weights = 1 / denominator


# ---------------------------------------------------------------- log-probs and objective

LOGITS_AT_ONCE = 2**25  # logits (positions x vocabulary) held at a time: 128 MiB in fp32, and a few times that in work


def packed_logprobs(model, row, temperature):
    """Log-probs of the response tokens under the sampling distribution, and its entropy (no gradient). Two [R] fp32.

    The logits are divided by the temperature (1 where it is 0: greedy sampling is scored at 1). The vocabulary projection
    runs at the response positions alone, in parts of LOGITS_AT_ONCE logits which are computed again in the backward pass:
    memory does not grow with vocabulary x response tokens.
    """
    with autocast(model):
        return state_logprobs(*hidden_states(model, row), row.targets, temperature)


def state_logprobs(hidden, head, targets, temperature):
    """packed_logprobs from hidden states [R, H] and the head; call inside autocast(model)."""
    size = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
    parts = list(zip(hidden.split(size), targets.split(size)))
    again = torch.is_grad_enabled() and len(parts) > 1
    entropies = [[] for _ in parts]
    logprobs = [checkpoint(head_logprobs, head, *part, temperature, entropy, use_reentrant=False) if again else
                head_logprobs(head, *part, temperature, entropy) for part, entropy in zip(parts, entropies)]
    return torch.cat(logprobs), torch.cat([entropy for (entropy,) in entropies])


def hidden_states(model, row):
    """Final hidden states [R, H] that predict the response tokens, and the head that makes logits of them.

    The head is set aside for this call rather than the body called alone: a sharded model gathers its weights only when it
    is called as a whole. models.check_head() refuses a model whose logits are not the head's of these states.
    """
    mask, head = row.mask, model.get_output_embeddings()
    if model.config._attn_implementation == "eager":  # eager attention adds the mask to its scores; sdpa takes bools
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    model.set_output_embeddings(torch.nn.Identity())
    try:
        hidden = model(input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=mask, use_cache=False,
                       logits_to_keep=row.response_index).logits[0]
    finally:
        model.set_output_embeddings(head)
    return hidden, head


def head_logprobs(head, hidden, targets, temperature, entropy):
    """Log-probs [P] fp32 of some positions: hidden [P, H], targets [P]. The first call appends their entropies [P] to the list
    `entropy`; the second, in the backward pass, has no need of them."""
    logits = head(hidden).float() / (temperature or 1.0)
    normaliser = logits.logsumexp(-1)
    if not entropy:
        with torch.no_grad():
            entropy.append(normaliser - ((logits - normaliser[:, None]).exp_() * logits).sum(-1))
    return logits.gather(-1, targets[:, None])[:, 0] - normaliser


MAX_LOG_RATIO = 20.0  # exp of it is finite in fp32; clamped before exp, for after it the gradient would be 0 * inf = NaN


def token_losses(new, old, ref, advantages, config):
    """GRPO's loss per token: -(min(ratio * A, clip(ratio) * A) - beta * k3). arXiv 2402.03300, eq. 3 and 4.

    new, old, ref, advantages: [R] fp32; ref may be None (beta 0). k3 = exp(ref - new) - (ref - new) - 1 >= 0.
    Returns loss [R], k3 [R], clipped [R] bool (where the clip took the gradient away).
    """
    ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - config.clip_eps, 1 + config.clip_eps)
    gain = torch.min(ratio * advantages, bounded * advantages)
    clipped = bounded * advantages < ratio * advantages
    if ref is None:
        return -gain, torch.zeros_like(new), clipped
    drift = (ref - new).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = drift.exp() - drift - 1
    return -(gain - config.beta * k3), k3, clipped


def row_loss(model, row, config):
    """Weighted loss of one row (a scalar with gradient) and its statistics, sums over tokens."""
    new, entropy = packed_logprobs(model, row, config.temperature)
    old = new.detach() if row.old is None else row.old
    loss, k3, clipped = token_losses(new, old, row.ref, row.advantages, config)
    loss, real = (loss * row.weights).sum(), (row.weights > 0).float()  # 0: a filler, see fill()
    stats = torch.stack([loss.detach(), (k3.detach() * row.weights).sum(), (clipped * real).sum(), (entropy * real).sum(), real.sum()])
    return loss, stats, (k3.detach() * real).max()


# ---------------------------------------------------------------- the step

def autocast(model):
    """bf16 compute on CUDA over fp32 master weights (updates around 1e-6 would round away in bf16); fp32 elsewhere.

    Never around an optimizer step: autocast keeps its bf16 copies of the weights until its end, and they would be stale.
    """
    return torch.autocast("cuda", torch.bfloat16) if device_of(model).type == "cuda" else contextlib.nullcontext()


def all_reduce(tensor, op="sum"):
    """Sum (or max) over all processes, in place; without torchrun the tensor itself."""
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return tensor


def score(model, rows, config):
    """Log-probs of every row without gradient, as a list of [R]."""
    with torch.no_grad():
        return [packed_logprobs(model, row, config.temperature)[0] for row in rows]


def update(model, rows, optimizer, config, row_loss):
    """One optimizer step on all rows of all processes; returns loss, k3, clip share, entropy, grad norm, k3 max.

    row_loss(model, row, config) gives a row's loss, its statistics and the largest k3; comparators have their own.
    """
    optimizer.zero_grad(set_to_none=True)
    stats, k3_max = torch.zeros(5, device=device_of(model)), torch.zeros((), device=device_of(model))
    for row in rows:
        loss, row_stats, row_k3 = row_loss(model, row, config)
        loss.backward()
        stats += row_stats
        k3_max = torch.maximum(k3_max, row_k3)
    all_reduce(stats), all_reduce(k3_max, "max")
    grad_norm = sync_and_clip(model, config)
    loss, k3, clipped, entropy, tokens = stats.tolist()
    finite = math.isfinite(loss) and math.isfinite(grad_norm)  # sums over all processes, so all decide alike
    if tokens and finite:  # with Adam's momentum, a step on no gradient at all would still move the weights
        optimizer.step()
    return {"skipped": not finite, "loss": loss, "k3_mean": k3, "k3_max": k3_max.item(), "clip_share": clipped / max(tokens, 1),
            "entropy": entropy / tokens if tokens else None, "grad_norm": grad_norm}


def sync_and_clip(model, config):
    """Sum gradients over processes (denominators are global, so the sum is the gradient), then clip their norm.

    The gradients of a sharded model were summed in the backward pass.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if dist.is_initialized() and not is_sharded(model):
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def fill(rows, device):
    """Add rows of weight 0 until every process has as many: each pass of a sharded model is one of all processes together."""
    most = int(all_reduce(torch.tensor(float(len(rows)), device=device), "max"))
    while len(rows) < most:
        rows.append(replace(pack([0], [[0]], [0.0], device), weights=torch.zeros(1, device=device)))


def optimise(model, reference, trees, optimizer, config):
    """Pack trees (with advantages) and take config.updates_per_rollout optimizer steps. Returns metrics of the last."""
    rows = [row for tree in trees for row in pack_tree(tree, config, device_of(model))]
    kept = kept_nodes(trees)
    counts = torch.tensor([len(kept), sum(len(n.response_ids) for n in kept)], dtype=torch.float64, device=device_of(model))
    responses, tokens = all_reduce(counts).tolist()
    token_weights(rows, responses, tokens, config)
    if is_sharded(model):
        fill(rows, device_of(model))
    if reference is not None:
        with adapters_off(reference):  # with LoRA the reference is the model itself
            for row, logprobs in zip(rows, score(reference, rows, config)):
                row.ref = logprobs
    if config.updates_per_rollout > 1:
        for row, logprobs in zip(rows, score(model, rows, config)):
            row.old = logprobs
    for _ in range(config.updates_per_rollout):
        metrics = update(model, rows, optimizer, config, row_loss)
    return metrics


def murphy_step(model, reference, tokenizer, problems, executor, optimizer, config, seed, bar=None):
    """One step of MURPHY on this process's problems. Returns (trees, metrics); metrics are over all processes.

    seed rules all sampling of the step, so that a resumed run samples what an unbroken one would have; bar (tqdm) tells what it is at.
    """
    torch.manual_seed(seed)
    seconds, start = {}, time.perf_counter()
    with unsharded(model), autocast(model):
        trees = grow_trees(model, tokenizer, problems, executor, turns=1 if config.method == "grpo" else config.turns,
                           group_size=config.width, branch=1 if config.method == "grpo-mt" else None,
                           sampling=config.sampling, binary_reward=config.reward == "binary", seconds=seconds, bar=bar)
    if bar is not None:
        bar.set_description("optimising")
    for tree in trees:
        assign_credit(tree, config)
    grown = time.perf_counter()
    metrics = optimise(model, reference, trees, optimizer, config)
    seconds |= {"rollout": grown - start, "optimisation": time.perf_counter() - grown}
    return trees, tree_metrics(trees, config, seconds) | metrics


# ---------------------------------------------------------------- metrics

def tree_metrics(trees, config, seconds):
    """Numbers that say whether a run is healthy, over the trees of all processes.

    seconds_execution is the wait for programs after the last sample of a turn; the rest of their time runs beside sampling.
    """
    facts = [[(n.turn, n.reward, n.advantage is None, len(n.response_ids), n.truncated, hash(tuple(n.response_ids)))
              for n in tree.nodes] for tree in trees]
    spreads = [(credit_spread(tree, group), group.truncated) for tree in trees for group in tree.groups]
    gathered = [None] * dist.get_world_size() if dist.is_initialized() else [(facts, spreads, seconds)]
    if dist.is_initialized():
        dist.all_gather_object(gathered, (facts, spreads, seconds))
    nodes = [node for part, _, _ in gathered for tree in part for node in tree]
    per_tree = [tree for part, _, _ in gathered for tree in part]
    spreads = [s for _, part, _ in gathered for s in part]
    times = [s for _, _, s in gathered]
    scored = [n for n in nodes if n[1] is not None]
    metrics = {}
    for turn in range(1, max((n[0] for n in nodes), default=0) + 1):
        at = [n[1] for n in scored if n[0] == turn]
        metrics[f"reward_turn{turn}"] = mean(at)
        metrics[f"solved_turn{turn}"] = mean([r == 1 for r in at])
    metrics["solved_prompts"] = mean([any(n[1] == 1 for n in tree) for tree in per_tree])
    known = [s for s, _ in spreads if s is not None]
    length = [n[3] for n in nodes]
    rollout_seconds = max(t.get("sampling", 0) for t in times)
    return metrics | {
        "nodes": len(nodes), "groups": len(spreads), "infra": len(nodes) - len(scored),
        "group_std": mean(known), "flat_groups": mean([s == 0 for s in known]), "pruned_share": mean([n[2] for n in nodes]),
        "length_mean": mean(length), "length_max": max(length, default=0), "truncated_share": mean([n[4] for n in nodes]),
        "cut_prompts": mean([cut for _, cut in spreads]), "distinct_responses": len({n[5] for n in nodes}) / max(len(nodes), 1),
        "tokens": sum(length), "tokens_per_second": sum(length) / rollout_seconds if rollout_seconds else None,
        "seconds_rollout": max(t["rollout"] for t in times), "seconds_sampling": rollout_seconds,
        "seconds_execution": max(t.get("execution", 0) for t in times),
        "seconds_optimisation": max(t["optimisation"] for t in times)}


def mean(values):
    return sum(values) / len(values) if values else None


def credit_spread(tree, group):
    """Sample std of a group's credits; 0.0 if flat, None if nothing there was scored."""
    values = [tree.nodes[i].credit for i in group.members if tree.nodes[i].credit is not None]
    return None if not values else 0.0 if credit.is_flat(values) else torch.tensor(values).std().item()
