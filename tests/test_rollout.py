"""Sampling from shared prefixes against plain decoding, and the growth of trees. G.. and T.. name public reports."""
import threading
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import rollout
from common import StubExecutor, StubVerdict, byte_tokenizer, random_model, slow_greedy, slow_logprobs
from plan import LiveBytes
from problems import BadInput, Problem, Test
from rollout import (Sampling, batches, chains_of, evaluate, first_stop, generation_config, grow_trees, needs_fix, prefix_of, prefix_room, render,
                     sample_batch, sampling_mode, solved_by_turn, stop_ids)
from models import enable_checkpointing

STOP = [2, 3, 4, 5, 6]
PREFIXES = [list(range(3, 40)), list(range(50, 60)), [7]]
PROBLEM = Problem("p1", "Write f.", [Test("assert", "assert f(1) == 2")])


@pytest.fixture(autouse=True)
def every_text_is_a_program(monkeypatch):
    """Random models write no code; here what they write is the program."""
    monkeypatch.setattr(rollout, "extract_code", lambda text, starter: text)


def draw(model, prefixes, group_size, sampling, stop=STOP):
    with sampling_mode(model):
        return sample_batch(model, prefixes, group_size, sampling, stop)


# ---------------------------------------------------------------- sampling

@pytest.mark.parametrize("family", ["olmo2", "qwen3"])
@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_greedy_tokens_are_those_of_plain_decoding(family, chunk):
    """Left-padded prefixes of three lengths, prefilled once, expanded, in chunks: against no cache and no batch."""
    model = random_model(family)
    sampled = draw(model, PREFIXES, 3, Sampling(temperature=0, max_new_tokens=40, chunk=chunk))
    ended = 0
    for prefix, group in zip(PREFIXES, sampled):
        wanted = slow_greedy(model, prefix, 40, STOP)
        ended += wanted[-1] in STOP
        assert group == [(wanted, wanted[-1] not in STOP)] * 3
    assert 0 < ended < 3  # the case must hold both kinds


def test_greedy_tokens_are_those_of_generate():
    model = random_model()
    ids = torch.tensor([PREFIXES[0]] * 2)
    plain = model.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=STOP, pad_token_id=0)[:, len(PREFIXES[0]):].tolist()
    (group,) = draw(model, PREFIXES[:1], 2, Sampling(temperature=0, max_new_tokens=20, chunk=6))
    assert [ids[:first_stop(row, STOP)] for ids, row in zip([g[0] for g in group], plain)] == [r[:first_stop(r, STOP)] for r in plain]


class Steps:
    """The (rows, tokens, cached tokens) of every forward pass of a model."""
    def __init__(self, model):
        self.shapes = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _, __, inputs):
        self.shapes.append((*inputs["input_ids"].shape, inputs["cache"].get_seq_length()))


