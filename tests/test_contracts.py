"""What has gone wrong in other trainers, as contracts of this one: the public reports that no other test file covers.

G.. name the cases of the reports. Elsewhere: G01-G07, G12, G17-G19, G23, G27, G33 in test_murphy.py, G08-G11 in test_credit.py, G13-G15, G24, G25,
G28 in test_rollout.py, G32 and two processes in test_distributed.py, resume bit for bit in test_train.py.
"""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import murphy
import rollout
import train
from common import StubExecutor, StubVerdict, byte_tokenizer, random_model, slow_greedy, slow_logprobs
from murphy import MurphyConfig, assign_credit, optimise, pack, pack_tree, packed_logprobs, row_loss, token_losses, token_weights
from problems import Problem, Test, extract_code, messages
from rollout import Group, Node, Sampling, Tree, grow_trees, new_node, prefill, sample_batch, sampling_mode

CONFIG = MurphyConfig(beta=0.0, max_new_tokens=8)
STOP = [2]


def one_group(rewards, lengths, prefix=(3, 4)):
    nodes = [Node(-1, 1, 0, [5 + i] * n, "", "", False, reward=r) for i, (n, r) in enumerate(zip(lengths, rewards))]
    return Tree(Problem("p", ""), nodes, [Group(-1, list(prefix), list(range(len(nodes))))])


def step(model, trees, config=CONFIG):
    for tree in trees:
        assign_credit(tree, config)
    return optimise(model, None, trees, torch.optim.AdamW(model.parameters(), lr=1e-3), config)


# ---------------------------------------------------------------- masks and padding

def test_G16_a_pad_id_inside_a_prompt_is_read():
    """Chat markers may share the pad id: the mask comes from the lengths, not from the ids."""
    model, marked, plain = random_model(), [2, 9, 2, 8], [7, 9, 7, 8]
    with sampling_mode(model):
        ids, mask, _ = prefill(model, [[11] * 6, marked[1:]], 1, 2, max_new_tokens=8)
        assert ids[1].tolist() == [2, 2, 2, 9, 2, 8] and mask[1].tolist() == [0, 0, 0, 1, 1, 1]
        got = sample_batch(model, [[11] * 6, marked], 1, Sampling(temperature=0, max_new_tokens=6), STOP)[1][0][0]
    assert got == slow_greedy(model, marked, 6, STOP) != slow_greedy(model, plain, 6, STOP)
    row = pack(marked, [[5, 6]], [1.0])
    assert row.mask[0, 0, -1].tolist() == [True] * 6
    assert torch.allclose(packed_logprobs(model, row, 1.0)[0], slow_logprobs(model, marked, [5, 6]), atol=1e-5)


@pytest.mark.parametrize("family", ["olmo2", "qwen3"])
def test_G20_left_padding_changes_no_log_prob(family):
    model, short = random_model(family), [11, 12, 13]
    with sampling_mode(model):
        ids, mask, cache = prefill(model, [[9] * 40, short], 1, 0, max_new_tokens=8)
        padded = model(input_ids=ids[:, -1:], attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1, cache=cache).logits[1, -1]
        alone = model(input_ids=torch.tensor([short])).logits[0, -1]
    assert (padded.log_softmax(-1) - alone.log_softmax(-1)).abs().max() < 1e-4


def test_G21_a_row_holds_no_filler():
    """Filler with a wrong old log-prob cannot weigh in: responses of unequal length are packed without any."""
    row = pack([3, 4], [[5], [6, 7, 2]], [1.0, 1.0])
    assert len(row.targets) == 4 and row.input_ids.shape[1] == 2 + 4
    loss, _, _ = token_losses(torch.tensor([-1.0]), torch.tensor([-1.0]), None, torch.tensor([1.0]), CONFIG)
    assert loss.tolist() == [-1.0]


