"""The packed pass and the objective against slow obvious versions. G.. and T.. name public reports of wrong behaviour."""
import math
import random
from dataclasses import replace

import pytest
import torch

import murphy
from common import random_model, slow_logprobs
from murphy import (MurphyConfig, assign_credit, head_logprobs, kept_nodes, optimise, pack, pack_tree, packed_logprobs, row_loss, sync_and_clip,
                    token_losses, token_weights)
from problems import BadInput, Problem
from rollout import Group, Node, Tree

CONFIG = MurphyConfig(beta=0.0, max_new_tokens=8)
PREFIX = [5, 9, 11, 3, 40, 41, 7]
RESPONSES = [[5, 6, 7, 2], [9, 10], [2], [11, 12, 13, 14, 15, 16]]
ADVANTAGES = [1.0, -1.0, 0.5, -0.5]


def make_tree(seed=0, turns=2, width=3):
    """A tree of random tokens and rewards; every failing node has children."""
    rng = random.Random(seed)
    tree, frontier = Tree(Problem("p", "prompt")), [-1]
    for turn in range(1, turns + 1):
        grown = []
        for parent in frontier:
            tree.groups.append(Group(parent, [rng.randrange(3, 97) for _ in range(rng.randint(2, 9))]))
            for _ in range(width):
                ids = [rng.randrange(3, 97) for _ in range(rng.randint(0, 7))] + [2]
                tree.groups[-1].members.append(len(tree.nodes))
                tree.nodes.append(Node(parent, turn, len(tree.groups) - 1, ids, "", "", False, reward=rng.choice([0.0, 0.25, 0.5, 1.0])))
                grown += [len(tree.nodes) - 1] if tree.nodes[-1].reward < 1 else []
        frontier = grown
    return tree


def credited(config, seeds=(0, 1)):
    trees = [make_tree(seed) for seed in seeds]
    for tree in trees:
        assign_credit(tree, config)
    return trees


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def close(a, b, relative):
    return (a - b).norm() <= relative * b.norm()


# ---------------------------------------------------------------- the packed row