def test_a_prefix_is_prefilled_once_and_finished_rows_leave_between_chunks():
    model = random_model()
    plain = [slow_greedy(model, prefix, 40, STOP) for prefix in PREFIXES]
    steps = Steps(model)
    draw(model, PREFIXES, 3, Sampling(temperature=0, max_new_tokens=40, chunk=8))
    assert steps.shapes[0] == (3, len(PREFIXES[0]) - 1, 0)  # one row a prefix, not one a response
    rows = [shape[0] for shape in steps.shapes[1:]]
    assert all(shape[1] == 1 for shape in steps.shapes[1:])
    going = lambda done: 3 * sum(len(ids) > done or ids[-1] not in STOP for ids in plain)  # responses that a chunk must still see
    assert rows == [going(8 * (k // 8)) for k in range(len(rows))] and len(set(rows)) > 1


@pytest.mark.parametrize("room", [1, 5, 100])
def test_a_growing_cache_holds_what_a_concatenated_one_does(room, monkeypatch):
    monkeypatch.setattr(rollout, "ROOM", room)
    model, ids = random_model(), torch.tensor([PREFIXES[1], PREFIXES[0][:10]])
    grown, plain, wanted = rollout.growing_cache(model, 17), DynamicCache(config=model.config), torch.tensor([3, 0, 2])
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 10)):
            for cache in (grown, plain):
                model(input_ids=ids[:, start:end], cache=cache, use_cache=True)
        assert [cache.get_seq_length() for cache in (grown, plain)] == [10, 10]
        for cache in (grown, plain):
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(wanted)
        outs = [[model(input_ids=torch.tensor([[7], [8], [9]]), cache=cache, use_cache=True).logits for _ in range(7)] for cache in (grown, plain)]
    assert torch.allclose(torch.stack(outs[0]), torch.stack(outs[1]), atol=1e-5)
    for a, b in zip(grown.layers, plain.layers):
        assert a.keys.shape == b.keys.shape == (3, 2, 17, 16) and torch.allclose(a.keys, b.keys, atol=1e-5) and torch.allclose(a.values, b.values, atol=1e-5)


def test_a_growing_cache_copies_old_tokens_only_when_its_room_is_used_up(monkeypatch):
    monkeypatch.setattr(rollout, "ROOM", 10)
    model = random_model()
    cache, places = rollout.growing_cache(model, 42), set()
    with torch.no_grad():
        for token in range(40):
            model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
            places.add(cache.layers[0].buffer.data_ptr())
    assert len(places) <= 4 and cache.get_seq_length() == 40 and cache.layers[0].buffer.shape[-2] == 42  # not 44: no more than asked for


def test_a_bar_tells_how_many_rows_are_left():
    class Bar:
        said = []
        set_description = said.append
    with sampling_mode(model := random_model()):
        (group,) = sample_batch(model, PREFIXES[:1], 2, Sampling(temperature=0, max_new_tokens=9, chunk=6), [96], Bar)
    left = sum(len(ids) > 6 for ids, _ in group), sum(truncated for _, truncated in group)
    assert Bar.said == [f"sampling, {left[0]} of 2 rows still at 6 tokens", f"sampling, {left[1]} of 2 rows still at 9 tokens"]


def test_sampled_frequencies_are_those_of_the_model():
    """2,000 first tokens: the share of each likely token is within four standard errors of its probability."""
    model = random_model()
    torch.manual_seed(0)
    (group,) = draw(model, [PREFIXES[1]], 2000, Sampling(temperature=0.7, max_new_tokens=1))
    p = torch.softmax(model(input_ids=torch.tensor([PREFIXES[1]])).logits[0, -1] / 0.7, -1)
    counts = torch.bincount(torch.tensor([ids[0] for ids, _ in group]), minlength=len(p)) / 2000
    assert ((counts - p).abs() <= 4 * (p * (1 - p) / 2000).sqrt() + 1e-3).all()


def test_one_seed_gives_one_sample_and_rows_differ():
    model, sampling = random_model(), Sampling(max_new_tokens=12)
    torch.manual_seed(3)
    one = draw(model, PREFIXES, 4, sampling)
    torch.manual_seed(3)
    assert draw(model, PREFIXES, 4, sampling) == one
    torch.manual_seed(4)  # G29: another process samples with another seed
    assert draw(model, PREFIXES, 4, sampling) != one
    assert len({tuple(ids) for ids, _ in one[0]}) == 4


def test_G24_generation_defaults_of_a_checkpoint_do_not_leak_in():
    """With top_k 1 in force every sample would be the greedy one."""
    model = random_model()
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.1, temperature=0.01, repetition_penalty=1.5,
                                               min_new_tokens=9, eos_token_id=2, suppress_tokens=[8], max_length=3)
    saved = model.generation_config.to_dict()
    torch.manual_seed(0)
    leaky = draw(model, [PREFIXES[0]], 64, Sampling(max_new_tokens=6))
    clean_model = random_model()
    torch.manual_seed(0)
    assert leaky == draw(clean_model, [PREFIXES[0]], 64, Sampling(max_new_tokens=6))
    assert len({ids[0] for ids, _ in leaky[0]}) > 5
    assert model.generation_config.to_dict() == saved  # and a checkpoint keeps its own file


