"""What several test files share: small random models and the slow obvious versions of the two fast paths."""
import torch
from transformers import AutoModelForCausalLM, Olmo2Config, Qwen3Config

SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def random_model(family="olmo2", attention="sdpa", seed=0, **more):
    """A small model with large random weights, so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = Olmo2Config(**SIZES | more) if family == "olmo2" else Qwen3Config(head_dim=16, **SIZES | more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.15)
    return model


def slow_logprobs(model, prefix_ids, response_ids, temperature=1.0):
    """Token by token definition: the whole sequence alone in a batch, full logits, full log-softmax."""
    ids = torch.tensor([prefix_ids + response_ids])
    logits = model(input_ids=ids).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    return torch.stack([logprobs[len(prefix_ids) + t - 1, token] for t, token in enumerate(response_ids)])


def slow_greedy(model, prefix_ids, length, stop):
    """Greedy decoding without cache, padding or batch."""
    ids = list(prefix_ids)
    for _ in range(length):
        ids.append(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] in stop:
            break
    return ids[len(prefix_ids):]


CHAT_TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}"
                 "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}")


def byte_tokenizer(chat_template=CHAT_TEMPLATE):
    """One token per byte, and three special ones; adds a begin-of-text token of its own unless told not to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    special = ["<pad>", "<bos>", "<eos>"]
    vocab = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
                                   chat_template=chat_template, model_max_length=512)


class StubVerdict:
    """What rollout asks of a verdict: given rewards, no programs run."""
    def __init__(self, passed, infra=False, public=None):
        self.passed, self.infra, self.public = passed, infra, public or [True] * len(passed)
        self.status = ["infra" if infra else "passed" if p else "failed" for p in passed]
        self.reward = sum(passed) / len(passed) if passed else 0.0

    def visible(self):
        return StubVerdict([p for p, shown in zip(self.passed, self.public) if shown], self.infra)

    def feedback(self, max_chars=1000):
        return f"Passed {sum(self.passed)} of {len(self.passed)} tests.".ljust(300, "!")[:max_chars]


class StubExecutor:
    """Judges by a function (code, position of the job) -> StubVerdict; remembers the jobs."""
    def __init__(self, judge):
        self.judge, self.jobs = judge, []

    def run(self, jobs):
        self.jobs += jobs
        return [self.judge(code, len(self.jobs) - len(jobs) + i) for i, (code, _) in enumerate(jobs)]
