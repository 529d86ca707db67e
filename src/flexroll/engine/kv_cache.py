"""The paged KV cache: one pool of keys and values, and the page table as the device sees it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flexroll.engine.decoder_config import DecoderConfig
from flexroll.engine.page_table import PageTable


class KVCache:
    """Pool [n_layers, 2, n_kv_heads, (n_pages + 1) * page_size, head_dim]; nothing ever copies it or a layer of it.

    keys, values: per layer the view [1, n_kv_heads, tokens, head_dim] that attention reads.
    table: int32 [n_slots + 1, max_blocks] on the device, (slot, logical block) -> page.
    block_of: int32 [n_pages + 1] on the device, page -> its logical block, the same for all who share the page.
    Both are written by `place` when a slot is given to a sequence, and grow by a page in the decode step. What belongs
    to a slot or page that is not in use is stale; nobody asks.
    """

    def __init__(self, config: DecoderConfig, pages: PageTable, dtype: torch.dtype, device: torch.device) -> None:
        self.pages, self.config = pages, config
        shape = (config.n_layers, 2, config.n_kv_heads, (pages.n_pages + 1) * pages.page_size, config.head_dim)
        # Zeros, not empty: padded rows read page 0, and a NaN there would spread through 0 * NaN.
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = [self.pool[layer, 0].unsqueeze(0) for layer in range(config.n_layers)]
        self.values = [self.pool[layer, 1].unsqueeze(0) for layer in range(config.n_layers)]
        self.table = torch.zeros(pages.table.shape, dtype=torch.int32, device=device)
        self.block_of = torch.zeros(pages.n_pages + 1, dtype=torch.int32, device=device)

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def n_bytes(self) -> int:
        return self.pool.numel() * self.pool.element_size()

    def place(self, slots: Sequence[int]) -> None:
        """Bring what the device knows of these slots in step with the page table."""
        table = self.pages.table[list(slots)]
        self.table.index_copy_(0, upload(np.asarray(slots, dtype=np.int64), self.device), upload(table, self.device))
        blocks = np.broadcast_to(np.arange(table.shape[1]), table.shape)
        used = table > 0  # a block that is not mapped yet says page 0
        pairs = upload(np.stack([table[used], blocks[used]]).astype(np.int64), self.device)
        self.block_of[pairs[0]] = pairs[1].int()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target) of every layer; no page is both."""
        source, target = upload(np.array(pairs, dtype=np.int64).T, self.device)
        size = self.pages.page_size
        pages = self.pool.unflatten(3, (-1, size)).flatten(0, 2)  # [layers * 2 * heads, pages, size, head_dim]
        pages[:, target] = pages[:, source]

    def addresses(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool rows int64 [n] of positions int64 [n] of slots int64 [n]."""
        size = self.pages.page_size
        return self.table[slots, positions // size].long() * size + positions % size


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device, without waiting for it: from pinned memory that its stream holds on to."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
