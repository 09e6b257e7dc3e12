"""Adapters: PEFT config, tensor keys, audit, layout, packing, and the pool of slots.

Read in this order: `dims`, `layout` (where things lie), `config`, `keys`, `safefile` (what a
directory says), `audit`, `pack`, `stage` (directory to `image`), `pool` (image to slot).
"""
