"""`MoE.from_block`: layers on the weights of live blocks of transformers, one of every family with a preset."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.tolerance import assert_close
from moe_torch import LoRA, MoE, layer_spec_from_config
from moe_torch.layers.block_names import BlockArray
from tests.support.families import tiny
from tests.support.layers import tolerances
from tests.support.torch import in_flat_buffer, mapped, on_engines, running_on, to_numpy

transformers = pytest.importorskip("transformers", reason="the blocks are those of transformers")
pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")

from tools.sweep import models
from tools.sweep.measure import block_run


def block_of(family: str) -> Any:
    """The last block of a family's tiny model, or a skip where this transformers keeps the experts' weights apart."""
    block: Any = list(models.moe_blocks(models.build(family)).values())[-1]
    if family == "aria" and not hasattr(block.experts, "gate_up_proj"):
        pytest.skip(f"transformers {transformers.__version__} computes {family} outside of its experts interface")
    return block


def draw() -> torch.Tensor:
    return torch.randn(2, models.T // 2, models.D, generator=torch.Generator().manual_seed(3))


@on_engines
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3", "aria", "nemotron_h"])
def test_layer_is_the_block(engine: str, family: str) -> None:
    """Shared experts with a gate; interleaved and biased; grouped with a correction bias; in_out; ungated.

    The sweep has every family: tests/torch/test_families.py.
    """
    with running_on(engine) as device:
        block = block_of(family).to(device)
        layer, x = MoE.from_block(block), draw().to(device)
        with torch.no_grad():
            wanted, ids = block_run(block, x)
            y, aux = layer(x, return_aux=True)
        assert ids is not None and torch.equal(aux.ids.sort(-1).values, ids.sort(-1).values.int())
        label = f"{family} on {engine}"
        assert_close(to_numpy(y), to_numpy(wanted), tolerances(layer.spec, "float32")["output"], label)


def test_a_norm_of_the_experts_sum_is_the_blocks_own() -> None:
    """Which files have beside the block, under another name."""
    block = block_of("deepseek_v3")
    block.post_mlp_layernorm = torch.nn.RMSNorm(models.D)
    layer = MoE.from_block(block, block.config.to_dict() | {"model_type": "axk1"})
    assert layer.output is not None and layer.output.norm is block.post_mlp_layernorm.weight


def test_weights_are_the_blocks_own() -> None:
    block = block_of("deepseek_v3")
    layer = MoE.from_block(block)
    assert layer.experts.gate_up is block.experts.gate_up_proj and layer.experts.down is block.experts.down_proj
    assert layer.router.weight is block.gate.weight
    bias = layer.router.correction_bias
    assert bias is not None and bias.data_ptr() == block.gate.e_score_correction_bias.data_ptr()
    assert layer.shared_experts is not None and layer.shared_experts.down is block.shared_experts.down_proj.weight
    assert layer.copied == ("shared_experts.gate_up",)
    assert MoE.from_block(block_of("gpt_oss")).copied == ()
    dbrx = MoE.from_block(block_of("dbrx"), models.build("dbrx").config)
    assert dbrx.copied == ("experts.gate_up", "experts.down")
    layer(draw()).square().sum().backward()
    assert block.experts.gate_up_proj.grad is not None and block.gate.weight.grad is not None


def test_a_model_trains_with_the_layer_in_the_blocks_place() -> None:
    model, inputs = models.build("qwen3_moe"), models.inputs("qwen3_moe")
    wanted = models.outputs(model(**inputs))
    other = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.mlp = MoE.from_block(layer.mlp)
    found = models.outputs(model(**inputs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for one in (found, models.outputs(other(**inputs))):
        one.square().sum().backward()
    theirs = other.model.layers[0].mlp.experts.gate_up_proj.grad
    torch.testing.assert_close(model.model.layers[0].mlp.experts.gate_up.grad, theirs, rtol=1e-3, atol=1e-4)


def test_the_mode_and_frozen_parameters_stay() -> None:
    block = block_of("qwen2_moe").requires_grad_(False).eval()
    layer = MoE.from_block(block)
    assert not layer.training and not any(parameter.requires_grad for parameter in layer.parameters())


def test_a_bfloat16_correction_bias_is_copied() -> None:
    block = block_of("deepseek_v3").bfloat16()
    layer = MoE.from_block(block)
    assert layer.copied == ("router.correction_bias", "shared_experts.gate_up")
    assert layer.router.correction_bias is not None and layer.router.correction_bias.dtype == torch.float32
    assert layer(draw().bfloat16()).dtype == torch.bfloat16


def test_weights_at_unaligned_addresses_of_a_file(tmp_path: pathlib.Path) -> None:
    """Where `from_pretrained` leaves them on a CPU."""
    model = models.build("gpt_oss")
    model.save_pretrained(tmp_path)
    block = type(model).from_pretrained(tmp_path).model.layers[1].mlp
    moved = block.experts.gate_up_proj
    moved.data = mapped(tmp_path / "weights", moved)
    assert moved.data_ptr() % 16
    layer = MoE.from_block(block)
    assert layer.experts.gate_up is block.experts.gate_up_proj is moved and moved.data_ptr() % 16 == 0
    wanted, _ = block_run(model.model.layers[1].mlp, draw())
    torch.testing.assert_close(layer(draw()), wanted, rtol=1e-4, atol=1e-5)


def test_a_view_of_a_flat_buffer_is_no_copy_of_it() -> None:
    """An optimizer steps in the buffer: a copy would never move. Aligned views are taken as they are."""
    block = models.build("gpt_oss").model.layers[1].mlp
    in_flat_buffer(block, offset=1)
    with pytest.raises(InvalidInput, match=r"must start at a multiple of 16 bytes, got a view of .* pad the buffer"):
        MoE.from_block(block)
    flat = in_flat_buffer(block.experts, offset=4)
    if all(one.data_ptr() % 16 == 0 for one in block.experts.parameters()):
        in_flat_buffer(block.router, offset=4)
        layer = MoE.from_block(block)
        before = layer(draw())
        flat.mul_(2)
        assert not torch.equal(layer(draw()), before)


def test_a_decoder_layer_with_router_and_experts_of_its_own() -> None:
    """Gemma 4."""
    decoder = models.build("gemma4").model.layers[0]
    layer = MoE.from_block(decoder)
    assert layer.copied == () and layer.router.weight is decoder.router.proj.weight
    assert layer.router.norm is decoder.router.scale and layer.router.expert_scale is decoder.router.per_expert_scale
    decoder.experts.act_fn = torch.nn.ReLU()
    with pytest.raises(InvalidInput, match=r"experts\.act_fn of .* got ReLU"):
        MoE.from_block(decoder)


def test_what_is_no_block_is_refused() -> None:
    block = block_of("mixtral")
    with pytest.raises(InvalidInput, match=r"submodules experts and gate or router, got MixtralExperts with"):
        MoE.from_block(block.experts)
    with pytest.raises(InvalidInput, match="block must be a Module"):
        MoE.from_block(models)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="vitpose_backbone' cannot be described"):
        MoE.from_block(block_of("vitpose_backbone"), {"model_type": "vitpose_backbone"})
    llama = block_of("llama4")
    with pytest.raises(InvalidInput, match="config must be given for Llama4TextMoe"):
        MoE.from_block(llama)
    assert MoE.from_block(llama, models.build("llama4").config).copied[0] == "shared_experts.gate_up"


def test_a_part_that_the_layer_does_not_have_is_named() -> None:
    block = block_of("mixtral")
    block.norm = torch.nn.LayerNorm(models.D, bias=False)
    with pytest.raises(
        Unsupported, match=r"block must hold only gate.weight, .* by its config, got .* with norm\.weight,"
    ):
        MoE.from_block(block)
    block = block_of("mixtral")
    block.gate = torch.nn.Identity()
    with pytest.raises(InvalidInput, match=r"block must hold gate.weight by its config, got MixtralSparseMoeBlock"):
        MoE.from_block(block)
    block = block_of("qwen3_moe")
    block.experts.down_proj = torch.nn.Parameter(block.experts.down_proj[:-1])
    message = r"experts.down_proj of block must make experts.down \[8, 32, 24\] by its config, got \[7, 32, 24\]"
    with pytest.raises(InvalidInput, match=message):
        MoE.from_block(block)


def test_another_familys_config_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"block must hold gate\.e_score_correction_bias, shared_experts\.gate_proj\.weight, "
    ):
        MoE.from_block(block_of("mixtral"), models.build("deepseek_v3").config)


def replaced(part: Any) -> None:
    part.__class__ = type("Mine", (type(part),), {"forward": lambda part, x: x})


def test_a_block_that_no_longer_is_its_config_is_refused() -> None:
    """Settings, activation and code that were changed after the block was made."""
    changes: dict[str, Any] = {
        r"gate\.top_k of .* must be 3 by its config, got 2; give": lambda block: setattr(block.gate, "top_k", 2),
        r"gate\.num_group of .* got 2;": lambda block: setattr(block.gate, "num_group", 2),
        r"routed_scaling_factor of .* got 7": lambda block: setattr(
            block if hasattr(block, "routed_scaling_factor") else block.gate, "routed_scaling_factor", 7
        ),
        r"experts\.act_fn of .* got ReLU": lambda block: setattr(block.experts, "act_fn", torch.nn.ReLU()),
        r"shared_experts\.act_fn of .*Re": lambda block: setattr(block.shared_experts, "act_fn", torch.nn.ReLU()),
        r"block of .* must run its class's own forward": lambda block: setattr(block, "forward", lambda x: x),
        r"shared_experts\.up_proj of .* must run": lambda block: setattr(block.shared_experts.up_proj, "forward", id),
        r"experts of .* must run its": lambda block: block.experts.register_full_backward_hook(lambda *_: None),
        r"gate of .* must run its class's own forward without hooks": lambda block: block.gate.register_forward_hook(
            lambda module, inputs, output: None
        ),
        r"block of Mine must run its class's own": replaced,
        r"gate_proj of .* must run its class's own": lambda block: replaced(block.shared_experts.gate_proj),
    }
    for message, change in changes.items():
        block = copy.deepcopy(block_of("deepseek_v3"))
        change(block)
        with pytest.raises((InvalidInput, Unsupported), match=message):
            MoE.from_block(block)
    model = models.build("qwen3_moe")
    model.config.num_experts_per_tok += 1
    with pytest.raises(InvalidInput, match=r"gate\.top_k of Qwen3MoeSparseMoeBlock must be 4 by its config, got 3"):
        MoE.from_block(model.model.layers[0].mlp, model.config)


@on_engines
def test_ids_from_a_table(engine: str) -> None:
    """DeepSeek-V4's first layers look up the experts of each token; the model gives the ids to all of its blocks."""
    model = tiny("deepseek_v4", mlp_layer_types=["hash_moe", "moe"], swiglu_limit=0.5)
    blocks: Any = models.moe_blocks(model).items()
    (first, block), (second, learned) = blocks
    x: Any
    x, tokens = draw().requires_grad_(), models.inputs("deepseek_v4")["input_ids"].view(2, -1)
    wanted = block(x, input_ids=tokens)
    wanted.square().sum().backward()
    gradients = [block.gate.weight.grad.clone(), block.experts.down_proj.grad.clone(), x.grad.clone()]
    model.zero_grad()
    with running_on(engine) as device:
        model.to(device)
        layer: Any
        layer, other = MoE.from_block(block, model.config), MoE.from_block(learned, model.config)
        assert layer.copied == ("router.table", "shared_experts.gate_up") and layer.router.table.dtype == torch.int32
        rows, tokens = x.detach().to(device).requires_grad_(), tokens.to(device)
        y, aux = layer(rows, input_ids=tokens, return_aux=True)
        y.square().sum().backward()
        allowed = tolerances(layer.spec, "float32")["output"]
        assert_close(to_numpy(y.detach()), to_numpy(wanted.detach()), allowed, "output")
        assert torch.equal(aux.ids, block.gate.tid2eid[tokens.view(-1)].int())
        found = [layer.router.weight.grad, layer.experts.down.grad, rows.grad]
        for gradient, expected in zip(found, gradients, strict=True):
            torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            ids = {"input_ids": models.inputs("deepseek_v4")["input_ids"].to(device)}
            logits = model(**ids).logits
            model.set_submodule(first, layer)
            model.set_submodule(second, other)
            torch.testing.assert_close(model(**ids).logits, logits, rtol=1e-4, atol=1e-5)
        outside = tokens.clone()
        outside[0, 0], outside[1, 1] = -1, models.VOCABULARY
        _, aux = layer(rows, input_ids=outside, return_aux=True)
        assert int(aux.invalid_ids) == 2 * models.K and (aux.ids.view(2, -1, models.K)[0, 0] == -1).all()


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.5])
def test_sparsemixer_in_evaluation(jitter: float) -> None:
    """Phi's router: ids, weights and gradients of transformers' block, which draws experts only in training."""
    model = tiny("phimoe", num_experts_per_tok=2, router_jitter_noise=jitter)
    block: Any = next(iter(models.moe_blocks(model).values()))
    x = draw().requires_grad_()
    _, wanted_weights, ids = block.router(x.view(-1, models.D))
    wanted = block(x)
    wanted.square().sum().backward()
    held = (block.router.weight, block.experts.down_proj, x)
    gradients = [None if one.grad is None else one.grad.clone() for one in held]
    model.zero_grad()
    x.grad = None
    with running_on("reference"):
        layer = MoE.from_block(block, model.config)
        y, aux = layer(x, return_aux=True)
        y.square().sum().backward()
    assert torch.equal(aux.ids, ids.int())
    assert (wanted_weights < 0.99).any() == (jitter > 0)
    torch.testing.assert_close(aux.weights, wanted_weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    for one, expected in zip(held, gradients, strict=True):
        torch.testing.assert_close(
            one.grad, torch.zeros_like(one) if expected is None else expected, rtol=1e-3, atol=1e-4
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("family", "compiled"), [("qwen3_moe", False), ("mixtral", False), ("gpt_oss", False), ("mixtral", True)]
)
def test_auxiliary_losses_are_of_all_routers(family: str, compiled: bool) -> None:
    """Of blocks that were replaced, and of those that were not."""
    model = models.build(family)
    ids = torch.arange(14).view(2, 7) % model.config.vocab_size
    wanted = model(ids, labels=ids, output_router_logits=True)
    layers = model.model.layers
    for replaced in (layers[:1],) if compiled else (layers[:1], layers):
        for decoder in replaced:
            if not isinstance(decoder.mlp, MoE):
                decoder.mlp = copy.deepcopy(MoE.from_block(decoder.mlp, model.config))
                if family == "gpt_oss":
                    decoder.mlp.register_forward_hook(lambda module, inputs, y: (y, None))
        run: Any = torch.compile(model, backend="eager") if compiled else model
        found = run(ids, labels=ids, output_router_logits=True)
        assert len(found.router_logits) == len(wanted.router_logits) == len(layers)
        for one, other in zip(found.router_logits, wanted.router_logits, strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.aux_loss, wanted.aux_loss)
        assert compiled or run(ids).logits.shape == wanted.logits.shape
    if family != "gpt_oss":
        y, aux = layers[0].mlp(draw(), return_aux=True)
        assert y.shape == draw().shape and aux.logits.shape[1] == layers[0].mlp.spec.num_experts


@pytest.mark.parametrize("family", ["mixtral", "minimax", "minimax_m2", "dbrx"])
def test_noise_of_training_is_the_blocks(family: str) -> None:
    """Drawn from the same seed, it is the same number."""
    model = tiny(family) if family == "dbrx" else tiny(family, router_jitter_noise=0.3)
    block: Any = next(iter(models.moe_blocks(model).values()))
    if family == "dbrx":
        model.config.ffn_config.moe_jitter_eps = block.router.moe_jitter_eps = 0.3
    with pytest.raises(
        Unsupported, match=r"(router_jitter_noise|moe_jitter_eps) in config.json must be 0 or null .* 0.3"
    ):
        layer_spec_from_config(model.config)
    for training in (True, False):
        layer = MoE.from_block(block.train(training), model.config)
        torch.manual_seed(7)
        wanted, ids = block_run(block, draw())
        torch.manual_seed(7)
        y, aux = layer(x=draw(), return_aux=True)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
        assert ids is None or torch.equal(aux.ids.sort(-1).values, ids.sort(-1).values.int())
        assert torch.equal(layer(draw()), layer(draw())) != training
        with pytest.warns(UserWarning, match=r"export_weights leaves out input_noise=0\.3"):
            layer.export_weights()


def test_sparsemixer_is_not_trained() -> None:
    """Its block draws experts in training, and may draw noise."""
    model = tiny("phimoe", num_experts_per_tok=2, input_jitter_noise=0.2)
    block: Any = next(iter(models.moe_blocks(model).values()))
    layer, x = MoE.from_block(block, model.config), draw()
    torch.testing.assert_close(layer(x), block(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(Unsupported, match=r"must be in evaluation, got training, where the block draws experts"):
        layer.train()(x)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "lfm2_moe", "minimax_m2", "gpt_oss", "ernie4_5_moe"])
def test_the_blocks_router_chooses_in_bfloat16(family: str) -> None:
    """The block's ids bit by bit. Of 64 experts, the layer's router has others, since rounded logits tie."""
    many = {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 8} if family == "qwen3_moe" else {}
    model = tiny(family, **many).bfloat16()
    block: Any = list(models.moe_blocks(model).values())[-1]
    x: Any = torch.randn(2, 200, models.D, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    with torch.no_grad():
        wanted, ids = block_run(block, x)
    layer = copy.deepcopy(MoE.from_block(block, model.config, block_router=True))
    y, aux = layer(x, return_aux=True)
    assert ids is not None and torch.equal(aux.ids.sort(-1).values, ids.sort(-1).values.int())
    assert float((y.detach() - wanted).abs().max()) <= 2e-2 * float(wanted.abs().max())
    y.float().square().sum().backward()
    assert x.grad is not None and layer.router.weight.grad is not None and bool(layer.router.weight.grad.any())
    _, plain = MoE.from_block(block, model.config)(x, return_aux=True)
    assert torch.equal(plain.ids.sort(-1).values, ids.sort(-1).values.int()) != bool(many) or family == "lfm2_moe"
    # The caller's ids come first, and the layer's weights are the router's.
    _, own = layer(x, expert_ids=ids.view(2, 200, -1).flip(-1), return_aux=True)
    assert torch.equal(own.ids, ids.flip(-1).int())
    with torch.no_grad():
        layer.router.weight.neg_()
        assert not torch.equal(layer(x, return_aux=True)[1].ids, aux.ids)
    # The choice would follow the weight alone.
    handle = layer.router.register_forward_hook(lambda module, inputs, logits: -logits)
    with pytest.raises(Unsupported, match=r"block_router must be False where layer\.router has an adapter, a hook or"):
        layer(x)
    handle.remove()
    layer.add_lora(LoRA(2, targets=("router",)))
    with pytest.raises(Unsupported, match=r"block_router must be False where layer\.router has an adapter, a hook or"):
        layer(x)
    layer.lora = None
    layer.set_submodule("router", torch.nn.Sequential(layer.router))
    with pytest.raises(Unsupported, match="would not follow, got Sequential; leave block_router out"):
        layer(x)


def test_router_arrays_go_back_in_their_type_and_shape() -> None:
    table = BlockArray("router.table", ("gate.tid2eid",), (4, 2), torch.int64)
    (back,) = table.split(table.join([torch.ones(4, 2, dtype=torch.int64)]))
    assert back.dtype == torch.int64 and back.shape == (4, 2)
    bias = BlockArray("router.correction_bias", ("gate.bias",), (1, 4), torch.float32)
    assert bias.split(bias.join([torch.ones(1, 4)]))[0].shape == (1, 4)


@pytest.mark.parametrize("family", ["llama4", "phimoe", "deepseek_v4", "afmoe"])
def test_routers_that_cannot_choose_for_the_layer_are_refused(family: str) -> None:
    model = tiny(family)
    block: Any = next(iter(models.moe_blocks(model).values()))
    with pytest.raises(Unsupported, match="block_router must be False for"):
        MoE.from_block(block, model.config, block_router=True)
