// The LoRA delta of a float32 engine: out[row] += scale * (B (A x[row])), a slot for every row.
//
// What it is: the float32 form of lora.cu, with the same launches, tables and invariants, for
// engines that are compared with an oracle: nothing is rounded on the way, and speed comes second.
// #define lines put in front: RANK, a multiple of 8 (8..128); CHUNK, a multiple of 256.
//
// Invariants: as in lora.cu; each row reads its own weights.

typedef unsigned long long u64;
struct __align__(16) Floats {
  float x, y, z, w;
};

#define SHRINK_WARPS (RANK % 16 == 0 ? 4 : 2)
#define RANKS_PER_WARP 4
#define EXPAND_THREADS 128
#define TILES (RANK <= 8 ? 4 : RANK <= 16 ? 2 : 1)

__device__ __forceinline__ float dot4(Floats a, Floats b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

__device__ __forceinline__ Floats load_weights(const float* p) {
  Floats v;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p));
  return v;
}

// planes[split][row][slice][RANK] = A[slot] x[row] over elements split * CHUNK .. + CHUNK.
// Grid (RANK / (4 * SHRINK_WARPS) * n_slices, n_rows, splits), block 32 * SHRINK_WARPS.
extern "C" __global__ void __launch_bounds__(32 * SHRINK_WARPS, 6)
lora_shrink(float* __restrict__ planes, const float* __restrict__ x, const u64* __restrict__ a0,
            const u64* __restrict__ a1, const u64* __restrict__ a2,
            const int* __restrict__ row_slot, int n_rows, int k_in, int x_stride, int n_slices,
            int max_loras) {
  const int row = blockIdx.y;
  const int slot = row_slot[row];
  if (slot < 0) return;
  if (slot >= max_loras) __trap();
  const int tiles = RANK / (RANKS_PER_WARP * SHRINK_WARPS);
  const int slice = blockIdx.x / tiles;
  const u64* table = slice == 0 ? a0 : slice == 1 ? a1 : a2;
  const float* A = (const float*)table[slot];
  if (!A) return;
  const int lane = threadIdx.x & 31;
  const int rank = ((blockIdx.x % tiles) * SHRINK_WARPS + (threadIdx.x >> 5)) * RANKS_PER_WARP;
  const float* weights = A + (u64)rank * k_in;
  const float* input = x + (u64)row * x_stride;
  const int first = blockIdx.z * CHUNK;
  const int last = first + CHUNK < k_in ? first + CHUNK : k_in;
  float sum[RANKS_PER_WARP] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
  for (int k = first + lane * 4; k < last; k += 128) {
    Floats w[RANKS_PER_WARP];
#pragma unroll
    for (int j = 0; j < RANKS_PER_WARP; ++j) w[j] = load_weights(weights + (u64)j * k_in + k);
    const Floats v = *(const Floats*)(input + k);
#pragma unroll
    for (int j = 0; j < RANKS_PER_WARP; ++j) sum[j] = dot4(v, w[j], sum[j]);
  }
#pragma unroll
  for (int j = 0; j < RANKS_PER_WARP; ++j) {
#pragma unroll
    for (int d = 16; d; d >>= 1) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], d);
  }
  const u64 plane = (u64)blockIdx.z * n_rows + row;
  if (lane == 0) {
    const Floats total = {sum[0], sum[1], sum[2], sum[3]};
    *(Floats*)(planes + (plane * n_slices + slice) * RANK + rank) = total;
  }
}

// out[row][column_j + i] += scale * (B[slot][i] . sum of planes), in place, multiply and add
// rounded one by one. Grid (tiles of all slices, n_rows), block EXPAND_THREADS; a block takes
// 128 * TILES rows of B, a thread one of each tile.
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS, 8)
lora_expand(float* __restrict__ out, const float* __restrict__ planes, const u64* __restrict__ a0,
            const u64* __restrict__ a1, const u64* __restrict__ a2, const u64* __restrict__ b0,
            const u64* __restrict__ b1, const u64* __restrict__ b2, const float* __restrict__ c0,
            const float* __restrict__ c1, const float* __restrict__ c2,
            const int* __restrict__ row_slot, int n_rows, int out_stride, int n_splits,
            int n_slices, int max_loras, int n_out0, int n_out1, int n_out2, int column0, int column1,
            int column2) {
  __shared__ __align__(16) float xa[RANK];
  const int row = blockIdx.y;
  const int slot = row_slot[row];
  if (slot < 0) return;
  if (slot >= max_loras) __trap();
  const int span = EXPAND_THREADS * TILES;
  int tile = blockIdx.x, slice = 0;
  const int tiles0 = (n_out0 + span - 1) / span, tiles1 = (n_out1 + span - 1) / span;
  if (tile >= tiles0) {
    tile -= tiles0;
    slice = 1;
    if (tile >= tiles1) {
      tile -= tiles1;
      slice = 2;
    }
  }
  const u64* a_table = slice == 0 ? a0 : slice == 1 ? a1 : a2;
  const u64* b_table = slice == 0 ? b0 : slice == 1 ? b1 : b2;
  const float* scales = slice == 0 ? c0 : slice == 1 ? c1 : c2;
  const int n_out = slice == 0 ? n_out0 : slice == 1 ? n_out1 : n_out2;
  const int column = slice == 0 ? column0 : slice == 1 ? column1 : column2;
  const float* B = (const float*)b_table[slot];
  if (!B || !a_table[slot]) return;
  const float scale = scales[slot];
  for (int i = threadIdx.x; i < RANK; i += EXPAND_THREADS) {
    const float* plane = planes + ((u64)row * n_slices + slice) * RANK + i;
    const u64 step = (u64)n_rows * n_slices * RANK;
    float sum = 0.f;
    for (int s = 0; s < n_splits; ++s) sum += plane[s * step];
    xa[i] = sum;
  }
  __syncthreads();
  float* target = out + (u64)row * out_stride + column;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const int o = tile * span + t * EXPAND_THREADS + threadIdx.x;
    if (o >= n_out) continue;
    const float* weights = B + (u64)o * RANK;
    float sum = 0.f;
#pragma unroll 4
    for (int r = 0; r < RANK; r += 4)
      sum = dot4(load_weights(weights + r), *(const Floats*)(xa + r), sum);
    target[o] = __fadd_rn(target[o], __fmul_rn(scale, sum));
  }
}
