"""A CUDA driver without a GPU, for tests: unmodified cuda.bindings runs on it.

What it is: `libcuda.so.1` as a stub in C whose entry points are Python (`driver`), streams that run
only when something must wait for them, capture rules, graphs, and an interpreter of the PTX that
NVRTC really emits (`ptx_exec`), which judges every access.

Never automatic: nothing in the engine loads it. A test loads it by `load.load`, which makes every
later CUDA call of the process land here, so a process that uses a real GPU must not call it;
`gpu.cuda_probe` knows the stub by an exported symbol and refuses it unless it was asked for.
"""