def test_G22_a_tree_without_any_scored_node_is_no_row_and_no_nan():
    void, lively, model = one_group([None, None], [2, 2]), one_group([0.0, 1.0], [2, 3]), random_model()
    alone = step(random_model(), [lively])
    both = step(model, [void, lively])
    assert pack_tree(void, CONFIG, "cpu") == [] and both["loss"] == alone["loss"] and both["grad_norm"] == alone["grad_norm"] > 0
    before = [p.clone() for p in model.parameters()]
    metrics = step(model, [void])
    assert metrics["loss"] == 0.0 and not metrics["skipped"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


# ---------------------------------------------------------------- tokens in, tokens out

def merging_tokenizer():
    """Its "he" + "llo" decode to the text that it encodes as the one token "hello"."""
    vocab = {"<eos>": 0, "he": 1, "llo": 2, "hello": 3, "h": 4, "e": 5, "l": 6, "o": 7, "lo": 8}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo")]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_G26_the_sampled_ids_are_trained_not_the_text_encoded_again():
    tokenizer = merging_tokenizer()
    nodes = [new_node(tokenizer, Problem("p", ""), -1, 0, ids, False) for ids in ([1, 2, 0], [3, 0])]
    assert nodes[0].text == nodes[1].text == "hello" and tokenizer.encode("hello") == [3]
    for node, reward in zip(nodes, (1.0, 0.0)):
        node.reward = reward
    tree = Tree(Problem("p", ""), nodes, [Group(-1, [6], [0, 1])])
    assign_credit(tree, CONFIG)
    (row,) = pack_tree(tree, CONFIG, "cpu")
    # the end-of-turn token, which the text does not show, is there too
    assert row.input_ids.tolist() == [[6, 1, 2, 0, 3, 0]] and row.targets.tolist() == [1, 2, 0, 3, 0]


def test_G36_the_loss_reads_the_prefix_that_was_sampled_from(monkeypatch):
    """Reasoning of an earlier turn is left out of the next prompt, so turns are samples of their own: same ids in rollout and loss."""
    sampled, plain = {}, rollout.sample_batch

    def spy(model, prefixes, group_size, *rest):
        groups = plain(model, prefixes, group_size, *rest)
        sampled.update({tuple(prefix): [ids for ids, _ in group] for prefix, group in zip(prefixes, groups)})
        return groups
    monkeypatch.setattr(rollout, "sample_batch", spy)
    monkeypatch.setattr(rollout, "extract_code", lambda text, starter: text)
    model, tokenizer = random_model(vocab_size=300, max_position_embeddings=2048), byte_tokenizer()
    tokenizer.model_max_length = 10**9
    torch.manual_seed(0)
    (tree,) = grow_trees(model, tokenizer, [Problem("p", "Write f.", [Test("assert", "assert f(1) == 2")])],
                         StubExecutor(lambda code, i: StubVerdict([i % 2 == 0, False])), turns=2, group_size=2, sampling=Sampling(max_new_tokens=5))
    assign_credit(tree, CONFIG)
    rows = pack_tree(tree, replace(CONFIG, beta=0.04), "cpu")
    assert len(rows) == len(tree.groups) == len(sampled) == 3
    for row, group in zip(rows, tree.groups):
        n = len(group.prefix_ids)
        assert row.input_ids[0, :n].tolist() == group.prefix_ids
        assert row.input_ids[0, n:].tolist() == sum(sampled[tuple(group.prefix_ids)], [])
    chat = messages(Problem("p", "Write f."), "<think>it is 1 or 2</think>def f(x): return 2", "Passed 1 of 2 tests.")
    assert [m["content"] for m in chat][:2] == ["Write f.", "def f(x): return 2"]
    assert extract_code("<think>```python\nx = 1\n```</think>nothing") == ""


# ---------------------------------------------------------------- sampling while training

def test_G23_gradient_checkpointing_leaves_sampling_its_cache():
    """In training mode with checkpointing on, transformers may turn the cache off: greedy tokens equal, one token a row and step."""
    model, prefix = random_model(), [5, 9, 11, 3, 40]
    wanted = slow_greedy(model, prefix, 8, STOP)
    model.activation_checkpointing_enable()
    model.train()
    widths = []
    model.register_forward_pre_hook(lambda _, __, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True)
    with sampling_mode(model):
        got = sample_batch(model, [prefix], 2, Sampling(temperature=0, max_new_tokens=8), STOP)
    assert [ids for ids, _ in got[0]] == [wanted] * 2
    assert widths == [len(prefix) - 1] + [1] * len(wanted) and model.training


def seed_of_rank(monkeypatch, tmp_path, rank, at):
    """The seed that train.py gives to step `at` on process `rank` of 2."""
    class Done(Exception):
        pass

    def spy(model, reference, tokenizer, problems, executor, optimizer, config, seed, **_):
        seeds.append(seed)
        if len(seeds) > at:
            raise Done
        return [], {"skipped": False, "truncated_share": 0, "flat_groups": 0, "infra": 0, "nodes": 1, "reward_turn1": 0.0,
                    "solved_prompts": 0.0, "tokens_per_second": 1.0}
    seeds = []
    monkeypatch.setattr(train, "start_processes", lambda: (rank, 2, torch.device("cpu")))
    monkeypatch.setattr(train, "from_first", lambda value: tmp_path if value is None else value)
    monkeypatch.setattr(train, "held_out_scores", lambda *_: [0.0])
    monkeypatch.setattr(train, "murphy_step", spy)
    with pytest.raises(Done):
        train.main(["--steps", "3", "--workers", "1", "--out", str(tmp_path / str(rank))])
    return seeds


def test_G29_processes_and_steps_sample_from_seeds_of_their_own(monkeypatch, tmp_path):
    seeds = seed_of_rank(monkeypatch, tmp_path, 0, 2) + seed_of_rank(monkeypatch, tmp_path, 1, 2)
    assert len(seeds) == len(set(seeds)) == 6


# ---------------------------------------------------------------- several processes, memory

def test_G30_G31_gradients_meet_once_after_the_last_micro_batch(monkeypatch):
    """No wrapper to forget and no schedule to get wrong: gradients are summed by hand, once a step; then every replica is compared."""
    order, loss, sync = [], murphy.row_loss, murphy.sync_and_clip
    monkeypatch.setattr(murphy, "row_loss", lambda *a: order.append("row") or loss(*a))
    monkeypatch.setattr(murphy, "sync_and_clip", lambda *a: order.append("sync") or sync(*a))
    step(random_model(), [one_group([0.0, 1.0], [2, 3], prefix=[3, k]) for k in range(4)])
    assert order == ["row"] * 4 + ["sync"]


def test_G30_two_equal_replicas_double_the_sum_and_nothing_else(monkeypatch):
    model, config = random_model(), replace(CONFIG, max_grad_norm=1e9)
    row = pack([3, 4], [[5, 6], [7]], [1.0, -1.0])
    token_weights([row], 2, 3, config)
    row_loss(model, row, config)[0].backward()
    alone = [p.grad.clone() for p in model.parameters()]
    monkeypatch.setattr(murphy.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(murphy.dist, "all_reduce", lambda tensor, *_: tensor.mul_(2))
    murphy.sync_and_clip(model, config)
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), alone))


