"""Rollout: grow feedback-conditioned trees of programs with Hugging Face `generate`.

A *group* is one prefix (task, or task + attempt + feedback) and the responses sampled from it. Each prefix
is prefilled once; its KV cache is then expanded to one row per response, grows in place, and loses the rows that have
finished. Batches are formed under a token budget over all prompts and failing nodes of a turn. Turn by turn, every failing node
becomes the parent of a new group whose prefix ends with the executor's feedback. Sampled tokens are kept as
ids and never re-tokenised; a child's prefix is rendered afresh from chat messages.

Left out: batching across processes, other inference engines, recurrent (non-KV) caches.

    trees = grow_trees(model, tokenizer, problems, executor, turns=2, group_size=8, sampling=Sampling())
"""
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from problems import FIX_INSTRUCTION, BadInput, Problem, extract_code, messages


@dataclass
class Node:
    """One sampled program. `None` is "not there", never 0; `reward` is never overwritten by a derived value."""
    parent: int                      # index of the attempt it corrects, -1 at turn 1
    turn: int                        # from 1
    group: int                       # index into Tree.groups
    response_ids: list[int]          # as sampled, with the end-of-turn token if there is one
    text: str                        # the response, decoded without special tokens
    code: str                        # what was run; "" when the response holds no code
    truncated: bool                  # no end-of-turn token within max_new_tokens
    verdict: object = None           # executor.Verdict
    reward: float | None = None      # None: the executor failed, not the program
    credit: float | None = None      # after MaRS / MeRS
    advantage: float | None = None   # None: not trained on (pruned, or without reward)
    reflection: str = ""             # what the model wrote about its failure (Reflexion scaffold only)


@dataclass
class Group:
    """Siblings: one prefix, and the nodes sampled from it."""
    parent: int
    prefix_ids: list[int]
    members: list[int] = field(default_factory=list)
    truncated: bool = False          # the prefix lost feedback or the old attempt to fit the context


@dataclass
class Tree:
    problem: Problem
    nodes: list[Node] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def rewards(self):
        return [node.reward for node in self.nodes]

    @property
    def parents(self):
        return [node.parent for node in self.nodes]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Nothing of a checkpoint's own generation defaults is used."""
    temperature: float = 1.0         # 0 means greedy
    top_k: int = 0                   # 0: off
    top_p: float = 1.0               # 1: off
    max_new_tokens: int = 512
    batch_tokens: int = 65536        # rows x (prefix + max_new_tokens) of one batch, bounds the KV cache
    chunk: int = 32                  # tokens between two looks at which rows have finished


# ---------------------------------------------------------------- sampling

