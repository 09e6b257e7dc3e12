// The tables kernels read, changed in place: one column, nobody else's cells.
//
// What it is: header-free CUDA C for NVRTC. Invariant: only cells of the given slot are written, so
// rows of other slots may be served while it runs.

typedef unsigned long long u64;
typedef unsigned char u8;

// For every pair p: a_table[p][slot] = base + a_offsets[p], b likewise, scale_table[p][slot] =
// scales[p] where present[p]; 0 elsewhere. base 0 empties the slot and reads no other argument.
// Tables [n_pairs, max_loras]. Grid (ceil(n_pairs / 128), 1, 1), block 128.
extern "C" __global__ void __launch_bounds__(128)
lora_refresh(u64* __restrict__ a_table, u64* __restrict__ b_table, float* __restrict__ scale_table,
             const u64* __restrict__ a_offsets, const u64* __restrict__ b_offsets,
             const u8* __restrict__ present, const float* __restrict__ scales, u64 base, int slot,
             int max_loras, int n_pairs) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (pair >= n_pairs) return;
  const u64 cell = (u64)pair * max_loras + slot;
  const bool on = base != 0 && present[pair] != 0;
  a_table[cell] = on ? base + a_offsets[pair] : 0;
  b_table[cell] = on ? base + b_offsets[pair] : 0;
  scale_table[cell] = on ? scales[pair] : 0.f;
}
