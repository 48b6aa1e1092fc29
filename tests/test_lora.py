"""Adapters: exactly the base at the start, the chain rule for gradients, merged weights, and runs that resume."""
import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import murphy
from common import SIZES, random_model
from lora import adapted, adapter_state, adapters_off, add_adapters, merged
from murphy import optimise, pack, packed_logprobs
from test_murphy import ADVANTAGES, CONFIG, PREFIX, RESPONSES, credited
from test_train import SMALL, lines, main, refused, settings_of, weights, without_times
from models import TINY, enable_checkpointing, load_model


def base_model(family):
    if family != "qwen2":
        return random_model(family)
    torch.manual_seed(0)  # biases in attention, lm_head tied to the embedding
    return AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, tie_word_embeddings=True), dtype=torch.float32).eval()


def with_adapters(base, rank=4, alpha=8.0, trained=True):
    model = add_adapters(copy.deepcopy(base), rank, alpha)
    if trained:  # as after some steps: B is no longer 0
        with torch.no_grad():
            for m in adapted(model).values():
                m.lora_b.normal_(0, 0.05, generator=torch.Generator().manual_seed(m.out_features))
    return model


def logprobs(model):
    return packed_logprobs(model, pack(PREFIX, RESPONSES, ADVANTAGES), 1.0)[0]


families = pytest.mark.parametrize("family", ["olmo2", "qwen3", "qwen2"])


@families
def test_at_the_start_the_model_is_its_base_to_the_bit(family):
    base = base_model(family)
    model = with_adapters(base, trained=False)
    assert torch.equal(logprobs(model), logprobs(base))
    assert len(adapted(model)) == 7 * SIZES["num_hidden_layers"]
    assert {n.rsplit(".", 1)[1] for n, p in model.named_parameters() if p.requires_grad} == {"lora_a", "lora_b"}


@families
def test_merged_weights_are_the_model_and_switched_off_it_is_the_base(family):
    base = base_model(family)
    model, plain = with_adapters(base), copy.deepcopy(base)
    assert plain.load_state_dict(merged(model), strict=True) and merged(model).keys() == base.state_dict().keys()
    assert (logprobs(model) - logprobs(plain)).abs().max() < 1e-5 < 1e-2 < (logprobs(model) - logprobs(base)).abs().max()
    with adapters_off(model):
        assert torch.equal(logprobs(model), logprobs(base))
    assert (logprobs(model) - logprobs(plain)).abs().max() < 1e-5
    assert torch.equal(merged(model)["model.embed_tokens.weight"], base.state_dict()["model.embed_tokens.weight"])


@families
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_follow_the_chain_rule_and_only_adapters_have_them(family, checkpointing):
    """dB = s dW A', dA = s B' dW, where dW is the gradient of the merged plain model; with and without recomputation."""
    base = base_model(family)
    model, plain = with_adapters(base), copy.deepcopy(base)
    plain.load_state_dict(merged(model))
    if checkpointing:
        enable_checkpointing(model)
    for m in (model, plain):
        (logprobs(m) * torch.linspace(-1, 1, sum(map(len, RESPONSES)))).sum().backward()
    for name, m in adapted(model).items():
        full = plain.get_submodule(name).weight.grad
        for got, want in ((m.lora_b.grad, m.scale * full @ m.lora_a.T), (m.lora_a.grad, m.scale * m.lora_b.T @ full)):
            assert want.norm() > 0 and (got - want).norm() < 1e-4 * want.norm(), name
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_the_model_is_its_own_reference():
    """With beta, a step whose reference is the model itself equals one whose reference is a copy of the base."""
    config, base = replace(CONFIG, beta=0.1), random_model()
    steps = []
    for own in (True, False):
        model = with_adapters(base)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        steps.append((optimise(model, model if own else base, credited(config), optimizer, config), adapter_state(model)))
    (a, state_a), (b, state_b) = steps
    assert a == b and a["k3_mean"] > 1e-3 and all(torch.equal(state_a[n], state_b[n]) for n in state_a)


def test_a_frozen_bf16_base_keeps_its_bits_under_fp32_adapters(monkeypatch):
    """The types of a run on CUDA, with CPU autocast in the place of CUDA's."""
    monkeypatch.setattr(murphy, "autocast", lambda model: torch.autocast("cpu", torch.bfloat16))
    model = with_adapters(random_model().bfloat16(), trained=False)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    metrics = optimise(model, model, credited(CONFIG), optimizer, CONFIG)
    assert metrics["grad_norm"] > 0 and not metrics["skipped"]
    for name, p in model.state_dict().items():
        if name.endswith("lora_b"):
            assert p.dtype == torch.float32 and p.abs().max() > 0
        elif not name.endswith("lora_a"):
            assert p.dtype == torch.bfloat16 and torch.equal(p, before[name])
    assert merged(model)["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


# ---------------------------------------------------------------- runs

LORA = [*SMALL, "--lora-rank", "4", "--learning-rate", "1e-2", "--beta", "0.04", "--gradient-checkpointing", "--save-every", "1",
        "--eval-problems", "1", "--eval-iterations", "1", "--turns", "1"]


def test_a_run_resumes_bit_for_bit_and_its_checkpoint_is_a_plain_model(tmp_path):
    for name, steps in (("unbroken", "2"), ("broken", "1")):
        assert main(["--out", str(tmp_path / name), "--steps", steps, *LORA]) == 0
    assert main(["--resume", str(tmp_path / "broken"), "--steps", "2"]) == 0
    one, two = (without_times(lines(tmp_path / n / "metrics.jsonl")) for n in ("unbroken", "broken"))
    assert one == two and one[0]["k3_mean"] == 0 and one[1]["k3_mean"] > 0  # at step 0 the model is its reference
    one, two = (weights(tmp_path / n, 2) for n in ("unbroken", "broken"))
    base = load_model(TINY).state_dict()
    assert one.keys() == two.keys() == base.keys() and all(torch.equal(one[k], two[k]) for k in one)
    changed = {k.split(".")[-2] for k in one if not torch.equal(one[k], base[k])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_flags():
    run, config, _ = settings_of(["--lora-rank", "8", "--model", "some/model"])
    assert (run["lora_rank"], run["lora_alpha"], config.learning_rate) == (8, None, pytest.approx(1e-5))
    assert settings_of(["--lora-rank", "8", "--learning-rate", "3e-4"])[1].learning_rate == 3e-4


@pytest.mark.parametrize("flags, words", [(["--lora-rank", "0"], "--lora-rank"), (["--lora-alpha", "4"], "--lora-rank"),
                                          (["--lora-rank", "4", "--lora-alpha", "-1"], "--lora-alpha")])
def test_bad_flags_are_refused(capsys, flags, words):
    assert words in refused(capsys, flags)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(murphy.BadInput, match="GPT2"):
        from transformers import GPT2Config
        add_adapters(AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), 2, 4)