def test_the_sampled_distribution_is_the_trained_one():
    """Log-probs from the scores of generate against those of the packed pass."""
    from murphy import pack, packed_logprobs
    model, sampling = random_model(), Sampling(temperature=0.7, max_new_tokens=9)
    model.generation_config = GenerationConfig(top_k=3, top_p=0.5, temperature=2.0, eos_token_id=2)
    torch.manual_seed(0)
    with sampling_mode(model):
        config = generation_config(sampling, STOP, 9)
        config.output_scores = config.return_dict_in_generate = True
        out = model.generate(torch.tensor([PREFIXES[0]]), generation_config=config)
    response = out.sequences[0, len(PREFIXES[0]):].tolist()
    scores = [torch.log_softmax(s[0], -1)[t].item() for s, t in zip(out.scores, response)]
    packed, _ = packed_logprobs(model, pack(PREFIXES[0], [response], [1.0]), 0.7)
    assert packed.tolist() == pytest.approx(scores, abs=1e-5)
    assert slow_logprobs(model, PREFIXES[0], response, 0.7).tolist() == pytest.approx(scores, abs=1e-5)


def test_sampling_mode_puts_dropout_off_and_restores_training():
    model = random_model().train()
    with sampling_mode(model):
        assert not model.training and not torch.is_grad_enabled()
    assert model.training and torch.is_grad_enabled()


@pytest.mark.parametrize("ids, stop, end", [
    ([5, 6, 2, 2, 2], [2], 3),       # G13: pad == eos, the first one belongs to the response
    ([5, 7, 3, 0, 0], [2, 3], 3),    # G14: several stop ids
    ([5, 7, 9, 4], [2], None)])      # G15: none, so the response is truncated
def test_a_response_ends_with_its_first_stop_id(ids, stop, end):
    assert first_stop(ids, set(stop)) == end


def test_G14_stop_ids_are_the_checkpoints_and_the_tokenizers():
    model, tokenizer = random_model(), byte_tokenizer()
    model.generation_config.eos_token_id = [7, 5]
    assert stop_ids(model, tokenizer) == [2, 5, 7]
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == [2]


def test_batches_hold_every_prefix_once_and_keep_to_the_budget():
    prefixes, sampling = [[0] * n for n in (5, 90, 20, 20, 300, 1)], Sampling(max_new_tokens=10, batch_tokens=400)
    made = batches(prefixes, 4, sampling)
    assert sorted(i for batch in made for i in batch) == list(range(6))
    for batch in made:
        assert len(batch) == 1 or len(batch) * 4 * (max(len(prefixes[i]) for i in batch) + 10) <= 400
    assert batches([], 4, sampling) == []


# ---------------------------------------------------------------- prefixes

def test_G25_G35_one_begin_of_text_token_and_the_assistant_turn_open():
    tokenizer = byte_tokenizer()
    ids = render(tokenizer, [{"role": "user", "content": "hi"}])
    assert ids.count(1) == 1 and ids[0] == 1
    assert tokenizer.decode(ids).endswith("<|user|>\nhi\n<|assistant|>\n")


def node_with(text="attempt", **more):
    from rollout import Node
    return Node(-1, 1, 0, [5, 2], text, text, False, **more)


def test_a_long_prompt_loses_feedback_first_then_the_attempt_never_the_task():
    tokenizer, seen = byte_tokenizer(), []
    feedback = lambda max_chars: seen.append(max_chars) or "F" * max_chars
    sizes = [len(prefix_of(tokenizer, PROBLEM, node_with(), lambda n, m=m: "F" * min(n, m), 10**6)[0]) for m in (1000, 500, 250, 0)]
    whole, cut = prefix_of(tokenizer, PROBLEM, node_with(), feedback, sizes[0])
    assert not cut and tokenizer.decode(whole).count("F") == 1000
    for room, kept in ((sizes[0] - 1, 500), (sizes[1] - 1, 250), (sizes[2] - 1, 0)):
        ids, cut = prefix_of(tokenizer, PROBLEM, node_with(), feedback, room)
        assert cut and len(ids) <= room and tokenizer.decode(ids).count("F") == kept and "attempt" in tokenizer.decode(ids)
    task = render(tokenizer, [{"role": "user", "content": PROBLEM.prompt}])
    ids, cut = prefix_of(tokenizer, PROBLEM, node_with("long " * 50), feedback, len(task))
    assert cut and ids == task
    with pytest.raises(BadInput, match="p1.*tokens"):
        prefix_of(tokenizer, PROBLEM, None, None, len(task) - 1)


