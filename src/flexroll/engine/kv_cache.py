"""The paged KV cache: one flat pool of keys and one of values a layer."""

from __future__ import annotations

import numpy as np
import torch

from flexroll.engine.decoder_config import DecoderConfig
from flexroll.engine.page_table import PageTable


class KVCache:
    """Pools [1, n_kv_heads, (n_pages + 1) * page_size, head_dim] for K and for V of every layer, and their page table.

    `logical` mirrors `pages.logical` on the device, for mask functions: int32 [n_slots + 1, n_pages + 1].
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: PageTable,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages = pages
        shape = (1, config.n_kv_heads, (pages.n_pages + 1) * pages.page_size, config.head_dim)
        # Zeros, not empty: padded rows read page 0, and a NaN there would spread through 0 * NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.logical = torch.from_numpy(pages.logical).to(device, copy=True)

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.keys + self.values)

    def write(self, layer: int, addresses: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [n, n_kv_heads, head_dim] at pool rows `addresses` int64 [n], in place."""
        self.keys[layer][0].index_copy_(1, addresses, keys.transpose(0, 1))
        self.values[layer][0].index_copy_(1, addresses, values.transpose(0, 1))

    def sync(self) -> None:
        """Bring the device's `logical` in step with the page table; costs only what changed."""
        slots, pages, blocks = self.pages.take_changes()
        if len(slots):
            device = self.logical.device
            index = (torch.from_numpy(slots).to(device), torch.from_numpy(pages).to(device))
            self.logical.index_put_(index, torch.from_numpy(blocks).to(device))

    def addresses(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Pool rows int64 [n] of logical positions [n] of slots [n]."""
        size = self.pages.page_size
        return self.pages.table[slots, positions // size].astype(np.int64) * size + positions % size
