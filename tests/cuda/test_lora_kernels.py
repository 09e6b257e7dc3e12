"""The LoRA kernels: exact answers over ranks, batches, widths and layouts, on real NVRTC output."""

from __future__ import annotations

import numpy as np
import pytest

from rota.errors import DeviceError
from rota.gpu.kernels.lora_device import lora_specs, splits_of


def padded(rank):
    return -(-rank // 8) * 8


def mixed(n, n_slots=3, seed=1):
    """Slots of n rows with base rows, repeats, and the last slot somewhere."""
    slots = np.random.default_rng(seed).integers(-1, n_slots, n)
    slots[0] = n_slots - 1
    return slots


@pytest.mark.parametrize("rank", range(1, 65))
def test_every_rank_is_exact(rig, problem, rank):
    p = problem(
        n=4, k_in=72, rank=padded(rank), real_rank=rank, widths=(37, 20), slots=[2, -1, 0, 2]
    )
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("rank", [96, 128])
def test_large_ranks_are_exact(rig, problem, rank):
    p = problem(n=3, k_in=264, rank=rank, widths=(150,), slots=[1, 0, -1])
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("n", range(1, 131))
def test_every_batch_is_exact(rig, problem, n):
    rank = (8, 16, 24)[n % 3]
    p = problem(n=n, k_in=40, rank=rank, widths=(24,), slots=mixed(n))
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 7, 8, 12, 24, 64])
@pytest.mark.parametrize("n", [1, 33, 130])
def test_the_named_ranks_at_small_and_large_batches(rig, problem, rank, n):
    p = problem(n=n, k_in=64, rank=padded(rank), real_rank=rank, widths=(40,), slots=mixed(n))
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("k_in", [8, 248, 256, 264, 512, 520, 1032, 4096, 4104])
def test_inputs_of_every_length_around_the_splits(rig, problem, k_in):
    p = problem(n=2, k_in=k_in, rank=16, widths=(30,), slots=[1, 2])
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("rank", [8, 16, 32, 40])
@pytest.mark.parametrize("width", [1, 31, 127, 128, 129, 512, 700])
def test_outputs_of_every_width_around_the_tiles(rig, problem, rank, width):
    p = problem(n=2, k_in=16, rank=rank, widths=(width, 1, width), slots=[0, 2])
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("rank", [8, 16])
def test_a_head_over_a_large_vocabulary(rig, problem, rank):
    p = problem(n=2, k_in=16, rank=rank, widths=(248_320,), slots=[0, 2])
    assert np.array_equal(p.solve(rig), p.expected())


RUNS = (
    [1, 1, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 1, 1, 1, 1, 2, 2],
    [2, 0, 0, 0, 0, 0, -1, -1, 0, 0, 2],
    [-1, 1, 1, -1, 1, 1, 1, -1, 1],
    [0, 1, 0, 1, 0, 0, 1, 1],
    [2, 2, 2],
)


@pytest.mark.parametrize("slots", RUNS)
@pytest.mark.parametrize("rank", [8, 24, 64])
def test_runs_of_one_slot_are_exact_wherever_they_start_and_end(rig, problem, rank, slots):
    p = problem(n=len(slots), k_in=520, rank=rank, widths=(150, 70), slots=slots)
    assert np.array_equal(p.solve(rig), p.expected())


def test_a_run_of_one_slot_reads_its_weights_once(fake_rig, problem):
    def sixteen_byte_loads(slots):
        p = problem(n=8, k_in=256, rank=8, widths=(128,), slots=slots).load(fake_rig)
        arena, seen = fake_rig.driver.arena, []
        judge = arena.judge_lanes

        def counting(addresses, nbytes, what):
            if nbytes == 16 and ".nc.L1::no_allocate" in what:
                seen.append(len(addresses))
            judge(addresses, nbytes, what)

        arena.judge_lanes = counting
        p.apply()
        assert np.array_equal(p.result(), p.expected())
        del arena.judge_lanes
        return sum(seen)

    assert sixteen_byte_loads([1] * 8) * 4 == sixteen_byte_loads([0, 1] * 4)


def test_q_k_v_of_different_widths_in_one_launch_pair(rig, problem):
    p = problem(n=5, k_in=576, rank=16, widths=(576, 192, 192), slots=[0, 1, -1, 2, 0])
    p.load(rig)
    p.apply()
    if rig.driver:  # the second may begin while the first still runs
        calls = rig.driver.calls
        assert (calls["cuLaunchKernel"], calls["cuLaunchKernelEx"]) == (1, 1)
    assert np.array_equal(p.result(), p.expected())


def test_base_rows_and_absent_pairs_keep_every_bit(rig, problem):
    p = problem(n=4, k_in=64, rank=8, widths=(32, 32), slots=[-1, 0, 1, -1])
    p.out[:] = 0x7FC1  # a NaN with a payload: any arithmetic on it would change the bits
    p.absent = {(0, 0), (1, 0), (1, 1)}
    got = p.solve(rig)
    assert np.array_equal(got[[0, 1, 3]], p.out[[0, 1, 3]])
    assert np.array_equal(got[2, p.columns[1] :], p.out[2, p.columns[1] :])


