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
