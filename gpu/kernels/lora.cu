// Batched LoRA delta on the GPU: out[row] += scale * bf16(B bf16(A x[row])), a slot for every row.
//
// What it is: header-free CUDA C for NVRTC. The text is specialised by #define lines put in front:
//   RANK   padded rank, a multiple of 8 (8..128)
//   CHUNK  elements of k_in one block reduces, a multiple of 256
// Layouts: A [RANK, k_in], B [n_out, RANK], x and out rows: bf16. Tables: one u64 cell a slot,
// 0 = no pair; scales f32, one a slot. Up to three slices (q, k, v; gate, up) share x.
//
// Invariants:
// * a row's result depends on its own x and slot only: the order of every sum is fixed by RANK,
//   CHUNK and k_in, never by the number of rows, and nothing is added atomically;
// * neighbouring rows of one slot share the reading of its weights, and still sum alone;
// * rows with slot -1 and slices with an empty cell read no weights and write nothing;
// * a slot outside the tables traps: the wrong weights are never used in silence.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(16) Pack {
  u32 x, y, z, w;
};
struct __align__(16) Floats {
  float x, y, z, w;
};

#define SHRINK_WARPS (RANK % 16 == 0 ? 4 : 2)
#define RANKS_PER_WARP 4
// Neighbouring rows of one slot, within groups of RUN, read their weights once.
#define RUN 4
#define EXPAND_THREADS 128
// Lanes that share one row of B: the largest power of two that divides RANK / 8, at most 8.
#define LANES (RANK % 64 == 0 ? 8 : RANK % 32 == 0 ? 4 : RANK % 16 == 0 ? 2 : 1)
#define PACKS (RANK / 8 / LANES)
// Tiles of 32 rows a warp works on at once: at least four 16-byte loads in flight a lane.
#define TILES (RANK <= 8 ? 4 : RANK <= 16 ? 2 : 1)

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }

// Round to nearest even; a NaN stays a NaN.
__device__ __forceinline__ u16 to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ __forceinline__ float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ float dot8(Pack a, Pack b, float sum) {
  sum = fmaf(low(a.x), low(b.x), sum);
  sum = fmaf(high(a.x), high(b.x), sum);
  sum = fmaf(low(a.y), low(b.y), sum);
  sum = fmaf(high(a.y), high(b.y), sum);
  sum = fmaf(low(a.z), low(b.z), sum);
  sum = fmaf(high(a.z), high(b.z), sum);
  sum = fmaf(low(a.w), low(b.w), sum);
  return fmaf(high(a.w), high(b.w), sum);
}

