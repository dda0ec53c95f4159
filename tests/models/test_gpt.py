import pytest
import torch

from ptdbench.models.gpt import GPT
from ptdbench.models.materialize import parameter_count
from tests.models.made import check_logits, filled
from tests.models.their_weights import from_gpt2


def gpt(**options):
    return filled(GPT, layers=2, heads=4, width=32, sequence_length=24, vocabulary=60, **options)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_gpt2_weights_give_the_logits_of_transformers(tie_weights):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=24, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tie_weights
    )
    theirs = transformers.GPT2LMHeadModel(config)
    check_logits(gpt(tie_weights=tie_weights), theirs, lambda state: from_gpt2(state, heads=4))


def test_the_tied_weight_is_one_parameter_with_both_gradients():
    tied, untied = gpt(), gpt(tie_weights=False)
    untied.load_state_dict(tied.state_dict())
    tokens, targets = torch.randint(60, (2, 2, 24))
    for model in (tied, untied):
        model(tokens, targets).backward()
    assert tied.head.projection.weight is tied.embedding.token.weight
    assert tied.tied() == [("embedding.token.weight", "head.projection.weight")]
    assert untied.tied() == []
    both = untied.embedding.token.weight.grad + untied.head.projection.weight.grad
    torch.testing.assert_close(tied.embedding.token.weight.grad, both)
    assert parameter_count(untied) - parameter_count(tied) == 60 * 32