def test_G34_the_vocabulary_projection_runs_at_response_positions_alone():
    assert 8 * 1024 * 151936 * 4 / 2**30 == pytest.approx(4.637, abs=1e-3)  # one fp32 copy of all logits, which must not exist
    model, positions = random_model(), []
    model.lm_head.register_forward_hook(lambda _, inputs, __: positions.append(inputs[0].shape[:-1].numel()))
    row = pack([3] * 50, [[5, 6, 7], [8, 9]], [1.0, -1.0])
    got, _ = packed_logprobs(model, row, 1.0)
    assert positions and max(positions) <= 5
    wanted = torch.cat([slow_logprobs(model, [3] * 50, r) for r in ([5, 6, 7], [8, 9])])
    assert torch.allclose(got, wanted, atol=1e-5)


# ---------------------------------------------------------------- rows of the reports without a case

def test_a_row_is_never_cut_to_fit():
    """A training row that is cut to a limit trains another sequence: a response longer than row_tokens has a row of its own, whole."""
    tree = one_group([0.0, 1.0, 0.5], [30, 4, 4], prefix=range(3, 23))
    assign_credit(tree, CONFIG)
    rows = pack_tree(tree, replace(CONFIG, row_tokens=28), "cpu")
    assert [row.input_ids.shape[1] for row in rows] == [20 + 30, 20 + 8]
    assert torch.cat([row.targets for row in rows]).tolist() == [5] * 30 + [6] * 4 + [7] * 4