def test_G28_prefix_and_response_fit_the_context():
    model, tokenizer = random_model(max_position_embeddings=100), byte_tokenizer()
    assert prefix_room(model.config, tokenizer, Sampling(max_new_tokens=20)) == 80


# ---------------------------------------------------------------- trees

def grown(judge, problems=(PROBLEM,), **more):
    model, tokenizer = random_model(vocab_size=300, max_position_embeddings=1024), byte_tokenizer()
    tokenizer.model_max_length = 10**9
    torch.manual_seed(0)
    executor = StubExecutor(judge)
    options = dict(turns=3, group_size=3, sampling=Sampling(max_new_tokens=5)) | more
    return grow_trees(model, tokenizer, list(problems), executor, **options), executor, tokenizer


def test_failing_nodes_are_expanded_and_passing_ones_are_not():
    trees, executor, _ = grown(lambda code, i: StubVerdict([i % 3 == 0, i % 3 == 0]))
    (tree,) = trees
    assert [n.turn for n in tree.nodes] == [1] * 3 + [2] * 6 + [3] * 12
    assert [n.parent for n in tree.nodes] == [-1] * 3 + [1] * 3 + [2] * 3 + [p for p in (4, 5, 7, 8) for _ in range(3)]
    assert tree.rewards == [1.0, 0.0, 0.0] * 7 and len(executor.jobs) == 21
    for g, group in enumerate(tree.groups):  # T05, T20: a group is one parent and one prefix
        assert {tree.nodes[i].parent for i in group.members} == {group.parent} and {tree.nodes[i].group for i in group.members} == {g}


def test_a_childs_prefix_holds_task_attempt_and_feedback():
    trees, _, tokenizer = grown(lambda code, i: StubVerdict([True, False]), turns=2)
    tree = trees[0]
    text = tokenizer.decode(tree.groups[1].prefix_ids)
    order = [text.index(part) for part in (PROBLEM.prompt, tree.nodes[0].text.strip() or "<|assistant|>", "Passed 1 of 2 tests.")]
    assert order == sorted(order) and text.endswith("<|assistant|>\n")


def test_G26_sampled_ids_are_kept_and_text_is_decoded_from_them():
    trees, _, tokenizer = grown(lambda code, i: StubVerdict([True]), turns=1)
    for node in trees[0].nodes:
        assert len(node.response_ids) <= 5 and node.text == tokenizer.decode(node.response_ids, skip_special_tokens=True)
        assert node.truncated == (node.response_ids[-1] != 2)


def test_an_infra_verdict_is_no_reward_and_is_not_expanded():
    trees, _, _ = grown(lambda code, i: StubVerdict([False], infra=i == 0), turns=2)
    assert trees[0].rewards[0] is None and [n.parent for n in trees[0].nodes if n.turn == 2] == [1, 1, 1, 2, 2, 2]


def test_chains_have_one_child_per_failing_node():
    trees, _, _ = grown(lambda code, i: StubVerdict([False]), branch=1)
    assert [n.parent for n in trees[0].nodes] == [-1, -1, -1, 0, 1, 2, 3, 4, 5]


def test_binary_reward_is_one_only_if_all_pass():
    trees, _, _ = grown(lambda code, i: StubVerdict([True, i == 1]), turns=1, binary_reward=True)
    assert trees[0].rewards == [0.0, 1.0, 0.0]