def stop_ids(model, tokenizer):
    """All token ids that end a response: the checkpoint's list (often several) and the tokenizer's own."""
    listed = model.generation_config.eos_token_id
    ids = set(listed if isinstance(listed, (list, tuple)) else [listed]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


@contextmanager
def sampling_mode(model):
    """Dropout off, and a blank generation config: `generate` fills what we leave out from the checkpoint's."""
    trained, saved = model.training, model.generation_config
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.generation_config = saved
        model.train(trained)


def generation_config(sampling, stop, max_new_tokens):
    """Every field that shapes the distribution, set. Pads are never read, so any stop id serves as one."""
    drawn = dict(do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return GenerationConfig(**(drawn if sampling.temperature > 0 else dict(do_sample=False)),
                            repetition_penalty=1.0, max_new_tokens=max_new_tokens, use_cache=True,
                            eos_token_id=stop, pad_token_id=stop[0])


ROOM = 256  # tokens that a cache grows by at once


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer in a buffer with room for ROOM more tokens (at most `most` in all): a new token is written, the
    old ones are not copied as by concatenation. Without gradient. `keys` and `values`, as everywhere [rows, heads, tokens,
    head size], are views of the buffer."""

    def __init__(self, most):
        super().__init__()
        self.most, self.buffer = most, None  # buffer: [2, rows, heads, tokens and room, head size]

    def update(self, key_states, value_states, *_, **__):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self.buffer is None or self.buffer.shape[-2] < end:
            rows, heads, _, size = key_states.shape
            self.buffer = key_states.new_empty(2, rows, heads, max(end, min(end + ROOM, self.most)), size)
            for buffer, old in zip(self.buffer, (self.keys, self.values) if start else ()):
                buffer[:, :, :start] = old
        for buffer, new in zip(self.buffer, (key_states, value_states)):
            buffer[:, :, start:end] = new
        self.keys, self.values = self.buffer[:, :, :, :end]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self.buffer = None

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.buffer = None


def growing_cache(model, most):
    """An empty KV cache for up to `most` tokens a row; layers with a sliding window or of other kinds stay as transformers has them."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def prefill(model, prefixes, group_size, pad, max_new_tokens):
    """Run each prefix (all but its last token) once and expand the KV cache to group_size rows a prefix.

    Returns ids [P * G, L] and mask [P * G, L], padded on the left, and the cache of length L - 1.
    """
    longest = max(len(p) for p in prefixes)
    rows = [([pad] * (longest - len(p)) + p, [0] * (longest - len(p)) + [1] * len(p)) for p in prefixes]
    ids = torch.tensor([r[0] for r in rows], device=model.device)
    mask = torch.tensor([r[1] for r in rows], device=model.device)
    cache = growing_cache(model, longest + max_new_tokens)
    if longest > 1:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1],
              cache=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(group_size)
    return ids.repeat_interleave(group_size, 0), mask.repeat_interleave(group_size, 0), cache


def first_stop(ids, stop):
    """Length of a response up to and with its first stop id; None if it has none."""
    return next((i + 1 for i, token in enumerate(ids) if token in stop), None)


def sample_batch(model, prefixes, group_size, sampling, stop, bar=None):
    """Sample group_size responses for each prefix. Returns, per prefix, a list of (ids, truncated).

    Call inside `sampling_mode`. `generate` keeps computing rows that have ended; so it runs in chunks,
    and finished rows leave the batch (and its cache) between two chunks. bar (tqdm) tells how far it is.
    """
    ids, mask, cache = prefill(model, prefixes, group_size, stop[0], sampling.max_new_tokens)
    responses = [([], True) for _ in range(len(ids))]
    rows, stop_set, left = list(range(len(ids))), set(stop), sampling.max_new_tokens
    while rows and left > 0:
        grown = model.generate(ids, attention_mask=mask, cache=cache, synced_gpus=False,  # processes take steps of their own
                               generation_config=generation_config(sampling, stop, min(sampling.chunk, left)))
        new = grown[:, ids.shape[1]:].tolist()
        going = []
        for position, row in enumerate(rows):
            end = first_stop(new[position], stop_set)
            responses[row] = (responses[row][0] + new[position][:end], end is None)
            if end is None:
                going.append(position)
        left -= sampling.chunk
        if bar is not None:
            bar.set_description(f"sampling, {len(going)} of {len(responses)} rows still at {sampling.max_new_tokens - max(left, 0)} tokens")
        rows = [rows[position] for position in going]
        if rows and left > 0 and len(going) < len(new):
            index = torch.tensor(going, device=ids.device)
            cache.batch_select_indices(index)
            grown, mask = grown[index], mask[index]
        mask = torch.cat([mask, mask.new_ones(len(mask), grown.shape[1] - ids.shape[1])], 1)
        ids = grown
    return [responses[i:i + group_size] for i in range(0, len(responses), group_size)]


def batches(prefixes, group_size, sampling):
    """Indices of prefixes, longest first, in batches whose padded size stays within batch_tokens (at least one)."""
    batch, batch_list = [], []
    for i in sorted(range(len(prefixes)), key=lambda i: (-len(prefixes[i]), i)):
        row = len(prefixes[batch[0] if batch else i]) + sampling.max_new_tokens
        if batch and (len(batch) + 1) * group_size * row > sampling.batch_tokens:
            batch_list.append(batch)
            batch = []
        batch.append(i)
    return batch_list + [batch] if batch else batch_list


# ---------------------------------------------------------------- prefixes

def render(tokenizer, chat):
    """Token ids of a chat, ready for the next assistant turn; the template writes the one begin-of-text token."""
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]


def prefix_of(tokenizer, problem, node, feedback, max_tokens, instruction=FIX_INSTRUCTION):
    """The prefix of a group: of turn 1 (node None) or of the correction of `node`. Returns (ids, truncated).

    A prompt that grows too long loses feedback first, then the old attempt, never the task.
    `feedback(max_chars)` renders the feedback. Raises BadInput if the task alone is longer than max_tokens.
    """
    if node is not None:
        for max_chars in (1000, 500, 250, 0):
            text = feedback(max_chars) if max_chars else ""
            ids = render(tokenizer, messages(problem, node.text, text, instruction))
            if len(ids) <= max_tokens:
                return ids, max_chars < 1000
    ids = render(tokenizer, messages(problem))
    if len(ids) > max_tokens:
        raise BadInput(f"problem {problem.task_id}: its prompt has {len(ids)} tokens and at most {max_tokens} fit beside "
                       "the response; lower --max-new-tokens, or leave the problem out")
    return ids, node is not None