def test_a_response_that_was_cut_is_trained_by_its_reward_and_marked():
    """A length stop is no parse error: the reward of its program counts as any other's, and the share is in the metrics."""
    whole, cut = one_group([1.0, 0.0], [3, 3]), one_group([1.0, 0.0], [3, 3])
    cut.nodes[0].truncated = True
    assert step(random_model(), [cut])["grad_norm"] == step(random_model(), [whole])["grad_norm"] > 0
    metrics = murphy.tree_metrics([cut], CONFIG, {"rollout": 1.0, "optimisation": 1.0})
    assert metrics["truncated_share"] == 0.5 and metrics["length_mean"] == 3.0


def test_dead_groups_and_equal_responses_are_counted():
    trees = [one_group([0.35] * 4, [2] * 4), one_group([0.0, 1.0], [2, 3])]
    trees[0].nodes[1].response_ids = trees[0].nodes[0].response_ids
    for tree in trees:
        assign_credit(tree, CONFIG)
    metrics = murphy.tree_metrics(trees, CONFIG, {"rollout": 1.0, "optimisation": 1.0})
    assert metrics["flat_groups"] == 0.5 and metrics["group_std"] == pytest.approx(0.5 * 0.5**0.5)
    assert metrics["distinct_responses"] == 4 / 6  # [5, 5] twice in one tree and again in the other, [6, 6], [7, 7], [8, 8], [6, 6, 6]


def test_special_tokens_that_the_text_does_not_show_shift_nothing():
    """Texts and ids have lengths of their own; only ids are sliced."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a", add_special_tokens=False) + [1] + tokenizer.encode("b", add_special_tokens=False) + [2]
    node = new_node(tokenizer, Problem("p", ""), -1, 0, ids, False)
    assert node.text == "ab" and node.response_ids == ids
    row = pack([9, 10], [node.response_ids], [1.0])
    assert row.targets.tolist() == ids and row.response_index.tolist() == [1, 2, 3, 4]
    assert tokenizer.decode(row.input_ids[0, 2:]) == "a<bos>b<eos>"


def test_the_loss_is_finite_where_policies_are_far_apart_in_every_term():
    """Ratio and k3 are bounded before exp, in fp32: no inf - inf and no 0 * inf anywhere."""
    new = torch.tensor([-500.0, -1.0, -1.0], requires_grad=True)
    loss, k3, _ = token_losses(new, torch.tensor([-1.0, -500.0, -1.0]), torch.tensor([-1.0, -1.0, -500.0]), torch.tensor([1.0, -1.0, 1.0]),
                               replace(CONFIG, beta=0.04))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(new.grad).all() and k3[2].item() == pytest.approx(20 - 1, abs=1e-3)


def test_temperature_is_in_policy_old_and_reference_alike():
    """With equal models the k3 is 0 and the ratio 1 at any temperature; were one of them scored at 1, neither would be."""
    model, config = random_model(), replace(CONFIG, beta=0.04, temperature=0.5, updates_per_rollout=2)
    trees = [one_group([0.0, 1.0], [3, 4])]
    for tree in trees:
        assign_credit(tree, config)
    metrics = optimise(model, random_model(), trees, torch.optim.AdamW(model.parameters(), lr=0.0), config)
    assert metrics["k3_max"] == pytest.approx(0.0, abs=1e-6) and metrics["clip_share"] == 0.0
    far, _ = packed_logprobs(model, pack([3, 4], [[5, 5, 5]], [1.0]), 1.0)
    near, _ = packed_logprobs(model, pack([3, 4], [[5, 5, 5]], [1.0]), 0.5)
    assert (far - near).abs().max() > 0.1


def test_the_prompts_of_a_group_are_equal_and_groups_are_of_one_parent():
    judge = SimpleNamespace(run=lambda jobs: [StubVerdict([False]) for _ in jobs])
    model, tokenizer = random_model(vocab_size=300, max_position_embeddings=2048), byte_tokenizer()
    tokenizer.model_max_length = 10**9
    problems = [Problem(name, f"Write {name}.", [Test("assert", "assert f(1) == 2")]) for name in "fg"]
    for problem, tree in zip(problems, grow_trees(model, tokenizer, problems, judge, turns=2, group_size=2, sampling=Sampling(max_new_tokens=4))):
        assert [g.parent for g in tree.groups] == [-1, 0, 1] and [g.members for g in tree.groups] == [[0, 1], [2, 3], [4, 5]]
        assert all(f"Write {problem.task_id}." in tokenizer.decode(g.prefix_ids) for g in tree.groups)
