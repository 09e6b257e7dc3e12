"""The models: config, weights, paged KV memory, sampling, and the runner that steps them."""