@pytest.mark.parametrize("family", ["olmo2", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_and_gradients_are_those_of_lone_sequences(family, attention, temperature):
    model = random_model(family, attention)
    row = pack(PREFIX, RESPONSES, ADVANTAGES)
    fast, _ = packed_logprobs(model, row, temperature)
    (fast * row.advantages).sum().backward()
    fast_gradient = gradients(model).clone()
    model.zero_grad()
    slow = torch.cat([slow_logprobs(model, PREFIX, r, temperature) for r in RESPONSES])
    (slow * row.advantages).sum().backward()
    assert (fast - slow).abs().max() < 1e-5
    assert close(fast_gradient, gradients(model), 1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_in_parts_change_nothing(tied, monkeypatch):
    model, row, got = random_model(tie_word_embeddings=tied), pack(PREFIX, RESPONSES, ADVANTAGES), []
    for at_once in (10**9, 2 * 97, 1):
        monkeypatch.setattr(murphy, "LOGITS_AT_ONCE", at_once)
        model.zero_grad()
        logprobs, entropy = packed_logprobs(model, row, 0.7)
        (logprobs * row.advantages).sum().backward()
        got.append((logprobs, entropy, gradients(model).clone()))
    for logprobs, entropy, gradient in got[1:]:
        assert torch.allclose(logprobs, got[0][0], atol=1e-6) and torch.allclose(entropy, got[0][1], atol=1e-6)
        assert close(gradient, got[0][2], 1e-6)


def test_logits_in_parts_are_never_whole(monkeypatch):
    monkeypatch.setattr(murphy, "LOGITS_AT_ONCE", 2 * 97)
    model, seen = random_model(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    packed_logprobs(model, pack(PREFIX, RESPONSES, ADVANTAGES), 1.0)[0].sum().backward()
    assert {tuple(shape) for shape in seen} <= {(2, 97), (1, 97)} and sum(map(len, RESPONSES)) * 2 == sum(shape[0] for shape in seen)


def test_gradient_checkpointing_changes_nothing():
    model, row, got = random_model(), pack(PREFIX, RESPONSES, ADVANTAGES), []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
            model.train()
        model.zero_grad()
        (packed_logprobs(model, row, 1.0)[0] * row.advantages).sum().backward()
        got.append(gradients(model).clone())
    assert torch.equal(*got)


def test_entropy_is_that_of_the_tempered_distribution():
    model, row = random_model(), pack(PREFIX, [[5]], [1.0])
    _, entropy = packed_logprobs(model, row, 0.5)
    p = torch.softmax(model(input_ids=torch.tensor([PREFIX])).logits[0, -1] / 0.5, -1)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-4)


def test_a_small_row_drawn_by_hand():
    row = pack([7, 8], [[1, 2], [3]], [1.0, -2.0])
    assert row.input_ids.tolist() == [[7, 8, 1, 2, 3]] and row.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert row.mask[0, 0].int().tolist() == [[1, 0, 0, 0, 0],
                                            [1, 1, 0, 0, 0],
                                            [1, 1, 1, 0, 0],
                                            [1, 1, 1, 1, 0],
                                            [1, 1, 0, 0, 1]]  # the second response sees the prefix and itself
    assert row.response_index.tolist() == [1, 2, 1] and row.targets.tolist() == [1, 2, 3]
    assert row.advantages.tolist() == [1.0, 1.0, -2.0] and row.lengths.tolist() == [2, 2, 1]


def test_G19_G27_only_responses_are_targets_and_each_by_the_token_before_it():
    row = pack([3, 4, 5], [[6, 7]], [1.0])
    assert row.response_index.tolist() == [2, 3] and row.targets.tolist() == [6, 7]  # logits 2:4 for targets 3:5
    segments = [(3, 0), (2, 1), (4, 0), (2, 1)]  # prompt, attempt, feedback, attempt: as two rows, one per turn
    trained = [0] * 3 + [1] * 2 + [0] * 4 + [1] * 2
    assert sum(trained) == sum(len(pack([1] * n, [[2, 3]], [0.0]).targets) for n in (3, 3 + 2 + 4)) == 4
    assert [m for n, m in segments for _ in range(n)] == trained


def test_T07_every_node_is_trained_once_and_no_prefix_is():
    tree = Tree(Problem("p", ""), [Node(-1, 1, 0, [5] * 10, "", "", False, reward=r) for r in (0, 0, 1, 1)], [Group(-1, [3] * 100, list(range(4)))])
    assign_credit(tree, CONFIG)
    assert sum(len(row.targets) for row in pack_tree(tree, CONFIG, "cpu")) == 40


@pytest.mark.parametrize("row_tokens", [1, 12, 20, 1000])
def test_splitting_a_group_over_rows_changes_no_gradient(row_tokens):
    wanted, model = None, random_model()
    for size in (10**6, row_tokens):
        config = replace(CONFIG, row_tokens=size)
        model.zero_grad()
        rows = [row for tree in credited(config) for row in pack_tree(tree, config, "cpu")]
        token_weights(rows, 24, 100, config)
        for row in rows:
            row_loss(model, row, config)[0].backward()
            assert row.input_ids.shape[1] <= size or (row.lengths == len(row.targets)).all()
        wanted = gradients(model).clone() if wanted is None else wanted
    assert close(gradients(model), wanted, 1e-5)


# ---------------------------------------------------------------- the objective

def losses(new, old=None, ref=None, advantages=(1.0,), config=CONFIG):
    t = lambda v: torch.tensor(v, dtype=torch.float32)
    new = t(new).requires_grad_()
    return new, *token_losses(new, new.detach() if old is None else t(old), None if ref is None else t(ref), t(advantages), config)


def naive_loss(new, old, ref, a, config):
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - config.clip_eps), 1 + config.clip_eps)
    return -min(ratio * a, clipped * a) + config.beta * (math.exp(ref - new) - (ref - new) - 1)


def test_token_losses_agree_with_a_scalar_loop():
    rng, config = random.Random(0), replace(CONFIG, beta=0.04)
    values = [(rng.uniform(-3, 0), rng.uniform(-3, 0), rng.uniform(-3, 0), rng.uniform(-2, 2)) for _ in range(200)]
    new, old, ref, a = map(list, zip(*values))
    _, loss, _, clipped = losses(new, old, ref, a, config)
    assert loss.tolist() == pytest.approx([naive_loss(*v, config) for v in values], abs=1e-5)
    assert clipped.tolist() == [(a > 0 and math.exp(n - o) > 1.2) or (a < 0 and math.exp(n - o) < 0.8) for n, o, _, a in values]


def test_the_clip_takes_the_gradient_away_on_the_far_side_only():
    for new, a, moves in [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)]:
        x, loss, _, _ = losses([new], [0.0], advantages=[a])
        loss.sum().backward()
        assert (x.grad.item() != 0) == moves


