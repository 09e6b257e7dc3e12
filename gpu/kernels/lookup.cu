// The shrink of an embedding's LoRA delta: each row's column of A, looked up by its token.
//
// What it is: header-free CUDA C for NVRTC, put before `lora_expand`. Specialised by #define lines:
//   RANK   padded rank, a multiple of 8 (8..128)
//   F32    elements are float32; without it they are bf16
// Layout: A [RANK, vocab]. Table: one u64 cell a slot, 0 = no pair.
//
// Invariants:
// * rows with slot -1 or an empty cell read no weights and write nothing;
// * a slot outside the table, or a token outside the vocabulary, traps;
// * the kernel behind may begin from the start on: what it reads of this one it waits for.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#ifdef F32
typedef float Elem;
__device__ __forceinline__ float widen(float v) { return v; }
#else
typedef u16 Elem;
__device__ __forceinline__ float widen(u16 v) { return __uint_as_float((u32)v << 16); }
#endif

// planes[row][RANK] f32 = A[slot][:, tokens[row]]. Grid (ceil(n_rows * RANK / 128), 1, 1), block
// 128: a thread a rank of a row.
extern "C" __global__ void __launch_bounds__(128)
lora_lookup(float* __restrict__ planes, const s64* __restrict__ tokens,
            const u64* __restrict__ a_table, const int* __restrict__ row_slot, int n_rows,
            int vocab, int max_loras) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int place = blockIdx.x * 128 + threadIdx.x;
  const int row = place / RANK, rank = place - row * RANK;
  if (row >= n_rows) return;
  const int slot = row_slot[row];
  if (slot < 0) return;
  if (slot >= max_loras) __trap();
  const Elem* A = (const Elem*)a_table[slot];
  if (!A) return;
  const s64 token = tokens[row];
  if (token < 0 || token >= vocab) __trap();
  planes[place] = widen(__ldg(A + (s64)rank * vocab + token));
}