def prefix_room(config, tokenizer, sampling):
    """Tokens that a prefix may have, so that prefix + max_new_tokens fit the model's context."""
    context = min(getattr(config, "max_position_embeddings", None) or 10**9, tokenizer.model_max_length)
    return context - sampling.max_new_tokens


# ---------------------------------------------------------------- growing

def grow_trees(model, tokenizer, problems, executor, *, turns, group_size, branch=None, sampling=Sampling(),
               binary_reward=False, public_feedback=False, reflexion=False, choose=None, seconds=None, bar=None):
    """Grow one tree per problem. Source: MURPHY paper, rollout with feedback-conditioned expansion.

    Turn 1 samples group_size programs per problem; at each later turn every node whose program failed is
    expanded into `branch` children (default group_size; 1 grows chains). With public_feedback the expansion
    and the feedback follow the public tests alone (for evaluation); otherwise all tests. A node's reward is the
    share of its tests that pass (with binary_reward: 1 only if all do). With reflexion the model first writes down
    what went wrong, and its children read that too. choose(tree, nodes), if given, picks the one node that is kept of each
    group (best-of-N); by whatever it likes but the verdict. Programs of a batch run in a
    background thread while the next batch is sampled. `seconds`, if given, is a dict to which the
    time spent in "sampling", and in waiting for "execution", is added; `bar` a tqdm whose description tells how far it is.
    Returns: list of Tree, with verdicts and rewards; credits and advantages are None.
    """
    stop, room = stop_ids(model, tokenizer), prefix_room(model.config, tokenizer, sampling)
    trees, verdicts = [Tree(problem) for problem in problems], {}
    frontier = [(tree, -1) for tree in trees]
    for turn in range(1, turns + 1):
        if reflexion and turn > 1:
            reflect(model, tokenizer, frontier, room, public_feedback, sampling, stop)
        groups = [open_group(tokenizer, tree, parent, room, public_feedback) for tree, parent in frontier]
        width = group_size if turn == 1 else branch or group_size
        for (tree, _), members in zip(frontier, sample_and_run(
                model, tokenizer, frontier, groups, executor, width, sampling, stop, verdicts, seconds, bar)):
            for node in members if choose is None else [choose(tree, members)]:
                node.turn = turn
                node.reward = reward_of(node.verdict, binary_reward)
                tree.groups[node.group].members.append(len(tree.nodes))
                tree.nodes.append(node)
        frontier = [(tree, i) for tree in trees for i, node in enumerate(tree.nodes)
                    if node.turn == turn and needs_fix(node, public_feedback)]
        if not frontier:
            break
    return trees


def needs_fix(node, public_feedback=False):
    """A failing program is expanded; a passing one, or one without a verdict of its own, is not."""
    if node.reward is None:
        return False
    if not public_feedback:
        return node.reward < 1
    shown = node.verdict.visible()
    return bool(shown.passed) and not all(shown.passed)


def feedback_of(tree, i, public_feedback):
    """The feedback on node i as a function of max_chars, with the reflections on it and on earlier attempts."""
    verdict = tree.nodes[i].verdict.visible() if public_feedback else tree.nodes[i].verdict
    notes = []
    while i >= 0:
        notes = [tree.nodes[i].reflection] * bool(tree.nodes[i].reflection) + notes
        i = tree.nodes[i].parent
    written = "\n\nYour notes on failed attempts:\n" + "\n".join(notes) if notes else ""
    return lambda max_chars: verdict.feedback(max_chars) + written[:max_chars]


def open_group(tokenizer, tree, parent, room, public_feedback):
    node, feedback = None, None
    if parent >= 0:
        node, feedback = tree.nodes[parent], feedback_of(tree, parent, public_feedback)
    ids, truncated = prefix_of(tokenizer, tree.problem, node, feedback, room)
    tree.groups.append(Group(parent, ids, truncated=truncated))
    return len(tree.groups) - 1


REFLECT_INSTRUCTION = "In two sentences and without code: why did the program fail, and what must change?"