def test_G05_G07_k3_and_its_gradient_see_the_reference():
    config = replace(CONFIG, beta=1.0)
    x, loss, k3, _ = losses([-1.0], ref=[-2.0], advantages=[0.0], config=config)
    loss.sum().backward()
    assert k3.item() == pytest.approx(0.36787944) and x.grad.item() == pytest.approx(0.63212056)
    y, other, _, _ = losses([-1.0], ref=[-5.0], advantages=[0.0], config=config)
    other.sum().backward()
    assert y.grad.item() == pytest.approx(1 - math.exp(-4)) and y.grad.item() != x.grad.item()


def test_G06_a_far_reference_gives_finite_loss_and_gradient():
    x, loss, k3, _ = losses([-300.0], ref=[-1.0], advantages=[1.0], config=replace(CONFIG, beta=0.04))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all() and k3.item() > 1e8


def test_G12_a_flat_group_has_no_policy_loss_but_its_kl_pulls():
    new = [-1.0, -1.0]
    drift = 0.4
    for _ in range(20):  # Newton: the drift whose k3 is 0.1
        drift -= (math.exp(drift) - drift - 1.1) / (math.exp(drift) - 1)
    ref = [-1.0 + drift] * 2
    _, loss, k3, _ = losses(new, ref=ref, advantages=[0.0, 0.0], config=replace(CONFIG, beta=0.04))
    assert k3.mean().item() == pytest.approx(0.1, abs=1e-6) and loss.mean().item() == pytest.approx(0.004, abs=1e-7)


def test_G17_G18_temperature_divides_logits_and_zero_scores_at_one():
    logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    at = lambda temperature: head_logprobs(torch.nn.Identity(), logits, target, temperature, []).item()
    assert at(0.5) == pytest.approx(-0.01814993, abs=1e-6)
    assert at(0) == at(1.0) == pytest.approx(-0.12692802, abs=1e-6)


def test_G23_the_first_update_is_on_policy():
    model, trees = random_model(), credited(CONFIG)
    metrics = update_metrics(model, trees, replace(CONFIG, updates_per_rollout=1))
    assert metrics["clip_share"] == 0.0
    row = pack(PREFIX, RESPONSES, ADVANTAGES)
    row.weights, row.old = torch.ones(len(row.targets)), packed_logprobs(model, row, 1.0)[0].detach()
    loss = row_loss(model, row, CONFIG)[0].item()
    row.old = None
    assert loss == row_loss(model, row, CONFIG)[0].item() == pytest.approx(-row.advantages.sum().item(), abs=1e-5)


def update_metrics(model, trees, config, reference=None, lr=1e-3):
    return optimise(model, reference, trees, torch.optim.AdamW(model.parameters(), lr=lr), config)


# ---------------------------------------------------------------- denominators

def row_of(length, advantage):
    return pack([1], [[3] * length], [advantage])


