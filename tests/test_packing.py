"""Token tries: what is shared, what is exact, and how a batch is split."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from aflow_tune.engines.local.packed_model import (
    PackedModel,
    Sample,
    micro_batches,
    pack,
    token_scores,
)


def sample(tokens: list[int], prompt: int, mask: list[int] | None = None, **fields: object):
    width = len(tokens) - prompt
    flags = torch.tensor(mask if mask is not None else [1] * width, dtype=torch.bool)
    return Sample(torch.tensor(tokens), prompt, flags, **fields)  # type: ignore[arg-type]


def group(prompt: int, responses: list[int], *, vocabulary: int = 250) -> list[Sample]:
    """Samples with one random prompt; no two responses start with the same token."""
    generator = torch.Generator().manual_seed(prompt)
    head = torch.randint(0, vocabulary, (prompt,), generator=generator).tolist()
    samples = []
    for k, n in enumerate(responses):
        tail = torch.randint(0, vocabulary, (n - 1,), generator=generator).tolist()
        samples.append(sample([*head, k, *tail], prompt))
    return samples


def mixed_batch() -> list[Sample]:
    """Prompts shared by a group, a second turn that repeats the first, masks with holes."""
    batch = group(12, [9, 3, 17, 1]) + group(5, [6, 30])
    first = batch[0].tokens_T.tolist()
    mask = [0] * 4 + [1] * 3 + [0, 1]
    batch.append(sample([*first, 7, 8, 9, 10, 11, 12, 13, 14, 15], len(first), mask))
    batch.append(sample(first, 12))
    batch.append(sample([4, 5, 6], 2, [0]))
    return batch


def test_positions_and_scores_of_a_small_trie() -> None:
    """abc|de and abc|df: nodes a b c d, both last tokens predicted after d."""
    row = pack([sample([1, 2, 3, 4, 5], 3), sample([1, 2, 3, 4, 6], 3, [0, 1])])
    assert row is not None
    assert row.tokens_N.tolist() == [1, 2, 3, 4]
    assert row.positions_N.tolist() == [0, 1, 2, 3]
    assert row.scored_U.tolist() == [2, 3]
    assert row.node_M.tolist() == [0, 1, 1]
    assert row.target_M.tolist() == [4, 5, 6]
    assert row.row_M.tolist() == [0, 0, 1]
    assert row.column_M.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "batch",
    [mixed_batch(), group(300, [150, 1, 40]) + group(290, [3])],
    ids=["short", "over several tiles of queries"],
)
def test_gradients_equal_those_of_unpacked_rows(batch: list[Sample], tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    weights = torch.randn(len(batch), 150, generator=torch.Generator().manual_seed(1))
    policy = PackedModel(model)
    assert all((policy.packed, policy.fused_head, policy.fused_norms))
    scores, entropy = policy.scores(batch, 150, entropy=True)
    assert entropy is not None
    ((scores + 0.3 * entropy) * weights).sum().backward()
    total = torch.zeros(())
    for row, s in enumerate(batch):
        logits = plain(input_ids=s.tokens_T[None]).logits[0, s.prompt_length - 1 : -1]
        dist = torch.distributions.Categorical(logits=logits)
        value = dist.log_prob(s.tokens_T[s.prompt_length :]) + 0.3 * dist.entropy()
        total = total + (value * s.action_mask_R * weights[row, : len(value)]).sum()
    total.backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert float((a.grad - b.grad).norm()) <= 1e-5 * float(b.grad.norm()), name


MISTRAL = MistralConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=8, initializer_range=0.3,
    attn_implementation="sdpa",
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
MAMBA = MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=4)


LLAMA = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model_class", "config", "is_packed", "temperature"),
    [
        (LlamaForCausalLM, LLAMA, True, 1.0),
        (LlamaForCausalLM, LLAMA, True, 0.7),
        (MistralForCausalLM, MISTRAL, True, 1.0),  # its sliding window is respected
        (GPT2LMHeadModel, GPT2, True, 1.0),
        (MambaForCausalLM, MAMBA, False, 0.7),
    ],
)
def test_scores_and_entropies_are_those_of_single_rows(
    model_class, config, is_packed: bool, temperature: float
) -> None:
    torch.manual_seed(0)
    plain = model_class(config).eval()
    packed = PackedModel(copy.deepcopy(plain), temperature=temperature)
    assert packed.packed == is_packed
    batch = mixed_batch()
    scores, entropy = packed.scores(batch, 40, entropy=True)
    for row, s in enumerate(batch):
        logits = plain(input_ids=s.tokens_T[None]).logits[0, s.prompt_length - 1 : -1]
        dist = torch.distributions.Categorical(logits=logits / temperature)
        found = torch.stack([scores[row], entropy[row]])[:, : len(logits)]
        expected = torch.stack([dist.log_prob(s.tokens_T[s.prompt_length :]), dist.entropy()])
        assert torch.allclose(found, expected * s.action_mask_R, atol=1e-5, rtol=0)


def test_token_scores_match_autograd_over_plain_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over several chunks, with a bias, a temperature and a trained head."""
    monkeypatch.setattr("aflow_tune.engines.local.packed_model.CHUNK_ELEMENTS", 3 * 11)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()
        for shape in ((7, 5), (11, 5), (11,))
    ]
    node = torch.tensor([0, 0, 3, 6, 6, 6, 2])
    target = torch.tensor([1, 4, 10, 0, 0, 5, 7])
    coefficients = torch.randn(7, generator=generator)
    logp, entropy = token_scores(*leaves, node, target, temperature=0.8, entropy=True)
    assert entropy is not None
    value = (logp * coefficients).sum() + (entropy * coefficients).sum()
    grads = torch.autograd.grad(value, leaves)
    dense = ((leaves[0] @ leaves[1].T + leaves[2]) / 0.8).log_softmax(-1)
    expected_entropy = -(dense.exp() * dense).sum(-1)
    expected = torch.autograd.grad(
        (dense[node, target] * coefficients).sum() + (expected_entropy * coefficients).sum(), leaves
    )
    assert torch.allclose(logp, dense[node, target], atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    for ours, theirs in zip(grads, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_micro_batches_keep_runs_whole_and_groups_together() -> None:
    samples = group(10, [6, 6, 6, 6])  # 10 + 4 * 5 = 30 tokens
    samples += group(9, [6, 6, 6, 6])  # 29 tokens
    for index, s in enumerate(samples):
        s.run = index // 2
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert micro_batches(samples, groups, 100) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert micro_batches(samples, groups, 40) == groups
    # A group that cannot fit is cut between runs, and a run that cannot fit is not cut.
    assert micro_batches(samples, groups, 20) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert micro_batches(samples, groups, 1) == [[0, 1], [2, 3], [4, 5], [6, 7]]
