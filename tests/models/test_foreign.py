from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ptdbench.models.flops import _grouped_flops
from ptdbench.models.foreign import Adapted, adapt, build
from ptdbench.models.materialize import materialize, parameter_count
from ptdbench.models.protocol import FlopsUnknown, Model
from ptdbench.problems import ConfigError
from tests.models.assembled import assembled


def example():
    return torch.empty(1, 6, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")


class Plain(nn.Module):
    """Knows nothing of the protocol; ``layers`` is how many people name their blocks."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class WithLoss(Plain):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)


class TakesTargets(Plain):
    def forward(self, x, targets=None):
        outputs = super().forward(x)
        return outputs if targets is None else F.cross_entropy(outputs, targets, label_smoothing=0.1)


def variant(forward=Plain.forward, base=Plain, **parts):
    """Another of such layers, called otherwise, or with more attributes."""
    return lambda: assembled(forward, base, **parts)


def returns_row(self, x, targets=None):
    outputs = TakesTargets.forward(self, x, targets)
    return outputs if targets is None else outputs[None]


class WithBoth(Plain):
    def forward(self, x, targets=None):
        outputs = super().forward(x)
        return outputs, None if targets is None else F.cross_entropy(outputs, targets, label_smoothing=0.1)


class Talkative(TakesTargets):
    def parts(self):
        return {f"layers.{i}": layer for i, layer in enumerate(self.layers)}

    def tied(self):
        return [("layers.0.bias", "layers.1.bias")]

    def reset(self, name, tensor, generator):
        tensor.fill_(len(name))


def target(cls):
    return f"{__name__}.{cls.__name__}"


def batch():
    return torch.randn(8, 6), torch.randint(4, (8,))


def test_a_plain_module_gets_the_default_losses():
    inputs, classes = batch()
    model = adapt(Plain(), example)
    outputs = model.module(inputs)
    assert isinstance(model, Model)
    torch.testing.assert_close(model(inputs), outputs)
    torch.testing.assert_close(model(inputs, classes), F.cross_entropy(outputs, classes))
    numbers = torch.randn(8, 4)
    torch.testing.assert_close(model(inputs, numbers), F.mse_loss(outputs, numbers))


@pytest.mark.parametrize("kind", [
    WithLoss, TakesTargets, WithBoth, variant(loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    variant(loss=lambda outputs, targets: WithLoss.loss(None, outputs, targets)[None]),
    variant(returns_row, TakesTargets),
])  # fmt: skip
def test_a_module_may_bring_its_loss(kind):
    inputs, classes = batch()
    model = adapt(kind(), example)
    expected = F.cross_entropy(model(inputs), classes, label_smoothing=0.1)
    torch.testing.assert_close(model(inputs, classes), expected)


@pytest.mark.parametrize(("returned", "kind_of_loss"), [
    (lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"), r"a tensor of shape \(8,\)"),
    (lambda outputs, _: {"cost": outputs.mean()}, "dict"),
    (lambda outputs, _: SimpleNamespace(loss=None, logits=outputs), "SimpleNamespace"),
])  # fmt: skip
def test_invalid_losses_are_named(returned, kind_of_loss):
    kind = variant(lambda self, x, targets=None: returned(Plain.forward(self, x), targets))
    rule = rf"^Assembled\.forward\(inputs, targets\) must return the mean loss, .*, but returns {kind_of_loss}$"
    with pytest.raises(TypeError, match=rule):
        adapt(kind(), example)(*batch())


class Narrow(Plain):
    def __init__(self):
        super().__init__()
        self.layers[2].bfloat16()

    @classmethod
    def from_pretrained(cls):
        return cls()


@pytest.mark.parametrize(
    ("made_by", "remedy"), [("", r"return it as \.float\(\)"), (".from_pretrained", r"try \+model\.dtype=float32")]
)
def test_weights_that_are_not_fp32_are_refused(made_by, remedy):
    with pytest.raises(ConfigError, match=rf"layers\.2\.weight is bfloat16, but .*; {remedy}$"):
        build({"_target_": target(Narrow) + made_by}, seed=1, example=example)


def test_weights_without_a_shape_are_refused():
    with pytest.raises(ConfigError, match=r"weight is lazy: .*; .* nn\.LazyLinear by nn\.Linear"):
        build({"_target_": "torch.nn.LazyLinear", "out_features": 2}, seed=1, example=example)


def test_loss_of_narrow_outputs_is_fp32():
    inputs, classes = batch()
    model = adapt(WithLoss(), example).bfloat16()
    inputs = inputs.bfloat16()
    assert model(inputs).dtype == torch.bfloat16
    expected = F.cross_entropy(model(inputs).float(), classes, label_smoothing=0.1)
    assert torch.equal(model(inputs, classes), expected)


def test_no_targets_need_a_loss():
    """Of the module itself: a scalar, or an object that has it."""
    inputs, none = batch()[0], torch.empty(len(batch()[0]), 0)
    with pytest.raises(TypeError, match=r"^there are no targets, and forward\(\) returns no loss"):
        adapt(Plain(), example)(inputs, none)
    for returned in (
        lambda self, inputs: inputs.square().mean(),
        lambda self, inputs: {"loss": inputs.square().mean()},
    ):
        model = adapt(assembled(returned), example)
        assert torch.equal(model(inputs, none), inputs.square().mean())


def test_plain_module_is_cut_between_layers():
    model = adapt(Plain(), example)
    assert model.layers() == list(model.module.layers)
    assert list(model.parts()) == ["layers.0", "layers.1", "layers.2"]
    assert model.tied() == []
    assert adapt(nn.Linear(6, 4), example).layers() == []


def test_flops_are_counted_for_one_sample():
    """2 FLOPs a weight forward, 2 for its gradient and 2 for its inputs', which the first layer needs not."""
    module = Plain()
    before = module.layers[1].running_mean.clone()
    assert adapt(module, example).train_flops() == {"module": 4 * 6 * 5 + 6 * 5 * 4}
    assert torch.equal(module.layers[1].running_mean, before)
    assert all(parameter.grad is None for parameter in module.parameters())


class Remembers(Plain):
    """Makes what it needs when it is first called: an attribute, a buffer and an entry of a table."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = None, {}
        self.register_buffer("shift", None, persistent=False)

    def forward(self, x):
        if self.scale is None:
            self.scale, self.shift = (torch.ones(4, device=x.device) for _ in range(2))
            self.table[x.shape[1:]] = torch.ones(4, device=x.device)
        return super().forward(x) * self.scale * self.table[x.shape[1:]] + self.shift


@pytest.mark.parametrize("ask", [Adapted.train_flops, Adapted.parts])
def test_a_trial_leaves_nothing_in_the_module(ask):
    """A tensor that it kept would have no values, or be on another device than the run."""
    module = Remembers()
    model = adapt(module, example)
    ask(model)
    assert (module.scale, module.shift, module.table, module.training) == (None, None, {}, True)
    model(*batch())
    assert module.scale.device == module.shift.device == torch.device("cpu")


@pytest.mark.parametrize("window", [None, 4, 99])
def test_flops_of_windowed_attention_count_its_pairs(window):
    """Scores and mixing of all heads, backward twice: of T positions with W, of which a causal mask leaves out W²/2.

    Of a model that looks at values unless it is traced.
    """
    from transformers import MistralConfig, MistralForCausalLM  # takes seconds, which other workers need not spend

    layers, width, words, tokens = 2, 16, 64, 12
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": layers, "vocab_size": words}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    module = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=window))
    sample = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    weights = layers * (2 * width * width + 2 * width * 8 + 3 * width * 32) + words * width
    model, seen = adapt(module, lambda: (sample, sample)), min(window or tokens, tokens)
    pairs = 12 * layers * width
    assert model.train_flops() == {"module": pytest.approx(6 * weights * tokens + pairs * tokens * seen)}
    assert model.masked_flops() == pytest.approx(pairs * seen**2 / 2)


class Attends(Plain):
    """Attention among vectors of 6 features, then layers; the one of its embedding trains or not."""

    def __init__(self, causal=True, window=None, frozen=False):
        super().__init__()
        self.embedding = nn.Embedding(8, 6).requires_grad_(not frozen)
        self.attention = nn.Module()
        self.attention.is_causal, self.attention.sliding_window = causal, window
        self.attention.forward = lambda x: x @ x.mT @ x

    def forward(self, x):
        return super().forward(self.attention(self.embedding(x)).mean(1))


def flops_of(module):
    """All and those masked, for one sample of 12 words, without those of the layers."""
    words = torch.empty(1, 12, dtype=torch.int64, device="meta")
    model = adapt(module, lambda: (words, example()[1]))
    layers = 3 * 2 * (6 * 5 + 5 * 4) - (0 if module.embedding.weight.requires_grad else 2 * 6 * 5)
    return model.train_flops()["module"] - layers, model.masked_flops()


@pytest.mark.parametrize(("frozen", "passes"), [(False, 3), (True, 1)])
def test_frozen_attention_counts_one_pass(frozen, passes):
    pairs = passes * 2 * 2 * 6
    assert flops_of(Attends(frozen=frozen)) == (pairs * 12 * 12, pairs * 12 * 12 / 2)
    assert flops_of(Attends(frozen=frozen, window=4)) == (pytest.approx(pairs * 12 * 4), pytest.approx(pairs * 4 * 2))


@pytest.mark.parametrize(("window", "seen"), [(None, 12), (3, 5), (9, 12)])
def test_two_sided_window_counts_its_pairs(window, seen):
    assert flops_of(Attends(causal=False, window=window)) == (pytest.approx(3 * 2 * 2 * 6 * 12 * seen), 0)


def grouped(self, x):
    x, ends = F.pad(Plain.forward(self, x), (0, 4)).bfloat16(), torch.arange(3, dtype=torch.int32, device=x.device)
    return F.grouped_mm(x, self.experts.bfloat16(), offs=ends).float()


def test_products_of_experts_count():
    layers = 3 * 2 * (6 * 5 + 5 * 4) - 2 * 6 * 5  # inputs have no gradients
    module = variant(grouped, experts=nn.Parameter(torch.randn(3, 8, 16)))()
    assert adapt(module, example).train_flops() == {"module": layers + 3 * 2 * 8 * 16}


@pytest.mark.parametrize(
    ("first", "second", "flops"),
    [([7, 8], [3, 8, 16], 7 * 8 * 16), ([8, 7], [7, 16], 8 * 7 * 16), ([3, 16, 8], [8, 7], 16 * 8 * 7),
     ([3, 5, 8], [3, 8, 16], 3 * 5 * 8 * 16)],
)  # fmt: skip
def test_flops_of_grouped_products(first, second, flops):
    assert _grouped_flops(first, second) == 2 * flops


MIXED = SimpleNamespace(sliding_window=4, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(("attributes", "window"), [
    ({"is_sliding": False}, None), ({"is_sliding": True}, 4),  # Exaone4
    ({"config": MIXED, "layer_idx": 1}, None), ({"config": MIXED, "layer_idx": 0}, 4),  # Qwen2-MoE
    ({"config": MIXED}, 4), ({"config": SimpleNamespace(layer_types=["full_attention"]), "layer_idx": 0}, 4),
])  # fmt: skip
def test_window_counts_where_used(attributes, window):
    module = Attends(window=4)
    vars(module.attention).update(attributes)
    assert flops_of(module) == flops_of(Attends(window=window))
    if attributes.get("config") is MIXED:
        del module.attention.sliding_window
        assert flops_of(module) == flops_of(Attends(window=window))


class Mixes(Plain):
    """Multiplies batches of matrices, and does not say whether that is causal."""

    def forward(self, x):
        x = super().forward(x)
        return (x[:, :, None] @ x[:, None, :]).sum(-1)


class Says(Mixes):
    def masked_flops(self):
        return 7.0


class Counts(Plain):
    def train_flops(self):
        return {"layers.0": 1.0}


@pytest.mark.parametrize(("kind", "masked"), [(Plain, 0.0), (Mixes, None), (Says, 7.0), (Counts, None)])
def test_masked_flops_if_stated_or_impossible(kind, masked):
    assert adapt(kind(), example).masked_flops() == masked


class Answers(Plain):
    """Returns an object, as models of Hugging Face do, and names its inputs."""

    main_input_name = "vectors"

    def __init__(self, kind=SimpleNamespace, with_logits=True):
        super().__init__()
        self.kind, self.with_logits, self.outputs = kind, with_logits, super().forward

    def forward(self, anything=None, vectors=None, use_cache=True):
        assert not use_cache
        outputs = super().forward(vectors)
        return self.kind(logits=outputs) if self.with_logits else self.kind(loss=outputs.mean())


@pytest.mark.parametrize("kind", [SimpleNamespace, dict])
def test_hugging_face_outputs_are_understood(kind):
    inputs, classes = batch()
    model = adapt(Answers(kind), example)
    assert model(inputs).shape == (8, 4)
    torch.testing.assert_close(model(inputs, classes), F.cross_entropy(model(inputs), classes))
    loss = adapt(Answers(kind, with_logits=False), example)
    torch.testing.assert_close(loss(inputs, classes), loss.module.outputs(inputs).mean())
    with pytest.raises(TypeError, match=rf"must return a tensor, .* \.logits or \.loss, but returns {kind.__name__}"):
        loss(inputs)


def test_weights_that_are_one_object_are_tied():
    module = Plain(4)
    module.layers.append(nn.Linear(6, 4))
    module.layers[3].weight = module.layers[0].weight
    assert adapt(module, example).tied() == [("module.layers.0.weight", "module.layers.3.weight")]


def test_flops_that_cannot_be_counted_say_why():
    with pytest.raises(FlopsUnknown, match=r"no train_flops\(\).*item\(\)"):
        adapt(variant(lambda self, x: Plain.forward(self, x) * x.sum().item())(), example).train_flops()


def test_without_reset_the_seed_gives_the_values():
    config = {"_target_": target(Plain), "width": 7}
    state = torch.random.get_rng_state()
    first, again, other = (build(config, seed=seed, example=example) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert parameter_count(first) == 6 * 7 + 7 + 2 * 7 + 7 * 4 + 4
    weights = [model.module.layers[0].weight for model in (first, again, other)]
    assert not weights[0].is_meta
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    materialize(first, first, device="cpu", seed=9)
    assert torch.equal(weights[0], weights[1])


def test_reset_builds_on_the_meta_device():
    model = build({"_target_": target(Talkative)}, seed=1, example=example)
    assert isinstance(model, Adapted)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, model, device="cpu", seed=1)
    assert (model.module.layers[0].weight == len("layers.0.weight")).all()
    assert (model.module.layers[1].running_var == len("layers.1.running_var")).all()


class Scaled(Plain):
    def __init__(self, is_stacked: bool) -> None:
        super().__init__()
        self.is_stacked = is_stacked
        self.first, self.second = (nn.Parameter(torch.tensor(value)) for value in (0.0, 1.0))

    def forward(self, x):
        if self.is_stacked:  # two weights of one element make a matrix, with which the product is another
            return super().forward(x)[:, :2] * torch.stack([self.first, self.second]).exp()
        return super().forward(x) * self.first.exp() + self.second


@pytest.mark.parametrize("is_stacked", [False, True])
def test_scalars_get_a_dimension_unless_that_changes_the_loss(is_stacked):
    scaled = build({"_target_": target(Scaled), "is_stacked": is_stacked}, seed=1, example=example).module
    assert [scaled.first.shape, scaled.second.shape] == [() if is_stacked else (1,)] * 2
    assert [scaled.first.item(), scaled.second.item()] == [0, 1]


def test_a_criterion_replaces_the_loss():
    criterion = {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1}
    model = build({"_target_": target(Plain), "criterion": criterion}, seed=1, example=example)
    inputs, classes = batch()
    expected = F.cross_entropy(model(inputs), classes, label_smoothing=0.1)
    torch.testing.assert_close(model(inputs, classes), expected)
    with pytest.raises(ConfigError, match="computes its loss itself"):
        build({"_target_": target(TakesTargets), "criterion": criterion}, seed=1, example=example)
