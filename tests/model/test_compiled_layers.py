"""All layers in one call: the same bits as layer by layer, and a way round what it cannot run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from rota.errors import InternalError
from rota.gpu.host import HostDevice
from rota.gpu.kernels import (
    act,
    affine,
    attention_kernel,
    bf16,
    bgmv_dot,
    layers_kernel,
    linear_tiles_kernel,
    norm,
    rope,
)
from rota.gpu.kernels.compiled import Compiled
from rota.gpu.kernels.linear_tiles import TileLinear
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model import compiled_layers, llama
from rota.gpu.model.compiled_layers import MAX_ROWS, CompiledLayers
from rota.gpu.model.config import load_config
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.runner import RowInput, Runner
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.weights import layer_shapes

FAMILIES = ("llama", "qwen2", "qwen3")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
KERNELS = (
    act.silu_mul_kernel,
    affine.affine_kernel,
    attention_kernel.paged_attention_kernel,
    bgmv_dot.lora_dot_kernel,
    layers_kernel.layers_kernel,
    linear_tiles_kernel.tile_linear_kernel,
    norm.rms_norm_kernel,
    rope.rope_and_cache_kernel,
)
BLOCKS = 8
PROMPT = [44, 54, 99, 14, 50, 102, 37, 66, 50, 6, 5, 38, 7, 34, 85, 23, 4, 30, 20, 22, 62, 49]
OTHER = [8, 36, 28, 108, 9]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if (why := bf16.why_no_tiles()) is not None:
        pytest.skip(f"all layers in one call need matrix tiles: {why}")
    yield
    torch.set_num_threads(before)


def random_model(folder, oracle):
    """A checkpoint of the oracle's family in sizes that fit the tiles."""
    folder.mkdir()
    config = json.loads((oracle / "config.json").read_text()) | SIZES
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * SIZES["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    known = load_config(folder)
    shapes = {"model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,)}
    for layer in range(known.num_layers):
        shapes |= layer_shapes(known, layer)
    generator = torch.Generator().manual_seed(7)

    def made(shape):
        value = torch.randn(shape, generator=generator)
        return (value / math.sqrt(shape[1]) if len(shape) == 2 else 1 + 0.1 * value).bfloat16()

    tensors = {name: made(shape) for name, shape in shapes.items()}
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def random_adapter(folder, model, seed, *, rank=8, modules=("q", "k", "v", "o"), dora=False):
    """A PEFT adapter of the attention or of all modules, DoRA on request."""
    folder.mkdir(parents=True)
    known = load_config(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in (
        item for i in range(known.num_layers) for item in layer_shapes(known, i).items()
    ):
        if not name.endswith("_proj.weight"):
            continue
        path = name.removesuffix(".weight")
        if path.rsplit(".", 1)[1].removesuffix("_proj") not in modules:
            continue
        key = f"base_model.model.{path}"
        a = torch.randn((rank, shape[1]), generator=generator) / math.sqrt(shape[1])
        b = torch.randn((shape[0], rank), generator=generator) * 0.3
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        if dora:
            size = 0.5 + torch.rand(shape[0], generator=generator)
            tensors[f"{key}.lora_magnitude_vector"] = size
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [f"{m}_proj" for m in modules],
        "use_dora": dora,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


ALL = ("q", "k", "v", "o", "gate", "up", "down")


class Served:
    """A runner with three adapters: attention alone, all modules, DoRA on all modules."""

    def __init__(self, model, adapters):
        self.folder = model
        self.runner = Runner.load(
            model,
            HostDevice(checked=True),
            RunnerOptions(
                dtype="bfloat16",
                max_loras=4,
                max_lora_rank=16,
                num_blocks=96,
                max_step_tokens=128,
                max_sequences=80,
            ),
        )
        self.seen = []
        self.runner.logits_sink = lambda seqs, logits: self.seen.append(logits.clone())
        for slot, folder in enumerate(adapters):
            source = DirectorySource(folder)
            image = stage(source, self.runner.layout, base_rows=self.runner.base_rows).image
            self.runner.commit(slot, image)

    def step(self, *rows):
        """Logits of one step of (seq, slot, start, tokens)."""
        self.seen.clear()
        self.runner.step(
            [
                RowInput(
                    seq,
                    slot,
                    start,
                    tuple(tokens),
                    tuple(range(seq, seq + 1)) if seq >= BLOCKS else tuple(range(88, 96)),
                    True,
                )
                for seq, slot, start, tokens in rows
            ]
        )
        return self.seen[0]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, data_dir, tmp_path_factory):
    """(all layers in one call, layer by layer), of one model."""
    folder = tmp_path_factory.mktemp("compiled")
    model = random_model(folder / "model", data_dir / "oracle" / request.param / "base")
    adapters = [
        random_adapter(folder / "attention", model, 1),
        random_adapter(folder / "all", model, 2, rank=16, modules=ALL),
        random_adapter(folder / "dora", model, 3, rank=4, modules=ALL, dora=True),
    ]
    compiled = Served(model, adapters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "compiled_layers", lambda *given: None)
        layered = Served(model, adapters)
    yield compiled, layered
    for each in (compiled, layered):
        each.runner.close()


@pytest.fixture
def linears(monkeypatch):
    """How many linears were called from Python."""
    calls = []
    call = TileLinear.__call__

    def counted(self, x):
        calls.append(self)
        return call(self, x)

    monkeypatch.setattr(TileLinear, "__call__", counted)
    return calls


def steps_of(slot):
    """A prompt in pieces and whole, beside rows of every kind, then a decode step of all."""
    others = [(20 + i, s, 0, OTHER) for i, s in enumerate((0, 1, 2, -1, 1))]
    yield [(0, slot, 0, PROMPT)]
    yield [(0, slot, 0, PROMPT[:9]), *others]
    yield [(0, slot, 9, PROMPT[9:]), (30, -1, 0, OTHER)]
    yield [
        (0, slot, len(PROMPT), [3]),
        *((20 + i, s, len(OTHER), [7 + i]) for i, s in enumerate((0, 1, 2, -1, 1))),
    ]


@pytest.mark.parametrize("slot", [-1, 0, 1, 2])
def test_same_bits_as_layer_by_layer(pair, linears, slot):
    compiled, layered = pair
    for rows in steps_of(slot):
        linears.clear()
        one = compiled.step(*rows)
        assert len(linears) == 1  # the head's
        assert torch.equal(one, layered.step(*rows))
        assert len(linears) == 2 + 4 * SIZES["num_hidden_layers"]
    assert one.isfinite().all() and one.std() > 0


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33, MAX_ROWS])
def test_every_number_of_rows(pair, linears, count):
    compiled, layered = pair
    rows = [(BLOCKS + i, i % 4 - 1, 0, [11 + i]) for i in range(count)]
    assert torch.equal(compiled.step(*rows), layered.step(*rows))
    assert len(linears) == 2 + 4 * SIZES["num_hidden_layers"]


