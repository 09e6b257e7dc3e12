"""Rows with factors and offsets beside rows without: nobody else pays, nobody else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rota.errors import StagingError
from rota.gpu.kernels.affine import AffineGroup
from rota.gpu.lora.dims import LoraModule
from rota.gpu.lora.fused import grouped_rows
from rota.gpu.model.config import load_config
from rota.gpu.model.linears import BaseLinears

PROMPT = [44, 54, 99, 14, 50, 102, 37, 66, 50, 6, 5, 38, 7, 34, 85, 23, 4, 30]
OTHER = [8, 36, 28, 108, 9]
DTYPES = ["float32", "bfloat16"]
CASES = [("qwen3", "dora", "attn_mlp_r8"), ("qwen2", "bias_all", "attn_mlp_r8")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "affine", "plain"), CASES)
def test_mixed_rows_are_each_as_alone(open_bench, dtype, family, affine, plain):
    bench, off = open_bench(family, dtype), open_bench(family, dtype, max_loras=0)
    bench.commit(0, bench.image(affine))
    bench.commit(1, bench.image(plain))
    alone = {slot: bench.step((0, slot, 0, PROMPT)) for slot in (-1, 0, 1)}
    assert torch.equal(alone[-1], off.step((0, -1, 0, PROMPT)))
    assert not torch.equal(alone[0], alone[-1])
    for slot in (-1, 0, 1):
        rows = [(1, 0, 0, OTHER), (2, 1, 0, OTHER), (3, -1, 0, OTHER)]
        mixed = bench.step(rows[0], (0, slot, 0, PROMPT), *rows[1:])
        assert torch.equal(mixed[1], alone[slot][0])
        # Prefill in pieces and one decoded token, beside the others.
        bench.step((0, slot, 0, PROMPT[:7]), sample=False)
        bench.step((0, slot, 7, PROMPT[7:-1]), *rows)
        last = bench.step(*rows, (0, slot, len(PROMPT) - 1, PROMPT[-1:]))
        assert torch.equal(last[-1], alone[slot][0])


@pytest.mark.parametrize("family", ["qwen3"])
def test_only_rows_that_need_it_launch_it(open_bench, monkeypatch, family):
    bench = open_bench(family)
    bench.commit(0, bench.image("dora"))
    bench.commit(1, bench.image("attn_mlp_r8"))
    calls = []
    apply = AffineGroup.apply

    def counted(self, *args):
        calls.append(self)
        apply(self, *args)

    monkeypatch.setattr(AffineGroup, "apply", counted)
    bench.step((0, -1, 0, PROMPT), (1, 1, 0, OTHER))
    assert calls == []
    bench.step((0, -1, 0, PROMPT), (1, 0, 0, OTHER))
    assert len(calls) == 2 * 4  # two layers, every group


def test_the_torch_references_agree(open_bench, reference):
    bench, ref = open_bench("qwen3", use_numba=False), reference("qwen3")["cases"]["dora"]
    bench.commit(0, bench.image("dora"))
    assert bench.greedy([(0, ref["ids"])], 12) == [ref["greedy_f32"]]


def test_base_weights_are_read_as_served(data_dir, tmp_path):
    folder = data_dir / "oracle" / "qwen2" / "base"
    dims = load_config(folder).to_lora_dims()
    linears = BaseLinears(folder, torch.bfloat16, dims)
    whole = linears.rows(1, LoraModule.UP_PROJ, 0, 80)
    assert whole.shape == (80, 48) and str(whole.dtype) == "float32"
    assert (linears.rows(1, LoraModule.UP_PROJ, 17, 20) == whole[17:20]).all()
    assert linears.bias(0, LoraModule.UP_PROJ) is None
    assert linears.bias(0, LoraModule.Q_PROJ).shape == (48,)
    linears.close()
    linears.close()
    with pytest.raises(StagingError) as caught:
        linears.rows(1, LoraModule.UP_PROJ, 0, 1)
    assert caught.value.code == "base-weights-unreadable"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (LoraModule.IN_PROJ_QKV, "in_proj_qkvz"),
        (LoraModule.IN_PROJ_Z, "in_proj_qkvz"),
        (LoraModule.IN_PROJ_B, "in_proj_ba"),
        (LoraModule.IN_PROJ_A, "in_proj_ba"),
    ],
)
def test_rows_of_fused_inputs_are_taken_apart_wherever_they_are_cut(data_dir, module, name):
    folder = data_dir / "oracle" / "qwen3_next" / "base"
    dims = load_config(folder).to_lora_dims()
    linears, order = BaseLinears(folder, torch.float32, dims), grouped_rows(dims)[module]
    whole = linears.whole(f"model.layers.0.linear_attn.{name}.weight")[order]
    for cut in range(1, len(order)):
        parts = [linears.rows(0, module, *part) for part in ((0, cut), (cut, len(order)))]
        assert (np.concatenate(parts) == whole).all()
    linears.close()


@pytest.mark.parametrize("layout", ["base", "base_released_layout"])
def test_rows_of_an_expert_are_those_of_the_model(data_dir, layout):
    """One checkpoint has every expert's matrices apart, the other all of them in two tensors."""
    folder = data_dir / "oracle" / "qwen35_moe"
    dims = load_config(folder / layout).to_lora_dims()
    linears = BaseLinears(folder / layout, torch.float32, dims)
    apart = load_file(folder / "base" / "model.safetensors")
    for expert in range(dims.experts):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            module = LoraModule[f"EXPERT_{leaf.upper()}"]
            want = apart[f"model.layers.1.mlp.experts.{expert}.{leaf}.weight"].float().numpy()
            assert (linears.rows(1, module, 0, len(want), expert) == want).all()
            assert (linears.rows(1, module, 3, 7, expert) == want[3:7]).all()
    linears.close()


def test_an_expert_that_is_not_at_hand_is_a_refusal(data_dir):
    folder = data_dir / "oracle" / "qwen2" / "base"
    linears = BaseLinears(folder, torch.float32, load_config(folder).to_lora_dims())
    with pytest.raises(StagingError) as caught:
        linears.rows(0, LoraModule.EXPERT_UP_PROJ, 0, 1, 5)
    assert caught.value.code == "base-weights-unreadable"
    linears.close()


def test_a_checkpoint_cut_short_while_it_serves_is_a_refusal(data_dir, tmp_path):
    source = data_dir / "oracle" / "qwen2" / "base" / "model.safetensors"
    dims = load_config(source.parent).to_lora_dims()
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(source.read_bytes())
    linears = BaseLinears(tmp_path, torch.float32, dims)
    assert linears.rows(0, LoraModule.Q_PROJ, 0, 2).any()
    with copy.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(StagingError) as caught:
        linears.rows(1, LoraModule.DOWN_PROJ, 0, 2)
    assert caught.value.code == "base-weights-unreadable"
    linears.close()