def reflect(model, tokenizer, frontier, room, public_feedback, sampling, stop):
    """Reflexion (arXiv 2303.11366): the model writes a short note on each failed node. The wording is ours."""
    prefixes = []
    for tree, i in frontier:
        prefixes.append(prefix_of(tokenizer, tree.problem, tree.nodes[i], feedback_of(tree, i, public_feedback), room,
                                  REFLECT_INSTRUCTION)[0])
    short = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, 128))
    with sampling_mode(model):
        for batch in batches(prefixes, 1, short):
            for i, [(ids, _)] in zip(batch, sample_batch(model, [prefixes[i] for i in batch], 1, short, stop)):
                tree, node = frontier[i]
                tree.nodes[node].reflection = " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())


def sample_and_run(model, tokenizer, frontier, groups, executor, width, sampling, stop, verdicts, seconds, bar):
    """Sample and judge `width` nodes for each (tree, parent) of the frontier. Returns a list of lists of Node.

    A program that was run before in this rollout (siblings repeat each other, children their parents) is not run again:
    `verdicts` maps (id of the tests, program) to its verdict.
    """
    nodes = [None] * len(frontier)
    prefixes = [tree.groups[group].prefix_ids for (tree, _), group in zip(frontier, groups)]
    tests = [tree.problem.tests for tree, _ in frontier]
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as pool, sampling_mode(model):
        running = []
        for batch in batches(prefixes, width, sampling):
            for i, group in zip(batch, sample_batch(model, [prefixes[i] for i in batch], width, sampling, stop, bar)):
                tree, parent = frontier[i]
                nodes[i] = [new_node(tokenizer, tree.problem, parent, groups[i], *response) for response in group]
            jobs = {(id(tests[i]), node.code): (node.code, tests[i]) for i in batch for node in nodes[i]}
            jobs = {key: job for key, job in jobs.items() if key not in verdicts}
            verdicts |= dict.fromkeys(jobs)  # on its way
            running.append((list(jobs), pool.submit(executor.run, list(jobs.values()))))
        sampled = time.perf_counter()
        for keys, future in running:
            verdicts |= zip(keys, future.result(), strict=True)
    for i, group in enumerate(nodes):
        for node in group:
            node.verdict = verdicts[id(tests[i]), node.code]
    if seconds is not None:
        seconds["sampling"] = seconds.get("sampling", 0.0) + sampled - start
        seconds["execution"] = seconds.get("execution", 0.0) + time.perf_counter() - sampled
    return nodes


def new_node(tokenizer, problem, parent, group, response_ids, truncated):
    text = tokenizer.decode(response_ids, skip_special_tokens=True)
    return Node(parent, 0, group, response_ids, text, extract_code(text, problem.starter_code), truncated)


def reward_of(verdict, binary=False):
    """Share of tests passed, in [0, 1]; binary: 1 only if all are; None if the executor, not the program, failed."""
    if verdict.infra:
        return None
    return float(verdict.reward == 1) if binary else verdict.reward


# ---------------------------------------------------------------- evaluation

def chains_of(tree):
    """The chains of a tree grown with branch=1: per program of turn 1, its nodes in order of turns."""
    chains = {i: [node] for i, node in enumerate(tree.nodes) if node.parent < 0}
    root = {}
    for i, node in enumerate(tree.nodes):
        root[i] = i if node.parent < 0 else root[node.parent]
        if node.parent >= 0:
            chains[root[i]].append(node)
    return list(chains.values())


def solved_by_turn(chain, turns, counts=None):
    """Iter-k of one chain: is its latest attempt within the first k turns right? List of `turns` bools.

    The latest attempt, not any: choosing among attempts by hidden tests would leak them. `counts` masks the tests that
    decide (default all). An attempt that the executor failed on is not right.
    """
    def right(node):
        decisive = [p for i, p in enumerate(node.verdict.passed) if counts is None or counts[i]]
        return node.reward is not None and all(decisive)
    return [right(chain[min(k, len(chain)) - 1]) for k in range(1, turns + 1)]


def evaluate(model, tokenizer, problems, executor, iterations, sampling, public_feedback=True, bar=None):
    """One chain of up to `iterations` attempts per problem. Returns (trees, solved): solved[i][k - 1] is Iter-k.

    With public_feedback, feedback and the decision to stop follow the public tests alone; all tests decide "solved".
    """
    trees = grow_trees(model, tokenizer, problems, executor, turns=iterations, group_size=1, sampling=sampling,
                       public_feedback=public_feedback, bar=bar)
    return trees, [solved_by_turn(chains_of(tree)[0], iterations) for tree in trees]