@pytest.mark.parametrize("normaliser, wanted", [("grpo", 0.0), ("dapo", 0.5), ("dr-grpo", 0.25)])
def test_G01_the_three_normalisers_on_unequal_lengths(normaliser, wanted):
    config = replace(CONFIG, normaliser=normaliser, max_new_tokens=8)
    rows = [row_of(2, 1.0), row_of(6, -1.0)]
    token_weights(rows, responses=2, tokens=8, config=config)
    assert sum((row.weights * -row.advantages).sum().item() for row in rows) == pytest.approx(wanted)


def test_G02_G03_G04_one_denominator_for_all_micro_batches_and_processes():
    config = replace(CONFIG, normaliser="dapo")
    rows = [row_of(10, 1.0), row_of(30, 1.0)]  # two micro-batches, or two processes
    token_weights(rows, responses=2, tokens=40, config=config)
    per_token = (10 / 10, 60 / 30)
    assert sum((row.weights * x).sum().item() for row, x in zip(rows, per_token)) == pytest.approx(1.75)  # not 1.5
    rows = [row_of(100, 1.0)]
    token_weights(rows, responses=1, tokens=100, config=config)
    assert rows[0].weights.sum().item() == pytest.approx(1.0)  # the window is the optimizer step's, not the rollout's


@pytest.mark.parametrize("normaliser", ["grpo", "dapo", "dr-grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_and_gradient_against_a_loop_over_nodes(normaliser, beta):
    """The whole of optimise against the formula written out node by node."""
    config = replace(CONFIG, normaliser=normaliser, beta=beta, max_grad_norm=1e9)
    model, reference, trees = random_model(), random_model(seed=1), credited(config)
    metrics = update_metrics(model, trees, config, reference if beta else None)
    fast, model = gradients(model).clone(), random_model()
    kept = [(tree.groups[n.group].prefix_ids, n) for tree in trees for n in tree.nodes if n.advantage is not None]
    total = 0
    for prefix, n in kept:
        new = slow_logprobs(model, prefix, n.response_ids)
        loss = -(new - new.detach()).exp() * n.advantage
        if beta:
            drift = slow_logprobs(reference, prefix, n.response_ids).detach() - new
            loss = loss + beta * (drift.exp() - drift - 1)
        scale = {"grpo": len(n.response_ids) * len(kept), "dapo": sum(len(m.response_ids) for _, m in kept),
                 "dr-grpo": config.max_new_tokens * len(kept)}[normaliser]
        total = total + loss.sum() / scale
    total.backward()
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-6)
    assert close(fast, gradients(model), 1e-4)


def test_skipping_flat_groups_changes_nothing():
    """Their tokens stay in the denominators; only the useless backward pass is saved."""
    flat, lively = make_tree(3, turns=1), make_tree(0, turns=1)
    for node in flat.nodes:
        node.reward = 0.35
    for tree in (flat, lively):
        assign_credit(tree, CONFIG)
    assert pack_tree(flat, CONFIG, "cpu") == [] and len(pack_tree(flat, replace(CONFIG, beta=0.04), "cpu")) == 1
    model, unclipped = random_model(), replace(CONFIG, max_grad_norm=1e9)
    update_metrics(model, [flat, lively], unclipped)
    half = gradients(model).clone()
    model = random_model()
    update_metrics(model, [lively], unclipped)
    assert close(2 * half, gradients(model), 1e-5)


def test_a_step_without_any_gradient_moves_nothing():
    tree, model = make_tree(3, turns=1), random_model()
    for node in tree.nodes:
        node.reward = 0.0
    assign_credit(tree, CONFIG)
    before = [p.clone() for p in model.parameters()]
    metrics = update_metrics(model, [tree], CONFIG)
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0 and metrics["entropy"] is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_loss_that_is_not_finite_skips_the_step():
    model, trees = random_model(), credited(CONFIG)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    before = [p.clone() for p in model.parameters()]
    metrics = update_metrics(model, trees, CONFIG)
    assert metrics["skipped"] is True
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, model.parameters()))