def test_more_rows_go_layer_by_layer(pair, linears):
    compiled, layered = pair
    rows = [(BLOCKS + i, i % 4 - 1, 0, [11 + i]) for i in range(MAX_ROWS + 1)]
    assert torch.equal(compiled.step(*rows), layered.step(*rows))
    assert len(linears) == 2 * (1 + 4 * SIZES["num_hidden_layers"])


def test_no_step_of_either_way_compiles_anything(pair, tmp_path, monkeypatch):
    """Steps go layer by layer sooner or later: those kernels are ready from the start as well."""
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_entries", {})
    adapter = random_adapter(tmp_path / "dora", pair[0].folder, 3, rank=4, modules=ALL, dora=True)
    served = Served(pair[0].folder, [adapter])

    def late(self, arguments):
        raise AssertionError(f"{self.__name__} was compiled in a step")

    monkeypatch.setattr(Compiled, "_load", late)
    for count in (1, MAX_ROWS, MAX_ROWS + 1):
        served.step(*((BLOCKS + i, i % 2 - 1, 0, [11 + i]) for i in range(count)))
    served.runner.close()


def test_a_group_it_does_not_know_goes_layer_by_layer(pair, linears, monkeypatch):
    compiled, layered = pair
    rows = [(0, 1, 0, PROMPT), (20, -1, 0, OTHER)]
    expected = layered.step(*rows)
    compiled.runner._model._compiled._launches.clear()
    monkeypatch.setattr(compiled_layers, "_parts", lambda delta: None)
    linears.clear()
    assert torch.equal(compiled.step(*rows), expected)
    assert len(linears) == 1 + 4 * SIZES["num_hidden_layers"]
    # A step of base rows alone launches no group.
    linears.clear()
    compiled.step((20, -1, 0, OTHER))
    assert len(linears) == 1
    compiled.runner._model._compiled._launches.clear()


def test_a_replaced_adapter_is_the_one_that_serves(pair, tmp_path):
    """A slot's next version comes with the tables; plans of before are not used again."""
    compiled, layered = pair
    row = (0, 3, 0, PROMPT)
    seen = []
    for seed in (5, 6):
        model = random_adapter(tmp_path / str(seed), compiled.folder, seed, modules=ALL)
        for served in pair:
            image = stage(DirectorySource(model), served.runner.layout).image
            served.runner.commit(3, image)
        one = compiled.step(row)
        assert torch.equal(one, layered.step(row))
        seen.append(one)
    assert not torch.equal(*seen)
    for served in pair:
        served.runner.retire(3)
    with pytest.raises(InternalError):
        compiled.step(row)


def test_a_slot_outside_the_tables_is_refused(pair):
    """The tables' own limit, below the runner's check of slots."""
    compiled, _ = pair
    model = compiled.runner._model
    plan = compiled.runner._adapters.plan(frozenset({1}))
    slots = torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(InternalError) as caught:
        model._compiled.run(2, plan, slots.data_ptr())
    assert caught.value.code == "slot-out-of-range" and caught.value.found == "4"
    assert caught.value.subject == "row 1"


def test_lists_of_launches_are_bounded(pair, monkeypatch):
    compiled, _ = pair
    monkeypatch.setattr(compiled_layers, "MAX_PLANS", 2)
    for slots in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2)):
        compiled.step(*((20 + s, s, 0, OTHER) for s in slots))
        assert len(compiled.runner._model._compiled._launches) <= 2


@pytest.mark.parametrize(
    ("made", "dtype", "numba"),
    [(False, "bfloat16", True), (True, "float32", True), (True, "bfloat16", False)],
    ids=["sizes", "dtype", "no numba"],
)
def test_what_does_not_fit_is_served_all_the_same(
    data_dir, tmp_path, monkeypatch, made, dtype, numba
):
    model = data_dir / "oracle" / "llama" / "base"
    if made:
        model = random_model(tmp_path / "model", model)
    ran = []
    monkeypatch.setattr(CompiledLayers, "run", lambda self, *given: ran.append(given))
    options = RunnerOptions(dtype=dtype, num_blocks=8)
    runner = Runner.load(model, HostDevice(checked=True), options, use_numba=numba)
    runner.open_sequence(0, PROMPT, SamplingParams())
    [output] = runner.step([RowInput(0, -1, 0, tuple(PROMPT), (0, 1), True)])
    assert output.error is None and ran == []
    runner.close()
