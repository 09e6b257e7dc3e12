"""Kernels: torch reference and numba kernel side by side. Door: `host.HostKernels`."""