def test_several_updates_measure_the_ratio_against_the_first():
    config = replace(CONFIG, updates_per_rollout=3, learning_rate=1e-2)
    model, trees = random_model(), credited(config)
    old = packed_logprobs(model, pack(PREFIX, RESPONSES, ADVANTAGES), 1.0)[0]
    metrics = optimise(model, None, trees, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    assert metrics["clip_share"] > 0  # by the third update the policy has left the clip range somewhere
    assert not torch.equal(old, packed_logprobs(model, pack(PREFIX, RESPONSES, ADVANTAGES), 1.0)[0])


def test_gradients_are_clipped_to_the_norm():
    model = random_model()
    (packed_logprobs(model, pack(PREFIX, RESPONSES, ADVANTAGES), 1.0)[0].sum() * 100).backward()
    norm = sync_and_clip(model, replace(CONFIG, max_grad_norm=0.5))
    assert norm > 0.5 and gradients(model).norm().item() == pytest.approx(0.5, rel=1e-3)


def test_G33_an_update_that_bf16_would_round_away_is_kept():
    assert (torch.tensor(1.0, dtype=torch.bfloat16) - 0.001).item() == 1.0
    model = random_model()
    update_metrics(model, credited(CONFIG), CONFIG)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# ---------------------------------------------------------------- credit of a tree

@pytest.mark.parametrize("method", ["murphy", "grpo-mt"])
def test_a_node_without_reward_is_not_trained(method):
    tree = Tree(Problem("p", ""), [Node(-1, 1, 0, [5, 2], "", "", False, reward=r) for r in (0.0, None, 1.0)], [Group(-1, [3], [0, 1, 2])])
    assign_credit(tree, replace(CONFIG, method=method))
    assert [n.credit for n in tree.nodes] == [0.0, None, 1.0] and tree.nodes[1].advantage is None
    assert len(kept_nodes([tree])) == 2 and tree.nodes[0].advantage == -tree.nodes[2].advantage != 0


def test_pruned_nodes_leave_loss_and_denominator():
    config = replace(CONFIG, prune="intrap", budget=2)
    tree = Tree(Problem("p", ""), [Node(-1, 1, 0, [5] * 3, "", "", False, reward=r) for r in (0.0, 0.5, 0.5, 1.0)], [Group(-1, [3], [0, 1, 2, 3])])
    assign_credit(tree, config)
    assert [n.advantage is None for n in tree.nodes] == [False, True, True, False]
    (row,) = pack_tree(tree, config, "cpu")
    assert len(row.targets) == 6
    config = replace(config, prune="interp", budget=1)
    tree = make_tree(1)
    assign_credit(tree, config)
    assert {tree.nodes[i].turn for g in tree.groups for i in g.members if tree.nodes[i].advantage is not None} == {1, 2}
    assert len({n.parent for n in tree.nodes if n.turn == 2 and n.advantage is not None}) == 1


@pytest.mark.parametrize("change, flag", [
    (dict(group_size=1), "--group-size"), (dict(budget=0), "--budget"), (dict(turns=0), "--turns"), (dict(top_p=0.0), "--top-p"),
    (dict(credit="best"), "--credit"), (dict(learning_rate=float("nan")), "--learning-rate"), (dict(temperature=-1.0), "--temperature")])
def test_values_that_cannot_be_meant_name_their_flag(change, flag):
    with pytest.raises(BadInput, match=flag):
        replace(CONFIG, **change).check()


def test_a_second_update_reads_the_weights_of_the_first_under_autocast(monkeypatch):
    """Autocast keeps bf16 copies of weights; two updates on a rollout must equal those without that cache."""
    config, losses = replace(CONFIG, beta=0.1, updates_per_rollout=2), []
    for cached in (True, False):
        monkeypatch.setattr(murphy, "autocast", lambda model: torch.autocast("cpu", torch.bfloat16, cache_enabled=cached))
        model = random_model()
        losses.append(optimise(model, random_model(), credited(config), torch.optim.AdamW(model.parameters(), lr=1e-2), config)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