// Weights are read once a row: keep them out of L1 where whole lines are taken by one instruction.
__device__ __forceinline__ Pack load_weights(const u16* p) {
  Pack v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same through L1, for short rows of B whose lines neighbouring loads take in parts.
__device__ __forceinline__ Pack load_shared_line(const u16* p) {
  Pack v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Rows that this row serves: itself and those behind it in its group of RUN that have its slot; 0
// if a row before it in the group serves it. The same in all threads of a block.
__device__ __forceinline__ int run_of(const int* __restrict__ row_slot, int row, int n_rows,
                                      int slot) {
  const int place = row & (RUN - 1);
  const int* group = row_slot + (row - place);
  const int left = n_rows - (row - place);
  bool leads = true, open = true;
  int run = 1;
#pragma unroll
  for (int j = 0; j < RUN; ++j) {
    const bool same = j < left && group[j] == slot;
    if (j == place - 1 && same) leads = false;
    if (j > place) {
      open = open && same;
      run += open ? 1 : 0;
    }
  }
  return leads ? run : 0;
}

// Add four sums over the lanes of a warp, halving the number each lane holds while adding: lanes 0,
// 8, 16 and 24 end with one sum each.
__device__ __forceinline__ float add_lanes(const float* sum, int lane) {
  const bool upper = lane & 16;
  const float s0 = upper ? sum[0] : sum[2], s1 = upper ? sum[1] : sum[3];
  float t0 = upper ? sum[2] : sum[0], t1 = upper ? sum[3] : sum[1];
  t0 += __shfl_xor_sync(0xffffffffu, s0, 16);
  t1 += __shfl_xor_sync(0xffffffffu, s1, 16);
  const bool odd = lane & 8;
  float total = odd ? t1 : t0;
  total += __shfl_xor_sync(0xffffffffu, odd ? t0 : t1, 8);
  total += __shfl_xor_sync(0xffffffffu, total, 4);
  total += __shfl_xor_sync(0xffffffffu, total, 2);
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  return total;
}

// planes[split][row][slice][RANK] f32 = A[slot] x[row] over elements split * CHUNK .. + CHUNK.
// Grid (RANK / (4 * SHRINK_WARPS) * n_slices, n_rows, splits), block 32 * SHRINK_WARPS.
// Each warp sums four rows of A; every lane has (1 + 4) independent 16-byte loads in flight a step.
extern "C" __global__ void __launch_bounds__(32 * SHRINK_WARPS, 5)
lora_shrink(float* __restrict__ planes, const u16* __restrict__ x, const u64* __restrict__ a0,
            const u64* __restrict__ a1, const u64* __restrict__ a2,
            const int* __restrict__ row_slot, int n_rows, int k_in, int x_stride, int n_slices,
            int max_loras) {
  const int row = blockIdx.y;
  const int slot = row_slot[row];
  if (slot < 0) return;
  if (slot >= max_loras) __trap();
  const int run = run_of(row_slot, row, n_rows, slot);
  if (run == 0) return;
  const int tiles = RANK / (RANKS_PER_WARP * SHRINK_WARPS);
  const int slice = blockIdx.x / tiles;
  const u64* table = slice == 0 ? a0 : slice == 1 ? a1 : a2;
  const u16* A = (const u16*)table[slot];
  if (!A) return;
  const int lane = threadIdx.x & 31;
  const int rank = ((blockIdx.x % tiles) * SHRINK_WARPS + (threadIdx.x >> 5)) * RANKS_PER_WARP;
  const u16* weights = A + (u64)rank * k_in;
  const u16* input = x + (u64)row * x_stride;
  const int first = blockIdx.z * CHUNK;
  const int last = first + CHUNK < k_in ? first + CHUNK : k_in;
  const u64 plane = (u64)blockIdx.z * n_rows + row;
  float* target = planes + (plane * n_slices + slice) * RANK + rank + (lane >> 3);
  if (run == 1) {
    float sum[RANKS_PER_WARP] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
    for (int k = first + lane * 8; k < last; k += 256) {
      Pack w[RANKS_PER_WARP];
#pragma unroll
      for (int j = 0; j < RANKS_PER_WARP; ++j) w[j] = load_weights(weights + (u64)j * k_in + k);
      const Pack v = *(const Pack*)(input + k);
#pragma unroll
      for (int j = 0; j < RANKS_PER_WARP; ++j) sum[j] = dot8(v, w[j], sum[j]);
    }
    const float total = add_lanes(sum, lane);
    if ((lane & 7) == 0) *target = total;
    return;
  }
  // The same sums in the same order, for up to RUN rows at a time.
  float sums[RUN][RANKS_PER_WARP];
#pragma unroll
  for (int r = 0; r < RUN; ++r)
#pragma unroll
    for (int j = 0; j < RANKS_PER_WARP; ++j) sums[r][j] = 0.f;
#pragma unroll 1
  for (int k = first + lane * 8; k < last; k += 256) {
    Pack w[RANKS_PER_WARP];
#pragma unroll
    for (int j = 0; j < RANKS_PER_WARP; ++j) w[j] = load_weights(weights + (u64)j * k_in + k);
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
      if (r < run) {
        const Pack v = *(const Pack*)(input + (u64)r * x_stride + k);
#pragma unroll
        for (int j = 0; j < RANKS_PER_WARP; ++j) sums[r][j] = dot8(v, w[j], sums[r][j]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < RUN; ++r) {
    if (r < run) {
      const float total = add_lanes(sums[r], lane);
      if ((lane & 7) == 0) target[(u64)r * n_slices * RANK] = total;
    }
  }
}

// out[row][column_j + i] = bf16(out + scale * bf16(B[slot][i] . bf16(sum of planes))), in place.
// Grid (tiles of all slices, n_rows), block EXPAND_THREADS; a block takes 128 * TILES rows of B.
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS, RANK <= 96 ? 4 : 3)
lora_expand(u16* __restrict__ out, const float* __restrict__ planes, const u64* __restrict__ a0,
            const u64* __restrict__ a1, const u64* __restrict__ a2, const u64* __restrict__ b0,
            const u64* __restrict__ b1, const u64* __restrict__ b2, const float* __restrict__ c0,
            const float* __restrict__ c1, const float* __restrict__ c2,
            const int* __restrict__ row_slot, int n_rows, int out_stride, int n_splits,
            int n_slices, int max_loras, int n_out0, int n_out1, int n_out2, int column0, int column1,
            int column2) {
  __shared__ __align__(16) float xa[RUN * RANK];
  const int row = blockIdx.y;
  const int slot = row_slot[row];
  if (slot < 0) return;
  if (slot >= max_loras) __trap();
  const int run = run_of(row_slot, row, n_rows, slot);
  if (run == 0) return;
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
  const u16* B = (const u16*)b_table[slot];
  if (!B || !a_table[slot]) return;
  const float scale = scales[slot];
  const int lane = threadIdx.x & 31, sub = lane % LANES;
  const int base = tile * span + (threadIdx.x >> 5) * 32 * TILES + lane - sub;

  // B and out do not depend on the planes: ask for them first, so that their latencies overlap.
  Pack weights[TILES][LANES][PACKS];
  u16 before[TILES];
  u16* rows = out + (u64)row * out_stride + column;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      const int o = base + t * 32 + j;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        weights[t][j][p] = Pack{0u, 0u, 0u, 0u};
        if (o < n_out)
          weights[t][j][p] = load_shared_line(B + (u64)o * RANK + (p * LANES + sub) * 8);
      }
    }
    const int mine = base + t * 32 + sub;
    before[t] = mine < n_out ? rows[mine] : (u16)0;
  }
  for (int i = threadIdx.x; i < run * RANK; i += EXPAND_THREADS) {
    const int r = i / RANK;
    const float* plane = planes + ((u64)(row + r) * n_slices + slice) * RANK + (i - r * RANK);
    const u64 step = (u64)n_rows * n_slices * RANK;
    float sum = 0.f;
#pragma unroll 4
    for (int s = 0; s < n_splits; ++s) sum += plane[s * step];
    xa[i] = from_bf16(to_bf16(sum));
  }
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < run; ++r) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float sum[LANES];
#pragma unroll
      for (int j = 0; j < LANES; ++j) sum[j] = 0.f;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        const Floats* v = (const Floats*)(xa + r * RANK + (p * LANES + sub) * 8);
        const Floats v0 = v[0], v1 = v[1];
