// Batched LoRA delta on the GPU: out[row] += scale * round(B round(A x[row])), a slot for every row.
//
// What it is: header-free CUDA C for NVRTC. The text is specialised by #define lines put in front:
//   RANK   padded rank, a multiple of 8 (8..128)
//   CHUNK  elements of k_in one block reduces, a multiple of 256
//   F32    elements are float32, and nothing is rounded on the way; without it they are bf16
// Layouts: A [RANK, k_in], B [n_out, RANK], x and out rows: elements. Tables: one u64 cell a slot,
// 0 = no pair; scales f32, one a slot. Up to three slices (q, k, v; gate, up) share x.
//
// Invariants:
// * a row's result depends on its own x and slot only: the order of every sum is fixed by RANK,
//   CHUNK and k_in, never by the number of rows, and nothing is added atomically;
// * neighbouring rows of one slot share the reading of its weights, and still sum alone;
// * rows with slot -1 and slices with an empty cell read no weights and write nothing;
// * a slot outside the tables traps: the wrong weights are never used in silence;
// * the expand may begin while the shrink still runs (programmatic dependent launch, sm_90 on): until
//   it has waited it stores nothing and reads nothing the shrink writes, it never reads that through
//   the read-only path, and its grid cannot end before the shrink's.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(16) Pack {
  u32 x, y, z, w;
};
struct __align__(16) Floats {
  float x, y, z, w;
};

#ifdef F32
typedef float Elem;
__device__ __forceinline__ float narrow(float v) { return v; }
__device__ __forceinline__ float widen(float v) { return v; }

__device__ __forceinline__ float dot(Pack a, Pack b, float sum) {
  sum = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), sum);
  sum = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), sum);
  sum = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), sum);
  return fmaf(__uint_as_float(a.w), __uint_as_float(b.w), sum);
}

// The same with floats in shared memory.
__device__ __forceinline__ float dot(Pack a, const Floats* b, float sum) {
  const Floats v = b[0];
  sum = fmaf(__uint_as_float(a.x), v.x, sum);
  sum = fmaf(__uint_as_float(a.y), v.y, sum);
  sum = fmaf(__uint_as_float(a.z), v.z, sum);
  return fmaf(__uint_as_float(a.w), v.w, sum);
}
#else
typedef u16 Elem;
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }

