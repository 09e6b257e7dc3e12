"""rota: serve one base LLM with many LoRA adapters, and change adapters while it serves."""