#pragma unroll
        for (int j = 0; j < LANES; ++j) {
          const Pack b = weights[t][j][p];
          float s = sum[j];
          s = fmaf(low(b.x), v0.x, s);
          s = fmaf(high(b.x), v0.y, s);
          s = fmaf(low(b.y), v0.z, s);
          s = fmaf(high(b.y), v0.w, s);
          s = fmaf(low(b.z), v1.x, s);
          s = fmaf(high(b.z), v1.y, s);
          s = fmaf(low(b.w), v1.z, s);
          sum[j] = fmaf(high(b.w), v1.w, s);
        }
      }
      // Lane `sub` of a group ends with row `sub` of the group.
#pragma unroll
      for (int d = LANES / 2; d; d >>= 1) {
#pragma unroll
        for (int j = 0; j < d; ++j) {
          const bool upper = sub & d;
          const float send = upper ? sum[j] : sum[j + d];
          const float keep = upper ? sum[j + d] : sum[j];
          sum[j] = keep + __shfl_xor_sync(0xffffffffu, send, d);
        }
      }
      const int mine = base + t * 32 + sub;
      if (mine < n_out) {
        const float delta = from_bf16(to_bf16(sum[0]));
        const float after = __fadd_rn(from_bf16(before[t]), __fmul_rn(scale, delta));
        rows[mine] = to_bf16(after);
        // The next row's columns, asked for while this one's other tiles are summed.
        if (r + 1 < run) before[t] = rows[out_stride + mine];
      }
    }
    rows += out_stride;
  }
}