// Round to nearest even; a NaN stays a NaN.
__device__ __forceinline__ u16 narrow(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ __forceinline__ float widen(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ float dot(Pack a, Pack b, float sum) {
  sum = fmaf(low(a.x), low(b.x), sum);
  sum = fmaf(high(a.x), high(b.x), sum);
  sum = fmaf(low(a.y), low(b.y), sum);
  sum = fmaf(high(a.y), high(b.y), sum);
  sum = fmaf(low(a.z), low(b.z), sum);
  sum = fmaf(high(a.z), high(b.z), sum);
  sum = fmaf(low(a.w), low(b.w), sum);
  return fmaf(high(a.w), high(b.w), sum);
}

// The same with floats in shared memory.
__device__ __forceinline__ float dot(Pack a, const Floats* b, float sum) {
  const Floats v0 = b[0], v1 = b[1];
  sum = fmaf(low(a.x), v0.x, sum);
  sum = fmaf(high(a.x), v0.y, sum);
  sum = fmaf(low(a.y), v0.z, sum);
  sum = fmaf(high(a.y), v0.w, sum);
  sum = fmaf(low(a.z), v1.x, sum);
  sum = fmaf(high(a.z), v1.y, sum);
  sum = fmaf(low(a.w), v1.z, sum);
  return fmaf(high(a.w), v1.w, sum);
}
#endif

// Elements in 16 bytes.
#define WIDTH (16 / (int)sizeof(Elem))
#define SHRINK_WARPS (RANK % 16 == 0 ? 4 : 2)
#define RANKS_PER_WARP 4
// Neighbouring rows of one slot, within groups of RUN, read their weights once.
#define RUN 4
#define EXPAND_THREADS 128
// Lanes that share one row of B: the largest power of two that divides RANK / 8, at most 8.
#define LANES (RANK % 64 == 0 ? 8 : RANK % 32 == 0 ? 4 : RANK % 16 == 0 ? 2 : 1)
#define PACKS (RANK / WIDTH / LANES)
// Tiles of 32 rows a warp works on at once: at least four 16-byte loads in flight a lane.
#define TILES (RANK <= 8 ? 4 : RANK <= 16 ? 2 : 1)

// Weights are read once a row: keep them out of L1 where whole lines are taken by one instruction.
__device__ __forceinline__ Pack load_weights(const Elem* p) {
  Pack v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same through L1, for short rows of B whose lines neighbouring loads take in parts. Not by the
// read-only path (.nc): the assembler moves such loads behind griddepcontrol.wait.
__device__ __forceinline__ Pack load_shared_line(const Elem* p) {
  Pack v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Programmatic dependent launch: the next kernel's blocks may take free places from here on.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernel before has ended and its stores are seen.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a block without work: one block waits, or the grid could end before the kernel before it does
// and what follows on the stream overtake that.
__device__ __forceinline__ void leave() {
  if ((blockIdx.x | blockIdx.y) == 0) wait_for_kernel_before();
}

// What the kernel before wrote: not by the read-only path, which wants memory that nobody writes
// while this kernel runs.
__device__ __forceinline__ float load_plane(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
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
lora_shrink(float* __restrict__ planes, const Elem* __restrict__ x, const u64* __restrict__ a0,
            const u64* __restrict__ a1, const u64* __restrict__ a2,
            const int* __restrict__ row_slot, int n_rows, int k_in, int x_stride, int n_slices,
            int max_loras) {
  let_next_begin();
  const int row = blockIdx.y;
  const int slot = row_slot[row];
  if (slot < 0) return;
  if (slot >= max_loras) __trap();
  const int run = run_of(row_slot, row, n_rows, slot);
  if (run == 0) return;
  const int tiles = RANK / (RANKS_PER_WARP * SHRINK_WARPS);
  const int slice = blockIdx.x / tiles;
  const u64* table = slice == 0 ? a0 : slice == 1 ? a1 : a2;
  const Elem* A = (const Elem*)table[slot];
  if (!A) return;
  const int lane = threadIdx.x & 31;
  const int rank = ((blockIdx.x % tiles) * SHRINK_WARPS + (threadIdx.x >> 5)) * RANKS_PER_WARP;
  const Elem* weights = A + (u64)rank * k_in;
  const Elem* input = x + (u64)row * x_stride;
  const int first = blockIdx.z * CHUNK;
  const int last = first + CHUNK < k_in ? first + CHUNK : k_in;
  const u64 plane = (u64)blockIdx.z * n_rows + row;
  float* target = planes + (plane * n_slices + slice) * RANK + rank + (lane >> 3);
  if (run == 1) {
    float sum[RANKS_PER_WARP] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
    for (int k = first + lane * WIDTH; k < last; k += 32 * WIDTH) {
      Pack w[RANKS_PER_WARP];
#pragma unroll
      for (int j = 0; j < RANKS_PER_WARP; ++j) w[j] = load_weights(weights + (u64)j * k_in + k);
      const Pack v = *(const Pack*)(input + k);
#pragma unroll
      for (int j = 0; j < RANKS_PER_WARP; ++j) sum[j] = dot(v, w[j], sum[j]);
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
  for (int k = first + lane * WIDTH; k < last; k += 32 * WIDTH) {
    Pack w[RANKS_PER_WARP];
#pragma unroll
    for (int j = 0; j < RANKS_PER_WARP; ++j) w[j] = load_weights(weights + (u64)j * k_in + k);
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
      if (r < run) {
        const Pack v = *(const Pack*)(input + (u64)r * x_stride + k);
#pragma unroll
        for (int j = 0; j < RANKS_PER_WARP; ++j) sums[r][j] = dot(v, w[j], sums[r][j]);
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

// out[row][column_j + i] = round(out + scale * round(B[slot][i] . round(sum of planes))), in place;
// product and sum unfused.
// Grid (tiles of all slices, n_rows), block EXPAND_THREADS; a block takes 128 * TILES rows of B.
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS, RANK <= 96 ? 4 : 3)
lora_expand(Elem* __restrict__ out, const float* __restrict__ planes, const u64* __restrict__ a0,
            const u64* __restrict__ a1, const u64* __restrict__ a2, const u64* __restrict__ b0,
            const u64* __restrict__ b1, const u64* __restrict__ b2, const float* __restrict__ c0,
            const float* __restrict__ c1, const float* __restrict__ c2,
            const int* __restrict__ row_slot, int n_rows, int out_stride, int n_splits,
            int n_slices, int max_loras, int n_out0, int n_out1, int n_out2, int column0, int column1,
            int column2) {
  __shared__ __align__(16) float xa[RUN * RANK];
  const int row = blockIdx.y;
  const int slot = row_slot[row];
  if (slot >= max_loras) __trap();
  const int run = slot < 0 ? 0 : run_of(row_slot, row, n_rows, slot);
  if (run == 0) return leave();
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
  const Elem* B = (const Elem*)b_table[slot];
  if (!B || !a_table[slot]) return leave();
  const float scale = scales[slot];
  const int lane = threadIdx.x & 31, sub = lane % LANES;
  const int base = tile * span + (threadIdx.x >> 5) * 32 * TILES + lane - sub;

  // B and out do not depend on the planes: ask for them first, so that their latencies overlap.
  Pack weights[TILES][LANES][PACKS];
  Elem before[TILES];
  Elem* rows = out + (u64)row * out_stride + column;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      const int o = base + t * 32 + j;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        weights[t][j][p] = Pack{0u, 0u, 0u, 0u};
        if (o < n_out)
          weights[t][j][p] = load_shared_line(B + (u64)o * RANK + (p * LANES + sub) * WIDTH);
      }
    }
    const int mine = base + t * 32 + sub;
    before[t] = mine < n_out ? rows[mine] : (Elem)0;
  }
  wait_for_kernel_before();
  for (int i = threadIdx.x; i < run * RANK; i += EXPAND_THREADS) {
    const int r = i / RANK;
    const float* plane = planes + ((u64)(row + r) * n_slices + slice) * RANK + (i - r * RANK);
    const u64 step = (u64)n_rows * n_slices * RANK;
    float sum = 0.f;
#pragma unroll 4
    for (int s = 0; s < n_splits; ++s) sum += load_plane(plane + s * step);
    xa[i] = widen(narrow(sum));
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
        const Floats* v = (const Floats*)(xa + r * RANK + (p * LANES + sub) * WIDTH);
#pragma unroll
        for (int j = 0; j < LANES; ++j) sum[j] = dot(weights[t][j][p], v, sum[j]);
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
        const float delta = widen(narrow(sum[0]));
        const float after = __fadd_rn(widen(before[t]), __fmul_rn(scale, delta));
        rows[mine] = narrow(after);
        // The next row's columns, asked for while this one's other tiles are summed.
        if (r + 1 < run) before[t] = rows[out_stride + mine];
      }
    }
    rows += out_stride;
  }
}