def test_trees_do_not_depend_on_what_runs_beside_them_when_greedy():
    problems = [PROBLEM, Problem("p2", "Write another, longer one.", PROBLEM.tests), Problem("p3", "W", PROBLEM.tests)]
    greedy = dict(turns=2, sampling=Sampling(temperature=0, max_new_tokens=5))
    judge = lambda code, i: StubVerdict([False, True])
    together = grown(judge, problems, **greedy)[0]
    tight = grown(judge, problems, turns=2, sampling=replace(greedy["sampling"], batch_tokens=1))[0]
    for a, b, problem in zip(together, tight, problems, strict=True):
        alone = grown(judge, [problem], **greedy)[0][0]
        assert [n.response_ids for n in a.nodes] == [n.response_ids for n in b.nodes] == [n.response_ids for n in alone.nodes]


def test_batches_are_formed_over_all_problems_and_failing_nodes_of_a_turn(monkeypatch):
    """Not per problem: within the budget, one call samples all groups of a turn."""
    calls, plain = [], rollout.sample_batch
    monkeypatch.setattr(rollout, "sample_batch", lambda model, prefixes, *rest: calls.append(len(prefixes)) or plain(model, prefixes, *rest))
    problems = [Problem(f"p{k}", "x" * (1 + k), PROBLEM.tests) for k in range(4)]
    fails = lambda code, i: StubVerdict([i % 3 == 0])  # two of a group's three
    grown(fails, problems, turns=2)
    assert calls == [4, 8]
    calls.clear()
    grown(fails, problems, turns=2, sampling=Sampling(max_new_tokens=5, batch_tokens=2 * 3 * 450))
    assert sum(calls) == 12 and 2 < len(calls) < 12 and max(calls) > 1


def test_programs_run_while_the_next_batch_is_sampled(monkeypatch):
    """The first programs do not end before the second batch has been sampled; without overlap nothing would ever come of it."""
    second, plain, sampled = threading.Event(), rollout.sample_batch, []

    def sample(*arguments):
        sampled.append(0)
        if len(sampled) == 2:
            second.set()
        return plain(*arguments)

    class Waiting(StubExecutor):
        def run(self, jobs):
            assert second.wait(20), "the second batch waits for the programs of the first"
            return super().run(jobs)
    monkeypatch.setattr(rollout, "sample_batch", sample)
    model, tokenizer = random_model(vocab_size=300, max_position_embeddings=1024), byte_tokenizer()
    trees = grow_trees(model, tokenizer, [PROBLEM, Problem("p2", "Write another.", PROBLEM.tests)], Waiting(lambda code, i: StubVerdict([True])),
                       turns=1, group_size=2, sampling=Sampling(max_new_tokens=5, batch_tokens=1))
    assert len(sampled) == 2 and [tree.rewards for tree in trees] == [[1.0, 1.0]] * 2


def test_a_verdict_reaches_the_node_whose_code_was_run():
    """Batches are sampled longest first; verdicts must come back to their own nodes."""
    problems = [Problem(f"p{k}", "x" * (1 + 7 * k), PROBLEM.tests) for k in range(4)]
    trees, executor, _ = grown(lambda code, i: StubVerdict([True, False], infra=False), problems, turns=1,
                               sampling=Sampling(max_new_tokens=5, batch_tokens=1))
    assert [len(tree.nodes) for tree in trees] == [3] * 4
    assert sorted(code for code, _ in executor.jobs) == sorted(n.code for tree in trees for n in tree.nodes)


def test_a_program_is_run_once_for_all_siblings_and_children_that_repeat_it():
    trees, executor, _ = grown(lambda code, i: StubVerdict([False, i == 0]), turns=3, sampling=Sampling(temperature=0, max_new_tokens=5),
                               problems=[PROBLEM, Problem("p2", PROBLEM.prompt, list(PROBLEM.tests))])
    codes = [{(n.code) for n in tree.nodes} for tree in trees]
    assert len(executor.jobs) == len(codes[0]) + len(codes[1]) < sum(len(tree.nodes) for tree in trees)
    for tree in trees:  # equal programs have equal verdicts within a problem; other tests are other jobs
        assert all(a.verdict is b.verdict for a in tree.nodes for b in tree.nodes if a.code == b.code)
    assert trees[0].nodes[0].verdict is not trees[1].nodes[0].verdict


