// y = mul * y + add per output, another pair of vectors for every row.
//
// What it is: header-free CUDA C for NVRTC; #define F32 in front makes out float instead of bf16.
// Tables: one u64 cell a slot, the address of mul, fp32 [n_out], or 0 for none; add lies `after`
// bytes behind mul. Up to three slices of one fused output.
//
// Invariants:
// * product and sum are rounded to fp32 each, the result once to the element type, so that the host
//   gives the same bits;
// * rows with slot -1 and slices with an empty cell read no vectors and write nothing;
// * a slot outside the tables traps.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef F32
typedef float Elem;
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float narrow(float v) { return v; }
#else
typedef u16 Elem;
__device__ __forceinline__ float widen(u16 v) { return __uint_as_float((u32)v << 16); }
// Round to nearest even; a NaN stays a NaN.
__device__ __forceinline__ u16 narrow(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#endif

// Grid (ceil(widest / 256), rows, slices), block 256.
extern "C" __global__ void __launch_bounds__(256)
lora_affine(Elem* __restrict__ out, const u64* __restrict__ t0, const u64* __restrict__ t1,
            const u64* __restrict__ t2, const int* __restrict__ row_slot, int n_rows,
            int out_stride, int n_slices, int max_loras, int n_out0, int n_out1, int n_out2, int column0, int column1, int column2,
            int after0, int after1, int after2) {
  const int row = blockIdx.y, slice = blockIdx.z;
  if (row >= n_rows || slice >= n_slices) return;
  const int slot = row_slot[row];
  if (slot < 0) return;
  if (slot >= max_loras) __trap();
  const u64* table = slice == 0 ? t0 : slice == 1 ? t1 : t2;
  const int n_out = slice == 0 ? n_out0 : slice == 1 ? n_out1 : n_out2;
  const int column = slice == 0 ? column0 : slice == 1 ? column1 : column2;
  const int after = slice == 0 ? after0 : slice == 1 ? after1 : after2;
  const int o = blockIdx.x * blockDim.x + threadIdx.x;
  const u64 mul = table[slot];
  if (!mul || o >= n_out) return;
  const float factor = __ldg((const float*)mul + o);
  const float offset = __ldg((const float*)(mul + after) + o);
  Elem* y = out + (u64)row * out_stride + column + o;
  *y = narrow(__fadd_rn(__fmul_rn(widen(*y), factor), offset));
}