def test_a_cell_missing_on_either_side_is_no_pair(rig, problem):
    p = problem(n=2, k_in=64, rank=8, widths=(32,), slots=[0, 1])
    p.load(rig)
    p.a_cells[0, 0] = 0
    p.b_cells[0, 1] = 0
    rig.write(p.a_table, p.a_cells)
    rig.write(p.b_table, p.b_cells)
    p.apply()
    assert np.array_equal(p.result(), p.out)


def test_no_rows_launch_nothing(rig, problem):
    p = problem(n=1, k_in=64, rank=8, widths=(32,), slots=[0]).load(rig)
    p.apply(n=0)
    assert np.array_equal(p.result(), p.out)


def floats(p, seed):
    """Replace a problem's integers by random values: sums now depend on their order."""
    rng = np.random.default_rng(seed)

    def fill(shape):
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16)

    p.x, p.a = fill(p.x.shape), fill(p.a.shape)
    p.b = [fill(b.shape) for b in p.b]
    return p


@pytest.mark.parametrize("k_in", [200, 1032])
@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_row_does_not_depend_on_its_company(rig, problem, k_in, n_slots):
    p = floats(problem(n=9, k_in=k_in, rank=24, widths=(50,), slots=mixed(9, n_slots)), 3)
    together = p.solve(rig)
    for row in range(p.n):
        alone = floats(problem(n=9, k_in=k_in, rank=24, widths=(50,), slots=mixed(9, n_slots)), 3)
        alone.n = 1
        alone.slots, alone.x = alone.slots[row : row + 1], alone.x[row : row + 1]
        alone.out = alone.out[row : row + 1]
        assert np.array_equal(alone.solve(rig)[0], together[row]), row


def test_random_values_agree_with_the_host_form_and_float64(rig, host_rig, problem, bf16):
    _, from_bits = bf16

    def fresh():
        return floats(problem(n=6, k_in=1032, rank=32, widths=(100, 60), slots=mixed(6)), 5)

    p = fresh()
    got, want = from_bits(p.solve(rig)), from_bits(fresh().solve(host_rig))
    exact = from_bits(p.expected())
    size = np.abs(exact).max()
    # bf16 has 8 bits: one unit in the last place of the largest value is size / 128.
    assert np.abs(got - exact).max() <= size / 128
    assert np.abs(want - exact).max() <= size / 128
    assert (got == want).mean() > 0.97  # they differ only where a sum sits on a rounding edge


def test_the_host_form_is_exact_too(host_rig, problem):
    p = problem(n=6, k_in=1032, rank=16, widths=(40, 9, 30), slots=mixed(6))
    p.absent = {(1, 0)}
    assert np.array_equal(p.solve(host_rig), p.expected())


def test_blocks_in_any_order_give_the_same_bits(cuda_machine, rig, problem):
    if rig.driver is None:
        pytest.skip("a GPU chooses the order of blocks itself")
    forward = floats(problem(n=40, k_in=520, rank=16, widths=(300,), slots=mixed(40)), 7)
    backward = floats(problem(n=40, k_in=520, rank=16, widths=(300,), slots=mixed(40)), 7)
    first = forward.solve(rig)
    rig.driver.backwards = True
    assert np.array_equal(backward.solve(rig), first)


def test_a_slot_outside_the_tables_kills_the_device_by_name(fake_rig, problem):
    p = problem(n=2, k_in=64, rank=8, widths=(32,), slots=[0, 3])
    with pytest.raises(DeviceError) as caught:
        p.solve(fake_rig)
    assert (caught.value.code, caught.value.found) == ("device-dead", "CUDA_ERROR_LAUNCH_FAILED")
    assert fake_rig.driver.story == ["lora_shrink: trap"]


def test_what_the_kernels_cannot_serve_is_refused(rig, problem):
    with pytest.raises(DeviceError):
        lora_specs(12, 512)
    with pytest.raises(DeviceError):
        lora_specs(136, 512)
    p = problem(n=2, k_in=64, rank=8, widths=(32,), slots=[0, 1]).load(rig)
    wrong = (
        {"x_addr": p.x_addr + 8},
        {"x_stride": p.x_stride + 4},
        {"n": 3},
    )
    for change in wrong:
        old = {name: getattr(p, name) for name in change}
        for name, value in change.items():
            setattr(p, name, value)
        with pytest.raises(DeviceError) as caught:
            p.apply()
        assert caught.value.code == "bad-argument"
        for name, value in old.items():
            setattr(p, name, value)
    assert np.array_equal(p.result(), p.out)


def test_splits_depend_on_the_input_alone():
    assert [splits_of(k) for k in (8, 512, 576, 4096, 4104, 14336)] == [1, 1, 2, 8, 5, 14]