def test_T14_a_context_filled_by_feedback_is_marked():
    trees, _, _ = grown(lambda code, i: StubVerdict([False]), turns=2)
    assert not trees[0].groups[1].truncated
    model_context = len(trees[0].groups[1].prefix_ids) - 1 + 5
    model, tokenizer = random_model(vocab_size=300, max_position_embeddings=model_context), byte_tokenizer()
    torch.manual_seed(0)
    tree = grow_trees(model, tokenizer, [PROBLEM], StubExecutor(lambda c, i: StubVerdict([False])), turns=2, group_size=3,
                      sampling=Sampling(max_new_tokens=5))[0]
    assert not tree.groups[0].truncated and tree.groups[1].truncated
    assert len(tree.groups[1].prefix_ids) + 5 <= model_context


# ---------------------------------------------------------------- evaluation

def test_public_feedback_shows_and_stops_by_the_public_tests_alone():
    public = [True, False]
    hidden_fails, public_fails = StubVerdict([True, False], public=public), StubVerdict([False, True], public=public)
    node = node_with(verdict=hidden_fails, reward=0.5)
    assert needs_fix(node) and not needs_fix(node, public_feedback=True)
    assert needs_fix(node_with(verdict=public_fails, reward=0.5), public_feedback=True)
    assert not needs_fix(node_with(verdict=StubVerdict([False], public=[False]), reward=0.0), public_feedback=True)
    trees, _, tokenizer = grown(lambda code, i: public_fails, turns=2, public_feedback=True)
    assert "Passed 0 of 1 tests." in tokenizer.decode(trees[0].groups[1].prefix_ids)


def test_iterations_count_from_the_first_attempt_and_stay_solved():
    model, tokenizer = random_model(vocab_size=300, max_position_embeddings=2048), byte_tokenizer()
    tokenizer.model_max_length = 10**9
    two = [Problem(name, PROBLEM.prompt, list(PROBLEM.tests)) for name in "ab"]
    trees, solved = evaluate(model, tokenizer, two, StubExecutor(lambda code, i: StubVerdict([i == 2])), 3,
                             Sampling(temperature=0, max_new_tokens=4))
    assert solved == [[False, True, True], [False, False, False]]
    assert solved_by_turn(chains_of(trees[0])[0], 3) == solved[0]


def test_the_latest_attempt_counts_not_the_best():
    """A chain that was right by the hidden test, wrong by the public one, and then spoiled itself."""
    chain = [node_with(verdict=StubVerdict([False, True]), reward=0.5), node_with(verdict=StubVerdict([True, False]), reward=0.5)]
    assert solved_by_turn(chain, 3, counts=[False, True]) == [True, False, False]
    assert solved_by_turn(chain, 3, counts=[True, False]) == [False, True, True]
    broken = node_with(verdict=StubVerdict([True], infra=True), reward=None)
    assert solved_by_turn([broken], 1) == [False]


def test_chains_of_several_samples():
    trees, _, _ = grown(lambda code, i: StubVerdict([i in (1, 3)]), branch=1)
    assert [[trees[0].nodes.index(n) for n in chain] for chain in chains_of(trees[0])] == [[0, 3], [1], [2, 4, 5]]


def test_sampling_under_autocast_keeps_nothing_of_a_batch():
    """With gradient checkpointing, transformers makes embeddings require gradients; autocast then keeps a copy of each, for good."""
    model, sizes = random_model(), []
    enable_checkpointing(model)
    with torch.autocast("cpu", torch.bfloat16), sampling_mode(model), LiveBytes(model.parameters()) as live:
        for _ in range(3):
            sample_batch(model, [[5] * 20] * 2, 4, Sampling(max_new_tokens=16), [999])
            sizes.append(live.now)
    assert sizes[0] == sizes[1] == sizes[2]
