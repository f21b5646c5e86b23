"""How much of what a scheme reads at evaluation training never gave it.

Shapes: N rows, T query slots, S key slots, Q queries of the longest row.
"""

from __future__ import annotations

import numpy as np
import torch

from wherelm.model.decoder import Decoder

CHUNK = 256  # queries at a time; bounds the memory of long rows


def untrained_reads(model: Decoder, lengths_N: np.ndarray) -> float:
    """The share of (query, key) pairs, over all layers, that are read by something untrained.

    A bucket, a row of a table, a position or a distance that no row of training had, as the scheme
    says (`PositionScheme.untrained`). `lengths_N` are the inputs of each row; a pair counts once in
    each layer whose window holds it. 0 within the trained length.
    """
    longest = int(lengths_N.max(initial=0))
    # Position by position all rows are alike: row Q of the longest stands for as many as reach it.
    rows_Q = len(lengths_N) - np.searchsorted(np.sort(lengths_N), np.arange(longest), "right")
    layers: dict[tuple, int] = {}
    for layer in range(model.config.layers):
        kind = (model.scheme.for_layer(layer), model.window(layer))
        layers[kind] = layers.get(kind, 0) + 1
    read = untrained = 0
    for (scheme, window), count in layers.items():
        pairs_Q = np.minimum(np.arange(longest) + 1, window or longest)
        read += count * int((pairs_Q * rows_Q).sum())
        for start in range(0, longest, CHUNK):
            queries_1T = torch.arange(start, min(start + CHUNK, longest))[None]
            keys_1S = torch.arange(int(queries_1T[0, -1]) + 1)[None]
            found_1TS = scheme.untrained(queries_1T, keys_1S)
            if found_1TS is None:
                break
            back_1TS = queries_1T[:, :, None] - keys_1S[:, None, :]
            found_1TS = found_1TS & (back_1TS >= 0) & (back_1TS < (window or longest))
            untrained_T = found_1TS[0].sum(-1).numpy()
            untrained += count * int((untrained_T * rows_Q[start : start + CHUNK]).sum())
    return untrained / read if read else 0.0
