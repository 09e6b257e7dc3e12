"""The hands: devices, kernels, graphs, the LoRA pool and the models. Never imports `sched`."""
